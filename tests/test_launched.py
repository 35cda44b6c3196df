# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What CUDA launchers launch and how they cut a call, on five GPUs that are not there: what
tests/support/launched.json and choices.json have, nothing else."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from custom.cuda_ops.common import gpu

from .support import choices, launched

if gpu.INTERPRETED or gpu.without_gluon():
    pytest.skip("needs a compiling Triton with a whole Gluon", allow_module_level=True)


@pytest.mark.parametrize("spec", launched.OPS, ids=lambda spec: spec.name)
def test_launchers_launch_what_they_did(spec):
    kept = launched.read().get(spec.name, {})
    meant = "; if that is meant: python -m tests.support.launched"
    labels = set()
    for label, found in launched.everywhere(spec):
        labels.add(label)
        now = {there: launched.short(told) for there, told in found.items()}
        told = "\n".join(line for lines in found.values() for line in lines)
        assert now == kept.get(label), f"{label}{meant}\n{told}"
    assert labels == set(kept), meant


@pytest.mark.parametrize("place", choices.PLACES)
def test_calls_are_cut_as_they_were(place):
    kept, now = choices.read()[place], choices.chosen(place)
    for name in kept.keys() | now.keys():
        meant = f"{name}; if that is meant: python -m tests.support.choices"
        assert now.get(name) == kept.get(name), meant
