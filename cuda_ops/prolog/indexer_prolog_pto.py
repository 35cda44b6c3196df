# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Queries, head weights and new keys of the lightning indexer; rnd rounds to the dtype of x.

    query_index = RoPE(rnd(c W_qb))   key = RoPE(rnd(LayerNorm(x W_k)))   weights = rnd(x W_proj)

RoPE turns the first D columns of a head and rounds them; the others pass.  x W_k stays in float32
until its LayerNorm.

    condition                       kernels
    weights or a cache of 8 bits    quantized_stages.py
    else                            nz_matmul.py then stages.py
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import memory, quantized
from ...dispatch.ops.prolog.indexer_prolog_pto import Arguments
from . import quantized_matmul, quantized_stages, stages
from .nz_matmul import product
from .quantized_matmul import Rows, Weight


def unsupported(token_x: Tensor, **_: object) -> str | None:
    return stages.unsupported(token_x)


def forward(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor]:
    token_x = x["token_x"]
    requests, steps, hidden = token_x.shape
    ranks, size = x["query_norm"].shape[-1], x["ln_gamma_k"].shape[0]
    heads = x["weight_qb"].numel() // (ranks * size)
    tokens, device = requests * steps, token_x.device
    if tokens == 0:
        kinds = (
            (x["index_k_cache"].dtype, torch.float32)
            if x["kv_cache_quant_mode"]
            else 2 * (token_x.dtype,)
        )
        query_index = memory.empty((requests, steps, heads, size), kinds[0], device)
        return query_index, memory.empty((requests, steps, heads), kinds[1], device)
    if x["weight_quant_mode"] or x["kv_cache_quant_mode"]:
        return forward_quantized(**x)
    weights = memory.empty((requests, steps, heads), token_x.dtype, device)
    partial = product(
        token_x.view(tokens, hidden),
        [(x["weight_k"], size), (x["weight_proj"], heads)],
        x["weight_format"],
        keep_float=True,
        first=True,
    )
    index = stages.Index(
        x["ln_gamma_k"],
        x["ln_beta_k"],
        x["index_k_cache"],
        weights,
        x["ln_epsilon"],
        x["rope_interleaved"],
    )
    stages.token_stage(partial, x["rope_sin"], x["rope_cos"], x["cache_index"], None, index)
    query_index = stages.index_heads(
        x["query_norm"].view(tokens, ranks),
        x["weight_qb"],
        x["weight_format"],
        size,
        x["rope_sin"],
        x["rope_cos"],
        (requests, steps),
        x["rope_interleaved"],
        late=True,
    )
    return query_index, weights


def forward_quantized(**a: Unpack[Arguments]) -> tuple[Tensor, Tensor]:
    token_x, weight_qb, weight_k = a["token_x"], a["weight_qb"], a["weight_k"]
    weight_format, scale_format = a["weight_format"], a["scale_format"]
    shape, hidden = (token_x.shape[0], token_x.shape[1]), token_x.shape[-1]
    ranks, size = a["query_norm"].shape[-1], a["ln_gamma_k"].shape[0]
    heads = weight_qb.numel() // (ranks * size)
    of = quantized_stages.Index(
        a["ln_gamma_k"],
        a["ln_beta_k"],
        a["ln_epsilon"],
        a["index_k_cache"],
        a["index_k_scale_cache"],
        a["cache_index"],
        a["rope_sin"],
        a["rope_cos"],
        a["rope_interleaved"],
        a["index_hadamard"],
        a["hadamard_round"],
        scale_format,
    )
    x, c = (
        token_x.view(-1, hidden),
        Rows(a["query_norm"].view(-1, ranks), a["dequant_scale_q_norm"]),
    )
    rows: dict[torch.dtype, Rows] = {}
    kind, made = quantized.kind_of(weight_qb.dtype), []
    if kind is not None:
        of_x = [(x, None)] if weight_k.dtype is weight_qb.dtype else []
        of_c = [(c.values, a["smooth_scales_cq"])] if c.scale is None else []
        made = quantized_matmul.activations([*of_x, *of_c], kind, scale_format)
        if of_x:
            rows[weight_k.dtype] = made[0]
        if of_c:
            c = made[-1]
    weight = Weight(weight_qb, heads * size, a["dequant_scale_w_qb"])
    # the largest weight first: what x is multiplied by comes beside it
    q = quantized_stages.index_product(
        c, weight, weight_format, of, first=not made, second=bool(made)
    )
    key, proj = quantized_stages.products(
        x,
        rows,
        [Weight(weight_k, size, a["dequant_scale_w_k"]), Weight(a["weight_proj"], heads, None)],
        weight_format,
        scale_format,
        token_x.dtype,
        first=q is None,
        late=q is not None,
    )
    return quantized_stages.index_side(key, proj, q, c, weight, weight_format, shape, of)
