# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_fused_attention_backward; shapes as in fused_attention.py.

    delta = sum_d grad_o o - grad_lse     P = exp(S - lse)     dS = P (grad_o v^T - delta)
    grad_q = sm_scale dS k     grad_k = sm_scale dS^T q     grad_v = P^T grad_o

The gradients have the shapes and the dtype of q, k, v, contiguous; those of k and v are sums over
the query heads that share them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...check import Checker
from . import fused_attention
from .fused_attention import check_inputs

SCHEMA = (
    "npu_fused_attention_backward(Tensor grad_o, Tensor q, Tensor k, Tensor v, Tensor o,"
    " Tensor lse, bool causal=False, float? sm_scale=None, *, Tensor? cu_seqlens_q=None,"
    " Tensor? cu_seqlens_k=None, SymInt? window=None, bool deterministic=False,"
    " Tensor? grad_lse=None) -> (Tensor, Tensor, Tensor)"
)
GE = "FlashAttentionScoreGrad"
FUNCTION = "backward"


class Arguments(fused_attention.Arguments):
    grad_o: Tensor
    o: Tensor
    lse: Tensor
    grad_lse: Tensor | None


def check(c: Checker, x: Arguments) -> None:
    grad_o, q, o, lse, grad_lse = x["grad_o"], x["q"], x["o"], x["lse"], x["grad_lse"]
    check_inputs(c, x)
    c.same_device(q=q, grad_o=grad_o, o=o, lse=lse, grad_lse=grad_lse)
    c.same_dtype(q=q, v=x["v"], o=o, grad_o=grad_o)
    rows = "B H Nq" if x["cu_seqlens_q"] is None else "Tq H"
    c.shape("o", o, f"{rows} Dv")
    c.shape("grad_o", grad_o, f"{rows} Dv")
    statistics = torch.float64 if q.dtype is torch.float64 else torch.float32
    c.shape("lse", lse, rows)
    c.dtype("lse", lse, statistics)
    if grad_lse is not None:
        c.shape("grad_lse", grad_lse, rows)
        c.dtype("grad_lse", grad_lse, statistics)
    c.dense_rows(o=o, grad_o=grad_o)
    c.contiguous(lse=lse, grad_lse=grad_lse)


def fake(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
