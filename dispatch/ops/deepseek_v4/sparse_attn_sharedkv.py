# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments, outputs and autograd of npu_sparse_attn_sharedkv; shapes as in sharedkv.py.

out is of q's shape, softmax_lse [B, 1, S, N] or [1, T, N], without the sinks.  A token that sees
nothing, or is none of a request, gets out 0 and lse -inf.  `metadata` is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...check import Checker
from ...errors import NotSupported
from ..sparse_attention.sparse_flash_attention import statistics
from . import sharedkv

SCHEMA = f"npu_sparse_attn_sharedkv(Tensor q, *, {sharedkv.ARGUMENTS}) -> (Tensor, Tensor)"
GE = "SparseAttnSharedkv"


def check(c: Checker, x: Mapping[str, Any]) -> None:
    q: Tensor = x["q"]
    sharedkv.inputs(c, q, "D", "D", x)
    keys = dict(ori_kv=x["ori_kv"], cmp_kv=x["cmp_kv"])
    c.same_dtype(q=q, **keys)
    c.dense_rows(**keys)


def fake(q: Tensor, return_softmax_lse: bool, **_: Any) -> tuple[Tensor, Tensor]:
    shape = sharedkv.lse_shape(q) if return_softmax_lse else [0]
    return q.new_empty(q.shape), q.new_empty(shape, dtype=statistics(q))


# arguments of the gradient op that are the forward's
SHARED = (
    "ori_sparse_indices", "cmp_sparse_indices", "cu_seqlens_q", "cu_seqlens_ori_kv",
    "cu_seqlens_cmp_kv", "seqused_q", "seqused_kv", "sinks", "softmax_scale", "cmp_ratio",
    "ori_win_left", "layout_q", "layout_kv", "indices_are_slots", "ori_topk_length",
    "cmp_topk_length",
)  # fmt: skip
_KEYS = ("q", "ori_kv", "cmp_kv")


def setup_context(ctx: Any, x: dict[str, Any], output: tuple[Tensor, Tensor]) -> None:
    if x["layout_kv"] == "PA_ND":
        raise NotSupported(
            "npu_sparse_attn_sharedkv: an input requires grad, and the backward does not take "
            "paged keys. Call it under torch.no_grad(), or pass the keys as BSND or TND."
        )
    out, lse = output
    returned = x["return_softmax_lse"]
    if not returned:
        ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    named = {name: x[name] for name in (*_KEYS, *SHARED)}
    ctx.tensors = [n for n, value in named.items() if isinstance(value, Tensor)]
    ctx.options = {n: value for n, value in named.items() if n not in ctx.tensors}
    ctx.save_for_backward(*(named[n] for n in ctx.tensors), out, lse if returned else None)


def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> dict[str, Any]:
    if d_out is None and d_lse is None:
        return {}
    *saved, out, lse = ctx.saved_tensors
    x = dict(zip(ctx.tensors, saved, strict=True)) | ctx.options
    if lse is None:
        _, lse = torch.ops.custom.npu_sparse_attn_sharedkv(**x, return_softmax_lse=True)
    d_out = torch.zeros_like(out) if d_out is None else d_out.contiguous()
    q, ori_kv, cmp_kv = (x.pop(name) for name in _KEYS)
    d_q, d_ori, d_cmp = torch.ops.custom.npu_sparse_attn_sharedkv_grad(
        d_out,
        q,
        ori_kv,
        cmp_kv,
        out,
        lse,
        d_softmax_lse=None if d_lse is None else d_lse.contiguous(),
        **x,
    )
    d = dict(q=d_q, ori_kv=d_ori) | ({} if cmp_kv is None else dict(cmp_kv=d_cmp))
    if (sinks := x["sinks"]) is not None:
        # they enter through the denominator alone: minus their share of it times d_out . out
        limits = torch.finfo(sinks.dtype)
        whole = torch.logaddexp(lse.view(out.shape[:-1]), sinks).clamp(limits.min, limits.max)
        share = torch.exp(sinks.clamp(max=limits.max) - whole)
        delta = (d_out.to(sinks.dtype) * out.to(sinks.dtype)).sum(-1)
        d["sinks"] = -(share * delta).sum([*range(delta.ndim - 1)])
    return d
