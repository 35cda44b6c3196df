# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Queries, head weights and new keys of the lightning indexer; rnd rounds to the dtype of x.

    query_index = RoPE(rnd(c W_qb))   key = RoPE(rnd(LayerNorm(x W_k)))   weights = rnd(x W_proj)

RoPE turns the first Dr dims of a head and rounds them; the others pass.  x W_k is not rounded.

Weights of 8 bits: c and x are quantized before their products (weight_args.py).  A cache of 8 bits:
keys and queries are quantized, and the queries' scales multiplied into the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...common import paged, quantized, rope
from ...ops.prolog.indexer_prolog_pto import Arguments
from ..caches import index_cache_write, quantize_index_query
from ..common import weight_args
from ..common.precision import accumulator


def forward(**arguments: Any) -> tuple[Tensor, Tensor]:
    a = arguments
    query, key, weights = projected(**a)
    slots = a["cache_index"].flatten()
    if a["kv_cache_quant_mode"] == 0:
        paged.scatter(a["index_k_cache"], slots, key)
        return query, weights
    kind = quantized.kind_of(a["index_k_cache"].dtype)
    assert kind is not None  # the check said so
    form = {name: a[name] for name in ("scale_format", "index_hadamard", "hadamard_round")}
    index_cache_write.forward(
        k=key,
        values=a["index_k_cache"],
        scales=a["index_k_scale_cache"],
        slots=slots,
        kind=kind,
        **form,
    )
    return quantize_index_query.forward(q=query, weights=weights, kind=kind, fold=True, **form)


def projected(**a: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor]:
    """(queries [.., Ni, Di], keys [T, Di], weights [.., Ni]) in the dtype of x"""
    token_x, weight_format = a["token_x"], a["weight_format"]
    dtype, wide = token_x.dtype, accumulator(token_x)
    size, rotary = a["ln_gamma_k"].shape[0], a["rope_sin"].shape[-1]
    tokens = token_x.shape[:-1]
    sin, cos = (each.flatten(0, -2).to(wide) for each in (a["rope_sin"], a["rope_cos"]))

    def rotate_first(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
        first = rope.rotate(x[..., :rotary].to(wide), sin, cos, a["rope_interleaved"])
        return torch.cat([first.to(dtype), x[..., rotary:]], dim=-1)

    c = weight_args.rows(
        a["query_norm"],
        a["dequant_scale_q_norm"],
        a["weight_qb"],
        a["scale_format"],
        a["smooth_scales_cq"],
    )
    query = weight_args.product(c, a["weight_qb"], a["dequant_scale_w_qb"], weight_format).to(dtype)
    query = query.unflatten(-1, (query.shape[-1] // size, size))
    query = rotate_first(query, sin[:, None], cos[:, None])

    x = weight_args.rows(token_x, None, a["weight_k"], a["scale_format"])
    key = weight_args.product(x, a["weight_k"], a["dequant_scale_w_k"], weight_format).to(wide)
    key = torch.nn.functional.layer_norm(
        key, [size], a["ln_gamma_k"].to(wide), a["ln_beta_k"].to(wide), a["ln_epsilon"]
    ).to(dtype)
    key = rotate_first(key, sin, cos)

    x = weight_args.Rows(token_x.flatten(0, -2), None)
    weights = weight_args.product(x, a["weight_proj"], None, weight_format).to(dtype)
    return query.unflatten(0, tokens), key, weights.unflatten(0, tokens)
