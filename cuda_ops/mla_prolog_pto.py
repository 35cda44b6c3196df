# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Queries of absorbed latent attention and the new rows of its cache; rnd rounds to the dtype of x.

    c = rnd(RMSNorm(rnd(x W_dq)))   [q, q_rope] = rnd(c W_uq_qr)   query = rnd(q W_uk)
    [l, l_rope] = rnd(x W_dkv_kr)   kv_cache = rnd(RMSNorm(l))     kr_cache = rnd(RoPE(l_rope))

Three launches, each beginning while the one before it ends: x products, norms and scatter, then a
program a head from c to its outputs.  Few heads or more than 256 tokens take four: c product,
absorption and rotation.
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
    **_: object,
) -> tuple[Tensor, Tensor, Tensor]:
    requests, steps, hidden = token_x.shape
    heads, _, rank = weight_uk.shape
    ranks, rotary = rmsnorm_gamma_cq.shape[0], rope_sin.shape[-1]
    dtype, device = token_x.dtype, token_x.device
    query_norm = memory.empty((requests, steps, ranks), dtype, device)
    tokens = requests * steps
    if tokens == 0:
        query = memory.empty((requests, steps, heads, rank), dtype, device)
        return query, memory.empty((requests, steps, heads, rotary), dtype, device), query_norm
    part = product(
        token_x.view(tokens, hidden),
        [(weight_dq, ranks), (weight_dkv_kr, rank + rotary)],
        weight_format,
        keep_float=True,
        first=True,
    )
    latent = prolog.Latent(
        rmsnorm_gamma_cq, rmsnorm_gamma_ckv, kv_cache, kr_cache, query_norm,
        rmsnorm_epsilon_cq, rmsnorm_epsilon_ckv, rope_interleaved,
    )  # fmt: skip
    prolog.token_stage(part, rope_sin, rope_cos, cache_index, latent, None)
    query, query_rope = prolog.query_heads(
        query_norm.view(tokens, ranks), weight_uq_qr, weight_format, weight_uk, rope_sin, rope_cos,
        (requests, steps), rope_interleaved,
    )  # fmt: skip
    return query, query_rope, query_norm
