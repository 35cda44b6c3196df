# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Queries of absorbed latent attention and the new rows of its cache; rnd rounds to the dtype of x.

    c = rnd(RMSNorm(rnd(x W_dq)))   [q, q_rope] = rnd(c W_uq_qr)   query = rnd(q W_uk)
    [l, l_rope] = rnd(x W_dkv_kr)   kv_cache = rnd(RMSNorm(l))     kr_cache = rnd(RoPE(l_rope))

Without W_dq, c is x, and the two products of x share a launch.

The products run on the cube (product.py), the rest on the vector cores (rows.py), row by row.
Weights or a cache of 8 bits: quantized_prolog.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import memory, mla_v3
from ...dispatch.ops.prolog.mla_prolog_pto import Arguments
from . import absorption, product, quantized_prolog, quantized_rows, rows
from .product import Rows


def unsupported(
    token_x: Tensor,
    weight_uk: Tensor,
    rmsnorm_gamma_cq: Tensor | None,
    kv_cache: Tensor,
    rope_sin: Tensor,
    weight_format: str = "nd",
    weight_quant_mode: int = 0,
    kv_cache_quant_mode: int = 0,
    kv_cache_dtype: int | None = None,
    **_: Any,
) -> str | None:
    kv_quantized = kv_cache if kv_cache_quant_mode else None
    reason = quantized_prolog.unsupported(weight_quant_mode, kv_quantized, kv_cache_dtype)
    if reason := reason or quantized_prolog.not_multiplied(token_x, weight_uk):
        return reason
    is_quantized = weight_quant_mode or kv_cache_quant_mode
    widest = quantized_rows.widest() if is_quantized else rows.widest()
    ranks = 0 if rmsnorm_gamma_cq is None else rmsnorm_gamma_cq.shape[0]
    if max(ranks, kv_cache.shape[-1]) > widest:
        return f"a row of more than {widest} numbers does not fit into UB at once"
    if rope_sin.shape[-1] % 16:
        return f"the rotary size is {rope_sin.shape[-1]}, expected a multiple of 16"
    return None


def forward(**arguments: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor]:
    return with_rows(**arguments)[:3]


def v3(**arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """npu_mla_prolog_v3"""
    return mla_v3.outputs(arguments, with_rows(**mla_v3.as_pto(arguments)))


def with_rows(**arguments: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor, Rows]:
    """Behind the outputs the query norm as its product takes it."""
    if arguments["weight_quant_mode"] or arguments["kv_cache_quant_mode"]:
        return quantized_prolog.mla(**arguments)
    outputs = _of_16_bits(**arguments)
    return *outputs, Rows(outputs[2])


def _of_16_bits(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor]:
    token_x, weight_uk, weight_uq_qr = x["token_x"], x["weight_uk"], x["weight_uq_qr"]
    weight_dq, rmsnorm_gamma_cq = x["weight_dq"], x["rmsnorm_gamma_cq"]
    rope_sin, rope_cos, rope_interleaved = x["rope_sin"], x["rope_cos"], x["rope_interleaved"]
    weight_format = x["weight_format"]
    batch, length, hidden = token_x.shape
    tokens, rotary = batch * length, rope_sin.shape[-1]
    heads, plain, latent = weight_uk.shape

    def new(*shape: int) -> Tensor:
        return memory.empty(shape, token_x.dtype, token_x.device)

    query, query_rope = absorption.room(batch, length, weight_uk, rotary, token_x.dtype)
    query_norm = None if rmsnorm_gamma_cq is None else new(tokens, rmsnorm_gamma_cq.shape[0])
    if tokens:
        rows_of_x, width = token_x.view(tokens, hidden), latent + rotary
        both = new(tokens, heads, plain + rotary)
        queries = weight_uq_qr, both.flatten(1)
        if query_norm is None:
            sums = memory.empty((1, tokens, width), torch.float32, token_x.device)
            both_of_x = [queries, (x["weight_dkv_kr"], sums[0])]
            product.weights(rows_of_x, both_of_x, weight_format)
        else:
            assert weight_dq is not None  # as there is a norm
            of_x = [(weight_dq, query_norm.shape[1]), (x["weight_dkv_kr"], width)]
            sums = product.in_parts(rows_of_x, of_x, weight_format)
        of_latent = rows.Latent(
            rmsnorm_gamma_cq,
            x["rmsnorm_gamma_ckv"],
            x["kv_cache"],
            x["kr_cache"],
            query_norm,
            x["rmsnorm_epsilon_cq"],
            x["rmsnorm_epsilon_ckv"],
            rope_interleaved,
        )
        rows.norms(sums, rope_sin, rope_cos, x["cache_index"], of_latent, None)
        if query_norm is not None:
            product.weights(query_norm, [queries], weight_format)
        absorption.queries(
            both,
            weight_uk,
            query.flatten(0, 1),
            query_rope.flatten(0, 1),
            rope_sin,
            rope_cos,
            rope_interleaved,
        )
    if query_norm is None:
        return query, query_rope, new(0)
    return query, query_rope, query_norm.view(batch, length, query_norm.shape[1])
