# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Which keys an index names, and where they lie."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from . import rows

LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Attention:
    """A call of sparse attention, as its launchers take it: q [rows, N, R], qr [rows, N, rope] (q
    where `rope` is 0), index [rows, K] whose numbers name `span` keys each, `entries` in all.  The
    statistics are written where not empty."""

    q: Tensor
    qr: Tensor
    key: Tensor
    kr: Tensor
    index: Tensor
    sinks: Tensor | None
    out: Tensor
    softmax_max: Tensor
    softmax_sum: Tensor
    plan: rows.Plan
    entries: int
    span: int
    scale_log2: float
    rope: int

    @property
    def query_strides(self) -> tuple[int, ...]:
        """(row, head) of q, and of qr."""
        return (*self.q.stride()[:2], *self.qr.stride()[:2])


@triton.jit
def placed(index, entry, seen, request, start, of, SPAN: tl.constexpr, LAYOUT: tl.constexpr):
    """(outer, inner, ok) of entries; the index of each names SPAN consecutive positions."""
    ok = (index >= 0) & (index < (seen + SPAN - 1) // SPAN)
    pos = tl.where(ok, index, 0).to(tl.int32) * SPAN + entry % SPAN
    ok = ok & (pos < seen)
    return rows.place(pos, ok, request, start, of, LAYOUT)


@triton.jit
def selected(
    entry, end, index_row, seen, request, start, of, SPAN: tl.constexpr, LAYOUT: tl.constexpr
):
    """(outer, inner, ok) of the entries of a row of indices that are below `end`."""
    index = tl.load(index_row + entry // SPAN, mask=entry < end, other=-1)
    return placed(index, entry, seen, request, start, of, SPAN, LAYOUT)


@triton.jit
def slot_of(outer, inner, ok, reach, LAYOUT: tl.constexpr):
    """One int32 for both indices of `placed`, -1 where absent."""
    size = LAYOUT.PAGE if LAYOUT.KEYS == rows.PAGED else reach
    return tl.where(ok, outer * size + inner, -1).to(tl.int32)
