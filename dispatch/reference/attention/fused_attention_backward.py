# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Gradients of scaled dot-product attention, from its log-sum-exp, a block of query rows at a time.

delta = sum_d grad_o o - grad_lse     P = exp(S - lse)     dS = P (grad_o v^T - delta)
grad_q = sm_scale dS k     grad_k = sm_scale dS^T q     grad_v = P^T grad_o
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...ops.attention.fused_attention_backward import Arguments
from ..common.precision import accumulator
from .fused_attention import Options, finite, group, heads_first, score_blocks, sequences, ungroup


def backward(**a: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor]:
    grad_o, q, k, v, lse = a["grad_o"], a["q"], a["k"], a["v"], a["lse"]
    grads = tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    delta = (grad_o.to(lse.dtype) * a["o"].to(lse.dtype)).sum(-1)
    if a["grad_lse"] is not None:
        delta = delta - a["grad_lse"]
    options = Options.of(q, a["causal"], a["sm_scale"], a["window"])
    if a["cu_seqlens_q"] is None or a["cu_seqlens_k"] is None:
        _sequence(grad_o, q, k, v, lse, delta, grads, options)
        return grads[0], grads[1], grads[2]
    for rows, keys in sequences(a["cu_seqlens_q"], a["cu_seqlens_k"], q, k):
        _sequence(
            heads_first(grad_o[rows]),
            heads_first(q[rows]),
            heads_first(k[keys]),
            heads_first(v[keys]),
            lse[rows].transpose(0, 1)[None],
            delta[rows].transpose(0, 1)[None],
            tuple(map(heads_first, (grads[0][rows], grads[1][keys], grads[2][keys]))),
            options,
        )
    return grads[0], grads[1], grads[2]


def _sequence(
    grad_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    grads: tuple[Tensor, ...],
    options: Options,
) -> None:
    """Gradients of [B, H, N, D] tensors, into the three views `grads`."""
    kind, heads, key_heads = accumulator(q), q.shape[1], k.shape[1]
    k_wide, v_wide = k.to(kind), v.to(kind)
    grad_k, grad_v = torch.zeros_like(k_wide), torch.zeros_like(v_wide)
    for rows, keys, scores in score_blocks(q, k, options):
        p = torch.exp(scores - finite(lse[:, :, rows])[..., None])
        grad_o_rows = group(grad_o[:, :, rows].to(kind), key_heads)
        grad_p = ungroup(grad_o_rows @ v_wide[:, :, keys].mT, heads)
        grad_s = p * (grad_p - delta[:, :, rows, None]) * options.sm_scale
        grad_s, p = group(grad_s, key_heads), group(p, key_heads)
        grads[0][:, :, rows] = ungroup(grad_s @ k_wide[:, :, keys], heads).to(q.dtype)
        grad_k[:, :, keys] += grad_s.mT @ group(q[:, :, rows].to(kind), key_heads)
        grad_v[:, :, keys] += p.mT @ grad_o_rows
    grads[1].copy_(grad_k)
    grads[2].copy_(grad_v)
