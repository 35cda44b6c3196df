# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Queries of attention over one shared key-value row, the rows themselves, and what the indexer
asks with; rnd rounds to the dtype of x, and what is rounded twice by a formula is rounded once.

    c = rnd(RMSNorm(rnd(x W_dq)))    query[h] = rnd(RoPE(RMSNorm(rnd(c W_uq)[h], no gain)))
    ori_kv = rnd(RoPE(RMSNorm(rnd(x W_kv))))
    query_index[h] = rnd(RoPE(rnd(c W_idx_qb)[h]))   weights = rnd(x W_idx_proj)

Weights of 8 bits: x and c are quantised before their products (weight_args.py).
Rows of 8 bits are rounded to bfloat16, not to the dtype of x, and quantised (quantizers.py).

RoPE turns the last Dr dims where they stand.  Token j of a request stands at act_seqs - seqused +
j; one before position 0 or from seqused on gives zeros and writes nothing.

Models: DeepSeek-V4.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...common import paged, rope
from ..common import quantizers, weight_args
from ..common.precision import accumulator
from .hc_pre import inverse_root


def forward(
    token_x: Tensor,
    w_dq: Tensor,
    w_uq: Tensor,
    w_kv: Tensor,
    gamma_cq: Tensor,
    gamma_kv: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    ori_kv: Tensor,
    ori_block_table: Tensor,
    act_seqs: Tensor,
    seqused: Tensor | None,
    w_idx_qb: Tensor | None,
    w_idx_proj: Tensor | None,
    rms_norm_eps: float,
    weight_format: str,
    kv_kind: str,
    index_hadamard: bool,
    hadamard_round: str,
    dequant_scale_w_dq: Tensor | None,
    dequant_scale_w_uq: Tensor | None,
    dequant_scale_w_kv: Tensor | None,
    dequant_scale_w_idx_qb: Tensor | None,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype, wide = token_x.dtype, accumulator(token_x)
    size, tokens = gamma_kv.shape[0], token_x.shape[:2]
    sin, cos = rope_sin.to(wide), rope_cos.to(wide)
    position, present = positions(act_seqs, seqused, tokens[1])

    def product(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
        rows = weight_args.rows(x, None, weight, "ue8m0")
        out = weight_args.product(rows, weight, scale, weight_format)
        return out.to(dtype).to(wide).view(*tokens, out.shape[-1])

    def normed(x: Tensor) -> Tensor:
        return x * inverse_root(x, rms_norm_eps)

    def heads_of(x: Tensor, size: int) -> Tensor:
        heads: Tensor = x.unflatten(-1, (x.shape[-1] // size, size))
        return heads

    def told(x: Tensor) -> Tensor:
        there = present.view(*tokens, *[1] * (x.ndim - 2))
        return torch.where(there, x, 0).to(dtype)

    query_norm = told(normed(product(token_x, w_dq, dequant_scale_w_dq)) * gamma_cq.to(wide))
    query = normed(heads_of(product(query_norm, w_uq, dequant_scale_w_uq), size))
    query = told(rope.rotate_last(query, sin[:, :, None], cos[:, :, None]))

    row = normed(product(token_x, w_kv, dequant_scale_w_kv)) * gamma_kv.to(wide)
    row = rope.rotate_last(row, sin, cos).flatten(0, 1)
    request = torch.arange(tokens[0], device=token_x.device)
    slot = paged.slots(ori_block_table, request, position, *ori_kv.shape[:2])
    slot = torch.where(present, slot, -1).flatten()
    if kv_kind == "fp8":
        quantizers.write_v4_rows(ori_kv, slot, row)
    else:
        quantizers.write(ori_kv[:, :, 0], slot, row.to(dtype))

    if w_idx_qb is None or w_idx_proj is None:
        return query, query_norm, token_x.new_empty([0]), token_x.new_empty([0])
    weights = told(product(token_x, w_idx_proj))
    index = product(query_norm, w_idx_qb, dequant_scale_w_idx_qb)
    index = heads_of(index, index.shape[-1] // weights.shape[-1])
    index = rope.rotate_last(index, sin[:, :, None], cos[:, :, None]).to(dtype)
    if index_hadamard:
        index = quantizers.hadamard(index, index.shape[-1] ** -0.5)
        if hadamard_round == "bf16" and wide is not torch.float64:
            index = index.bfloat16()
    return query, query_norm, told(index), weights


def positions(act_seqs: Tensor, seqused: Tensor | None, steps: int) -> tuple[Tensor, Tensor]:
    """(position, whether it is there) of every token [B, S]."""
    token = torch.arange(steps, device=act_seqs.device)
    used = torch.full_like(act_seqs, steps) if seqused is None else seqused.clamp(0, steps)
    position = (act_seqs.long() - used)[:, None] + token
    return position, (token < used[:, None]) & (position >= 0)
