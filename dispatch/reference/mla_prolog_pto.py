# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Queries of absorbed latent attention and the new rows of its cache; rnd rounds to the dtype of x.

c = rnd(RMSNorm(rnd(x W_dq)))   [q, q_rope] = rnd(c W_uq_qr)   query = rnd(q W_uk)
[l, l_rope] = rnd(x W_dkv_kr)   kv_cache = rnd(RMSNorm(l))     kr_cache = rnd(RoPE(l_rope))
"""

from __future__ import annotations

from torch import Tensor

from ..common import nz, paged, rope
from ._precision import accumulator, matmul


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
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, wide = token_x.dtype, accumulator(token_x)
    heads, plain, rank = weight_uk.shape
    sin, cos = rope_sin.to(wide), rope_cos.to(wide)

    down = matmul(token_x, nz.to_nd(weight_dq, weight_format)).to(dtype)
    query_norm = rms_norm(down, rmsnorm_gamma_cq, rmsnorm_epsilon_cq)

    q = matmul(query_norm, nz.to_nd(weight_uq_qr, weight_format)).to(dtype)
    q = q.unflatten(-1, (heads, plain + rope_sin.shape[-1]))
    # one head's [B * S, Dn] times its [Dn, R]
    by_head = q[..., :plain].flatten(0, 1).transpose(0, 1)
    query = matmul(by_head, weight_uk).to(dtype).transpose(0, 1).contiguous()
    query_rope = rope.rotate(
        q[..., plain:].to(wide), sin[:, :, None], cos[:, :, None], rope_interleaved
    ).to(dtype)

    latent = matmul(token_x, nz.to_nd(weight_dkv_kr, weight_format)).to(dtype)
    key = rms_norm(latent[..., :rank], rmsnorm_gamma_ckv, rmsnorm_epsilon_ckv)
    key_rope = rope.rotate(latent[..., rank:].to(wide), sin, cos, rope_interleaved)
    slot = cache_index.flatten()
    paged.scatter(kv_cache, slot, key.flatten(0, 1))
    paged.scatter(kr_cache, slot, key_rope.flatten(0, 1))
    return query.view(*token_x.shape[:2], heads, rank), query_rope, query_norm


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    wide = x.to(accumulator(x))
    scale = (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (wide * scale * gamma.to(wide.dtype)).to(x.dtype)
