# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What this package takes of torch that torch does not promise: here alone.

Each is behind a check: where a name has moved, what torch does promise stands in, and costs the
host more time.  torch/_python_dispatch's and fake tensors' names are torch's documented ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import NotSupported

Kernel = Callable[..., Any]

_C = torch._C


def _named(name: str, of: Any = _C) -> Any:
    return getattr(of, name, None)


def _one_by_one(*args: Any, **kwargs: Any) -> bool:
    return any(x.requires_grad for x in _tensors((*args, *kwargs.values())))


_any_requires_grad = _named("_any_requires_grad") or _one_by_one


def want_gradient(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Tensors, in lists as well, where grad mode is on."""
    return torch.is_grad_enabled() and bool(_any_requires_grad(*args, **kwargs))


def _tensors(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


if hasattr(forward_ad, "_current_level"):

    def has_tangents() -> bool:
        """Whether a tensor may have a tangent of forward mode, which unpack_dual tells."""
        return forward_ad._current_level >= 0
else:

    def has_tangents() -> bool:
        return True


def in_torch_func() -> bool:
    """Inside grad, vjp or jacrev of torch.func; else torch refuses their gradients itself."""
    active = _named("_are_functorch_transforms_active")
    return bool(active and active())


def _nowhere() -> AbstractContextManager[Any]:
    raise NotSupported(
        f"custom: torch {torch.__version__} calls no op below autograd, expected 2.9 to 2.13. "
        "pip install one of these."
    )


# a context in which an op called again goes on below autograd
below_autograd: Callable[[], AbstractContextManager[Any]] = (
    _named("_AutoDispatchBelowADInplaceOrView") or _named("_AutoDispatchBelowAutograd") or _nowhere
)


def _keys_below() -> Any:
    full_after, key = _named("_dispatch_keyset_full_after"), _named("DispatchKey")
    last = getattr(key, "ADInplaceOrView", None)
    keys = None if full_after is None or last is None else full_after(last)
    told = all(hasattr(keys, name) for name in ("raw_repr", "highestPriorityTypeId", "__and__"))
    return keys if told else None


_BELOW = _keys_below()


def next_kernel(anew: Kernel, kernels: Mapping[str, Kernel]) -> Callable[[Any], Kernel]:
    """What the dispatcher would call next for a set of keys: of `kernels` that one, where its key
    is the next one, and so no mode or wrapper of tensors is between; else `anew`, for the op again,
    which reads all arguments anew."""
    if _BELOW is None:
        return lambda keys: anew
    known: dict[int, Kernel] = {}

    def below(keys: Any) -> Kernel:
        number = keys.raw_repr()
        found = known.get(number)
        if found is None:
            found = kernels.get((keys & _BELOW).highestPriorityTypeId().name, anew)
            known[number] = found
        return found

    return below


def _autocast_keys() -> Any:
    key, keys = _named("DispatchKey"), _named("DispatchKeySet")
    names = ("AutocastCPU", "AutocastCUDA", "AutocastPrivateUse1")
    if None in (keys, _named("_ExcludeDispatchKeyGuard")) or not all(
        hasattr(key, name) for name in names
    ):
        return None
    found = keys(getattr(key, names[0]))
    for name in names[1:]:
        found = found | keys(getattr(key, name))
    return found


_AUTOCAST = _autocast_keys()


def without_autocast() -> AbstractContextManager[Any]:
    """Of every device."""
    if _AUTOCAST is not None:
        guard: AbstractContextManager[Any] = _C._ExcludeDispatchKeyGuard(_AUTOCAST)
        return guard
    stack = ExitStack()
    for device in ("cpu", "cuda", "npu") if hasattr(torch, "npu") else ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def storage_of(tensor: Tensor) -> tuple[int, int]:
    """The same of tensors that share an allocation, and of no others that are alive."""
    storage = tensor.untyped_storage()
    pointer = storage.data_ptr()
    return getattr(storage, "_cdata", pointer), pointer
