# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Queries of absorbed latent attention and the new rows of its cache; rnd rounds to the dtype of
the gammas.

    c = rnd(RMSNorm(rnd(x W_dq)))   [q, q_rope] = rnd(c W_uq_qr)   query = rnd(q W_uk)
    [l, l_rope] = rnd(x W_dkv_kr)   kv_cache = rnd(RMSNorm(l))     kr_cache = rnd(RoPE(l_rope))

Three launches, each beginning while the one before it ends: x products, norms and scatter, then a
program a head from c to its outputs.  Few heads or more than 256 tokens take four: c product,
absorption and rotation.

With weights of 8 bits x is quantized in a launch of its own, c with its norm.

Without W_dq, c is x: one product of x has the queries and the latent, and the program a head begins
at the absorption.

    condition                       kernels
    weights or a cache of 8 bits    quantized_stages.py
    else                            nz_matmul.py then stages.py
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import memory, mla_v3, quantized
from ...dispatch.ops.prolog.mla_prolog_pto import Arguments
from . import quantized_matmul, quantized_stages, stages
from .nz_matmul import product
from .quantized_matmul import Rows, Weight


def unsupported(weight_uk: Tensor, **_: object) -> str | None:
    return stages.unsupported(weight_uk)


def forward(**arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return with_rows(**arguments)[:3]


def v3(**arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """npu_mla_prolog_v3"""
    return mla_v3.outputs(arguments, with_rows(**mla_v3.as_pto(arguments)))


def with_rows(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor, Rows]:
    """Behind the outputs the query norm as its product takes it."""
    token_x, weight_dq, rmsnorm_gamma_cq = x["token_x"], x["weight_dq"], x["rmsnorm_gamma_cq"]
    weight_uk, rope_sin, weight_format = x["weight_uk"], x["rope_sin"], x["weight_format"]
    requests, steps, hidden = token_x.shape
    heads, plain, rank = weight_uk.shape
    rotary, tokens = rope_sin.shape[-1], requests * steps
    shape = (0,) if rmsnorm_gamma_cq is None else (requests, steps, rmsnorm_gamma_cq.shape[0])
    if tokens and (x["weight_quant_mode"] or x["kv_cache_quant_mode"]):
        return _quantized(**x)
    query_norm = memory.empty(shape, weight_uk.dtype, token_x.device)
    query, query_rope = stages.query_room(weight_uk, rope_sin, (requests, steps))
    if tokens == 0:
        c = Rows(query_norm)
        if weight_dq is not None:
            c = quantized_matmul.none(x["weight_uq_qr"].dtype, query_norm)
        return query, query_rope, query_norm, c
    ahead = (x["weight_uq_qr"], heads * (plain + rotary))
    if weight_dq is not None:
        ahead = (weight_dq, shape[-1])
    partial = product(
        token_x.view(tokens, hidden),
        [ahead, (x["weight_dkv_kr"], rank + rotary)],
        weight_format,
        keep_float=weight_dq is not None,
        first=True,
    )
    latent = stages.Latent(
        rmsnorm_gamma_cq,
        x["rmsnorm_gamma_ckv"],
        x["kv_cache"],
        x["kr_cache"],
        None if weight_dq is None else query_norm,
        x["rmsnorm_epsilon_cq"],
        x["rmsnorm_epsilon_ckv"],
        x["rope_interleaved"],
    )
    rope_cos, interleaved = x["rope_cos"], x["rope_interleaved"]
    stages.token_stage(partial, rope_sin, rope_cos, x["cache_index"], latent, None)
    if weight_dq is None:
        stages.query_stage(partial, rope_sin, rope_cos, weight_uk, query, query_rope, interleaved)
    else:
        stages.query_heads(
            query_norm.view(tokens, -1),
            x["weight_uq_qr"],
            weight_format,
            weight_uk,
            rope_sin,
            rope_cos,
            (requests, steps),
            interleaved,
            into=(query, query_rope),
        )
    return query, query_rope, query_norm, Rows(query_norm)


def _quantized(**a: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor, Rows]:
    token_x, weight_dq, rope_sin = a["token_x"], a["weight_dq"], a["rope_sin"]
    rmsnorm_gamma_cq = a["rmsnorm_gamma_cq"]
    assert weight_dq is not None and rmsnorm_gamma_cq is not None  # the check said so
    shape, hidden = (token_x.shape[0], token_x.shape[1]), token_x.shape[-1]
    heads, plain, rank = a["weight_uk"].shape
    ranks, rotary = rmsnorm_gamma_cq.shape[0], rope_sin.shape[-1]
    x = token_x.view(-1, hidden)
    down, latent = quantized_stages.products(
        x,
        {} if a["dequant_scale_x"] is None else {x.dtype: Rows(x, a["dequant_scale_x"])},
        [
            Weight(weight_dq, ranks, a["dequant_scale_w_dq"]),
            Weight(a["weight_dkv_kr"], rank + rotary, a["dequant_scale_w_dkv_kr"]),
        ],
        a["weight_format"],
        a["scale_format"],
        rmsnorm_gamma_cq.dtype,
        first=True,
    )
    of = quantized_stages.Latent(
        rmsnorm_gamma_cq,
        a["rmsnorm_gamma_ckv"],
        a["rmsnorm_epsilon_cq"],
        a["rmsnorm_epsilon_ckv"],
        quantized.typed(a["kv_cache"], a["kv_cache_dtype"]),
        a["kr_cache"],
        a["cache_index"],
        rope_sin,
        a["rope_cos"],
        a["rope_interleaved"],
        a["kv_cache_quant_mode"] == 3,
        a["row_layout"],
        a["scale_format"],
        a["k_nope_clip_alpha"],
    )
    kind = quantized.kind_of(a["weight_uq_qr"].dtype)
    query_norm, c = quantized_stages.latent_tokens(down, latent, of, kind, a["smooth_scales_cq"])
    query, query_rope = quantized_stages.query_heads(
        c,
        Weight(a["weight_uq_qr"], heads * (plain + rotary), a["dequant_scale_w_uq_qr"]),
        a["weight_format"],
        a["weight_uk"],
        rope_sin,
        a["rope_cos"],
        shape,
        a["rope_interleaved"],
    )
    return query, query_rope, query_norm.view(*shape, ranks), c
