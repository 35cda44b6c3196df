# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The rows of one rank among the positions, in their order, and how many they are."""

from __future__ import annotations

import torch
from torch import Tensor


def forward(indices: Tensor, rank: int, size: int, interleave: int) -> tuple[Tensor, Tensor]:
    index = indices.long()
    stripe = index // interleave
    here = (index >= 0) & (index < 2**31) & (stripe % size == rank)
    local = stripe // size * interleave + index % interleave
    width = index.shape[-1]
    slot = (here.long().cumsum(-1) - 1).masked_fill(~here, width)
    packed = torch.full_like(torch.nn.functional.pad(index, (0, 1)), -1)
    packed = packed.scatter(-1, slot, local)[..., :width]
    rows = packed.to(torch.int32, memory_format=torch.contiguous_format)
    return rows, here.sum(-1).to(torch.int32)
