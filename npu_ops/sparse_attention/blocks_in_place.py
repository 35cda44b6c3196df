# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Grouped-query attention to chosen blocks where they lie: blocks and pages of whole RUNs of keys.

    note         vector cores    where each run of a list begins, and how much of it the token sees
    weigh        cube + vector   scores of the keys, for the query heads that share them
    accumulate   cube + vector   exp(z - m) value over all of them

A run is one copy, bound by what the token sees of it: rows behind that are not read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory
from ..common import cores, ragged, tiling, tune, tuples, two_passes
from ..common.ragged import Layout, Pages, Requests, pages_of, visible
from .sparse_flash_attention import placed, positions

_OP = "blocks_in_place"
RUN = 128  # keys of one bulk copy


class Apart(NamedTuple):
    """How far apart rows and heads are."""

    row: int
    head: int


@tuples.jit(["units", "lists", "runs", "count", "each"])
def note(
    index,
    table,
    slots,
    seen,
    units,
    lists,
    runs,
    count,
    each,
    of: Requests,
    pages: Pages,
    layout: Layout,
    BLOCKS: tl.constexpr,
    RUN: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Of each token's lists, `each` runs a block; BLOCKS: more than one."""
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        row = unit // lists
        request, start, limit = visible(row, *of, *layout)
        selected = index + (unit % lists * of.tokens + row).to(tl.int64) * count
        for at in range(0, runs, PIECE):
            j = at + tl.arange(0, PIECE)
            last = (limit + RUN - 1) // RUN
            number, exists = positions(selected, j, at, count, last, each, BLOCKS, PIECE)
            position = tl.where(exists, number, 0) * RUN
            slot = placed(
                position, exists, table, request, start, limit, *pages, layout.KEYS, PIECE
            )
            to = unit.to(tl.int64) * runs + j
            tl.store(slots + to, tl.maximum(slot, 0), mask=j < runs)
            visible_rows = tl.where(slot >= 0, tl.minimum(limit - position, RUN), 0)
            tl.store(seen + to, visible_rows, mask=j < runs)


@triton.jit
def logits(z, there, scale, KEY_TILE: tl.constexpr):
    """[keys, heads]; -inf from key `there` on."""
    j = tl.arange(0, KEY_TILE).to(tl.float32)
    return z * scale + tl.where(j < there.to(tl.float32), 0.0, float("-inf"))[:, None]


class Sizes(NamedTuple):
    """Of the heads: of keys, of lists, of queries that share a head of keys, padded to tiles."""

    shared: int
    lists: int
    group: int
    padded: int


@tuples.jit(["first", "rows", "runs", "splits", "scale"])
def weigh(
    query,
    key,
    slots,
    seen,
    scores,
    peaks,
    sums,
    first,
    rows,
    runs,
    splits,
    of_query: Apart,
    of_key: Apart,
    heads: Sizes,
    scale,
    SIZE: tl.constexpr,
    WHOLE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    set_workspace_multibuffer: tl.constexpr,
):
    """Each run has statistics of its own, so that nothing depends on `splits`.  The scores are
    stored as the cube has them, without scale and mask."""
    d = tl.arange(0, SIZE)
    j = tl.arange(0, KEY_TILE)
    tiles = heads.padded // HEAD_TILE
    for work in range(tl.program_id(0), rows * heads.shared * tiles * splits, tl.num_programs(0)):
        part = work % splits
        h = work // splits % tiles * HEAD_TILE + tl.arange(0, HEAD_TILE)
        unit = work // splits // tiles
        row = unit // heads.shared
        g = unit % heads.shared
        token = (first + row).to(tl.int64)
        from_query = query + token * of_query.row + d[None]
        from_query += (g * heads.group + h[:, None]) * of_query.head
        if WHOLE:
            q = tl.load(from_query)
        else:
            q = tl.load(from_query, mask=h[:, None] < heads.group, other=0.0)
        listed = (token * heads.lists + tl.minimum(g, heads.lists - 1)) * runs
        each = (runs + splits - 1) // splits
        for run in range(part * each, tl.minimum(part * each + each, runs)):
            there = tl.load(seen + listed + run)
            i = tl.load(slots + listed + run).to(tl.int64) + j
            from_key = key + g * of_key.head + i[:, None] * of_key.row + d[None]
            k = tl.load(from_key, mask=j[:, None] < there, other=0.0)
            z = tl.dot(k, tl.trans(q))  # [KEY_TILE, HEAD_TILE]
            to = unit.to(tl.int64) * runs + run
            tl.store(scores + (to * KEY_TILE + j)[:, None] * heads.padded + h[None], z)
            z = logits(z, there, scale, KEY_TILE)
            # finite: a run without a single key must not make NaN
            peak = tl.maximum(tl.max(z, 0), -1e30)
            tl.store(peaks + to * heads.padded + h, peak)
            tl.store(sums + to * heads.padded + h, tl.sum(tl.exp(z - peak[None]), 0))


@tuples.jit(["first", "rows", "runs", "scale"])
def accumulate(
    scores,
    peaks,
    sums,
    value,
    slots,
    seen,
    sinks,
    out,
    lse,
    first,
    rows,
    runs,
    of_value: Apart,
    heads: Sizes,
    scale,
    SIZE: tl.constexpr,
    SINKS: tl.constexpr,
    WHOLE: tl.constexpr,
    PARTS: tl.constexpr,
    PIECES: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    set_workspace_multibuffer: tl.constexpr,
):
    """Keys by heads: else both vector units do the work of the whole tile.  Every piece of the
    channels stores the statistics, the same ones."""
    COLUMNS: tl.constexpr = SIZE // PIECES
    j = tl.arange(0, KEY_TILE)
    tiles = heads.padded // HEAD_TILE
    for work in range(tl.program_id(0), rows * heads.shared * tiles * PIECES, tl.num_programs(0)):
        d = work % PIECES * COLUMNS + tl.arange(0, COLUMNS)
        h = work // PIECES % tiles * HEAD_TILE + tl.arange(0, HEAD_TILE)
        unit = work // PIECES // tiles
        row = unit // heads.shared
        g = unit % heads.shared
        token = (first + row).to(tl.int64)
        before = unit.to(tl.int64) * runs
        peak = tl.full((HEAD_TILE,), -1e30, tl.float32)
        total = tl.zeros((HEAD_TILE,), tl.float32)
        for part in range(0, runs, PARTS):
            i = part + tl.arange(0, PARTS)
            at = (before + i)[:, None] * heads.padded + h[None]
            m = tl.load(peaks + at, mask=(i < runs)[:, None], other=-1e30)
            s = tl.load(sums + at, mask=(i < runs)[:, None], other=0.0)
            new = tl.maximum(peak, tl.max(m, 0))
            total = total * tl.exp(peak - new) + tl.sum(s * tl.exp(m - new[None]), 0)
            peak = new
        listed = (token * heads.lists + tl.minimum(g, heads.lists - 1)) * runs
        acc = tl.zeros((HEAD_TILE, COLUMNS), tl.float32)
        for run in range(0, runs):
            there = tl.load(seen + listed + run)
            i = tl.load(slots + listed + run).to(tl.int64) + j
            z = tl.load(scores + ((before + run) * KEY_TILE + j)[:, None] * heads.padded + h[None])
            z = logits(z, there, scale, KEY_TILE)
            from_value = value + g * of_value.head + i[:, None] * of_value.row + d[None]
            v = tl.load(from_value, mask=j[:, None] < there, other=0.0)
            p = tl.exp(z - peak[None]).to(v.dtype)  # [KEY_TILE, HEAD_TILE]
            acc = tl.dot(tl.trans(p), v, acc)
        denominator = total
        if SINKS:
            if WHOLE:
                sink = tl.load(sinks + g * heads.group + h)
            else:
                sink = tl.load(sinks + g * heads.group + h, mask=h < heads.group, other=0.0)
            denominator += tl.exp(sink - peak)
        # without a key the sums are 0, and so is the result
        denominator = tl.where(denominator > 0, denominator, 1.0)[:, None]
        x = (acc / denominator).to(out.dtype.element_ty)
        log = peak + tl.log(tl.where(total > 0, total, 1.0))
        log = tl.where(total > 0, log, float("-inf"))
        to = (token * heads.shared + g) * heads.group + h
        if WHOLE:
            tl.store(out + to[:, None] * SIZE + d[None], x)
            tl.store(lse + to, log)
        else:
            there = h < heads.group
            tl.store(out + to[:, None] * SIZE + d[None], x, mask=there[:, None])
            tl.store(lse + to, log, mask=there)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: Tensor,
    scale: float,
    each: int,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    plan: ragged.Plan,
) -> None:
    """`each`: runs of a block."""
    (tokens, heads, size), device, shared = query.shape, query.device, key.shape[2]
    lists, _, count = index.shape
    runs, group = count * each, heads // shared
    slots, seen = (memory.empty((tokens, lists, runs), torch.int32, device) for _ in range(2))
    note[(min(tokens * lists, cores.vector()),)](
        index,
        plan.table,
        slots=slots,
        seen=seen,
        units=tokens * lists,
        lists=lists,
        runs=runs,
        count=count,
        each=each,
        **pages_of(key, plan.table),
        **plan.requests,
        **plan.flags,
        BLOCKS=each > 1,
        RUN=RUN,
        **tune.only(f"{_OP}.note").keywords,
    )
    weighing = two_passes.weighing(_OP, group, size)
    head_tile = weighing.tiles["HEAD_TILE"]
    padded = tiling.up(group, head_tile)
    tiles = padded // head_tile
    at_once = tiling.at_once(tokens, shared * runs * RUN * padded * 4)
    splits = two_passes.splits(at_once * shared, tiles, head_tile, runs * RUN, RUN)
    accumulating = two_passes.accumulating(_OP, at_once * shared, padded, size)
    pieces = padded // accumulating.tiles["HEAD_TILE"] * accumulating.tiles["PIECES"]
    scores = memory.empty((at_once, shared, runs, RUN, padded), torch.float32, device)
    peaks, sums = (
        memory.empty((at_once, shared, runs, padded), torch.float32, device) for _ in range(2)
    )
    of_heads, flags = (shared, lists, group, padded), dict(SIZE=size, WHOLE=group == padded)
    for first in range(0, tokens, at_once):
        rows = min(at_once, tokens - first)
        weigh[(min(rows * shared * tiles * splits, cores.cube()),)](
            query,
            key,
            slots,
            seen,
            scores,
            peaks,
            sums,
            first,
            rows,
            runs,
            splits,
            *query.stride()[:2],
            *key.stride()[1:3],
            *of_heads,
            scale,
            **flags,
            **weighing.keywords,
        )
        accumulate[(min(rows * shared * pieces, cores.cube()),)](
            scores,
            peaks,
            sums,
            value,
            slots,
            seen,
            lse if sinks is None else sinks,
            out,
            lse,
            first,
            rows,
            runs,
            *value.stride()[1:3],
            *of_heads,
            scale,
            SINKS=sinks is not None,
            **flags,
            **accumulating.keywords,
        )
