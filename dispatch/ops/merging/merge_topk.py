# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_merge_topk.

    values, positions [P, .., C]   merged positions int32, values [.., K]

A position that is negative, or beyond 2**31 - 1, is absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...check import Checker, tensors

SCHEMA = "npu_merge_topk(Tensor values, Tensor positions, SymInt k) -> (Tensor, Tensor)"
ONNX = "MergeTopK"


def check(c: Checker, a: Mapping[str, Any]) -> None:
    values, positions = a["values"], a["positions"]
    c.same_device(**tensors(a))
    c.floating("values", values)
    c.integer("positions", positions)
    c.require(
        values.ndim >= 2, f"`values` has shape {list(values.shape)}, expected [parts, .., C]."
    )
    c.require(
        positions.shape == values.shape,
        f"`positions` has shape {list(positions.shape)}, expected {list(values.shape)}, that of "
        "`values`.",
    )
    c.count("k", a["k"])
    c.dense_rows(values=values, positions=positions)


def fake(values: Tensor, positions: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = [*values.shape[1:-1], k]
    return positions.new_empty(shape, dtype=torch.int32), values.new_empty(shape)
