# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What each op does at the Autograd key: differentiate, or refuse.

`torch.library.register_autograd` takes neither keyword-only tensors (torch_npu's schemas have them)
nor ops that write their arguments, so both kernels are our own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from .backends import Call, Prepare
from .common.private_torch import (
    below_autograd,
    has_tangents,
    in_torch_func,
    next_kernel,
    want_gradient,
)
from .dispatch_keys import caches, written
from .errors import NotSupported
from .op_spec import Spec

Kernel = Callable[..., Any]


def _wants_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _refuse_tangents(
    spec: Spec, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """No op has a formula of forward mode, and without one a tangent is lost in silence."""
    if not has_tangents():
        return
    for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
        if isinstance(value, torch.Tensor) and forward_ad.unpack_dual(value).tangent is not None:
            raise NotSupported(
                f"{spec.name}: `{name}` has a tangent of forward mode (jvp, jacfwd, dual numbers), "
                "expected a plain tensor. Take the gradient backwards, or detach() it."
            )


def _recording(spec: Spec, op: torch._ops.OpOverload) -> Kernel:
    """Records the op with the spec's own formula.  `setup_context` sees all arguments by name, and
    `backward` answers by name."""
    assert spec.setup_context is not None and spec.backward is not None
    save, gradients = spec.setup_context, spec.backward
    defaults = {argument.name: argument.default_value for argument in op._schema.arguments}
    names = [*defaults]
    positional = sum(not argument.kwarg_only for argument in op._schema.arguments)
    keywords = [a.name for a in op._schema.arguments if a.kwarg_only]

    def forward(ctx: Any, *values: Any) -> Any:
        given = dict(zip(keywords, values[positional:], strict=True))
        # no view is tracked there: an output that a backend cuts out of a wider buffer is no view
        with below_autograd():
            out = op(*values[:positional], **given)
        save(ctx, dict(zip(names, values, strict=True)), out)
        return out

    def backward(ctx: Any, *grads: Any) -> Any:
        found = gradients(ctx, *grads)
        assert found.keys() <= set(names), f"{spec.name} has no {found.keys() - set(names)}"
        return tuple(found.get(name) for name in names)

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    recorded: Any = type(spec.name, (torch.autograd.Function,), members)

    def wanted(*args: Any, **kwargs: Any) -> Any:
        if in_torch_func():
            raise NotSupported(
                f"{spec.name}: the gradient is taken by torch.func (grad, vjp, jacrev), "
                "expected autograd. Use torch.autograd.grad() or .backward()."
            )
        values = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        return recorded.apply(*values.values())

    return wanted


def _refusing(spec: Spec, op: torch._ops.OpOverload) -> Kernel:
    """Of an op that has no backward."""
    names = [argument.name for argument in op._schema.arguments]
    remedy = "Call it under torch.no_grad() (or torch.inference_mode())."
    if spec.name.endswith(("_grad", "_backward")):
        remedy = f"There are no second derivatives: leave create_graph=True out. {remedy}"

    def wanted(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        name = next(name for name in names if _wants_gradient(given.get(name)))
        raise RuntimeError(
            f"{spec.name}: `{name}` requires grad, and this op has no backward. {remedy}"
        )

    return wanted


def kernel(spec: Spec, op: torch._ops.OpOverload, preparing: Mapping[str, Prepare]) -> Kernel:
    """Records or refuses a call where an argument requires grad and grad mode is on.  Else it is
    made here, as the dispatcher's next key prepares it; what it wrote counts as written."""
    names = [argument.name for argument in op._schema.arguments]
    places = written(op)
    wanted = (_recording if spec.differentiable else _refusing)(spec, op)

    def anew(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        return Call(nullcontext(), op, args, kwargs)

    below = next_kernel(anew, preparing)

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_tangents(spec, names, args, kwargs)
        if want_gradient(args, kwargs):
            return wanted(*args, **kwargs)
        # counted once, below: PyTorch would refuse a tensor of inference mode that it has written
        with below_autograd():
            call = below(keys)(args, kwargs)
            with call.ready:
                out = call.function(*call.args, **call.kwargs)
            if call.ran is not None:
                call.ran()
        if places:
            # kernels write behind PyTorch's back: a backward that saved a cache has to know
            increment_version([cache for _, cache in caches(places, args, kwargs)])
        return out

    return kernel
