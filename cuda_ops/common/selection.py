# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Which keys an index names, and where they lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from . import rows
from .combine import Parts


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

    def arguments(self, parts: Parts, per_split: int) -> dict[str, Any]:
        """What kernels take by name that cut a row into `parts`; without sinks they read none."""
        return dict(
            sinks=self.softmax_max if self.sinks is None else self.sinks,
            results=parts.results(self.out),
            softmax_max=self.softmax_max,
            softmax_sum=self.softmax_sum,
            scale_log2=self.scale_log2,
            entries=self.entries,
            per_split=per_split,
            **self.plan.arguments,
        )


@triton.jit
def physical_slots(
    index, entry, kv_len, request, start, of, SPARSE_BLOCK: tl.constexpr, LAYOUT: tl.constexpr
):
    """(outer, inner, valid) of entries; the index of each names SPARSE_BLOCK positions in a row."""
    valid = (index >= 0) & (index < (kv_len + SPARSE_BLOCK - 1) // SPARSE_BLOCK)
    pos = tl.where(valid, index, 0).to(tl.int32) * SPARSE_BLOCK + entry % SPARSE_BLOCK
    valid = valid & (pos < kv_len)
    return rows.physical_slot(pos, valid, request, start, of, LAYOUT)


@triton.jit
def selected(
    entry,
    end,
    index_row,
    kv_len,
    request,
    start,
    of,
    SPARSE_BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """(outer, inner, valid) of the entries of a row of indices that are below `end`."""
    index = tl.load(index_row + entry // SPARSE_BLOCK, mask=entry < end, other=-1)
    return physical_slots(index, entry, kv_len, request, start, of, SPARSE_BLOCK, LAYOUT)


@triton.jit
def slot_of(outer, inner, valid, max_kv_len, LAYOUT: tl.constexpr):
    """One int32 for both indices of `physical_slots`, -1 where absent."""
    size = LAYOUT.PAGE if LAYOUT.KEYS == rows.PAGED else max_kv_len
    return tl.where(valid, outer * size + inner, -1).to(tl.int32)
