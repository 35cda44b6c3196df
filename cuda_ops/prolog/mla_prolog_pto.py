# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Queries of absorbed latent attention and the new rows of its cache; rnd rounds to the dtype of
the gammas.

    c = rnd(RMSNorm(rnd(x W_dq)))   [q, q_rope] = rnd(c W_uq_qr)   query = rnd(q W_uk)
    [l, l_rope] = rnd(x W_dkv_kr)   kv_cache = rnd(RMSNorm(l))     kr_cache = rnd(RoPE(l_rope))

Three launches, each beginning while the one before it ends: x products, norms and scatter, then a
program a head from c to its outputs.  Few heads or more than 256 tokens take four: c product,
absorption and rotation.

With weights of 8 bits x is quantised in a launch of its own, c with its norm.

    condition                       kernels
    weights or a cache of 8 bits    quantised_stages.py
    else                            nz_matmul.py then stages.py
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...dispatch.common import memory, quantised
from . import quantised_matmul, quantised_stages, stages
from .nz_matmul import product
from .quantised_matmul import Rows, Weight


def unsupported(rmsnorm_gamma_cq: Tensor, **_: object) -> str | None:
    return stages.unsupported(rmsnorm_gamma_cq)


def forward(**arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, query_rope, query_norm, _ = with_rows(**arguments)
    return query, query_rope, query_norm


def with_rows(
    token_x: Tensor,
    weight_dq: Tensor,
    weight_uq_qr: Tensor,
    weight_uk: Tensor,
    weight_dkv_kr: Tensor,
    rmsnorm_gamma_cq: Tensor,
    rmsnorm_gamma_ckv: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    cache_index: Tensor,
    rmsnorm_epsilon_cq: float,
    rmsnorm_epsilon_ckv: float,
    rope_interleaved: bool,
    weight_format: str,
    weight_quant_mode: int,
    kv_cache_quant_mode: int,
    **of_8_bits: Any,
) -> tuple[Tensor, Tensor, Tensor, Rows]:
    """Behind the outputs the query norm as its product takes it."""
    requests, steps, hidden = token_x.shape
    heads, _, rank = weight_uk.shape
    ranks, rotary = rmsnorm_gamma_cq.shape[0], rope_sin.shape[-1]
    dtype, device = rmsnorm_gamma_cq.dtype, token_x.device
    tokens = requests * steps
    if tokens == 0:
        query = memory.empty((requests, steps, heads, rank), dtype, device)
        query_rope = memory.empty((requests, steps, heads, rotary), dtype, device)
        query_norm = memory.empty((requests, steps, ranks), dtype, device)
        return query, query_rope, query_norm, quantised_matmul.none(weight_uq_qr.dtype, query_norm)
    if weight_quant_mode or kv_cache_quant_mode:
        return _of_8_bits(
            token_x,
            weight_dq,
            weight_uq_qr,
            weight_uk,
            weight_dkv_kr,
            rmsnorm_gamma_cq,
            rmsnorm_gamma_ckv,
            rope_sin,
            rope_cos,
            kv_cache,
            kr_cache,
            cache_index,
            rmsnorm_epsilon_cq,
            rmsnorm_epsilon_ckv,
            rope_interleaved,
            weight_format,
            kv_cache_quant_mode,
            **of_8_bits,
        )
    query_norm = memory.empty((requests, steps, ranks), dtype, device)
    partial = product(
        token_x.view(tokens, hidden),
        [(weight_dq, ranks), (weight_dkv_kr, rank + rotary)],
        weight_format,
        keep_float=True,
        first=True,
    )
    latent = stages.Latent(
        rmsnorm_gamma_cq,
        rmsnorm_gamma_ckv,
        kv_cache,
        kr_cache,
        query_norm,
        rmsnorm_epsilon_cq,
        rmsnorm_epsilon_ckv,
        rope_interleaved,
    )
    stages.token_stage(partial, rope_sin, rope_cos, cache_index, latent, None)
    query, query_rope = stages.query_heads(
        query_norm.view(tokens, ranks),
        weight_uq_qr,
        weight_format,
        weight_uk,
        rope_sin,
        rope_cos,
        (requests, steps),
        rope_interleaved,
    )
    return query, query_rope, query_norm, Rows(query_norm)


def _of_8_bits(
    token_x: Tensor,
    weight_dq: Tensor,
    weight_uq_qr: Tensor,
    weight_uk: Tensor,
    weight_dkv_kr: Tensor,
    rmsnorm_gamma_cq: Tensor,
    rmsnorm_gamma_ckv: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    cache_index: Tensor,
    rmsnorm_epsilon_cq: float,
    rmsnorm_epsilon_ckv: float,
    rope_interleaved: bool,
    weight_format: str,
    kv_cache_quant_mode: int,
    dequant_scale_x: Tensor | None,
    dequant_scale_w_dq: Tensor | None,
    dequant_scale_w_uq_qr: Tensor | None,
    dequant_scale_w_dkv_kr: Tensor | None,
    smooth_scales_cq: Tensor | None,
    k_nope_clip_alpha: Tensor | None,
    kv_cache_dtype: int | None,
    row_layout: str,
    scale_format: str,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Rows]:
    shape, hidden = (token_x.shape[0], token_x.shape[1]), token_x.shape[-1]
    heads, plain, rank = weight_uk.shape
    ranks, rotary = rmsnorm_gamma_cq.shape[0], rope_sin.shape[-1]
    x = token_x.view(-1, hidden)
    down, latent = quantised_stages.first_products(
        x,
        {} if dequant_scale_x is None else {x.dtype: Rows(x, dequant_scale_x)},
        [
            Weight(weight_dq, ranks, dequant_scale_w_dq),
            Weight(weight_dkv_kr, rank + rotary, dequant_scale_w_dkv_kr),
        ],
        weight_format,
        scale_format,
        rmsnorm_gamma_cq.dtype,
    )
    of = quantised_stages.Latent(
        rmsnorm_gamma_cq,
        rmsnorm_gamma_ckv,
        rmsnorm_epsilon_cq,
        rmsnorm_epsilon_ckv,
        quantised.typed(kv_cache, kv_cache_dtype),
        kr_cache,
        cache_index,
        rope_sin,
        rope_cos,
        rope_interleaved,
        kv_cache_quant_mode == 3,
        row_layout,
        scale_format,
        k_nope_clip_alpha,
    )
    kind = quantised.kind_of(weight_uq_qr.dtype)
    query_norm, c = quantised_stages.latent_tokens(down, latent, of, kind, smooth_scales_cq)
    query, query_rope = quantised_stages.query_heads(
        c,
        Weight(weight_uq_qr, heads * (plain + rotary), dequant_scale_w_uq_qr),
        weight_format,
        weight_uk,
        rope_sin,
        rope_cos,
        shape,
        rope_interleaved,
    )
    return query, query_rope, query_norm.view(*shape, ranks), c
