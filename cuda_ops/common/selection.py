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
    def query_strides(self) -> dict[str, int]:
        """By the names that kernels use."""
        steps = (*self.q.stride()[:2], *self.qr.stride()[:2])
        return dict(zip(("q_row", "q_head", "qr_row", "qr_head"), steps, strict=True))


@triton.jit
def placed(
    index, entry, seen, request, start, table, table_stride, pages,
    SPAN: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """(outer, inner, ok) of entries; the index of each names SPAN consecutive positions."""
    ok = (index >= 0) & (index < (seen + SPAN - 1) // SPAN)
    pos = tl.where(ok, index, 0).to(tl.int32) * SPAN + entry % SPAN
    ok = ok & (pos < seen)
    return rows.place(pos, ok, request, start, table, table_stride, pages, PAGE, KEYS)


@triton.jit
def selected(
    entry, end, index_row, seen, request, start, table, table_stride, pages,
    SPAN: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """(outer, inner, ok) of the entries of a row of indices that are below `end`."""
    index = tl.load(index_row + entry // SPAN, mask=entry < end, other=-1)
    return placed(index, entry, seen, request, start, table, table_stride, pages, SPAN, PAGE, KEYS)


@triton.jit
def slot_of(outer, inner, ok, reach, PAGE: tl.constexpr, KEYS: tl.constexpr):
    """One int32 for both indices of `placed`, -1 where absent."""
    size = PAGE if KEYS == rows.PAGED else reach
    return tl.where(ok, outer * size + inner, -1).to(tl.int32)


def key_strides(key: Tensor, kr: Tensor, value: Tensor, layout: str) -> dict[str, int]:
    """(outer, inner) strides of the three, by the names that kernels use."""
    names = ("key_o", "key_i", "rope_o", "rope_i", "value_o", "value_i")
    found = [s for each in (key, kr, value) for s in rows.strides(each, layout)]
    return dict(zip(names, found, strict=True))
