# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Queries, head weights and new keys of the lightning indexer; rnd rounds to the dtype of x.

    query_index = RoPE(rnd(c W_qb))   key = RoPE(rnd(LayerNorm(x W_k)))   weights = rnd(x W_proj)

RoPE turns the first D columns of a head and rounds them; the others pass.  x W_k stays in float32
until its LayerNorm.

    condition                       kernels
    weights or a cache of 8 bits    quantised_stages.py
    else                            nz_matmul.py then stages.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...dispatch.common import memory, quantised
from . import quantised_matmul, quantised_stages, stages
from .nz_matmul import product
from .quantised_matmul import Rows, Weight


def unsupported(token_x: Tensor, **_: object) -> str | None:
    return stages.unsupported(token_x)


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
    weight_quant_mode: int,
    kv_cache_quant_mode: int,
    **of_8_bits: Any,
) -> tuple[Tensor, Tensor]:
    requests, steps, hidden = token_x.shape
    ranks, size = query_norm.shape[-1], ln_gamma_k.shape[0]
    heads = weight_qb.numel() // (ranks * size)
    tokens, device = requests * steps, token_x.device
    if tokens == 0:
        kinds = (
            (index_k_cache.dtype, torch.float32) if kv_cache_quant_mode else 2 * (token_x.dtype,)
        )
        query_index = memory.empty((requests, steps, heads, size), kinds[0], device)
        return query_index, memory.empty((requests, steps, heads), kinds[1], device)
    if weight_quant_mode or kv_cache_quant_mode:
        return _of_8_bits(
            token_x,
            query_norm,
            weight_qb,
            weight_k,
            weight_proj,
            ln_gamma_k,
            ln_beta_k,
            rope_sin,
            rope_cos,
            index_k_cache,
            cache_index,
            ln_epsilon,
            rope_interleaved,
            weight_format,
            **of_8_bits,
        )
    weights = memory.empty((requests, steps, heads), token_x.dtype, device)
    partial = product(
        token_x.view(tokens, hidden),
        [(weight_k, size), (weight_proj, heads)],
        weight_format,
        keep_float=True,
        first=True,
    )
    index = stages.Index(
        ln_gamma_k, ln_beta_k, index_k_cache, weights, ln_epsilon, rope_interleaved
    )
    stages.token_stage(partial, rope_sin, rope_cos, cache_index, None, index)
    query_index = stages.index_heads(
        query_norm.view(tokens, ranks),
        weight_qb,
        weight_format,
        size,
        rope_sin,
        rope_cos,
        (requests, steps),
        rope_interleaved,
        late=True,
    )
    return query_index, weights


def _of_8_bits(
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
    index_k_scale_cache: Tensor | None,
    dequant_scale_q_norm: Tensor | None,
    dequant_scale_w_qb: Tensor | None,
    dequant_scale_w_k: Tensor | None,
    smooth_scales_cq: Tensor | None,
    index_hadamard: bool,
    hadamard_round: str,
    scale_format: str,
) -> tuple[Tensor, Tensor]:
    shape, hidden = (token_x.shape[0], token_x.shape[1]), token_x.shape[-1]
    ranks, size = query_norm.shape[-1], ln_gamma_k.shape[0]
    heads = weight_qb.numel() // (ranks * size)
    of = quantised_stages.Index(
        ln_gamma_k,
        ln_beta_k,
        ln_epsilon,
        index_k_cache,
        index_k_scale_cache,
        cache_index,
        rope_sin,
        rope_cos,
        rope_interleaved,
        index_hadamard,
        hadamard_round,
        scale_format,
    )
    x, c = token_x.view(-1, hidden), Rows(query_norm.view(-1, ranks), dequant_scale_q_norm)
    rows: dict[torch.dtype, Rows] = {}
    kind, made = quantised.kind_of(weight_qb.dtype), []
    if kind is not None:
        of_x = [(x, None)] if weight_k.dtype is weight_qb.dtype else []
        of_c = [(c.values, smooth_scales_cq)] if c.scale is None else []
        made = quantised_matmul.activations([*of_x, *of_c], kind, scale_format)
        if of_x:
            rows[weight_k.dtype] = made[0]
        if of_c:
            c = made[-1]
    weight = Weight(weight_qb, heads * size, dequant_scale_w_qb)
    # the largest weight first: what x is multiplied by comes beside it
    q = quantised_stages.index_product(
        c, weight, weight_format, of, first=not made, second=bool(made)
    )
    key, proj = quantised_stages.first_products(
        x,
        rows,
        [Weight(weight_k, size, dequant_scale_w_k), Weight(weight_proj, heads, None)],
        weight_format,
        scale_format,
        token_x.dtype,
        late=q is not None,
    )
    return quantised_stages.index_side(key, proj, q, c, weight, weight_format, shape, of)
