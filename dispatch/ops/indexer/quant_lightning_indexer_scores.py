# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_quant_lightning_indexer_scores: the positions, and their scores in float32.

Entries past the number of visible keys are -1, and their score is 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import quant_lightning_indexer

SCHEMA = (
    f"npu_quant_lightning_indexer_scores{quant_lightning_indexer.ARGUMENTS} -> (Tensor, Tensor)"
)
ONNX = "QuantLightningIndexerScores"


def check(**arguments: Any) -> None:
    quant_lightning_indexer.check_as("npu_quant_lightning_indexer_scores", **arguments)


def fake(query: Tensor, sparse_count: int, **_: Any) -> tuple[Tensor, Tensor]:
    shape = [*query.shape[:-2], 1, sparse_count]
    return query.new_empty(shape, dtype=torch.int32), query.new_empty(shape, dtype=torch.float32)
