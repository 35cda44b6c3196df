# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Sums over the queries that selected a key, in order of the queries: the same bits every time.

Every addend is a row of its own, at the place of its selection.  The inverted list names, key by
key, the places that selected it, in their order; one program a key adds their rows up in float32.
No atomics: neither the number of keys nor what else runs makes a sum slower or another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory
from ..runtime import launches


class Inverted(NamedTuple):
    """The places that selected key j: order[starts[j]], .. order[starts[j + 1] - 1]."""

    order: Tensor
    starts: Tensor


@triton.jit(do_not_specialize=["places", "keys"])
def _starts(ordered, starts, places, keys, BLOCK: tl.constexpr):
    """starts[j]: how many of the numbers, which rise, are below j."""
    key = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low, high = key * 0, key * 0 + places
    step = places
    while step > 0:
        middle = (low + high) // 2
        below = tl.load(ordered + middle, mask=(low < high) & (key <= keys), other=0) < key
        open_ = low < high
        low = tl.where(open_ & below, middle + 1, low)
        high = tl.where(open_ & (below == 0), middle, high)
        step = step // 2
    tl.store(starts + key, low, mask=key <= keys)


def invert(slots: Tensor, keys: int) -> Inverted:
    """Of the key that every place selected; `keys` where it selected none."""
    ordered, order = torch.sort(slots, stable=True)
    starts = memory.empty((keys + 1,), torch.int32, slots.device)
    launches.kernel(_starts, triton.cdiv(keys + 1, 256))(
        ordered, starts, slots.numel(), keys, BLOCK=256
    )
    return Inverted(order, starts)


@triton.jit
def _put(to, key, c, total, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Columns FIRST .. of a sum as the row `key` of a tensor that has COUNT of them."""
    inside = (c >= FIRST) & (c < FIRST + COUNT)
    tl.store(to + key * COUNT + c - FIRST, total.to(to.dtype.element_ty), mask=inside)


@triton.jit
def _sum(
    rows,
    order,
    starts,
    sums,
    out,
    second,
    third,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    WIDTHS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    WIDTH: tl.constexpr = WIDTHS[0] + WIDTHS[1] + WIDTHS[2]
    key = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_W)
    wide = (c < WIDTH)[None, :]
    begin, end = tl.load(starts + key), tl.load(starts + key + 1)
    i = begin + tl.arange(0, BLOCK_N)
    place = tl.load(order + i, mask=i < end, other=0)
    acc = tl.full([BLOCK_N, BLOCK_W], 0.0, tl.float32)
    for n in range(begin, end, BLOCK_N):
        i = n + tl.arange(0, BLOCK_N)
        at = rows + place.to(tl.int64)[:, None] * WIDTH + c[None, :]
        place = tl.load(order + i + BLOCK_N, mask=i + BLOCK_N < end, other=0)  # of the next ones
        acc += tl.load(at, mask=(i < end)[:, None] & wide, other=0.0).to(tl.float32)
    total = tl.sum(acc, 0)
    if not FIRST:
        total += tl.load(sums + key * WIDTH + c, mask=c < WIDTH, other=0.0)
    if LAST:
        _put(out, key, c, total, 0, WIDTHS[0])
        if WIDTHS[1] > 0:
            _put(second, key, c, total, WIDTHS[0], WIDTHS[1])
        if WIDTHS[2] > 0:
            _put(third, key, c, total, WIDTHS[0] + WIDTHS[1], WIDTHS[2])
    else:
        _put(sums, key, c, total, 0, WIDTH)


WARPS, ADDENDS = 4, 8


def add(
    rows: Tensor, by: Inverted, sums: Tensor, outs: Sequence[Tensor], first: bool, last: bool
) -> None:
    """sums[key] += the rows [places, W] that selected it; the first time they are written anew, the
    last time they go to `outs` instead, rounded: three, the columns of a row one behind the other,
    of which the latter may have none."""
    widths = tuple(out.shape[-1] for out in outs)
    launches.kernel(_sum, by.starts.numel() - 1)(
        rows,
        by.order,
        by.starts,
        sums,
        *outs,
        FIRST=first,
        LAST=last,
        WIDTHS=widths,
        BLOCK_W=triton.next_power_of_2(sum(widths)),
        BLOCK_N=ADDENDS,
        num_warps=WARPS,
    )
