# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The whole layer: both prologs over shared products, indexer, sparse attention.

    x [W_dq | W_dkv_kr | W_idx_k | W_idx_proj]  ->  norms, rotations, all three cache rows
    c W_idx_qb, rotation, scores
    top-k  beside  c W_uq_qr, absorption, rotation        (two streams)
    attention over the selected keys

The queries of the attention are made while the top-k runs, which leaves the memory idle; a captured
graph keeps the two branches.  The longer one stays in the stream of the scores, where its launch
overlaps their end.  Every cache row is written before any cache is read.

    condition                    kernels
    rows of latents in 8 bits    prolog/quantized_stages.py then
                                 indexer/quant_lightning_indexer.py,
                                 indexer/lightning_indexer.py then
                                 kv_quant_sparse_flash_attention.py
    other 8 bits                 prolog/quantized_stages.py then
                                 indexer/quant_lightning_indexer.py,
                                 indexer/lightning_indexer.py then sparse_flash_attention.py
    else                         prolog/nz_matmul.py then prolog/stages.py then
                                 indexer/lightning_indexer.py then
                                 sparse_flash_attention.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dispatch.common import layer, memory, quantized
from ..indexer import lightning_indexer, quant_lightning_indexer
from ..prolog import (
    indexer_prolog_pto,
    mla_prolog_pto,
    quantized_matmul,
    quantized_stages,
    stages,
)
from ..prolog.nz_matmul import product
from ..prolog.quantized_matmul import Rows, Weight
from ..runtime import launches
from . import kv_quant_sparse_flash_attention, sparse_flash_attention

_MODULES = (
    mla_prolog_pto,
    indexer_prolog_pto,
    lightning_indexer,
    sparse_flash_attention,
    quant_lightning_indexer,
    kv_quant_sparse_flash_attention,
)
STAGES = layer.Stages(*(module.forward for module in _MODULES))
REASONS = layer.Stages(*(module.unsupported for module in _MODULES))


def unsupported(**arguments: Any) -> str | None:
    return layer.of(arguments).unsupported(REASONS)


class Queries(NamedTuple):
    """What a layer's prologs give: of the indexer scores, the queries of the attention once they
    are asked for, and whether these are launched `first`, ahead of the top-k in its stream."""

    scored: lightning_indexer.Scored
    absorbed: Callable[..., tuple[Tensor, Tensor]]
    first: bool


def shared(**arguments: Any) -> Tensor:
    """npu_sparse_attention_shared_pto"""
    a = layer.Shared(**arguments)
    query, query_rope, *_ = mla_prolog_pto.with_rows(**a.of_mla_prolog())
    return a.attended(STAGES, query, query_rope, a.sparse_indices)


def with_indices(**arguments: Any) -> tuple[Tensor, Tensor]:
    """npu_sparse_attention_indices_pto"""
    a = layer.Whole(**arguments)
    return _attended(a, _prologs(a)(a))


def forward(**arguments: Any) -> Tensor:
    a = layer.Whole(**arguments)
    return _attended(a, _prologs(a)(a))[0]


def _prologs(a: layer.Whole) -> Callable[[layer.Whole], Queries | None]:
    if a.x.shape[0] * a.x.shape[1] == 0:
        return _of_no_token
    is_quantized = (
        a.weight_quant_mode or a.index_weight_quant_mode or a.kv_quantized or a.index_quantized
    )
    return _quantized_queries if is_quantized else _plain_queries


def _attended(a: layer.Whole, queries: Queries | None) -> tuple[Tensor, Tensor]:
    if queries is None:
        front, heads, rank = a.x.shape[:2], a.w_uk.shape[0], a.w_uk.shape[-1]
        indices = memory.empty((*front, 1, a.sparse_count), torch.int32, a.x.device)
        return memory.empty((*front, heads, rank), a.x.dtype, a.x.device), indices
    scored, absorbed, first = queries
    if not a.x.is_cuda:
        scored.select_last()
        query, query_rope = absorbed()
    else:
        with launches.SideStream(a.x.device) as side:
            if first:
                query, query_rope = absorbed()
                with side.stream():
                    scored.select_last()
            else:
                scored.select_last()
                with side.stream():
                    query, query_rope = absorbed(forked=True)
    indices = scored.indices
    if not a.kv_quantized:
        chosen = a.of_attention(query, query_rope, indices)
        return sparse_flash_attention.forward(**chosen)[0], indices
    chosen = a.of_rows(query, indices) | dict(query_rope=query_rope)
    return kv_quant_sparse_flash_attention.attended(False, **chosen)[0], indices


def _of_no_token(a: layer.Whole) -> None:
    pass


def _plain_queries(a: layer.Whole) -> Queries:
    requests, steps, hidden = a.x.shape
    rank = a.w_uk.shape[-1]
    ranks, rotary, size = a.gamma_cq.shape[0], a.sin.shape[-1], a.in_gamma_k.shape[0]
    dtype, device, tokens = a.x.dtype, a.x.device, requests * steps
    query_norm = memory.empty((tokens, ranks), dtype, device)
    weights = memory.empty((requests, steps, a.index_heads), dtype, device)
    projected = product(
        a.x.view(tokens, hidden),
        [
            (a.w_dq, ranks),
            (a.w_dkv_kr, rank + rotary),
            (a.w_idx_k, size),
            (a.w_idx_proj, a.index_heads),
        ],
        a.weight_format,
        keep_float=True,
        first=True,
    )
    stages.token_stage(
        projected,
        a.sin,
        a.cos,
        a.cache_index,
        stages.Latent(
            a.gamma_cq,
            a.gamma_ckv,
            a.kv_cache,
            a.kr_cache,
            query_norm,
            a.rms_norm_eps,
            a.rms_norm_eps,
            a.rope_interleaved,
        ),
        stages.Index(
            a.in_gamma_k,
            a.in_beta_k,
            a.index_k_cache,
            weights,
            a.layer_norm_eps,
            a.index_rope_interleaved,
        ),
    )

    query_index = stages.index_heads(
        query_norm,
        a.w_idx_qb,
        a.weight_format,
        size,
        a.sin,
        a.cos,
        (requests, steps),
        a.index_rope_interleaved,
    )
    scored = lightning_indexer.scores(**a.of_indexer(query_index, weights))
    of_heads = (query_norm, a.w_uq_qr, a.weight_format, a.w_uk, a.sin)
    absorbed = partial(
        stages.query_heads,
        *of_heads,
        a.cos,
        (requests, steps),
        a.rope_interleaved,
        into=stages.query_room(a.w_uk, a.sin, (requests, steps)),
    )
    # of more than 128 tokens the queries' programs would leave those of the top-k no registers
    first = tokens <= 128 and stages.is_one_launch(*of_heads)
    return Queries(scored, absorbed, first)


def _quantized_queries(a: layer.Whole) -> Queries:
    """The same stages on weights or caches of 8 bits (prolog/quantized_stages.py)."""
    requests, steps, hidden = a.x.shape
    heads, plain, rank = a.w_uk.shape
    ranks, rotary, size = a.gamma_cq.shape[0], a.sin.shape[-1], a.in_gamma_k.shape[0]
    down, latent, key, proj = quantized_stages.products(
        a.x.view(-1, hidden),
        {},
        [
            Weight(a.w_dq, ranks, a.dequant_scale_w_dq),
            Weight(a.w_dkv_kr, rank + rotary, a.dequant_scale_w_dkv_kr),
            Weight(a.w_idx_k, size, a.dequant_scale_w_idx_k),
            Weight(a.w_idx_proj, a.index_heads, None),
        ],
        a.weight_format,
        a.scale_format,
        a.x.dtype,
        first=True,
    )
    of_latents = quantized_stages.Latent(
        a.gamma_cq,
        a.gamma_ckv,
        a.rms_norm_eps,
        a.rms_norm_eps,
        a.rows() if a.kv_quantized else a.kv_cache,
        a.kr_cache,
        a.cache_index,
        a.sin,
        a.cos,
        a.rope_interleaved,
        a.kv_quantized,
        a.row_layout,
        a.scale_format,
        a.k_nope_clip_alpha,
    )
    of_keys = quantized_stages.Index(
        a.in_gamma_k,
        a.in_beta_k,
        a.layer_norm_eps,
        *a.index_cache(),
        a.cache_index,
        a.sin,
        a.cos,
        a.index_rope_interleaved,
        a.index_hadamard,
        a.hadamard_round,
        a.scale_format,
    )
    kind, index_kind = (quantized.kind_of(w.dtype) for w in (a.w_uq_qr, a.w_idx_qb))
    norm, c = quantized_stages.latent_tokens(down, latent, of_latents, kind, a.smooth_scales_cq)
    of_index = Rows(norm)
    if index_kind is not None:
        of_index = c
        if index_kind != kind:
            [of_index] = quantized_matmul.activations([(norm, None)], index_kind, a.scale_format)
    shape = requests, steps
    w_qb = Weight(a.w_idx_qb, a.index_heads * size, a.dequant_scale_w_idx_qb)
    q = quantized_stages.index_product(of_index, w_qb, a.weight_format, of_keys)
    query_index, weights = quantized_stages.index_side(
        key, proj, q, of_index, w_qb, a.weight_format, shape, of_keys
    )
    scoring = a.of_indexer(query_index, weights)
    if a.index_quantized:
        scored = quant_lightning_indexer.scores(None, **scoring)
    else:
        scored = lightning_indexer.scores(**scoring)
    w_uq_qr = Weight(a.w_uq_qr, heads * (plain + rotary), a.dequant_scale_w_uq_qr)
    of_heads = (c, w_uq_qr, a.weight_format, a.w_uk, a.sin)
    absorbed = partial(
        quantized_stages.query_heads,
        *of_heads,
        a.cos,
        shape,
        a.rope_interleaved,
        into=stages.query_room(a.w_uk, a.sin, shape),
    )
    first = requests * steps <= 128 and quantized_stages.is_one_launch(*of_heads)
    return Queries(scored, absorbed, first)
