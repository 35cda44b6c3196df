# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments, outputs and autograd of npu_merge_states.

    outs [P, .., D]   lses, sums [P, ..]   out [.., D]   lse [..]

Part i has weight exp(lse_i) with lse_i = lses_i, or lses_i + log(sums_i) where sums are given; a
part whose lse_i is not finite is empty, and what it holds is not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...check import Checker

SCHEMA = "npu_merge_states(Tensor outs, Tensor lses, Tensor? sums=None) -> (Tensor, Tensor)"
ONNX = "MergeStates"


def check(c: Checker, a: Mapping[str, Any]) -> None:
    outs, lses, sums = a["outs"], a["lses"], a["sums"]
    c.same_device(outs=outs, lses=lses, sums=sums)
    c.floating("outs", outs)
    c.dtype("lses", lses, torch.float32, torch.float64)
    c.same_dtype(lses=lses, sums=sums)
    c.require(outs.ndim >= 2, f"`outs` has shape {list(outs.shape)}, expected [parts, .., D].")
    for name, tensor in (("lses", lses), ("sums", sums)):
        c.require(
            tensor is None or tensor.shape == outs.shape[:-1],
            f"`{name}` has shape {list(tensor.shape) if tensor is not None else None}, expected "
            f"{list(outs.shape[:-1])}, that of `outs` without its last dimension.",
        )
    c.dense_rows(outs=outs)


def fake(outs: Tensor, lses: Tensor, sums: Tensor | None) -> tuple[Tensor, Tensor]:
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])


def setup_context(ctx: Any, x: dict[str, Any], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x["outs"], x["lses"], x["sums"], *output)


def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> dict[str, Any]:
    """With weights w_i = exp(lse_i - lse): d_outs_i = w_i d_out, and
    d_lse_i = w_i (d_out . (outs_i - out) + d_lse)."""
    outs, lses, sums, out, lse = ctx.saved_tensors
    d_out = torch.zeros_like(out) if d_out is None else d_out
    d_lse = torch.zeros_like(lse) if d_lse is None else d_lse
    each = lses if sums is None else lses + sums.log()
    counts = each.isfinite()
    weight = torch.exp(each - lse).masked_fill(~counts, 0)
    wide = weight.dtype
    d_outs = (weight[..., None] * d_out.to(wide)).to(outs.dtype)
    difference = (outs.to(wide) - out.to(wide)).masked_fill(~counts[..., None], 0)
    d_each = weight * ((difference * d_out.to(wide)).sum(-1) + d_lse)
    if sums is None:
        return {"outs": d_outs, "lses": d_each}
    return {
        "outs": d_outs,
        "lses": d_each,
        "sums": torch.where(counts, d_each / sums, 0),
    }
