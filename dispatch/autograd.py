# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What each op does at the Autograd key: differentiate, or refuse.

`torch.library.register_autograd` takes neither keyword-only tensors (torch_npu's schemas have them)
nor ops that write their arguments, so both kernels are our own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .spec import Spec


def _wants_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _any_wants_gradient(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if not torch.is_grad_enabled():
        return False
    return any(map(_wants_gradient, args)) or any(map(_wants_gradient, kwargs.values()))


def differentiable(spec: Spec, op: torch._ops.OpOverload) -> Callable[..., Any]:
    """Runs the op and, where an argument requires grad, records it with the spec's own formula.
    `setup_context` sees all arguments by name, and `backward` answers by name."""
    assert spec.setup_context is not None and spec.backward is not None
    save, gradients = spec.setup_context, spec.backward
    defaults = {argument.name: argument.default_value for argument in op._schema.arguments}
    names = [*defaults]
    positional = sum(not argument.kwarg_only for argument in op._schema.arguments)
    keywords = [a.name for a in op._schema.arguments if a.kwarg_only]

    def forward(ctx: Any, *values: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            given = dict(zip(keywords, values[positional:], strict=True))
            out = op(*values[:positional], **given)
        save(ctx, dict(zip(names, values, strict=True)), out)
        return out

    def backward(ctx: Any, *grads: Any) -> Any:
        found = gradients(ctx, *grads)
        assert found.keys() <= set(names), f"{spec.name} has no {found.keys() - set(names)}"
        return tuple(found.get(name) for name in names)

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    recorded: Any = type(spec.name, (torch.autograd.Function,), members)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if _any_wants_gradient(args, kwargs):
            values = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
            return recorded.apply(*values.values())
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args, **kwargs)

    return kernel


def refusing(spec: Spec, op: torch._ops.OpOverload) -> Callable[..., Any]:
    """Runs an op that has no backward; refuses arguments that want one while grad mode is on."""
    names = [argument.name for argument in op._schema.arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if _any_wants_gradient(args, kwargs):
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            name = next(name for name in names if _wants_gradient(given.get(name)))
            raise RuntimeError(
                f"{spec.name}: `{name}` requires grad, and this op has no backward. "
                "Call it under torch.no_grad() (or torch.inference_mode())."
            )
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args, **kwargs)

    return kernel
