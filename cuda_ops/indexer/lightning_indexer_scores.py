# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The positions and their scores: see lightning_indexer.py."""

from __future__ import annotations

import torch
from torch import Tensor

from .lightning_indexer import scaled_scores, select, unsupported

__all__ = ["forward", "unsupported"]


def forward(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_key: Tensor | None,
    block_table: Tensor | None,
    layout_query: str,
    layout_key: str,
    sparse_count: int,
    sparse_mode: int,
    cmp_ratio: int,
    **_: object,
) -> tuple[Tensor, Tensor]:
    scored = scaled_scores(
        query,
        key,
        weights,
        None,
        None,
        actual_seq_lengths_query,
        actual_seq_lengths_key,
        block_table,
        layout_query,
        layout_key,
        sparse_count,
        sparse_mode,
        torch.float32,
        cmp_ratio,
    )
    return select(scored)
