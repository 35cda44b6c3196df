# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Queries of attention over one shared key-value row, the rows themselves, and what the indexer
asks with; rnd rounds to the dtype of x, and what is rounded twice by a formula is rounded once.

    c = rnd(RMSNorm(rnd(x W_dq)))    query[h] = rnd(RoPE(RMSNorm(rnd(c W_uq)[h], no gain)))
    ori_kv = rnd(RoPE(RMSNorm(rnd(x W_kv))))
    query_index[h] = rnd(RoPE(rnd(c W_idx_qb)[h]))   weights = rnd(x W_idx_proj)

Weights of 8 bits: x and c are quantized before their products (weight_args.py).
Rows of 8 bits are rounded to bfloat16, not to the dtype of x, and quantized (quantizers.py).

RoPE turns the last Dr dims where they stand.  Token j of a request stands at act_seqs - seqused +
j; one before position 0 or from seqused on gives zeros and writes nothing.

Models: DeepSeek-V4.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...common import paged, rope
from ...ops.deepseek_v4.sharedkv_prolog_pto import Arguments
from ..common import quantizers, weight_args
from ..common.precision import accumulator
from .hc_pre import inverse_root


def forward(**a: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    token_x, ori_kv = a["token_x"], a["ori_kv"]
    dtype, wide = token_x.dtype, accumulator(token_x)
    size, tokens = a["gamma_kv"].shape[0], token_x.shape[:2]
    sin, cos = a["rope_sin"].to(wide), a["rope_cos"].to(wide)
    position, present = positions(a["act_seqs"], a["seqused"], tokens[1])

    def product(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
        rows = weight_args.rows(x, None, weight, "ue8m0")
        out = weight_args.product(rows, weight, scale, a["weight_format"])
        return out.to(dtype).to(wide).view(*tokens, out.shape[-1])

    def normed(x: Tensor) -> Tensor:
        return x * inverse_root(x, a["rms_norm_eps"])

    def heads_of(x: Tensor, size: int) -> Tensor:
        heads: Tensor = x.unflatten(-1, (x.shape[-1] // size, size))
        return heads

    def told(x: Tensor) -> Tensor:
        there = present.view(*tokens, *[1] * (x.ndim - 2))
        return torch.where(there, x, 0).to(dtype)

    query_norm = told(
        normed(product(token_x, a["w_dq"], a["dequant_scale_w_dq"])) * a["gamma_cq"].to(wide)
    )
    query = normed(heads_of(product(query_norm, a["w_uq"], a["dequant_scale_w_uq"]), size))
    query = told(rope.rotate_last(query, sin[:, :, None], cos[:, :, None]))

    row = normed(product(token_x, a["w_kv"], a["dequant_scale_w_kv"])) * a["gamma_kv"].to(wide)
    row = rope.rotate_last(row, sin, cos).flatten(0, 1)
    request = torch.arange(tokens[0], device=token_x.device)
    slot = paged.slots(a["ori_block_table"], request, position, *ori_kv.shape[:2])
    slot = torch.where(present, slot, -1).flatten()
    if a["kv_kind"] == "fp8":
        quantizers.write_v4_rows(ori_kv, slot, row)
    else:
        quantizers.write(ori_kv[:, :, 0], slot, row.to(dtype))

    if a["w_idx_qb"] is None or a["w_idx_proj"] is None:
        return query, query_norm, token_x.new_empty([0]), token_x.new_empty([0])
    weights = told(product(token_x, a["w_idx_proj"]))
    index = product(query_norm, a["w_idx_qb"], a["dequant_scale_w_idx_qb"])
    index = heads_of(index, index.shape[-1] // weights.shape[-1])
    index = rope.rotate_last(index, sin[:, :, None], cos[:, :, None]).to(dtype)
    if a["index_hadamard"]:
        index = quantizers.hadamard(index, index.shape[-1] ** -0.5)
        if a["hadamard_round"] == "bf16" and wide is not torch.float64:
            index = index.bfloat16()
    return query, query_norm, told(index), weights


def positions(act_seqs: Tensor, seqused: Tensor | None, steps: int) -> tuple[Tensor, Tensor]:
    """(position, whether it is there) of every token [B, S]."""
    token = torch.arange(steps, device=act_seqs.device)
    used = torch.full_like(act_seqs, steps) if seqused is None else seqused.clamp(0, steps)
    position = (act_seqs.long() - used)[:, None] + token
    return position, (token < used[:, None]) & (position >= 0)
