# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Which candidates of all parts are the K best, exactly; their order is left to the machine's sort.

32 passes narrow down the K-th score, then 24 the last position that is taken among its equals.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory
from ..common import cores, entry, ragged, tune
from ..indexer.lightning_indexer import as_float

LEAST_SCORE = tl.constexpr(-3.4028234663852886e38)
LAST = 2**31 - 1
LONGEST = tl.constexpr(ragged.LONGEST)  # where floats stop to count
BEHIND = tl.constexpr(LAST)  # of what is not chosen


@triton.jit
def _tile(values, positions, part, v_part, p_part, s, count, TILE: tl.constexpr):
    """(score, position) of the candidates of a part from `s` on, as floats; -inf and 0 where there
    is none."""
    j = tl.arange(0, TILE)
    of_score = values + part.to(tl.int64) * v_part + s + j
    of_position = positions + part.to(tl.int64) * p_part + s + j
    position = tl.load(of_position, mask=j < count - s, other=-1).to(tl.float32)
    score = tl.load(of_score, mask=j < count - s, other=0.0).to(tl.float32)
    # a NaN comes last, and only what is absent is -inf
    score = tl.where(score > LEAST_SCORE, score, LEAST_SCORE)
    there = (position >= 0) & (position < LONGEST)
    return tl.where(there, score, float("-inf")), tl.where(there, position, 0.0)


@entry.jit(do_not_specialize=["k", "rows", "parts", "count", "v_part", "v_row", "p_part", "p_row"])
def choose(
    values,
    positions,
    marked,
    k,
    rows,
    parts,
    count,
    v_part,
    v_row,
    p_part,
    p_row,
    TILE: tl.constexpr,
):
    """marked [rows, parts, count]: the position of what is chosen, BEHIND of the others."""
    j = tl.arange(0, TILE)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        of_values = values + row.to(tl.int64) * v_row
        of_positions = positions + row.to(tl.int64) * p_row
        low = tl.full((), -2139095041, tl.int64)  # the key of -inf
        high = tl.full((), 2139095041, tl.int64)  # that of inf, plus one
        for _ in range(32):
            middle = (low + high) >> 1
            least = as_float(middle)
            above = tl.zeros((TILE,), tl.float32)
            for part in range(0, parts):
                for s in range(0, count, TILE):
                    score, _position = _tile(
                        of_values, of_positions, part, v_part, p_part, s, count, TILE
                    )
                    above += tl.where(score >= least, 1.0, 0.0)
            enough = tl.sum(above, 0) >= k.to(tl.float32)
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        least = as_float(low)
        above = tl.zeros((TILE,), tl.float32)
        for part in range(0, parts):
            for s in range(0, count, TILE):
                score, _position = _tile(
                    of_values, of_positions, part, v_part, p_part, s, count, TILE
                )
                above += tl.where(score > least, 1.0, 0.0)
        # how many of those equal to `least` are wanted; -inf is absent, never wanted
        ties = tl.where(low > -2139095041, k.to(tl.float32) - tl.sum(above, 0), 0.0)
        none = tl.full((), -1, tl.int32)
        last = tl.full((), LONGEST, tl.int32)
        for _ in range(25):
            middle = (none + last) >> 1
            equal = tl.zeros((TILE,), tl.float32)
            for part in range(0, parts):
                for s in range(0, count, TILE):
                    score, position = _tile(
                        of_values, of_positions, part, v_part, p_part, s, count, TILE
                    )
                    equal += tl.where(
                        (score == least) & (position <= middle.to(tl.float32)), 1.0, 0.0
                    )
            enough = tl.sum(equal, 0) >= ties
            last = tl.where(enough, middle, last)
            none = tl.where(enough, none, middle)
        final = tl.where(ties > 0, last, -1).to(tl.float32)
        for part in range(0, parts):
            for s in range(0, count, TILE):
                score, position = _tile(
                    of_values, of_positions, part, v_part, p_part, s, count, TILE
                )
                taken = (score > least) | ((score == least) & (position <= final))
                to = marked + (row.to(tl.int64) * parts + part) * count + s
                tl.store(to + j, tl.where(taken, position.to(tl.int32), BEHIND), mask=j < count - s)


def unsupported(values: Tensor, k: int, **_: Any) -> str | None:
    if values.dtype is torch.float64:
        return "values are float64, the vector unit computes in float32"
    candidates = values.shape[0] * values.shape[-1]
    if max(candidates, k) > ragged.LONGEST:
        return f"{candidates} candidates a row, the kernel counts up to {ragged.LONGEST}"
    return None


def forward(values: Tensor, positions: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Positions as everywhere on the NPU below ragged.LONGEST; those from there on are absent."""
    parts, *batch, count = values.shape
    out_positions = memory.empty((*batch, k), torch.int32, values.device)
    out_values = memory.empty((*batch, k), values.dtype, values.device)
    rows = out_positions.numel() // k
    if rows == 0 or parts * count == 0:
        return out_positions.fill_(-1), out_values.zero_()
    flat, flat_positions = values.reshape(parts, rows, count), positions.reshape(parts, rows, count)
    flat_positions = ragged.int32(flat_positions)
    marked = memory.empty((rows, parts * count), torch.int32, values.device)
    choose[(min(rows, cores.vector()),)](
        flat,
        flat_positions,
        marked,
        k,
        rows,
        parts,
        count,
        *flat.stride()[:2],
        *flat_positions.stride()[:2],
        **tune.only("merge_topk.choose").keywords,
    )
    chosen, order = marked.sort(-1)
    chosen, order = chosen[:, :k], order[:, :k]
    width, absent = chosen.shape[1], chosen == LAST
    found = flat.movedim(0, 1).reshape(rows, -1).gather(1, order)
    to = out_positions.view(rows, k).fill_(-1)
    to[:, :width].copy_(chosen.masked_fill(absent, -1))
    to_values = out_values.view(rows, k).zero_()
    to_values[:, :width].copy_(found.masked_fill(absent, 0))
    return out_positions, out_values
