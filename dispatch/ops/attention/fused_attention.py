# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments, outputs and autograd of npu_fused_attention.

    dense   q [B, H, Nq, D]  k [B, Hk, Nk, D]  v [B, Hk, Nk, Dv]  o [B, H, Nq, Dv]  lse [B, H, Nq]
    varlen  q [Tq, H, D]     k [Tk, Hk, D]     v [Tk, Hk, Dv]     o [Tq, H, Dv]     lse [Tq, H]

Row i of a sequence stands at position i + Nk - Nq.  It sees key j iff j <= position (causal) and
|position - j| < window.  A row that sees nothing gives o = 0 and lse = -inf; so do the tokens
before the first sequence of a varlen call, and behind the last.
"""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from torch import Tensor

from ...check import Checker
from ...errors import NotSupported
from ...values import known
from ..common import layouts

SCHEMA = (
    "npu_fused_attention(Tensor q, Tensor k, Tensor v, bool causal=False,"
    " float? sm_scale=None, *, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None,"
    " SymInt? window=None, bool deterministic=False) -> (Tensor, Tensor)"
)
GE = "FlashAttentionScore"
ONNX = "FusedAttention"


class Arguments(TypedDict):
    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    sm_scale: float | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    window: int | None
    deterministic: bool


FLOAT8 = (torch.float8_e5m2, torch.float8_e4m3fn)


def check(c: Checker, x: Arguments) -> None:
    check_inputs(c, x)
    if x["v"].dtype not in FLOAT8:
        c.same_dtype(q=x["q"], v=x["v"])


def check_inputs(c: Checker, x: Arguments) -> None:
    """What the forward and the backward op ask of the arguments that they share."""
    q, k, v, cu_seqlens_q = x["q"], x["k"], x["v"], x["cu_seqlens_q"]
    cu_seqlens_k = x["cu_seqlens_k"]
    c.same_device(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    c.floating("q", q)
    c.same_dtype(q=q, k=k)
    c.require(
        (cu_seqlens_q is None) == (cu_seqlens_k is None),
        "only one of `cu_seqlens_q` and `cu_seqlens_k` is given, expected both (varlen) or none. "
        "Where keys are cut as queries are, pass the same tensor for both.",
    )
    if cu_seqlens_q is None or cu_seqlens_k is None:
        c.shape("q", q, "B H Nq D")
        c.shape("k", k, "B Hk Nk D")
        c.shape("v", v, "B Hk Nk Dv")
        if known(q):
            _note_turned(c)
    else:
        c.shape("q", q, "Tq H D")
        c.shape("k", k, "Tk Hk D")
        c.shape("v", v, "Tk Hk Dv")
        for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            c.integers(name, cu_seqlens, "L")
            c.at_least(f"{name}.numel()", cu_seqlens.shape[0], 1)
            c.contiguous(**{name: cu_seqlens})
            layouts.prefix_sums(c, name, cu_seqlens, c.sizes[f"T{name[-1]}"])
    heads, key_heads = c.sizes["H"], c.sizes["Hk"]
    c.require(
        key_heads > 0 and heads % key_heads == 0,
        f"`q` has {heads} heads and `k` {key_heads}, expected a multiple of the heads of `k`. Pass "
        f"keys and values whose number of heads divides {heads}.",
    )
    c.at_least("head size of `q`", c.sizes["D"], 1)
    if x["window"] is not None:
        c.at_least("window", x["window"], 1)
    c.dense_rows(q=q, k=k, v=v)


def _note_turned(c: Checker) -> None:
    """Tokens and heads may have changed places."""
    heads, key_heads, rows, keys = (c.sizes[x] for x in ("H", "Hk", "Nq", "Nk"))
    if heads == key_heads and heads > rows >= keys and rows > 1:
        c.note(
            "layout",
            f"`q` is read as {heads} heads of {rows} tokens, [B, N, S, D]. If it is [B, S, N, D], "
            "as FlashAttention has it, pass q, k and v .transpose(1, 2).",
        )


def fake(q: Tensor, v: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    lse = torch.float64 if q.dtype is torch.float64 else torch.float32
    return q.new_empty([*q.shape[:-1], v.shape[-1]]), q.new_empty(q.shape[:-1], dtype=lse)


def setup_context(ctx: Any, x: dict[str, Any], output: tuple[Tensor, Tensor]) -> None:
    cu_seqlens = x["cu_seqlens_q"], x["cu_seqlens_k"]
    ctx.save_for_backward(x["q"], x["k"], x["v"], *output, *cu_seqlens)
    ctx.options = {name: x[name] for name in ("causal", "sm_scale", "window", "deterministic")}
    ctx.set_materialize_grads(False)


def backward(ctx: Any, grad_o: Tensor | None, grad_lse: Tensor | None) -> dict[str, Any]:
    q, k, v, o, lse, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
    if v.dtype in FLOAT8:
        raise NotSupported(
            f"npu_fused_attention: `v` is {str(v.dtype).removeprefix('torch.')}, and the backward "
            "needs it in the dtype of `q`. Convert `v` first."
        )
    if grad_o is None and grad_lse is None:
        return {}
    if grad_o is None:
        grad_o = torch.zeros_like(o)
    grads = torch.ops.custom.npu_fused_attention_backward(
        # an expanded gradient (of o.sum(), say) has no dense rows
        grad_o.contiguous(),
        q,
        k,
        v,
        o,
        lse,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        **ctx.options,
        grad_lse=None if grad_lse is None else grad_lse.contiguous(),
    )
    return dict(zip("qkv", grads, strict=True))
