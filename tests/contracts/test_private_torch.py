# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Where a private name of torch has moved, what torch promises stands in."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from custom.dispatch.common import private_torch
from custom.dispatch.errors import NotSupported
from torch.autograd import forward_ad

_OF_C = (
    "_any_requires_grad",
    "_are_functorch_transforms_active",
    "_AutoDispatchBelowADInplaceOrView",
    "_dispatch_keyset_full_after",
    "_ExcludeDispatchKeyGuard",
    "DispatchKey",
    "DispatchKeySet",
)
NAMES = [*((torch._C, name) for name in _OF_C), (forward_ad, "_current_level")]


def without(monkeypatch: Any, of: Any, *names: str) -> ModuleType:
    """The module, imported by a torch that has not got these names."""
    spec = importlib.util.spec_from_file_location(
        "custom.dispatch.common.private_torch_elsewhere", Path(private_torch.__file__)
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patch:
        for name in names:
            patch.delattr(of, name)
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("of", "name"), NAMES, ids=[name for _, name in NAMES])
def test_what_torch_promises_stands_in(of, name, monkeypatch):
    found = without(monkeypatch, of, name)
    plain, leaf = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)
    for module in (private_torch, found):
        assert module.want_gradient((plain,), dict(x=[plain, leaf]))
        assert not module.want_gradient((plain, None), dict(x=[plain], y=1))
        with torch.no_grad():
            assert not module.want_gradient((leaf,), {})
        with torch.autocast("cpu", torch.bfloat16):
            assert (plain @ plain).dtype is torch.bfloat16
            with module.without_autocast():
                assert (plain @ plain).dtype is torch.float32
            assert (plain @ plain).dtype is torch.bfloat16
        with module.below_autograd():
            assert not (leaf * 2).requires_grad
        assert not module.in_torch_func()
        with forward_ad.dual_level():
            assert module.has_tangents()
        assert module.storage_of(plain) == module.storage_of(plain[1:])
        assert module.storage_of(plain) != module.storage_of(leaf)
    if name in ("_dispatch_keyset_full_after", "DispatchKey"):
        assert found.next_kernel(len, dict(CPU=max))(None) is len


def test_a_torch_that_goes_nowhere_says_so(monkeypatch):
    names = ("_AutoDispatchBelowADInplaceOrView", "_AutoDispatchBelowAutograd")
    found = without(monkeypatch, torch._C, *names)
    with pytest.raises(NotSupported, match="calls no op below autograd, expected"):
        found.below_autograd()


PRIVATE = "torch._C", "forward_ad._", "._cdata", "_functorch"


def test_other_modules_have_no_private_name_of_torch():
    root = Path(private_torch.__file__).parents[2]
    known = {"private_torch.py", "register.py"}  # the latter of its own ops' names
    for folder in ("dispatch", "cuda_ops"):
        for path in (root / folder).rglob("*.py"):
            text = path.read_text()
            assert path.name in known or not [x for x in PRIVATE if x in text], path.name
