# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Autograd of an op whose gradient is an op of its own that takes the arguments again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def keep(ctx: Any, x: dict[str, Any], tensors: Sequence[str], options: Sequence[str] = ()) -> None:
    """What `backward` takes again of the arguments `x`.  An output that no loss uses has the
    gradient None."""
    ctx.names = tensors
    ctx.save_for_backward(*(x[name] for name in tensors))
    ctx.options = {name: x[name] for name in options}
    ctx.set_materialize_grads(False)


def backward(
    op: str,
    ctx: Any,
    learned: Sequence[str],
    like: Sequence[str] = (),
    **grads: Tensor | None,
) -> dict[str, Any]:
    """By name the gradients of those of `learned` that the call had, in the order in which
    `op` gives them.  It takes `grads`, of which the first ones are zeros shaped as the
    arguments `like` where no loss used the output."""
    if all(grad is None for grad in grads.values()):
        return {}
    x = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
    for name, argument in zip(grads, like, strict=False):
        if grads[name] is None:
            grads[name] = torch.zeros_like(x[argument])
    # an expanded gradient (of out.sum(), say) has no dense rows
    dense = {name: None if grad is None else grad.contiguous() for name, grad in grads.items()}
    found = getattr(torch.ops.custom, op)(**dense, **x, **ctx.options)
    return {name: grad for name, grad in zip(learned, found, strict=True) if x[name] is not None}


def empty(x: Mapping[str, Any], *names: str) -> tuple[Tensor, ...]:
    """For a fake: like each of these arguments; for one that is None [0], like the first one."""
    none = x[names[0]].new_empty([0])
    given = (none if x[name] is None else x[name] for name in names)
    return tuple(each.new_empty(each.shape) for each in given)
