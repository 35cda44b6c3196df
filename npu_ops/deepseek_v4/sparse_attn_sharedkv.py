# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Attention over window rows and compressed entries, which are keys and values at once.

    z = scale q . k   m = max z   l = sum exp(z - m)   out = sum exp(z - m) k / (l + exp(sink - m))

    note         vector cores    which rows and entries a token sees, in runs of at most SPAN rows
                                 that lie one behind the other: a run is a piece of a page
    collect      vector cores    rows that come in no such runs (chosen entries, slots, small pages)
                                 one behind the other, two in one copy, and their runs
    attend       cube + vector   all of it for a tile of heads, each key read once; of few keys,
                                 where there are tiles for all cores
    weigh        cube + vector   else: scores [T, K, N], and m and l of each part of the keys; few
                                 tokens are spread over the cores by their keys
    accumulate   cube + vector   exp(z - m) key over all keys in L0C; nothing is rescaled

A run is one bulk copy, bound by its length: rows behind it are not read.  The plan [T, width] of a
token is in two halves: HEAD numbers and the first rows of its runs; HEAD more and their lengths.
Runs of window rows come first, those of entries from `far_at` on: so many runs a window may meet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory
from ...dispatch.common.sharedkv import scale_of
from ..common import cores, entry, ragged, tiling, tune, two_passes
from ..common.front_end import extract_slice, get_element
from ..common.lengths import within
from ..common.ragged import PAGED, TND
from ..sparse_attention.sparse_flash_attention import pair, placed

SPAN = tl.constexpr(128)  # rows of a run at most; every key tile divides it
HEAD = tl.constexpr(8)
LANES = tl.constexpr(8)
MOST = 3 * 128  # keys that a token may see, where one pass is quicker by both models of time
# of the first half: what a token sees; the number of its runs is at NEAR_RUNS + whether of entries
REQUEST, BEGIN, LIMIT, CLOSED, FIRST_ROW, FIRST_ENTRY, NEAR_RUNS = (
    tl.constexpr(i) for i in range(7)
)
# where a source's rows come from: none, runs of its pages, or what `collect` lays out
NONE, RUNS, LAID_OUT = (tl.constexpr(i) for i in range(3))
# which rows `collect` takes
WINDOW, ALL, PICKED, SLOTS = (tl.constexpr(i) for i in range(4))
_KEYS = {"BSND": 0, "TND": 1, "PA_ND": 2}
IN_SLOTS = tl.constexpr(3)  # where a token's slots say all


@triton.jit
def between(row, sums, count, tokens):
    """(how many sums a row has passed, the last of them, the next one), in whatever order they
    come."""
    passed = 0
    first = 0
    end = tokens
    for start in range(0, count, 128):
        i = start + tl.arange(0, 128)
        bound = tl.minimum(tl.maximum(tl.load(sums + i, mask=i < count, other=tokens), 0), tokens)
        bound = bound.to(tl.float32)
        behind = bound <= row.to(tl.float32)
        passed += tl.sum(tl.where(behind, 1.0, 0.0), 0).to(tl.int32)
        first = tl.maximum(first, tl.max(tl.where(behind, bound, 0.0), 0).to(tl.int32))
        end = tl.minimum(end, tl.min(tl.where(behind, tokens * 1.0, bound), 0).to(tl.int32))
    return passed, first, end


@triton.jit
def runs_of(
    of_row,
    at,
    half,
    begin,
    end,
    origin,
    of_request,
    request,
    start,
    pages,
    page,
    page_rows,
    KEYS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Stores the runs of the positions begin .. end, cut where their distance from `origin` is a
    multiple of SPAN, from run `at` on; their number."""
    runs = (end - origin + SPAN - 1) // SPAN
    for done in range(0, runs, PIECE):
        i = done + tl.arange(0, PIECE)
        first = tl.maximum(origin + i * SPAN, begin)
        count = tl.minimum(origin + (i + 1) * SPAN, end) - first
        exists = i < runs
        slot = placed(
            first, exists, of_request, request, start, end, 0, pages, page, page_rows, KEYS, PIECE
        )
        count = tl.where(slot >= 0, count, 0)
        to = of_row + HEAD + at + i
        tl.store(to, tl.maximum(slot, 0), mask=exists)
        tl.store(to + half, count, mask=exists)
    return runs


@entry.jit(
    do_not_specialize=[
        "tokens", "requests", "width", "window", "ratio", "ori_reach", "cmp_reach", "ori_stride",
        "cmp_stride", "ori_pages", "cmp_pages", "ori_page", "cmp_page", "ori_page_rows",
        "cmp_page_rows",
    ]
)  # fmt: skip
def note(
    plan,
    sums,
    used_q,
    used_kv,
    ori_sums,
    cmp_sums,
    ori_table,
    cmp_table,
    tokens,
    requests,
    width,
    window,
    ratio,
    ori_reach,
    cmp_reach,
    ori_stride,
    cmp_stride,
    ori_pages,
    cmp_pages,
    ori_page,
    cmp_page,
    ori_page_rows,
    cmp_page_rows,
    Q_TND: tl.constexpr,
    Q_LENGTHS: tl.constexpr,
    KEYS: tl.constexpr,
    K_LENGTHS: tl.constexpr,
    NEAR: tl.constexpr,
    FAR: tl.constexpr,
    PIECE: tl.constexpr,
):
    rows = tokens
    if not Q_TND:
        rows = tokens * requests
    half = width // 2
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        if Q_TND:
            passed, first, end = between(row, sums, requests + 1, tokens)
            inside = (passed > 0) & (passed <= requests)
            request = tl.minimum(tl.maximum(passed - 1, 0), requests - 1)
            count = end - first
        else:
            request = row // tokens
            first = request * tokens
            count = tokens
            inside = row >= 0
        if Q_LENGTHS:
            count = tl.minimum(within(used_q + request, tokens), count)
        left = tl.where(inside, tl.maximum(count - (row - first), 0), 0)
        start = request * 0
        start_far = request * 0
        keys = ori_reach
        closed = cmp_reach
        if KEYS == TND:
            start = within(ori_sums + request, ori_reach)
            keys = tl.maximum(within(ori_sums + request + 1, ori_reach) - start, 0)
            if FAR != NONE:
                start_far = within(cmp_sums + request, cmp_reach)
                closed = tl.maximum(within(cmp_sums + request + 1, cmp_reach) - start_far, 0)
        if K_LENGTHS:
            keys = tl.minimum(within(used_kv + request, ori_reach), keys)
        limit = tl.where(left > 0, tl.maximum(keys - left + 1, 0), 0)
        if KEYS == IN_SLOTS:
            limit = left
        begin = tl.maximum(limit - window, 0)
        closed = tl.minimum(limit // ratio, closed)
        of_row = plan + row.to(tl.int64) * width
        tl.store(of_row + REQUEST, request)
        tl.store(of_row + BEGIN, begin)
        tl.store(of_row + LIMIT, limit)
        tl.store(of_row + CLOSED, closed)
        tl.store(of_row + FIRST_ROW, start)
        tl.store(of_row + FIRST_ENTRY, start_far)
        tl.store(of_row + NEAR_RUNS, 0)
        if NEAR == RUNS:
            # of the table, the columns from the first page in sight on
            behind = 0
            origin = begin
            of_table = ori_table
            if KEYS == PAGED:
                behind = begin // ori_page * ori_page
                origin = begin // SPAN * SPAN
                of_table += request.to(tl.int64) * ori_stride + begin // ori_page
            runs = runs_of(
                of_row,
                0,
                half,
                begin - behind,
                limit - behind,
                origin - behind,
                of_table,
                request,
                start,
                ori_pages,
                ori_page,
                ori_page_rows,
                KEYS,
                PIECE,
            )
            tl.store(of_row + NEAR_RUNS, runs)
        if FAR == RUNS:
            of_table = cmp_table
            if KEYS == PAGED:
                of_table += request.to(tl.int64) * cmp_stride
            runs = runs_of(
                of_row,
                (window + 2 * SPAN - 2) // SPAN,
                half,
                0,
                closed,
                0,
                of_table,
                request,
                start_far,
                cmp_pages,
                cmp_page,
                cmp_page_rows,
                KEYS,
                PIECE,
            )
            tl.store(of_row + NEAR_RUNS + 1, runs)


@triton.jit
def copies(source, slot, top, dense, to, row_stride, SIZE: tl.constexpr, ROWS: tl.constexpr):
    """The rows of the slots that exist, one behind the other from the dense row `to` on; `top` is
    one of them."""
    i = tl.arange(0, 2)
    for r in range(0, ROWS, 2):
        one = get_element(slot, (r,))
        other = get_element(slot, (r + 1,))
        there = tl.where(one >= 0, 1, 0) + tl.where(other >= 0, 1, 0)
        # a mask would not stop the read of an absent row
        one = tl.where(one >= 0, one, tl.where(other >= 0, other, top)).to(tl.int64)
        other = tl.where(other >= 0, other.to(tl.int64), one)
        x = pair(source, row_stride, tl.minimum(one, other), tl.maximum(one, other), SIZE)
        at = (to + i)[:, None] * SIZE + tl.arange(0, SIZE)[None]
        tl.store(dense + at, x, mask=(i < there)[:, None])
        to += there


@entry.jit(
    do_not_specialize=[
        "first", "rows", "count", "wide", "width", "at", "index_stride", "table_stride", "pages",
        "page", "page_rows", "row_stride",
    ]
)  # fmt: skip
def collect(
    source,
    index,
    table,
    lengths,
    plan,
    dense,
    first,
    rows,
    count,
    wide,
    width,
    at,
    index_stride,
    table_stride,
    pages,
    page,
    page_rows,
    row_stride,
    KIND: tl.constexpr,
    FAR: tl.constexpr,
    KEYS: tl.constexpr,
    LENGTHS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Programs share the rows evenly, in pieces of ROWS; each resolves the tokens that it has a
    part of, and stores their runs, the same ones."""
    pieces = wide // ROWS
    each = (rows * pieces + tl.num_programs(0) - 1) // tl.num_programs(0)
    first_piece = tl.program_id(0) * each
    stop = tl.minimum(first_piece + each, rows * pieces)
    for row in range(first_piece // pieces, (stop + pieces - 1) // pieces):
        token = (first + row).to(tl.int64)
        of_row = plan + token * width
        request = tl.load(of_row + REQUEST)
        begin = tl.load(of_row + BEGIN)
        limit = tl.load(of_row + (CLOSED if FAR else LIMIT))
        start = tl.load(of_row + (FIRST_ENTRY if FAR else FIRST_ROW))
        of_index = index + token * index_stride
        length = count
        if LENGTHS:
            length = within(lengths + token, count)
        if KIND == SLOTS:
            # of tokens of no request there are none
            length = tl.where(tl.load(of_row + LIMIT) > 0, length, 0)
        low = tl.maximum(first_piece - row * pieces, 0) * ROWS
        high = tl.minimum(stop - row * pieces, pieces) * ROWS
        total = 0
        for done in range(0, wide, PIECE):
            j = done + tl.arange(0, PIECE)
            if KIND == SLOTS:
                slot = tl.load(of_index + j, mask=j < length, other=-1)
                exists = (slot >= 0) & (slot < pages * page)
                number = tl.where(exists, slot // page, 0)
                slot = tl.where(exists, number * page_rows + slot - number * page, -1)
            else:
                if KIND == PICKED:
                    position = tl.load(of_index + j, mask=j < length, other=-1)
                elif KIND == ALL:
                    position = j
                else:
                    position = begin + j
                exists = (position >= 0) & (position < limit)
                slot = placed(
                    position,
                    exists,
                    table,
                    request,
                    start,
                    limit,
                    table_stride,
                    pages,
                    page,
                    page_rows,
                    KEYS,
                    PIECE,
                )
            top = tl.max(slot, 0)
            if top >= 0:
                for i in range(tl.maximum(low, done), tl.minimum(high, done + PIECE), ROWS):
                    before = tl.sum(tl.where((slot >= 0) & (j < i), 1.0, 0.0), 0).to(tl.int32)
                    copies(
                        source,
                        extract_slice(slot, (i - done,), (ROWS,), (1,)),
                        top,
                        dense,
                        row.to(tl.int64) * wide + total + before,
                        row_stride,
                        SIZE,
                        ROWS,
                    )
            total += tl.sum(tl.where(slot >= 0, 1.0, 0.0), 0).to(tl.int32)
        runs = (total + SPAN - 1) // SPAN
        for done in range(0, runs, PIECE):
            i = done + tl.arange(0, PIECE)
            to = of_row + HEAD + at + i
            tl.store(to, row * wide + i * SPAN, mask=i < runs)
            tl.store(to + width // 2, tl.minimum(total - i * SPAN, SPAN), mask=i < runs)
        tl.store(of_row + NEAR_RUNS + (1 if FAR else 0), runs)


@triton.jit
def run_at(ori, cmp, of_row, run, near, far_at, half, ori_row, cmp_row, SOURCES: tl.constexpr):
    """(where the first row begins, counted from `ori`, from row to row, length) of a run; those of
    entries follow `near` runs of window rows.  A selected pointer does not lower: its distance
    does."""
    of_run = of_row + HEAD + run
    stride = ori_row
    if SOURCES == 2:
        of_run += tl.where(run < near, 0, far_at - near)
        stride = tl.where(run < near, ori_row, cmp_row)
    begin = tl.load(of_run).to(tl.int64) * stride
    if SOURCES == 2:
        apart = (cmp.to(tl.int64) - ori.to(tl.int64)) // 2  # numbers of 16 bits
        begin += tl.where(run < near, 0, apart)
    return begin, stride, tl.load(of_run + half)


@triton.jit
def share(works):
    """(first, one past the last) of this program's works.  They are neighbours: one token of a
    request may see a run more than the next, a part of its keys be longer than the other, and
    steps that these divide would give a program all of those."""
    begin = works * tl.program_id(0) // tl.num_programs(0)
    return begin, works * (tl.program_id(0) + 1) // tl.num_programs(0)


@triton.jit
def logits(z, there, scale, KEY_TILE: tl.constexpr):
    """[keys, heads]; -inf from key `there` on."""
    j = tl.arange(0, KEY_TILE).to(tl.float32)
    return z * scale + tl.where(j < there.to(tl.float32), 0.0, float("-inf"))[:, None]


@entry.jit(
    do_not_specialize=[
        "first", "rows", "width", "far_at", "heads", "padded", "splits", "query_row", "query_head",
        "ori_row", "cmp_row", "scale",
    ]
)  # fmt: skip
def weigh(
    query,
    ori,
    cmp,
    plan,
    scores,
    peaks,
    sums,
    first,
    rows,
    width,
    far_at,
    heads,
    padded,
    splits,
    query_row,
    query_head,
    ori_row,
    cmp_row,
    scale,
    SOURCES: tl.constexpr,
    SIZE: tl.constexpr,
    WHOLE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    set_workspace_multibuffer: tl.constexpr,
):
    """Each key tile has statistics of its own, so that nothing depends on `splits`.  The scores are
    stored as the cube has them, without scale and mask."""
    TILES: tl.constexpr = SPAN // KEY_TILE
    d = tl.arange(0, SIZE)
    j = tl.arange(0, KEY_TILE)
    head_tiles = padded // HEAD_TILE
    half = width // 2
    start, end = share(rows * head_tiles * splits)
    for work in range(start, end):
        part = work % splits
        h = work // splits % head_tiles * HEAD_TILE + tl.arange(0, HEAD_TILE)
        row = work // splits // head_tiles
        token = (first + row).to(tl.int64)
        from_query = query + token * query_row + h[:, None] * query_head + d[None]
        if WHOLE:
            q = tl.load(from_query)
        else:
            q = tl.load(from_query, mask=h[:, None] < heads, other=0.0)
        of_row = plan + token * width
        near = tl.load(of_row + NEAR_RUNS)
        runs = near
        if SOURCES == 2:
            runs += tl.load(of_row + NEAR_RUNS + 1)
        each = (runs * TILES + splits - 1) // splits
        stop = tl.minimum(part * each + each, runs * TILES)
        for tile in range(part * each, stop):
            begin, stride, there = run_at(
                ori, cmp, of_row, tile // TILES, near, far_at, half, ori_row, cmp_row, SOURCES
            )
            passed = tile % TILES * KEY_TILE
            there -= passed
            from_key = ori + begin + (passed + j)[:, None] * stride + d[None]
            k = tl.load(from_key, mask=j[:, None] < there, other=0.0)
            z = tl.dot(k, tl.trans(q))  # [KEY_TILE, HEAD_TILE]
            part_of = (row * (half - HEAD) * TILES + tile).to(tl.int64)
            to = (part_of * KEY_TILE + j)[:, None] * padded + h[None]
            tl.store(scores + to, z)
            z = logits(z, there, scale, KEY_TILE)
            # finite: a tile without a single key must not make NaN
            peak = tl.maximum(tl.max(z, 0), -1e30)
            tl.store(peaks + part_of * padded + h, peak)
            tl.store(sums + part_of * padded + h, tl.sum(tl.exp(z - peak[None]), 0))


@entry.jit(
    do_not_specialize=[
        "first", "rows", "width", "far_at", "heads", "padded", "ori_row", "cmp_row", "scale",
    ]
)  # fmt: skip
def accumulate(
    scores,
    peaks,
    sums,
    ori,
    cmp,
    plan,
    sinks,
    out,
    lse,
    first,
    rows,
    width,
    far_at,
    heads,
    padded,
    ori_row,
    cmp_row,
    scale,
    SOURCES: tl.constexpr,
    SIZE: tl.constexpr,
    SINKS: tl.constexpr,
    WHOLE: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    PIECES: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    set_workspace_multibuffer: tl.constexpr,
):
    """`peaks` and `sums` are those of PART keys each.  Keys by heads: else both vector units do the
    work of the whole tile.  Every piece of a row's channels stores the statistics, the same
    ones."""
    COLUMNS: tl.constexpr = SIZE // PIECES
    j = tl.arange(0, KEY_TILE)
    head_tiles = padded // HEAD_TILE
    half = width // 2
    start, end = share(rows * head_tiles * PIECES)
    for work in range(start, end):
        d = work % PIECES * COLUMNS + tl.arange(0, COLUMNS)
        h = work // PIECES % head_tiles * HEAD_TILE + tl.arange(0, HEAD_TILE)
        row = work // PIECES // head_tiles
        token = (first + row).to(tl.int64)
        of_row = plan + token * width
        near = tl.load(of_row + NEAR_RUNS)
        runs = near
        if SOURCES == 2:
            runs += tl.load(of_row + NEAR_RUNS + 1)
        of_run = (row * (half - HEAD)).to(tl.int64)
        peak = tl.full((HEAD_TILE,), -1e30, tl.float32)
        total = tl.zeros((HEAD_TILE,), tl.float32)
        parts = runs * (SPAN // PART)
        for part in range(0, parts, PARTS):
            i = part + tl.arange(0, PARTS)
            at = (of_run * (SPAN // PART) + i)[:, None] * padded + h[None]
            m = tl.load(peaks + at, mask=(i < parts)[:, None], other=-1e30)
            s = tl.load(sums + at, mask=(i < parts)[:, None], other=0.0)
            new = tl.maximum(peak, tl.max(m, 0))
            total = total * tl.exp(peak - new) + tl.sum(s * tl.exp(m - new[None]), 0)
            peak = new
        acc = tl.zeros((HEAD_TILE, COLUMNS), tl.float32)
        for run in range(0, runs):
            begin, stride, there = run_at(
                ori, cmp, of_row, run, near, far_at, half, ori_row, cmp_row, SOURCES
            )
            at = ((of_run + run) * KEY_TILE + j)[:, None] * padded + h[None]
            z = logits(tl.load(scores + at), there, scale, KEY_TILE)
            from_key = ori + begin + j[:, None] * stride + d[None]
            v = tl.load(from_key, mask=j[:, None] < there, other=0.0)
            p = tl.exp(z - peak[None]).to(v.dtype)  # [KEY_TILE, HEAD_TILE]
            acc = tl.dot(tl.trans(p), v, acc)
        denominator = total
        if SINKS:
            if WHOLE:
                sink = tl.load(sinks + h)
            else:
                sink = tl.load(sinks + h, mask=h < heads, other=0.0)
            denominator += tl.exp(sink - peak)
        # without a key the sums are 0, and so is the result
        denominator = tl.where(denominator > 0, denominator, 1.0)[:, None]
        x = (acc / denominator).to(out.dtype.element_ty)
        log = peak + tl.log(tl.where(total > 0, total, 1.0))
        log = tl.where(total > 0, log, float("-inf"))
        to = token * heads + h
        if WHOLE:
            tl.store(out + to[:, None] * SIZE + d[None], x)
            tl.store(lse + to, log)
        else:
            tl.store(out + to[:, None] * SIZE + d[None], x, mask=h[:, None] < heads)
            tl.store(lse + to, log, mask=h < heads)


@triton.jit
def columns_of(sinks, h, none, heads, HEAD_TILE: tl.constexpr):
    """The sinks of the heads `h`, each in a row of its own: a product, since both vector units of
    the oldest compiler share no tile in which a vector of rows was loaded.  `none` is 0."""
    c = tl.arange(0, 16)
    row = tl.load(sinks + c[:, None] * heads + h[None], mask=c[:, None] < 1, other=0.0)
    one = tl.load(sinks + c[:, None] * 16 + c[None], mask=c[:, None] < none, other=1.0)
    return tl.dot(tl.trans(row), one, input_precision="ieee")


@entry.jit(
    do_not_specialize=[
        "first", "rows", "width", "far_at", "heads", "query_row", "query_head", "ori_row",
        "cmp_row", "scale",
    ]
)  # fmt: skip
def attend(
    query,
    ori,
    cmp,
    plan,
    sinks,
    out,
    lse,
    first,
    rows,
    width,
    far_at,
    heads,
    query_row,
    query_head,
    ori_row,
    cmp_row,
    scale,
    SOURCES: tl.constexpr,
    SIZE: tl.constexpr,
    SINKS: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    set_workspace_multibuffer: tl.constexpr,
    tile_mix_vector_loop: tl.constexpr,
    limit_auto_multi_buffer_of_local_buffer: tl.constexpr,
):
    """A tile is half a run.  What a head carries from tile to tile is LANES equal columns, see
    fused_attention.py.  A core's works are neighbours of one tile of heads, whose sinks it has
    made once."""
    d = tl.arange(0, SIZE)
    j = tl.arange(0, KEY_TILE)
    head_tiles = heads // HEAD_TILE
    half = width // 2
    start, end = share(rows * head_tiles)
    for tile_of_heads in range(start // rows, (end + rows - 1) // rows):
        before = tile_of_heads * rows
        h = tile_of_heads * HEAD_TILE + tl.arange(0, HEAD_TILE)
        if SINKS:
            sink = columns_of(sinks, h, tl.minimum(before, 0), heads, HEAD_TILE)
        for work in range(tl.maximum(start, before), tl.minimum(end, before + rows)):
            row = work - before
            token = (first + row).to(tl.int64)
            q = tl.load(query + token * query_row + h[:, None] * query_head + d[None])
            of_row = plan + token * width
            near = tl.load(of_row + NEAR_RUNS)
            runs = near
            if SOURCES == 2:
                runs += tl.load(of_row + NEAR_RUNS + 1)
            peak = tl.full((HEAD_TILE, LANES), -1e30, tl.float32)  # finite: a tile may hold no key
            total = tl.zeros((HEAD_TILE, LANES), tl.float32)
            # 0, as a number of this turn: a constant would be held beside what becomes of it
            acc = tl.full((HEAD_TILE, SIZE), (work < 0).to(tl.float32), tl.float32)
            # the first run of a window may be a half, so may the last one of each source
            of_lengths = of_row + HEAD + half
            length = tl.load(of_lengths)
            first_half = tl.where((near > 0) & (length <= KEY_TILE), 1, 0)
            length = tl.load(of_lengths + tl.maximum(near - 1, 0))
            last_half = tl.where((near > 1) & (length <= KEY_TILE), 1, 0)
            tiles = 2 * runs - first_half - last_half
            if SOURCES == 2:
                length = tl.load(of_lengths + far_at + tl.maximum(runs - near - 1, 0))
                tiles -= tl.where((runs > near) & (length <= KEY_TILE), 1, 0)
            for i in range(0, tiles):
                tile = i + tl.where(i > 0, first_half, 0)
                tile += tl.where(tile >= 2 * near - 1, last_half, 0)
                begin, stride, there = run_at(
                    ori, cmp, of_row, tile // 2, near, far_at, half, ori_row, cmp_row, SOURCES
                )
                passed = tile % 2 * KEY_TILE
                there -= passed
                from_key = ori + begin + (passed + j)[:, None] * stride + d[None]
                k = tl.load(from_key, mask=j[:, None] < there, other=0.0)
                z = tl.dot(q, tl.trans(k)) * scale
                seen = j.to(tl.float32) < there.to(tl.float32)
                z += tl.where(seen, 0.0, float("-inf"))[None]
                most = tl.max(z, 1)[:, None]
                new = tl.where(most > peak, most, peak)  # `maximum` asks for NaN, in six operations
                shrink = tl.exp(peak - new)
                p = tl.exp(z - tl.max(new, 1)[:, None])
                total = total * shrink + tl.sum(p, 1)[:, None]
                acc = acc * tl.max(shrink, 1)[:, None] + tl.dot(p.to(k.dtype), k)
                peak = new
            denominator = total
            if SINKS:
                denominator += tl.exp(tl.max(sink, 1)[:, None] - peak)
            # without a key the sums are 0, and so is the result
            denominator = tl.where(denominator > 0, denominator, 1.0)
            x = (acc / tl.max(denominator, 1)[:, None]).to(out.dtype.element_ty)
            log = peak + tl.log(tl.where(total > 0, total, 1.0))
            log = tl.where(total > 0, log, float("-inf"))
            to = token * heads + h
            tl.store(out + to[:, None] * SIZE + d[None], x)
            tl.store(lse + to, tl.max(log, 1))


@dataclass(frozen=True)
class _Source:
    """Rows that tokens see: `count` of them at most, by their table or behind one another."""

    how: int
    kind: int
    kv: Tensor
    table: Tensor
    index: Tensor | None
    lengths: Tensor | None
    count: int

    @property
    def row(self) -> int:
        if self.kv.ndim == 4 and self.kv.shape[1] == 1:
            return self.kv.stride(0)  # a page of one row: its stride is the only one
        return ragged.row_stride(self.kv)

    @property
    def pages(self) -> int:
        return self.kv.shape[0]

    @property
    def page(self) -> int:
        return self.kv.shape[-3] if self.kv.ndim == 4 else 1

    @property
    def page_rows(self) -> int:
        return 1 if self.kv.ndim == 4 and self.kv.shape[1] == 1 else ragged.page_rows(self.kv)

    @property
    def runs(self) -> int:
        return -(-self.count // SPAN.value)

    @property
    def laid_out(self) -> int:
        """How many rows of a token `collect` has room for."""
        return self.runs * SPAN.value if self.how == LAID_OUT.value else 0


def _source(
    kv: Tensor | None,
    table: Tensor | None,
    index: Tensor | None,
    lengths: Tensor | None,
    window: int | None,
    in_slots: bool,
    q: Tensor,
) -> _Source:
    """`window`: of window rows."""
    none = torch.empty(0, dtype=torch.int32, device=q.device)
    if kv is None or kv.numel() == 0:
        return _Source(
            NONE.value, ALL.value, q.new_empty((0, 1, 1, q.shape[-1])), none, None, None, 0
        )
    count = _reach(kv, table)
    pieces = table is None or kv.shape[1] % SPAN.value == 0
    how, kind = RUNS.value if pieces else LAID_OUT.value, ALL.value
    if window is not None:
        count, kind = min(window, count), WINDOW.value
    if index is not None:
        how, kind = LAID_OUT.value, SLOTS.value if in_slots else PICKED.value
        index, count = ragged.int32(index).flatten(0, -3).squeeze(-2), index.shape[-1]
    if lengths is not None:
        lengths = ragged.int32(lengths)
    if count == 0:
        how = NONE.value
    table = none if table is None or in_slots else ragged.int32(table)
    return _Source(how, kind, kv, table, index, lengths, count)


def _reach(kv: Tensor, table: Tensor | None) -> int:
    """The most rows of a request."""
    if kv.ndim == 3:
        return kv.shape[0]
    return kv.shape[1] * (1 if table is None else table.shape[1])


def unsupported(q: Tensor, **x: Any) -> str | None:
    if reason := tiling.not_multiplied(q=q):
        return reason
    size = q.shape[-1]
    if size % 32 or size == 0:
        return f"head_dim={size}: half of it comes in 16s"
    if overflow := tiling.weigh_overflow(16, 64, size, 0):
        return overflow
    for name, kv, table, index in (
        ("ori_kv", x["ori_kv"], x["ori_block_table"], x["ori_sparse_indices"]),
        ("cmp_kv", x["cmp_kv"], x["cmp_block_table"], x["cmp_sparse_indices"]),
    ):
        if kv is None:
            continue
        reach = kv.shape[:2].numel() if x["indices_are_slots"] else _reach(kv, table)
        if max(reach, 0 if index is None else index.shape[-1]) > ragged.LONGEST:
            return f"`{name}` reaches {reach} rows, the kernel reaches {ragged.LONGEST}"
        if kv.ndim == 4 and kv.shape[0] > ragged.LONGEST:
            return f"`{name}` has {kv.shape[0]} pages, the kernel knows {ragged.LONGEST} apart"
        if (kv.ndim == 3 or kv.shape[1] > 1) and (reason := ragged.uneven(**{name: kv})):
            return reason
    return None


class Seen:
    """What the tokens of a call see: both sources, and what `note` takes besides its tiles."""

    def __init__(self, q: Tensor, **x: Any) -> None:
        ori_kv, cmp_kv, slots = x["ori_kv"], x["cmp_kv"], x["indices_are_slots"]
        tables = x["ori_block_table"], x["cmp_block_table"]
        *batch, tokens, _heads, _size = q.shape
        self.rows = tokens
        self.requests = 1 if x["cu_seqlens_q"] is None else x["cu_seqlens_q"].shape[0] - 1
        if batch:
            self.requests, self.rows = batch[0], batch[0] * tokens
        indices = (x["ori_sparse_indices"] if slots else None), x["cmp_sparse_indices"]
        window = x["ori_win_left"] + 1
        self.near = near = _source(
            ori_kv, tables[0], indices[0], x["ori_topk_length"], window, slots, q
        )
        self.far = far = _source(
            cmp_kv, tables[1], indices[1], x["cmp_topk_length"], None, slots, q
        )
        self.nothing = near.count + (far.count if slots else 0) == 0
        self.far_at = (near.count + 2 * SPAN.value - 2) // SPAN.value
        self.width = 2 * (HEAD.value + self.far_at + far.runs)
        self.plan = memory.empty((self.rows, self.width), torch.int32, q.device)
        none = torch.empty(0, dtype=torch.int32, device=q.device)
        lengths = dict(
            sums=x["cu_seqlens_q"],
            used_q=x["seqused_q"],
            used_kv=None if slots else x["seqused_kv"],
            ori_sums=None if slots else x["cu_seqlens_ori_kv"],
            cmp_sums=None if slots else x["cu_seqlens_cmp_kv"],
        )
        self.noting = dict(
            plan=self.plan,
            **{n: none if of is None else ragged.int32(of) for n, of in lengths.items()},
            ori_table=near.table,
            cmp_table=far.table,
            tokens=tokens,
            requests=self.requests,
            width=self.width,
            window=near.count,
            ratio=max(x["cmp_ratio"], 1),
            ori_reach=_reach(ori_kv, tables[0]),
            cmp_reach=0 if cmp_kv is None else _reach(cmp_kv, tables[1]),
            ori_stride=near.table.stride(0),
            cmp_stride=far.table.stride(0),
            ori_pages=near.pages,
            cmp_pages=far.pages,
            ori_page=near.page,
            cmp_page=far.page,
            ori_page_rows=near.page_rows,
            cmp_page_rows=far.page_rows,
            Q_TND=x["cu_seqlens_q"] is not None,
            Q_LENGTHS=x["seqused_q"] is not None,
            KEYS=IN_SLOTS.value if slots else _KEYS[x["layout_kv"]],
            K_LENGTHS=x["seqused_kv"] is not None and not slots,
            NEAR=near.how,
            FAR=far.how,
        )


def _attending(sees: Seen, heads: int, size: int) -> tune.Config | None:
    """The tile of `attend`; None where two passes are quicker: many keys, whose part of the output
    leaves the cube tile by tile; heads that fill no tile; and fewer tiles than cores, whose keys
    are spread."""
    kernel = "sparse_attn_sharedkv.attend"
    whole = [config for config in tune.TABLE[kernel] if heads % config.tiles["HEAD_TILE"] == 0]
    if sees.near.count + sees.far.count > MOST or not whole:
        return None
    if sees.rows * heads // whole[0].tiles["HEAD_TILE"] < tiling.A3.cube_cores:
        return None
    return tune.choose(kernel, whole, size)


def forward(
    q: Tensor,
    sinks: Tensor | None,
    softmax_scale: float | None,
    layout_kv: str,
    return_softmax_lse: bool,
    plan: Tensor | None = None,
    **seen: Any,
) -> tuple[Tensor, Tensor]:
    """`plan`: what `note` has made for these arguments already."""
    *batch, length, heads, size = q.shape
    device = q.device
    out = memory.empty(q.shape, q.dtype, device)
    lse = memory.empty([*batch, 1, length, heads], torch.float32, device)
    returned = lse if return_softmax_lse else lse.new_empty([0])
    flat = q.flatten(0, -3)
    sees = Seen(q, layout_kv=layout_kv, **seen)
    rows, near, far = sees.rows, sees.near, sees.far
    if rows * heads == 0 or sees.requests == 0 or sees.nothing:
        out.zero_(), lse.fill_(-torch.inf)
        return out, returned

    none = torch.empty(0, dtype=torch.int32, device=device)
    span, far_at, half = SPAN.value, sees.far_at, sees.width // 2
    if plan is None:
        plan = sees.plan
        note[(min(rows, cores.vector()),)](
            **sees.noting, **tune.only("sparse_attn_sharedkv.note").keywords
        )
    attending = _attending(sees, heads, size)
    weighing = two_passes.weighing("sparse_attn_sharedkv", heads, size)
    head_tile, key_tile = weighing.tiles["HEAD_TILE"], weighing.tiles["KEY_TILE"]
    padded, wide = tiling.up(heads, head_tile), (half - HEAD.value) * span
    dense_row = (near.laid_out + far.laid_out) * size * q.itemsize
    each = dense_row if attending else dense_row + wide * padded * 4
    at_once = tiling.at_once(rows, each) if each else rows
    copying = tune.only("sparse_attn_sharedkv.collect")
    dense = [memory.empty((at_once, x.laid_out, size), q.dtype, device) for x in (near, far)]
    if attending is None:
        splits = two_passes.splits(at_once, padded // head_tile, head_tile, wide, key_tile)
        accumulating = two_passes.accumulating("sparse_attn_sharedkv", at_once, padded, size)
        scores = memory.empty((at_once, wide, padded), torch.float32, device)
        parts = (at_once, wide // key_tile, padded)
        peaks, sums = (memory.empty(parts, torch.float32, device) for _ in range(2))
    keys, strides = [near.kv, far.kv], [near.row, far.row]
    for i, source in enumerate((near, far)):
        if source.how == LAID_OUT.value:
            keys[i], strides[i] = dense[i], size
    for first in range(0, rows, at_once):
        now = min(at_once, rows - first)
        for i, source in enumerate((near, far)):
            if source.how != LAID_OUT.value:
                continue
            pieces = source.laid_out // copying.tiles["ROWS"]
            index, cut = source.index, source.lengths
            collect[(min(now * pieces, cores.vector()),)](
                source.kv,
                none if index is None else index,
                source.table,
                none if cut is None else cut,
                plan,
                dense[i],
                first,
                now,
                source.count,
                source.laid_out,
                2 * half,
                far_at * i,
                0 if index is None else index.stride(0),
                source.table.stride(0),
                source.pages,
                source.page,
                source.page_rows,
                source.row,
                KIND=source.kind,
                FAR=i == 1,
                KEYS=_KEYS[layout_kv],
                LENGTHS=cut is not None,
                SIZE=size,
                **copying.keywords,
            )
        if attending is not None:
            tiles = heads // attending.tiles["HEAD_TILE"]
            attend[(min(now * tiles, cores.cube()),)](
                flat,
                *keys,
                plan,
                out if sinks is None else sinks,
                out,
                lse,
                first,
                now,
                2 * half,
                far_at,
                heads,
                *flat.stride()[:2],
                *strides,
                scale_of(softmax_scale, size),
                SOURCES=1 + (far.count > 0),
                SIZE=size,
                SINKS=sinks is not None,
                **attending.keywords,
            )
            continue
        weigh[(min(now * padded // head_tile * splits, cores.cube()),)](
            flat,
            *keys,
            plan,
            scores,
            peaks,
            sums,
            first,
            now,
            2 * half,
            far_at,
            heads,
            padded,
            splits,
            *flat.stride()[:2],
            *strides,
            scale_of(softmax_scale, size),
            SOURCES=1 + (far.count > 0),
            SIZE=size,
            WHOLE=heads == padded,
            **weighing.keywords,
        )
        tiles = padded // accumulating.tiles["HEAD_TILE"] * accumulating.tiles["PIECES"]
        accumulate[(min(now * tiles, cores.cube()),)](
            scores,
            peaks,
            sums,
            *keys,
            plan,
            out if sinks is None else sinks,
            out,
            lse,
            first,
            now,
            2 * half,
            far_at,
            heads,
            padded,
            *strides,
            scale_of(softmax_scale, size),
            SOURCES=1 + (far.count > 0),
            SIZE=size,
            SINKS=sinks is not None,
            WHOLE=heads == padded,
            PART=key_tile,
            **accumulating.keywords,
        )
    return out, returned
