# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Tables of pages in any order."""

from __future__ import annotations

import torch
from torch import Tensor

from .case import Inputs


def shuffled(x: Inputs, lengths: list[int], page: int, spare: int) -> tuple[Tensor, list[int], int]:
    """The table, a column wider than the longest request; the `spare` pages that none owns; how
    many there are in all."""
    columns = [-(-n // page) for n in lengths]
    total = sum(columns) + spare
    order = x.permutation(total).tolist()
    table = torch.full((len(lengths), max(columns) + 1), -1)
    for row, count in zip(table, columns, strict=True):
        row[:count] = torch.tensor([order.pop() for _ in range(count)])
    return table, order, total
