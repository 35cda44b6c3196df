# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The positions and their scores: see lightning_indexer.py."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.ops.indexer.lightning_indexer_scores import Arguments
from .lightning_indexer import scaled_scores, select, unsupported

__all__ = ["forward", "unsupported"]


def forward(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor]:
    scored = scaled_scores(
        x["query"],
        x["key"],
        x["weights"],
        None,
        None,
        x["actual_seq_lengths_query"],
        x["actual_seq_lengths_key"],
        x["block_table"],
        x["layout_query"],
        x["layout_key"],
        x["sparse_count"],
        x["sparse_mode"],
        torch.float32,
        x["cmp_ratio"],
    )
    return select(scored)
