# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Which of a row's positions lie on this rank, packed to the front.

A program takes a row.

    condition    kernels
    any          _localize
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory
from ..runtime import launches

MOST = 32768  # positions of a row


@triton.jit
def _localize(indices, local, count, rank, size, interleave, K, i_row, K_PAD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, K_PAD)
    index = tl.load(indices + row * i_row + j, mask=j < K, other=-1)
    valid = (index >= 0) & (index <= 2147483647)
    index = tl.where(valid, index, 0).to(tl.int32)
    stripe = index // interleave
    on_rank = valid & (stripe % size == rank)
    slot = tl.cumsum(on_rank.to(tl.int32), 0) - 1
    found = tl.sum(on_rank.to(tl.int32), 0)
    to = local + row * K
    tl.store(to + slot, stripe // size * interleave + index % interleave, mask=on_rank)
    tl.store(to + j, tl.full([K_PAD], -1, tl.int32), mask=(j >= found) & (j < K))
    tl.store(count + row, found)


def unsupported(indices: Tensor, size: int, interleave: int, **_: Any) -> str | None:
    if indices.shape[-1] > MOST:
        return f"{indices.shape[-1]} indices a row, supported up to {MOST}"
    if max(size, interleave) >= 2**31:
        return f"size={size} and interleave={interleave}, supported below 2**31"
    return None


def forward(indices: Tensor, rank: int, size: int, interleave: int) -> tuple[Tensor, Tensor]:
    *batch, K = indices.shape
    local = memory.empty(indices.shape, torch.int32, indices.device)
    count = memory.empty(batch, torch.int32, indices.device)
    rows = count.numel()
    if local.numel() == 0:
        return local, count.zero_()
    flat = indices.reshape(rows, K)
    K_PAD = max(16, triton.next_power_of_2(K))
    launches.kernel(_localize, rows)(
        flat,
        local,
        count,
        rank,
        size,
        interleave,
        K,
        flat.stride(0),
        K_PAD=K_PAD,
        num_warps=min(16, max(1, K_PAD // 128)),
    )
    return local, count
