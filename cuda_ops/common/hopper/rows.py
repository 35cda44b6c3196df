# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""common/rows.py and common/selection.py for Gluon, where a vector needs a layout."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from .. import packed, rows
from ..gluon_names import cp_async
from ..selection import physical_slots, slot_of
from .layouts import GATHER


@gluon.jit
def request_of(row, of, LAYOUT: gl.constexpr, LINE: gl.constexpr):
    """`rows.request_of`; requests lie in registers as LINE says."""
    if LAYOUT.Q_TND:
        r = gl.arange(0, LAYOUT.REQUESTS, layout=LINE)
        ends = rows.within(gl.load(of.seqlens_q + r, mask=r < of.requests, other=0), of.tokens)
        return rows.between(row, r < of.requests, ends, of)
    else:
        return rows.of_batch(row, of)


@gluon.jit
def locate(row, of, LAYOUT: gl.constexpr, LINE: gl.constexpr):
    """`rows.locate`."""
    request, first, _ = request_of(row, of, LAYOUT, LINE)
    count = rows.rows_of(request, first, of, LAYOUT)
    start, keys = rows.keys_of(request, of, LAYOUT)
    return request, start, rows.sees((row - first).to(gl.int32), count, keys, LAYOUT.CAUSAL)


@gluon.jit
def slots(
    index, entry, kv_len, request, start, of, SPARSE_BLOCK: gl.constexpr, LAYOUT: gl.constexpr
):
    """Entries as rows of a key tensor whose rows are evenly spaced, negative where absent."""
    outer, inner, valid = physical_slots(
        index, entry, kv_len, request, start, of, SPARSE_BLOCK, LAYOUT
    )
    return slot_of(outer, inner, valid, of.max_kv_len, LAYOUT)


@gluon.jit
def gather_rows(base, step, places, tile, D: gl.constexpr, ABSENT: gl.constexpr):
    """Ask for rows of D numbers; where there is none for a 0, or if not ABSENT for the first."""
    place = places.load(gl.SliceLayout(1, GATHER))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, GATHER))
    at = gl.maximum(place, 0).to(gl.int64) * step
    if ABSENT:
        cp_async(tile, (base + at)[:, None] + d[None, :], mask=(place >= 0)[:, None])
    else:
        cp_async(tile, (base + at)[:, None] + d[None, :])
    async_copy.commit_group()


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def ends_of(of, REQUESTS: gl.constexpr, LINE: gl.constexpr):
    """`packed.ends_of`."""
    r = gl.arange(0, REQUESTS, layout=LINE)
    length = rows.within(gl.load(of.lengths + r, mask=r < of.requests, other=0), of.tokens)
    # of lengths that add up beyond 32 bits
    end = gl.minimum(gl.associative_scan(length.to(gl.int64), 0, _plus), of.tokens).to(gl.int32)
    return gl.where(r < of.requests, end, of.tokens + 1)


@gluon.jit
def locate_packed(row, of, REQUESTS: gl.constexpr, LINE: gl.constexpr):
    """`packed.locate`, whose loads wait for none of each other."""
    r = gl.arange(0, REQUESTS, layout=LINE)
    held = rows.within(gl.load(of.key_lengths + r, mask=r < of.requests, other=0), of.reach)
    request, first, stop = packed.request_of(row, ends_of(of, REQUESTS, LINE), of)
    held = gl.sum(gl.where(r == request, held, 0), 0)
    limit = rows.sees((row - first).to(gl.int32), stop - first, held, True)
    return request, gl.where(request < of.requests, limit, 0)
