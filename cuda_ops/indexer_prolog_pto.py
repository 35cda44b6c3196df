# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Queries, head weights and new keys of the lightning indexer; rnd rounds to the dtype of x.

    query_index = RoPE(rnd(c W_qb))   key = RoPE(rnd(LayerNorm(x W_k)))   weights = rnd(x W_proj)

RoPE turns the first D columns of a head and rounds them; the others pass.  x W_k stays in float32
until its LayerNorm.
"""

from __future__ import annotations

from torch import Tensor

from ..dispatch.common import memory
from . import prolog
from .nz_matmul import product


def unsupported(
    token_x: Tensor, weight_quant_mode: int = 0, kv_cache_quant_mode: int = 0, **_: object
) -> str | None:
    if weight_quant_mode or kv_cache_quant_mode:
        return "weights and caches of 8 bits have no kernel here yet"
    return prolog.unsupported(token_x)


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
    **_: object,
) -> tuple[Tensor, Tensor]:
    requests, steps, hidden = token_x.shape
    ranks, size = query_norm.shape[-1], ln_gamma_k.shape[0]
    heads = weight_qb.numel() // (ranks * size)
    weights = memory.empty((requests, steps, heads), token_x.dtype, token_x.device)
    tokens = requests * steps
    if tokens == 0:
        shape = (requests, steps, heads, size)
        return memory.empty(shape, token_x.dtype, token_x.device), weights
    part = product(
        token_x.view(tokens, hidden),
        [(weight_k, size), (weight_proj, heads)],
        weight_format,
        keep_float=True,
        first=True,
    )
    index = prolog.Index(
        ln_gamma_k, ln_beta_k, index_k_cache, weights, ln_epsilon, rope_interleaved
    )
    prolog.token_stage(part, rope_sin, rope_cos, cache_index, None, index)
    query_index = prolog.index_heads(
        query_norm.view(tokens, ranks), weight_qb, weight_format, size, rope_sin, rope_cos,
        (requests, steps), rope_interleaved, late=True,
    )  # fmt: skip
    return query_index, weights
