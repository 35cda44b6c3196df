# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Which of a row's positions lie on this rank, packed to the front, a tile of a row at a time.

A tile is packed by sorting: -slot where the position is here, -inf elsewhere; the positions are
then read again by their slots.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory
from ..common import cores, entry, ragged, tune
from ..common.front_end import sort


@entry.jit(do_not_specialize=["rank", "size", "interleave", "rows", "count", "i_row"])
def localize(
    indices, local, counts, rank, size, interleave, rows, count, i_row, TILE: tl.constexpr
):
    j = tl.arange(0, TILE)
    negative = -j.to(tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        of_row = indices + row.to(tl.int64) * i_row
        to = local + row.to(tl.int64) * count
        written = 0
        for s in range(0, count, TILE):
            index = tl.load(of_row + s + j, mask=j < count - s, other=-1)
            stripe = tl.maximum(index, 0) // interleave
            owner = stripe - stripe // size * size
            key = tl.where((index >= 0) & (owner == rank), negative, float("-inf"))
            taken = tl.sum(tl.where(key > float("-inf"), 1.0, 0.0), 0).to(tl.int32)
            if taken > 0:
                packed = sort(key, 0, True)
                slot = -tl.maximum(packed, -1.0 * TILE).to(tl.int32)
                # of what is not taken, any that there is
                here = tl.load(of_row + s + tl.where(j < taken, slot, 0))
                here = tl.maximum(here, 0)
                stripe = here // interleave
                inside = here - stripe * interleave
                tl.store(to + written + j, stripe // size * interleave + inside, mask=j < taken)
                written += taken
        for s in range(written, count, TILE):
            tl.store(to + s + j, tl.full((TILE,), -1, tl.int32), mask=j < count - s)
        tl.store(counts + row, written)


def unsupported(indices: Tensor, size: int, interleave: int, **_: Any) -> str | None:
    if size * interleave > ragged.LONGEST:
        return f"size * interleave is {size * interleave}, the kernel divides to {ragged.LONGEST}"
    return None


def forward(indices: Tensor, rank: int, size: int, interleave: int) -> tuple[Tensor, Tensor]:
    *batch, count = indices.shape
    local = memory.empty(indices.shape, torch.int32, indices.device)
    counts = memory.empty(batch, torch.int32, indices.device)
    rows = counts.numel()
    if local.numel() == 0:
        return local, counts.zero_()
    flat = ragged.int32(indices).reshape(rows, count)
    localize[(min(rows, cores.vector()),)](
        flat,
        local,
        counts,
        rank,
        size,
        interleave,
        rows,
        count,
        flat.stride(0),
        **tune.only("localize_indices.localize").keywords,
    )
    return local, counts
