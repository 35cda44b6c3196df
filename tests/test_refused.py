# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Which check refuses which spoiled argument: those of tests/support/refused.json, no others."""

from __future__ import annotations

import pytest

from .support import limits, refused
from .support.calls import every_spec


@every_spec
def test_each_check_speaks_where_it_did(spec):
    """Without a check a wrong call runs, or another check speaks for it."""
    kept, now = refused.read().get(spec.name, {}), refused.refusals(spec)
    for name in kept.keys() | now.keys():
        meant = f"`{name}`; if that is meant: python -m tests.support.refused"
        assert now.get(name) == kept.get(name), meant


@every_spec
def test_launchers_say_no_where_they_did(spec):
    """To sizes and dtypes, before a kernel reads them; on a GPU that is not there."""
    pytest.importorskip("triton")
    meant = "if that is meant: python -m tests.support.limits"
    assert limits.limits(spec) == limits.read().get(spec.name, {}), meant
