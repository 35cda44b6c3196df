# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_lightning_indexer_scores: the positions, and their scores in float32 (float64 of float64).

Entries past the number of visible keys are -1, and their score is 0.
"""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from torch import Tensor

from . import lightning_indexer

SCHEMA = (
    f"npu_lightning_indexer_scores{lightning_indexer.ARGUMENTS}{lightning_indexer.RATIO})"
    " -> (Tensor, Tensor)"
)
ONNX = "LightningIndexerScores"


class Arguments(TypedDict):
    query: Tensor
    key: Tensor
    weights: Tensor
    actual_seq_lengths_query: Tensor | None
    actual_seq_lengths_key: Tensor | None
    block_table: Tensor | None
    layout_query: str
    layout_key: str
    sparse_count: int
    sparse_mode: int
    pre_tokens: int
    next_tokens: int
    cmp_ratio: int


def check(**arguments: Any) -> None:
    lightning_indexer.check_as("npu_lightning_indexer_scores", **arguments)


def fake(query: Tensor, sparse_count: int, **_: Any) -> tuple[Tensor, Tensor]:
    shape = [*query.shape[:-2], 1, sparse_count]
    wide = torch.float64 if query.dtype is torch.float64 else torch.float32
    return query.new_empty(shape, dtype=torch.int32), query.new_empty(shape, dtype=wide)
