# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Queries, head weights and new keys of the lightning indexer; rnd rounds to the dtype of x.

    query_index = RoPE(rnd(c W_qb))   key = RoPE(rnd(LayerNorm(x W_k)))   weights = rnd(x W_proj)

RoPE turns the first Dr dims of a head and rounds them; the others pass.  x W_k is not rounded.
Weights or a cache of 8 bits: quantized_prolog.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import memory, nz
from ...dispatch.ops.prolog.indexer_prolog_pto import Arguments
from ..common import quantize, tiling
from . import product, quantized_prolog, rows


def unsupported(
    token_x: Tensor,
    ln_gamma_k: Tensor,
    rope_sin: Tensor,
    index_k_cache: Tensor,
    weight_format: str = "nd",
    weight_quant_mode: int = 0,
    kv_cache_quant_mode: int = 0,
    index_hadamard: bool = False,
    **_: Any,
) -> str | None:
    index_quantized = index_k_cache if kv_cache_quant_mode else None
    reason = quantized_prolog.unsupported(weight_quant_mode, index_quantized)
    if reason := reason or quantize.without_transform(index_hadamard):
        return reason
    if reason := tiling.not_multiplied(token_x=token_x):
        return reason
    rotary, size = rope_sin.shape[-1], ln_gamma_k.shape[0]
    if rotary % 16 or (size - rotary) % 16:
        return f"{rotary} rotary dims of {size}: both they and the rest come in 16s"
    return None


def forward(**arguments: Unpack[Arguments]) -> tuple[Tensor, Tensor]:
    if arguments["weight_quant_mode"] or arguments["kv_cache_quant_mode"]:
        heads = nz.columns_of(arguments["weight_proj"], arguments["weight_format"])
        return quantized_prolog.indexer(**arguments, heads=heads)
    return _of_16_bits(**arguments)


def _of_16_bits(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor]:
    token_x, query_norm, weight_proj = x["token_x"], x["query_norm"], x["weight_proj"]
    ln_gamma_k, rope_sin, rope_cos = x["ln_gamma_k"], x["rope_sin"], x["rope_cos"]
    rope_interleaved, weight_format = x["rope_interleaved"], x["weight_format"]
    batch, length, hidden = token_x.shape
    tokens, size = batch * length, ln_gamma_k.shape[0]
    heads = nz.columns_of(weight_proj, weight_format)
    device, dtype = token_x.device, token_x.dtype
    query_index = memory.empty((tokens, heads, size), dtype, device)
    weights = memory.empty((tokens, heads), dtype, device)
    if tokens:
        sums = product.in_parts(
            token_x.view(tokens, hidden),
            [(x["weight_k"], size), (weight_proj, heads)],
            weight_format,
        )
        of_index = rows.Index(
            ln_gamma_k,
            x["ln_beta_k"],
            x["index_k_cache"],
            weights,
            x["ln_epsilon"],
            rope_interleaved,
        )
        rows.norms(sums, rope_sin, rope_cos, x["cache_index"], None, of_index)
        c = query_norm.view(tokens, query_norm.shape[-1])
        product.weights(c, [(x["weight_qb"], query_index.flatten(1))], weight_format)
        rows.rotate(query_index, rope_sin, rope_cos, rope_interleaved)
    return query_index.view(batch, length, heads, size), weights.view(batch, length, heads)
