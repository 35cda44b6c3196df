# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Launchers of npu_ops over Triton, which lacks names of triton-ascend's."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from custom.dispatch import backends

from . import places


@contextmanager
def of_the_front_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is imported over the stand-in is forgotten."""
    names = SimpleNamespace(extract_slice=None, get_element=None, insert_slice=None, sort=None)
    monkeypatch.setitem(sys.modules, places.name("front_end"), names)
    package = importlib.import_module("custom.npu_ops.common")
    monkeypatch.setattr(package, "front_end", names, raising=False)
    before = {*sys.modules}
    backends.launcher.cache_clear()
    try:
        yield
    finally:
        backends.launcher.cache_clear()
        over_it = [x for x in {*sys.modules} - before if x.startswith("custom.npu_ops.")]
        # the innermost first: a package has its modules as attributes
        for name in sorted(over_it, reverse=True):
            package, _, own = name.rpartition(".")
            delattr(sys.modules[package], own)
            del sys.modules[name]
