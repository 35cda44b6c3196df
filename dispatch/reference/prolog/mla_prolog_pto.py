# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Queries of absorbed latent attention and the new rows of its cache; rnd rounds to the dtype of
the gammas, the working dtype.

c = rnd(RMSNorm(rnd(x W_dq)))   [q, q_rope] = rnd(c W_uq_qr)   query = rnd(q W_uk)
[l, l_rope] = rnd(x W_dkv_kr)   kv_cache = rnd(RMSNorm(l))     kr_cache = rnd(RoPE(l_rope))

Without W_dq, c = x.

Weights of 8 bits: x and c are quantized before their products (weight_args.py).  Rows of 8 bits:
what the two caches would get is quantized into one (latent_cache_write.py).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from ...common import mla_v3, paged, quantized, rope
from ...ops.prolog.mla_prolog_pto import Arguments
from ..caches import latent_cache_write
from ..common import weight_args
from ..common.precision import accumulator, matmul


def forward(**arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return with_rows(**arguments)[:3]


def v3(**arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """npu_mla_prolog_v3"""
    return mla_v3.outputs(arguments, with_rows(**mla_v3.as_pto(arguments)))


def with_rows(**a: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor, weight_args.Rows]:
    """Behind the outputs the query norm as its product takes it."""
    weight_dq, rmsnorm_gamma_cq, rope_sin = a["weight_dq"], a["rmsnorm_gamma_cq"], a["rope_sin"]
    weight_format, scale_format = a["weight_format"], a["scale_format"]
    dtype, wide = a["weight_uk"].dtype, accumulator(a["weight_uk"])
    heads, plain, rank = a["weight_uk"].shape
    tokens = a["token_x"].shape[:-1]
    sin, cos = (each.flatten(0, -2).to(wide) for each in (rope_sin, a["rope_cos"]))

    x = weight_args.rows(a["token_x"], a["dequant_scale_x"], a["weight_dkv_kr"], scale_format)
    if weight_dq is None or rmsnorm_gamma_cq is None:
        query_norm, c = a["weight_uk"].new_empty(0), x
    else:
        down = weight_args.product(x, weight_dq, a["dequant_scale_w_dq"], weight_format).to(dtype)
        normed = rms_norm(down, rmsnorm_gamma_cq, a["rmsnorm_epsilon_cq"])
        c = weight_args.rows(normed, None, a["weight_uq_qr"], scale_format, a["smooth_scales_cq"])
        query_norm = normed.view(*tokens, rmsnorm_gamma_cq.shape[0])
    q = weight_args.product(c, a["weight_uq_qr"], a["dequant_scale_w_uq_qr"], weight_format).to(
        dtype
    )
    q = q.unflatten(-1, (heads, plain + rope_sin.shape[-1]))
    # one head's [T, Dn] times its [Dn, R]
    by_head = q[..., :plain].transpose(0, 1)
    query = matmul(by_head, a["weight_uk"]).to(dtype).transpose(0, 1).contiguous()
    query_rope = rope.rotate(
        q[..., plain:].to(wide), sin[:, None], cos[:, None], a["rope_interleaved"]
    ).to(dtype)

    latent = weight_args.product(
        x, a["weight_dkv_kr"], a["dequant_scale_w_dkv_kr"], weight_format
    ).to(dtype)
    key = rms_norm(latent[..., :rank], a["rmsnorm_gamma_ckv"], a["rmsnorm_epsilon_ckv"])
    key_rope = rope.rotate(latent[..., rank:].to(wide), sin, cos, a["rope_interleaved"])
    slot = a["cache_index"].flatten()
    if a["kv_cache_quant_mode"] == 0:
        paged.scatter(a["kv_cache"], slot, key)
        paged.scatter(a["kr_cache"], slot, key_rope)
    else:
        rows = quantized.typed(a["kv_cache"], a["kv_cache_dtype"])
        kind = quantized.kind_of(rows.dtype)
        assert kind is not None  # the check said so
        latent_cache_write.forward(
            ckv=key,
            k_rope=key_rope.to(dtype).to(quantized.rotary_dtype(key)),
            rows=rows,
            slots=slot,
            kind=kind,
            row_layout=a["row_layout"],
            scale_format=scale_format,
            k_nope_clip_alpha=a["k_nope_clip_alpha"],
            rope_head_dim=rope_sin.shape[-1],
        )
    return (
        query.view(*tokens, heads, rank),
        query_rope.view(*tokens, heads, rope_sin.shape[-1]),
        query_norm,
        c,
    )


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    wide = x.to(accumulator(x))
    scale = (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (wide * scale * gamma.to(wide.dtype)).to(x.dtype)
