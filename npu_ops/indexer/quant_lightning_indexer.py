# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The indexer on int8 queries and keys: exact integer products, scaled.  The kernels are those of
lightning_indexer.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...dispatch.common import quantized
from ..common import tiling
from . import lightning_indexer


def unsupported(
    query: Tensor,
    key: Tensor,
    block_table: Tensor | None,
    query_dtype: int | None,
    cmp_ratio: int,
    **_: Any,
) -> str | None:
    if quantized.typed(query, query_dtype).dtype is not torch.int8:
        return "fp8: the cube and vector units of A2 and A3 have int8 and no fp8"
    size = query.shape[-1]
    overflow = tiling.matmul_overflow(64, 128, size)
    if size % 32 or overflow:
        return overflow or f"head size {size}, the cube unit takes multiples of 32 in int8"
    return lightning_indexer.out_of_reach(key, block_table, cmp_ratio)


def forward(**arguments: Any) -> Tensor:
    return selected(False, **arguments)[0]


def scored(**arguments: Any) -> tuple[Tensor, Tensor]:
    """npu_quant_lightning_indexer_scores"""
    return selected(True, **arguments)


def selected(
    scored: bool,
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    query_dequant_scale: Tensor | None,
    key_dequant_scale: Tensor,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_key: Tensor | None,
    block_table: Tensor | None,
    layout_query: str,
    layout_key: str,
    sparse_count: int,
    sparse_mode: int,
    query_dtype: int | None,
    key_dtype: int | None,
    cmp_ratio: int,
    select_tail: bool,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """(indices, their scores in float32, or none)"""
    query, key = quantized.typed(query, query_dtype), quantized.typed(key, key_dtype)
    return lightning_indexer.select(
        query,
        key,
        weights,
        query_dequant_scale,
        key_dequant_scale,
        actual_seq_lengths_query,
        actual_seq_lengths_key,
        block_table,
        layout_query,
        layout_key,
        sparse_count,
        sparse_mode,
        cmp_ratio,
        select_tail,
        torch.float32 if scored else None,
    )
