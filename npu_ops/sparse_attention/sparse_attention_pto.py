# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The whole layer: both prologs over shared products, indexer, sparse attention.

    x [W_dq | W_dkv_kr | W_idx_k | W_idx_proj]   ->  norms, rotations, all three cache rows
    c [W_uq_qr | W_idx_qb]                       ->  absorption; rotation of both
    scores and top-k                             ->  attention over the selected keys

Four launches before the scores.  Every cache row is written before any cache is read.
Where all weights have 8 bits: nine (quantized_prolog.py); only some, or caches alone: by stages.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...dispatch.common import layer, memory, nz
from ..indexer import lightning_indexer, quant_lightning_indexer
from ..prolog import absorption, indexer_prolog_pto, mla_prolog_pto, product, quantized_prolog, rows
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


def prologs(a: layer.Whole) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(query, query_rope, query_index, weights); the new rows of the caches are written."""
    (batch, length, hidden), (heads, plain, latent) = a.x.shape, a.w_uk.shape
    tokens, rank = batch * length, a.gamma_cq.shape[0]
    rotary, size = a.sin.shape[-1], a.in_gamma_k.shape[0]
    index_heads = nz.columns_of(a.w_idx_proj, a.weight_format)

    def new(*shape: int) -> Tensor:
        return memory.empty(shape, a.x.dtype, a.x.device)

    query, query_rope = absorption.room(batch, length, a.w_uk, rotary, a.x.dtype)
    query_index, weights = new(tokens, a.index_heads, size), new(tokens, index_heads)
    if tokens:
        query_norm, both = new(tokens, rank), new(tokens, heads, plain + rotary)
        sums = product.in_parts(
            a.x.view(tokens, hidden),
            [
                (a.w_dq, rank),
                (a.w_dkv_kr, latent + rotary),
                (a.w_idx_k, size),
                (a.w_idx_proj, index_heads),
            ],
            a.weight_format,
        )
        rows.norms(
            sums,
            a.sin,
            a.cos,
            a.cache_index,
            rows.Latent(
                a.gamma_cq,
                a.gamma_ckv,
                a.kv_cache,
                a.kr_cache,
                query_norm,
                a.rms_norm_eps,
                a.rms_norm_eps,
                a.rope_interleaved,
            ),
            rows.Index(
                a.in_gamma_k,
                a.in_beta_k,
                a.index_k_cache,
                weights,
                a.layer_norm_eps,
                a.index_rope_interleaved,
            ),
        )
        product.weights(
            query_norm,
            [(a.w_uq_qr, both.flatten(1)), (a.w_idx_qb, query_index.flatten(1))],
            a.weight_format,
        )
        absorption.queries(
            both,
            a.w_uk,
            query.flatten(0, 1),
            query_rope.flatten(0, 1),
            a.sin,
            a.cos,
            a.rope_interleaved,
            absorption.Index(query_index, a.index_rope_interleaved),
        )
    shape = (batch, length)
    return (
        query,
        query_rope,
        query_index.view(*shape, a.index_heads, size),
        weights.view(*shape, index_heads),
    )


def shared(**arguments: Any) -> Tensor:
    """npu_sparse_attention_shared_pto"""
    return layer.Shared(**arguments).run(STAGES)


def with_indices(**arguments: Any) -> tuple[Tensor, Tensor]:
    a = layer.Whole(**arguments)
    if a.weight_quant_mode == a.index_weight_quant_mode == 2:
        heads = nz.columns_of(a.w_idx_proj, a.weight_format)
        query, query_rope, query_index, weights = quantized_prolog.both(a, heads)
    elif a.weight_quant_mode or a.index_weight_quant_mode or a.kv_quantized or a.index_quantized:
        return a.run(STAGES)
    else:
        query, query_rope, query_index, weights = prologs(a)
    indices = a.selected(STAGES, query_index, weights)
    return a.attended(STAGES, query, query_rope, indices), indices


def forward(**arguments: Any) -> Tensor:
    return with_indices(**arguments)[0]
