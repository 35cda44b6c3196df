# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Registers every spec with PyTorch: definition, three backends, fake, autograd."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from . import autograd, backends
from .spec import Spec
from .specs import SPECS

NAMESPACE = "custom"

# FRAGMENT, because CANN's own extension already owns TORCH_LIBRARY(custom, ...)
_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def bind(
    schema: torch.FunctionSchema, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """All arguments by name: the dispatcher drops those that equal their default."""
    bound = {argument.name: argument.default_value for argument in schema.arguments}
    bound.update(zip(bound, args, strict=False))
    bound.update(kwargs)
    return bound


def overload(spec: Spec) -> torch._ops.OpOverload:
    found: torch._ops.OpOverload = getattr(getattr(torch.ops, NAMESPACE), spec.name).default
    return found


def _refuse_duplicate(spec: Spec) -> None:
    qualified = f"{NAMESPACE}::{spec.name}"
    if qualified in torch._C._dispatch_get_all_op_names():
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
    arguments = bind(overload(spec)._schema, args, kwargs)
    for name in _required_tensors(spec):
        # the dispatcher itself takes None for any tensor
        if arguments[name] is None:
            raise TypeError(
                f"{spec.name}: `{name}` is None, expected a tensor. Only an optional argument may "
                "be None."
            )
    spec.check(**arguments)
    return arguments


@cache
def _required_tensors(spec: Spec) -> tuple[str, ...]:
    arguments = overload(spec)._schema.arguments
    return tuple(a.name for a in arguments if isinstance(a.type, torch.TensorType))


def _kernel(spec: Spec, key: str) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return backends.run(spec, key, _checked(spec, args, kwargs))

    return kernel


def _fake(spec: Spec) -> Callable[..., Any]:
    def fake(*args: Any, **kwargs: Any) -> Any:
        return spec.fake(**_checked(spec, args, kwargs))

    return fake


def _register(spec: Spec) -> None:
    _refuse_duplicate(spec)
    _library.define(spec.schema, tags=(torch.Tag.pt2_compliant_tag,))
    for backend in backends.BACKENDS:
        _library.impl(spec.name, _kernel(spec, backend.key), backend.key)
    torch.library.register_fake(f"{NAMESPACE}::{spec.name}", _fake(spec), lib=_library)
    at_autograd = autograd.differentiable if spec.differentiable else autograd.refusing
    op = overload(spec)
    _library.impl(spec.name, at_autograd(spec, op, partial(bind, op._schema)), "Autograd")


def register_all() -> None:
    for spec in SPECS:
        _register(spec)
