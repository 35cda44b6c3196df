# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_sparse_attn_sharedkv_grad; shapes as in sharedkv.py, and no pages.

d_q, d_ori_kv, d_cmp_kv as what they belong to; d_cmp_kv [0] without `cmp_kv`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...check import Checker, tensors
from ..sparse_attention.sparse_flash_attention import statistics
from . import sharedkv

SCHEMA = (
    "npu_sparse_attn_sharedkv_grad(Tensor d_out, Tensor q, Tensor ori_kv, Tensor? cmp_kv,"
    " Tensor out, Tensor softmax_lse, *, Tensor? ori_sparse_indices=None,"
    " Tensor? cmp_sparse_indices=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_ori_kv=None,"
    " Tensor? cu_seqlens_cmp_kv=None, Tensor? seqused_q=None, Tensor? seqused_kv=None,"
    " Tensor? sinks=None, Tensor? d_softmax_lse=None, float? softmax_scale=0.0,"
    ' SymInt cmp_ratio=0, SymInt ori_win_left=127, str layout_q="BSND", str layout_kv="BSND",'
    " bool indices_are_slots=False, Tensor? ori_topk_length=None,"
    " Tensor? cmp_topk_length=None) -> (Tensor, Tensor, Tensor)"
)
FUNCTION = "backward"


def check(c: Checker, x: Mapping[str, Any]) -> None:
    q, d_out, out = x["q"], x["d_out"], x["out"]
    c.one_of("layout_kv", x["layout_kv"], "BSND", "TND")
    c.same_device(**tensors(x, "q", "d_out", "out", "softmax_lse", "d_softmax_lse"))
    sharedkv.inputs(c, q, "D", "D", x)
    keys = dict(ori_kv=x["ori_kv"], cmp_kv=x["cmp_kv"])
    c.same_dtype(q=q, **keys, d_out=d_out, out=out)
    rows = "B S" if x["layout_q"] == "BSND" else "T"
    c.shape("d_out", d_out, f"{rows} N D")
    c.shape("out", out, f"{rows} N D")
    c.dense_rows(**keys, d_out=d_out, out=out)
    *outer, inner = rows.split()
    for name, tensor in tensors(x, "softmax_lse", "d_softmax_lse").items():
        c.dtype(name, tensor, statistics(q))
        c.shape(name, tensor, " ".join([*outer, "1", inner, "N"]))
        c.contiguous(**{name: tensor})


def fake(
    q: Tensor, ori_kv: Tensor, cmp_kv: Tensor | None, **_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    d_cmp = q.new_empty([0] if cmp_kv is None else cmp_kv.shape)
    return q.new_empty(q.shape), q.new_empty(ori_kv.shape), d_cmp
