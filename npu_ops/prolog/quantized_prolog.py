# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Both prologs where weights or caches have 8 bits, no op itself: int8, with the working dtype
beside it wherever a weight or a cache keeps that.

    x  quantized, unless it came so       -> sums of its products
    sums  -> norms, rotations, cache rows -> the query's latent, quantized in the same launch
    c by its weight                       -> heads: scales, rotation; absorption
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import layer, memory, quantized
from ...dispatch.ops.prolog.indexer_prolog_pto import Arguments as IndexerArguments
from ...dispatch.ops.prolog.mla_prolog_pto import Arguments as MlaArguments
from ..common import quantize, tiling
from . import absorption, product, quantized_rows
from .product import Rows, Sums
from .quantized_rows import Rotation

_FP8 = "the cube and vector units of A2 and A3 have int8 and no fp8"


def unsupported(
    weight_quant_mode: int, cache: Tensor | None, number: int | None = None
) -> str | None:
    """Why neither prolog takes weights of this mode or this cache of 8 bits, or None."""
    if weight_quant_mode == 4:
        return f"weight_quant_mode=4: {_FP8}"
    if cache is not None and quantized.typed(cache, number).dtype is not torch.int8:
        return f"a cache of fp8: {_FP8}"
    return None


def not_multiplied(x: Tensor, gamma: Tensor) -> str | None:
    """Why the cube cannot multiply tokens of the working dtype, which int8 ones leave to the
    gamma."""
    if x.dtype is torch.int8:
        return tiling.not_multiplied(rmsnorm_gamma_cq=gamma)
    return tiling.not_multiplied(token_x=x)


def _products(
    x: Tensor,
    x_scale: Tensor | None,
    weights: Sequence[tuple[Tensor, int, Tensor | None]],
    weight_format: str,
) -> list[Sums]:
    """x [M, K] by weights of so many columns, which all have scales, or none."""
    scaled = [(w, scale) for w, _, scale in weights if scale is not None]
    if not scaled:
        sizes = [size for _, size, _ in weights]
        made = product.in_parts(x, [(w, size) for w, size, _ in weights], weight_format)
        return [Sums(part) for part in made.split(sizes, -1)]
    given = Rows(x, x_scale) if x_scale is not None else Rows(*quantize.of_rows(x))
    return product.sums(given, scaled, weight_format)


def mla(**x: Unpack[MlaArguments]) -> tuple[Tensor, Tensor, Tensor, Rows]:
    """Behind the outputs of mla_prolog_pto.py the query norm as its product takes it."""
    token_x, weight_uq_qr, weight_uk = x["token_x"], x["weight_uq_qr"], x["weight_uk"]
    weight_dq, rmsnorm_gamma_cq = x["weight_dq"], x["rmsnorm_gamma_cq"]
    assert weight_dq is not None and rmsnorm_gamma_cq is not None  # the check said so
    rope_sin, rope_cos = x["rope_sin"], x["rope_cos"]
    rope_interleaved, weight_format = x["rope_interleaved"], x["weight_format"]
    dequant_scale_w_uq_qr = x["dequant_scale_w_uq_qr"]
    batch, length, hidden = token_x.shape
    tokens, rank, rotary = batch * length, rmsnorm_gamma_cq.shape[0], rope_sin.shape[-1]
    heads, plain, latent = weight_uk.shape
    device = token_x.device

    def new(*shape: int) -> Tensor:
        return memory.empty(shape, rmsnorm_gamma_cq.dtype, device)

    query, query_rope = absorption.room(batch, length, weight_uk, rotary, rmsnorm_gamma_cq.dtype)
    of_query, of_rope = query.flatten(0, 1), query_rope.flatten(0, 1)
    query_norm = new(tokens, rank)
    is_quantized = dequant_scale_w_uq_qr is not None
    c = Rows(query_norm)
    if is_quantized:
        scale = memory.empty((tokens, 1), torch.float32, device)
        c = Rows(memory.empty((tokens, rank), torch.int8, device), scale)
    if tokens:
        down, key = _products(
            token_x.view(tokens, hidden),
            x["dequant_scale_x"],
            [
                (weight_dq, rank, x["dequant_scale_w_dq"]),
                (x["weight_dkv_kr"], latent + rotary, x["dequant_scale_w_dkv_kr"]),
            ],
            weight_format,
        )
        rotation = Rotation(rope_sin, rope_cos, rope_interleaved)
        of = quantized_rows.Latent(
            rmsnorm_gamma_cq,
            x["rmsnorm_gamma_ckv"],
            x["rmsnorm_epsilon_cq"],
            x["rmsnorm_epsilon_ckv"],
            quantized.typed(x["kv_cache"], x["kv_cache_dtype"]),
            x["kr_cache"],
            x["cache_index"],
            x["row_layout"] if x["kv_cache_quant_mode"] else None,
            x["k_nope_clip_alpha"],
            x["smooth_scales_cq"],
        )
        quantized_rows.of_latents(down, key, of, rotation, query_norm, c)
        if dequant_scale_w_uq_qr is not None:
            to_absorb = new(tokens, heads, plain)
            scaled = [(weight_uq_qr, dequant_scale_w_uq_qr)]
            (q,) = product.sums(c, scaled, weight_format, 1)
            quantized_rows.of_query_heads(q, rotation, to_absorb, of_rope)
            product.heads(to_absorb, weight_uk, of_query)
        else:
            both = new(tokens, heads, plain + rotary)
            product.weights(query_norm, [(weight_uq_qr, both.flatten(1))], weight_format)
            absorption.queries(
                both, weight_uk, of_query, of_rope, rope_sin, rope_cos, rope_interleaved
            )
    return query, query_rope, query_norm.view(batch, length, rank), c


def indexer(heads: int, **x: Unpack[IndexerArguments]) -> tuple[Tensor, Tensor]:
    """As indexer_prolog_pto.py; `heads` is what `weight_proj` has."""
    token_x, query_norm, weight_qb = x["token_x"], x["query_norm"], x["weight_qb"]
    weight_k, weight_proj, ln_gamma_k = x["weight_k"], x["weight_proj"], x["ln_gamma_k"]
    weight_format, index_k_scale_cache = x["weight_format"], x["index_k_scale_cache"]
    dequant_scale_q_norm = x["dequant_scale_q_norm"]
    dequant_scale_w_qb, dequant_scale_w_k = x["dequant_scale_w_qb"], x["dequant_scale_w_k"]
    batch, length, hidden = token_x.shape
    tokens, size, rank = batch * length, ln_gamma_k.shape[0], query_norm.shape[-1]
    dtype, device = token_x.dtype, token_x.device
    index_quantized = index_k_scale_cache is not None
    query = memory.empty((tokens, heads, size), torch.int8 if index_quantized else dtype, device)
    weights = memory.empty((tokens, heads), dtype, device)
    folded = memory.empty((tokens, heads), torch.float32, device) if index_quantized else None
    if tokens:
        rows, c = token_x.view(tokens, hidden), query_norm.view(tokens, rank)
        rotation = Rotation(x["rope_sin"], x["rope_cos"], x["rope_interleaved"])
        of = quantized_rows.Index(
            ln_gamma_k,
            x["ln_beta_k"],
            x["ln_epsilon"],
            x["index_k_cache"],
            index_k_scale_cache,
            x["cache_index"],
        )
        if dequant_scale_w_k is not None:
            (key,) = _products(rows, None, [(weight_k, size, dequant_scale_w_k)], weight_format)
            (proj,) = _products(rows, None, [(weight_proj, heads, None)], weight_format)
        else:
            given_both = [(weight_k, size, None), (weight_proj, heads, None)]
            key, proj = _products(rows, None, given_both, weight_format)
        quantized_rows.of_index_keys(key, proj, of, rotation, weights)
        if dequant_scale_w_qb is not None:
            given = (c, dequant_scale_q_norm)
            if dequant_scale_q_norm is None:
                given = quantize.of_rows(c, x["smooth_scales_cq"])
            scaled = [(weight_qb, dequant_scale_w_qb)]
            (q,) = product.sums(Rows(*given), scaled, weight_format, 1)
        else:
            q = Sums(memory.empty((1, tokens, heads * size), dtype, device))
            product.weights(c, [(weight_qb, q.parts[0])], weight_format)
        quantized_rows.of_index_heads(q, rotation, weights, query, folded)
    shape = (batch, length, heads)
    return query.view(*shape, size), (weights if folded is None else folded).view(shape)


def both(a: layer.Whole, index_heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(query, query_rope, query_index, weights) of a layer whose weights are all of int8: x and its
    norm are quantized once, and their products share a launch."""
    (batch, length, hidden), (heads, plain, _) = a.x.shape, a.w_uk.shape
    tokens, rank, size = batch * length, a.gamma_cq.shape[0], a.in_gamma_k.shape[0]
    rotary, device = a.sin.shape[-1], a.x.device

    def new(*shape: int) -> Tensor:
        return memory.empty(shape, a.x.dtype, device)

    query, query_rope = absorption.room(batch, length, a.w_uk, rotary, a.x.dtype)
    keys, scales = a.index_cache()
    index_quantized = scales is not None
    kind = torch.int8 if index_quantized else a.x.dtype
    query_index = memory.empty((tokens, index_heads, size), kind, device)
    weights = new(tokens, index_heads)
    folded = memory.empty((tokens, index_heads), torch.float32, device) if index_quantized else None
    if tokens:
        query_norm, to_absorb = new(tokens, rank), new(tokens, heads, plain)
        scale = memory.empty((tokens, 1), torch.float32, device)
        c = Rows(memory.empty((tokens, rank), torch.int8, device), scale)
        rotation = Rotation(a.sin, a.cos, a.rope_interleaved)
        of_index = Rotation(a.sin, a.cos, a.index_rope_interleaved)
        x = a.x.view(tokens, hidden)
        (proj,) = _products(x, None, [(a.w_idx_proj, index_heads, None)], a.weight_format)
        first: list[tuple[Tensor, Any]] = [
            (a.w_dq, a.dequant_scale_w_dq),
            (a.w_dkv_kr, a.dequant_scale_w_dkv_kr),
            (a.w_idx_k, a.dequant_scale_w_idx_k),
        ]
        second: list[tuple[Tensor, Any]] = [
            (a.w_uq_qr, a.dequant_scale_w_uq_qr),
            (a.w_idx_qb, a.dequant_scale_w_idx_qb),
        ]
        down, latents, key = product.sums(Rows(*quantize.of_rows(x)), first, a.weight_format)
        of = quantized_rows.Latent(
            a.gamma_cq,
            a.gamma_ckv,
            a.rms_norm_eps,
            a.rms_norm_eps,
            a.rows() if a.kv_quantized else a.kv_cache,
            a.kr_cache,
            a.cache_index,
            a.row_layout if a.kv_quantized else None,
            a.k_nope_clip_alpha,
            a.smooth_scales_cq,
        )
        quantized_rows.of_latents(down, latents, of, rotation, query_norm, c)
        index = quantized_rows.Index(
            a.in_gamma_k, a.in_beta_k, a.layer_norm_eps, keys, scales, a.cache_index
        )
        quantized_rows.of_index_keys(key, proj, index, of_index, weights)
        q, of_indexer = product.sums(c, second, a.weight_format, 1)
        quantized_rows.of_query_heads(q, rotation, to_absorb, query_rope.flatten(0, 1))
        quantized_rows.of_index_heads(of_indexer, of_index, weights, query_index, folded)
        product.heads(to_absorb, a.w_uk, query.flatten(0, 1))
    shape = (batch, length, index_heads)
    given = weights if folded is None else folded
    return query, query_rope, query_index.view(*shape, size), given.view(shape)
