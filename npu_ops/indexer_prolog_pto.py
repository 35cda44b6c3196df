# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Queries, head weights and new keys of the lightning indexer; rnd rounds to the dtype of x.

    query_index = RoPE(rnd(c W_qb))   key = RoPE(rnd(LayerNorm(x W_k)))   weights = rnd(x W_proj)

RoPE turns the first Dr dims of a head and rounds them; the others pass.  x W_k is not rounded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..dispatch.common import memory
from . import product, rows, tiling


def unsupported(
    token_x: Tensor,
    ln_gamma_k: Tensor,
    rope_sin: Tensor,
    weight_quant_mode: int = 0,
    kv_cache_quant_mode: int = 0,
    **_: Any,
) -> str | None:
    if reason := product.of_8_bits(weight_quant_mode, kv_cache_quant_mode):
        return reason
    if reason := tiling.not_multiplied(token_x=token_x):
        return reason
    rotary, size = rope_sin.shape[-1], ln_gamma_k.shape[0]
    if rotary % 16 or (size - rotary) % 16:
        return f"{rotary} rotary dims of {size}: both they and the rest come in 16s"
    return None


def forward(
    token_x: Tensor,
    query_norm: Tensor,
    weight_qb: Tensor,
    weight_k: Tensor,
    weight_proj: Tensor,
    ln_gamma_k: Tensor,
    ln_beta_k: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    index_k_cache: Tensor,
    cache_index: Tensor,
    ln_epsilon: float,
    rope_interleaved: bool,
    weight_format: str,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    batch, length, hidden = token_x.shape
    tokens, size = batch * length, ln_gamma_k.shape[0]
    four = weight_proj.ndim == 4
    heads = weight_proj.shape[0] * weight_proj.shape[3] if four else weight_proj.shape[1]
    device, dtype = token_x.device, token_x.dtype
    query_index = memory.empty((tokens, heads, size), dtype, device)
    weights = memory.empty((tokens, heads), dtype, device)
    if tokens:
        x = token_x.view(tokens, hidden)
        key = memory.empty((tokens, size), torch.float32, device)
        product.weight(x, weight_k, weight_format, key)
        rows.index_key(
            key, ln_gamma_k, ln_beta_k, ln_epsilon, rope_sin, rope_cos, cache_index,
            index_k_cache, rope_interleaved,
        )  # fmt: skip
        c = query_norm.view(tokens, query_norm.shape[-1])
        product.weight(c, weight_qb, weight_format, query_index.flatten(1))
        rows.rotate(query_index, rope_sin, rope_cos, rope_interleaved, query_index)
        product.weight(x, weight_proj, weight_format, weights)
    return query_index.view(batch, length, heads, size), weights.view(batch, length, heads)
