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
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..dispatch.common import layer, memory
from . import (
    indexer_prolog_pto,
    kv_quant_sparse_flash_attention,
    lightning_indexer,
    mla_prolog_pto,
    prolog,
    quant_lightning_indexer,
    sparse_flash_attention,
)
from .common import launches
from .nz_matmul import product

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
    return layer.Whole(**arguments).unsupported(REASONS)


def with_indices(**arguments: Any) -> tuple[Tensor, Tensor]:
    a = layer.Whole(**arguments)
    requests, steps, hidden = a.x.shape
    heads, _plain, rank = a.w_uk.shape
    ranks, rotary, size = a.gamma_cq.shape[0], a.sin.shape[-1], a.in_gamma_k.shape[0]
    dtype, device = a.x.dtype, a.x.device
    tokens = requests * steps
    if tokens == 0:
        indices = memory.empty((requests, steps, 1, a.sparse_count), torch.int32, device)
        return memory.empty((requests, steps, heads, rank), dtype, device), indices
    if a.weight_quant_mode or a.index_weight_quant_mode or a.in_rows or a.in_bytes:
        return a.run(STAGES)

    query_norm = memory.empty((tokens, ranks), dtype, device)
    weights = memory.empty((requests, steps, a.index_heads), dtype, device)
    part = product(
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
    prolog.token_stage(
        part, a.sin, a.cos, a.cache_index,
        prolog.Latent(
            a.gamma_cq, a.gamma_ckv, a.kv_cache, a.kr_cache, query_norm, a.rms_norm_eps,
            a.rms_norm_eps, a.rope_interleaved,
        ),
        prolog.Index(
            a.in_gamma_k, a.in_beta_k, a.index_k_cache, weights, a.layer_norm_eps,
            a.index_rope_interleaved,
        ),
    )  # fmt: skip

    query_index = prolog.index_heads(
        query_norm, a.w_idx_qb, a.weight_format, size, a.sin, a.cos, (requests, steps),
        a.index_rope_interleaved,
    )  # fmt: skip
    scored = lightning_indexer.scores(**a.of_indexer(query_index, weights))
    of_heads = (query_norm, a.w_uq_qr, a.weight_format, a.w_uk, a.sin)
    absorbed = partial(prolog.query_heads, *of_heads, a.cos, (requests, steps), a.rope_interleaved)
    if not a.x.is_cuda:
        indices, _ = lightning_indexer.select(scored)
        query, query_rope = absorbed()
    else:
        side = launches.Side(device)
        side.fork()
        # of more than 128 tokens the queries' programs would leave those of the top-k no registers
        if tokens <= 128 and prolog.is_one_launch(*of_heads):
            query, query_rope = absorbed()
            with side.stream():
                indices, _ = lightning_indexer.select(scored)
        else:
            indices, _ = lightning_indexer.select(scored)
            with side.stream():
                query, query_rope = absorbed(forked=True)
        side.join()
    out, _, _ = sparse_flash_attention.forward(**a.of_attention(query, query_rope, indices))
    return out, indices


def forward(**arguments: Any) -> Tensor:
    return with_indices(**arguments)[0]
