# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""DeepSeek-V4's layer: the stages of dispatch/common/layer_v4.py, one after the other.

All stages are asked whether they can run before the first of them writes.

    condition                    kernels
    sliding                      sharedkv_prolog_pto.py then sparse_attn_sharedkv.py then
                                 grouped_o_proj_pto.py
    HCA                          sharedkv_prolog_pto.py, compressor.py then
                                 sparse_attn_sharedkv.py then grouped_o_proj_pto.py
    CSA, index keys in 8 bits    sharedkv_prolog_pto.py, compressor.py,
                                 caches/quantize_index_query.py then
                                 indexer/quant_lightning_indexer.py then
                                 sparse_attn_sharedkv.py then grouped_o_proj_pto.py
    else                         sharedkv_prolog_pto.py, compressor.py then
                                 indexer/lightning_indexer.py then sparse_attn_sharedkv.py then
                                 grouped_o_proj_pto.py

CSA compresses twice, for its keys and for the indexer: of few tokens with one product.  Rows in 8
bits are attended by kv_quant_sparse_attn_sharedkv.py.  All launches overlap the one ahead.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...dispatch.common import layer_v4
from ..caches import quantize_index_query
from ..indexer import lightning_indexer, quant_lightning_indexer
from . import (
    compressor,
    grouped_o_proj_pto,
    kv_quant_sparse_attn_sharedkv,
    sharedkv_prolog_pto,
    sparse_attn_sharedkv,
)

_MODULES = (
    sharedkv_prolog_pto,
    compressor,
    quantize_index_query,
    lightning_indexer,
    quant_lightning_indexer,
    sparse_attn_sharedkv,
    kv_quant_sparse_attn_sharedkv,
    grouped_o_proj_pto,
)
STAGES = layer_v4.Stages(
    *[*(module.forward for module in _MODULES), grouped_o_proj_pto.turned_back]
)
REASONS = layer_v4.Stages(
    *[*(module.unsupported for module in _MODULES), grouped_o_proj_pto.unsupported]
)


def _few(a: layer_v4.Layer) -> list[Any]:
    """What the compressors take of a step of few tokens, which share a product and find out where
    requests begin; empty where tokens are many, or none."""
    of_each = [a.of_entries] if a.idx_k is None else [a.of_entries, a.of_index_keys]
    calls = [of(a.act_seqs) for of in of_each]
    few = a.x.numel() > 0 and all(compressor.is_few(**call) for call in calls)
    return calls if few else []


def unsupported(**arguments: Any) -> str | None:
    return layer_v4.Layer(**arguments).unsupported(REASONS)


def forward(**arguments: Any) -> Tensor:
    a = layer_v4.Layer(**arguments)
    query, _, query_index, weights = sharedkv_prolog_pto.forward(**a.of_prolog())
    indices = None
    if a.cmp_kv is not None:
        if few := _few(a):
            compressor.steps(*few, ends=True)
        else:
            start = a.starts()
            compressor.forward(**a.of_entries(start))
            if a.idx_k is not None:
                compressor.forward(**a.of_index_keys(start))
        if a.idx_k is not None:
            indices = a.selected(STAGES, query_index, weights)
    out = a.attention(STAGES)(**a.of_attention(query, indices))[0]
    last, given = a.output(STAGES, out)
    done: Tensor = last(**given)
    return done
