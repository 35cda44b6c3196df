# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Registers every spec with PyTorch: definition, three backends, fake, autograd, other keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from functools import cache, partial
from typing import Any

import torch

from . import autograd, backends, dispatch_keys, overlap
from .backends import Call
from .call_cache import CallCache, cache_key
from .op_spec import Spec
from .registry import SPECS

NAMESPACE = "custom"

# FRAGMENT, because CANN's own extension already owns TORCH_LIBRARY(custom, ...)
_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def bind(
    schema: torch.FunctionSchema, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """All arguments by name: the dispatcher drops those that equal their default."""
    return _bound({a.name: a.default_value for a in schema.arguments}, args, kwargs)


def _bound(
    defaults: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    return {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}


@cache
def _defaults(spec: Spec) -> dict[str, Any]:
    return bind(overload(spec)._schema, (), {})


def overload(spec: Spec) -> torch._ops.OpOverload:
    found: torch._ops.OpOverload = getattr(getattr(torch.ops, NAMESPACE), spec.name).default
    return found


def _refuse_duplicate(spec: Spec) -> None:
    qualified = f"{NAMESPACE}::{spec.name}"
    if hasattr(getattr(torch.ops, NAMESPACE), spec.name):
        dump = torch._C._dispatch_dump(qualified).splitlines()
        owner = next(
            (x.partition(":")[2] for x in dump if x.startswith("debug")), "unknown"
        ).strip()
        raise RuntimeError(
            f"{qualified} is already defined by another package ({owner}). Import only one of the "
            "two packages in a process, or import this one in another process."
        )


def _checked(spec: Spec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name, after the op's check."""
    arguments = _bound(_defaults(spec), args, kwargs)
    for name in _required_tensors(spec):
        # the dispatcher itself takes None for any tensor
        if arguments[name] is None:
            raise TypeError(
                f"{spec.name}: `{name}` is None, expected a tensor. Only an optional argument may "
                "be None."
            )
    spec.check(**arguments)
    for name, value in arguments.items():
        if type(value) is float and not math.isfinite(value):
            raise ValueError(
                f"{spec.name}: `{name}` is {value}, expected a finite number. Look at what it is "
                "computed from."
            )
    return arguments


def _refuse_freed(spec: Spec, arguments: Mapping[str, Any]) -> None:
    for name, x in arguments.items():
        if isinstance(x, torch.Tensor) and x.numel() and not x.untyped_storage().nbytes():
            raise ValueError(
                f"{spec.name}: the memory of `{name}` was freed (its storage has 0 bytes, as FSDP "
                f"leaves it), expected {list(x.shape)} numbers. Gather it before the call."
            )


@cache
def _required_tensors(spec: Spec) -> tuple[str, ...]:
    arguments = overload(spec)._schema.arguments
    return tuple(a.name for a in arguments if isinstance(a.type, torch.TensorType))


def _preparing(spec: Spec, key: str) -> backends.Prepare:
    writes = dispatch_keys.written(overload(spec))
    cached = CallCache(bool(writes))
    _call_caches.append(cached)

    def bound(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return _bound(_defaults(spec), args, kwargs)

    def prepare(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Cached?  Else bind, check, choose."""
        alike = cache_key(args, kwargs)
        replay = alike and cached.find(alike)
        if alike and replay:
            return replay.call(alike.tensors, args, kwargs)
        _refuse_freed(spec, bound(args, kwargs))
        arguments = _checked(spec, args, kwargs)
        overlap.refuse(spec.name, [name for _, name in writes], arguments, spec.tables)
        runner = backends.runner(spec, key, arguments)
        ran = partial(cached.keep, alike, backends.Replay(runner, bound)) if alike else None
        return Call(runner.ready(arguments), runner.function, (), arguments, ran)

    return prepare


def _kernel(prepare: backends.Prepare) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        call = prepare(args, kwargs)
        with call.ready:
            out = call.function(*call.args, **call.kwargs)
        if call.ran is not None:
            call.ran()
        return out

    return kernel


_call_caches: list[CallCache] = []


def forget() -> None:
    """No call is like an earlier one: for whoever replaces parts of this package (tests)."""
    for cached in _call_caches:
        cached.clear()


def compile_kernels(
    calls: Iterable[tuple[Spec, dict[str, Any]]], device: torch.device, executor: Executor
) -> None:
    """Have `executor` compile the kernels of these calls, by keyword and on `device`; nothing is
    launched.  For backends that can; the others do nothing."""
    key = next(backend.key for backend in backends.BACKENDS if backend.device == device.type)
    compiling = backends.compiling(backends.choose(key))
    if compiling is None:
        return
    with compiling(executor):
        for spec, given in calls:
            arguments = _checked(spec, (), given)
            with backends.made_current(device):
                backends.runner(spec, key, arguments).function(**arguments)


def _fake(spec: Spec) -> Callable[..., Any]:
    def fake(*args: Any, **kwargs: Any) -> Any:
        return spec.fake(**_checked(spec, args, kwargs))

    return fake


def _register(spec: Spec) -> None:
    _refuse_duplicate(spec)
    _library.define(spec.schema, tags=(torch.Tag.pt2_compliant_tag,))
    preparing = {backend.key: _preparing(spec, backend.key) for backend in backends.BACKENDS}
    for key, prepare in preparing.items():
        _library.impl(spec.name, _kernel(prepare), key)
    torch.library.register_fake(f"{NAMESPACE}::{spec.name}", _fake(spec), lib=_library)
    op = overload(spec)
    _library.impl(spec.name, autograd.kernel(spec, op, preparing), "Autograd", with_keyset=True)
    for key in dispatch_keys.AUTOCAST:
        _library.impl(spec.name, dispatch_keys.as_given(op), key)
    if op._schema.is_mutable:
        for kind in dispatch_keys.UNREAD:
            _library.impl(spec.name, dispatch_keys.resolved(spec, op, kind), kind.key)


def register_all() -> None:
    for spec in SPECS:
        _register(spec)
