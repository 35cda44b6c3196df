# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_localize_indices.

    indices [.., K]   local int32 [.., K]   count int32 [..]

Position p lies on rank (p // interleave) % size, as its row
p // (interleave * size) * interleave + p % interleave.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...check import Checker

SCHEMA = (
    "npu_localize_indices(Tensor indices, SymInt rank, SymInt size, SymInt interleave=1)"
    " -> (Tensor, Tensor)"
)
ONNX = "LocalizeIndices"


def check(c: Checker, a: Mapping[str, Any]) -> None:
    indices, rank, size, interleave = a["indices"], a["rank"], a["size"], a["interleave"]
    c.integer("indices", indices)
    c.require(
        1 <= indices.ndim <= 4,
        f"`indices` has shape {list(indices.shape)}, expected [.., K] with at most 4 dimensions.",
    )
    c.at_least("size", size, 1)
    c.at_least("interleave", interleave, 1)
    c.require(0 <= rank < size, f"`rank` is {rank}, expected 0 to {size - 1}, below `size`.")
    c.dense_rows(indices=indices)


def fake(indices: Tensor, rank: int, size: int, interleave: int) -> tuple[Tensor, Tensor]:
    return (
        indices.new_empty(indices.shape, dtype=torch.int32),
        indices.new_empty(indices.shape[:-1], dtype=torch.int32),
    )
