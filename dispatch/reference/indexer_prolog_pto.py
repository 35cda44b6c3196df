# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Queries, head weights and new keys of the lightning indexer; rnd rounds to the dtype of x.

    query_index = RoPE(rnd(c W_qb))   key = RoPE(rnd(LayerNorm(x W_k)))   weights = rnd(x W_proj)

RoPE turns the first Dr dims of a head and rounds them; the others pass.  x W_k is not rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..common import nz, paged, rope
from ._precision import accumulator, matmul


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
) -> tuple[Tensor, Tensor]:
    dtype, wide = token_x.dtype, accumulator(token_x)
    size, rotary = ln_gamma_k.shape[0], rope_sin.shape[-1]
    sin, cos = rope_sin.to(wide), rope_cos.to(wide)

    def rotate_first(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
        first = rope.rotate(x[..., :rotary].to(wide), sin, cos, rope_interleaved)
        return torch.cat([first.to(dtype), x[..., rotary:]], dim=-1)

    query = matmul(query_norm, nz.to_nd(weight_qb, weight_format)).to(dtype)
    query = query.unflatten(-1, (query.shape[-1] // size, size))
    query_index = rotate_first(query, sin[:, :, None], cos[:, :, None])

    key = matmul(token_x, nz.to_nd(weight_k, weight_format))
    key = torch.nn.functional.layer_norm(
        key, [size], ln_gamma_k.to(wide), ln_beta_k.to(wide), ln_epsilon
    ).to(dtype)
    key = rotate_first(key, sin, cos)
    paged.scatter(index_k_cache, cache_index.flatten(), key.flatten(0, 1))

    weights = matmul(token_x, nz.to_nd(weight_proj, weight_format)).to(dtype)
    return query_index, weights
