# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Exact top-k of the indexer's scores on values of 8 bits, as lightning_indexer.py's.

    score[t, p] = key_scale[p] sum_n weights[t, n] query_scale[t, n] relu(query[t, n] . key[p])

in float32 throughout; the key's scale comes last.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...common import layout, paged, quantised
from . import lightning_indexer


def forward(**arguments: Any) -> Tensor:
    return scored(**arguments)[0]


def scored(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    query_dequant_scale: Tensor | None,
    key_dequant_scale: Tensor,
    query_quant_mode: int,
    key_quant_mode: int,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_key: Tensor | None,
    block_table: Tensor | None,
    layout_query: str,
    layout_key: str,
    sparse_count: int,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    query_dtype: int | None,
    key_dtype: int | None,
    cmp_ratio: int,
) -> tuple[Tensor, Tensor]:
    """(indices, float32 scores)"""
    query, key = quantised.typed(query, query_dtype), quantised.typed(key, key_dtype)
    weights = weights.float()
    if query_dequant_scale is not None:
        weights = weights * query_dequant_scale.float()
    scale = layout.as_pages(key_dequant_scale[..., None])

    def score(rows: Tensor, by: Tensor, slots: Tensor) -> Tensor:
        found = lightning_indexer.scores(rows, layout.as_pages(key), by, slots)
        return found * paged.gather(scale, slots, torch.float32)[:, 0]

    return lightning_indexer.select(
        query.float(),
        key,
        weights,
        actual_seq_lengths_query,
        actual_seq_lengths_key,
        block_table,
        layout_query,
        layout_key,
        sparse_count,
        sparse_mode,
        cmp_ratio,
        score,
    )
