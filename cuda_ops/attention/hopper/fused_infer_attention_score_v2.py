# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The attention of fused_infer_attention_score_v2.py on a Hopper GPU, over latents of 512 channels
with a rotary part of 64 or without.

A program of each SM takes 64 rows of a request, heads of its tokens in order, and keys 128 at a
time, in two tiles of 64: sparse_attention's mla_consumers.py has what its warps do.  A whole tile
of keys comes by TMA, in boxes of as many keys as divide 64 and a page; one at an end of what is
seen comes key by key, and what no row sees as zeros.

Tiles of rows are taken whole, one after the other; with C.CUT every program has as many keys as the
others, of tiles that follow each other, and what it makes of a tile that it shares is put together
later.  C.ALONE, where keys come from memory: one consumer scores all tiles of keys, both multiply.
1 to 4 % faster than tiles in turn; where other rows read the keys too, up to 12 % slower (H200).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents

from ...common import gpu, rows
from ...common.gluon_names import barrier, cp_async, reinterpret, tma_load
from ...common.hopper.layouts import GATHER, LINE, S
from ...common.hopper.tma import aligned, describable, describe_box
from ...common.log2 import LEAST, LN2, LOG2E
from ...runtime import launches
from ...sparse_attention.hopper.mla_consumers import (
    LEFT,
    LEFT_FREE,
    QUERY,
    QUERY_FREE,
    RIGHT,
    RIGHT_FREE,
    SUMMED,
    TURNED,
    WEIGHED,
    WIDE,
    arrive,
    nothing_seen,
    products,
    step_of,
    tiles_of,
    total,
    weigh,
)

NOWHERE = gl.constexpr(2**31 - 1)  # the place of a key that no row sees
ROW = gl.constexpr(gl.SliceLayout(1, GATHER))


class Part(NamedTuple):
    """What a program does next: a tile of rows of a request, whose first row of the query, tokens,
    those of them that see keys, and keys these are; so many steps of 128 of them.  `piece` is -1
    where all keys of the tile are; else its number, with C.CUT of all that programs leave, and
    the one that begins with the tile leaves in `cuts` as well how many `pieces` of it there are."""

    request: Any
    first: Any
    length: Any
    used: Any
    kv_len: Any
    tile: Any
    steps: Any
    piece: Any
    pieces: Any


class Work(NamedTuple):
    """A program's part of all work: so many groups of tiles of rows from group `item` on; with
    C.CUT `left` units in all, where `at` units of the first group are others'.  Programs before
    number `more` have `size` + 1 units, others `size`."""

    item: Any
    count: Any
    at: Any
    left: Any
    size: Any
    more: Any


class Keys(NamedTuple):
    """Latents and rotary parts: as pointers with their steps, (page, key) of each; as descriptors
    of boxes, and shared memory in such boxes, the latents' left and right halves."""

    latent: Any
    rope: Any
    steps: Any
    latent_box: Any
    rope_box: Any
    left_boxes: Any
    right_boxes: Any
    rope_boxes: Any


class Output(NamedTuple):
    sinks: Any
    out: Any
    lse: Any
    parts: Any  # their numerators, maxima and sums
    cuts: Any
    by: Any  # strides of `out`, of rows and heads
    lse_by: Any  # of `lse`, of requests, rows and heads


@gluon.jit
def _later(a, b):
    return gl.maximum(a, b)


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def _requests(of, C: gl.constexpr):
    """(first row of the query, tokens) of every request, and of the tokens of none behind them."""
    r = gl.arange(0, C.REQUESTS, layout=LINE)
    begin = r * of.tokens
    end = gl.where(r < of.requests, begin + of.tokens, begin)
    if C.PIECES > 0:
        end = rows.within(gl.load(of.seqlens_q + r, mask=r < of.requests, other=0), of.tokens)
        begin = rows.within(
            gl.load(of.seqlens_q + r - 1, mask=(r > 0) & (r <= of.requests), other=0), of.tokens
        )
        end = gl.associative_scan(gl.where(r < of.requests, end, of.tokens), 0, _later)
        begin = gl.associative_scan(begin, 0, _later)
        begin = gl.where(r > of.requests, of.tokens, begin)
    return begin, end - begin


@gluon.jit
def _groups(tokens, C: gl.constexpr):
    """Of tiles of rows, that programs side by side take: they share keys in L2."""
    return (tokens * C.HEADS + 64 * C.GROUP - 1) // (64 * C.GROUP)


@gluon.jit
def _tile(item, of, C: gl.constexpr):
    """(request, its first row of the query, its tokens, those of them that see keys, tile): what
    this program takes of group `item`; no tokens where there is no such group."""
    if C.PIECES > 0:
        begin, count = _requests(of, C)
        tiles = gl.associative_scan(_groups(count, C), 0, _plus)
        r = gl.arange(0, C.REQUESTS, layout=LINE)
        request = gl.sum((tiles <= item).to(gl.int32), 0)
        first = gl.sum(gl.where(r == request, begin, 0), 0)
        length = gl.sum(gl.where(r == request, count, 0), 0)
        used = gl.where(request < of.requests, length, 0)
        tile = item - gl.max(gl.where(r < request, tiles, 0), 0)
    else:
        each = _groups(of.tokens, C)
        request = item // each
        first = request * of.tokens
        length = of.tokens
        used = of.tokens
        if C.HAS_Q:
            used = rows.within(gl.load(of.seqlens_q + request), of.tokens)
        tile = item % each
    return request, first, length, used, tile * C.GROUP + gl.program_id(0) % C.GROUP


@gluon.jit
def _low(high, window, C: gl.constexpr):
    """The first position that a row sees which sees none from `high` on."""
    low = high * 0
    if C.WINDOW:
        low = gl.maximum(high - 1 - window, 0)
    return low


@gluon.jit
def _reach(used, kv_len, window, C: gl.constexpr):
    """(where steps of 128 keys begin, how many there are) for all rows of a request."""
    stop = gl.where(used > 0, kv_len, 0)
    begin = _low(rows.sees(0, used, kv_len, C.CAUSAL), window, C) // 64 * 64
    return begin, (gl.maximum(stop - begin, 0) + 127) // 128


@gluon.jit
def _located(unit, groups, units, C: gl.constexpr):
    """(group, units of it before this one) that `unit` of all work lies in."""
    r = gl.arange(0, C.REQUESTS, layout=LINE)
    ends = gl.associative_scan(groups * units, 0, _plus)
    request = gl.sum((ends <= unit).to(gl.int32), 0)
    before = unit - gl.max(gl.where(r < request, ends, 0), 0)
    each = gl.maximum(gl.sum(gl.where(r == request, units, 0), 0), 1)
    item = gl.sum(gl.where(r < request, groups, 0), 0) + before // each
    return item, before % each


@gluon.jit
def _work(of, window, C: gl.constexpr):
    """Units are steps of 128 keys, and one more for each group; every program has as many of them,
    or one more."""
    program = gl.program_id(0) // C.GROUP
    programs = gl.num_programs(0) // C.GROUP
    if C.CUT:
        r = gl.arange(0, C.REQUESTS, layout=LINE)
        _, length = _requests(of, C)
        used = gl.where(r < of.requests, length, 0)
        if C.HAS_Q and C.PIECES == 0:
            used = rows.within(gl.load(of.seqlens_q + r, mask=r < of.requests, other=0), of.tokens)
        kv_len = gl.load(of.seqlens_k + r, mask=r < of.requests, other=0)
        _, steps = _reach(used, rows.within(kv_len, of.max_kv_len), window, C)
        groups = _groups(length, C)
        units = gl.sum(groups * (steps + 1), 0)
        size = units // programs
        more = units % programs
        unit = program * size + gl.minimum(program, more)
        left = size + (program < more).to(gl.int32)
        item, at = _located(unit, groups, steps + 1, C)
        last, _ = _located(unit + left - 1, groups, steps + 1, C)
        work = Work(item, gl.where(left > 0, last - item + 1, 0), at, left, size, more)
    else:
        if C.PIECES > 0:
            items = of.tokens * C.HEADS // 64 + of.requests + 1  # at most
        else:
            items = of.requests * _groups(of.tokens, C)
        # the last come first; neighbours share keys in L2
        this = program % items
        count = (items - this + programs - 1) // programs
        work = Work(items - 1 - this, count, 0, 0, 0, 0)
    return work


@gluon.jit
def _rows(part, C: gl.constexpr, LAYOUT: gl.constexpr):
    """(exists, token, head) of the tile's rows."""
    m = part.tile * 64 + gl.arange(0, 64, layout=LAYOUT)
    return m < part.length * C.HEADS, m // C.HEADS, m % C.HEADS


@gluon.jit
def _seen(part, window, C: gl.constexpr, LAYOUT: gl.constexpr):
    """A row sees the positions low .. high - 1."""
    exists, token, _ = _rows(part, C, LAYOUT)
    high = gl.where(exists, rows.sees(token, part.used, part.kv_len, C.CAUSAL), 0)
    return _low(high, window, C), high


@gluon.jit
def _masked(s, place, low, high, C: gl.constexpr):
    seen = place[None, :] < high[:, None]
    if C.WINDOW:
        seen = seen & (place[None, :] >= low[:, None])
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def _scores(tiles, low, high, phase, tile, zero, TILE, C: gl.constexpr):
    """[64, 64] scores of a tile; masked, not yet scaled."""
    s = products(tiles, phase, tile, zero, TILE, C.D)
    place = tiles.places.index(TILE).load(gl.SliceLayout(0, S))
    s = warpgroup_mma_wait(0, deps=[s])
    return _masked(s, place, low, high, C)


@gluon.jit
def _multiplied(acc, weights, values, old, new, bars, FREE):
    """The output with a tile's values, which are free then."""
    factor = gl.exp2(old - new)
    acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, WIDE))[:, None]
    running = warpgroup_mma(weights, values, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[running])
    arrive(bars, FREE)
    return acc, factor


@gluon.jit
def _score_and_multiply(
    row_max, row_sum, acc, low, high, scale_log2, tiles, t, last, C: gl.constexpr
):
    """Of the consumer that scores every tile: the t-th one's probabilities, and the left half of
    its values."""
    rope, bars = tiles.rope, tiles.bars
    tile = t & 1
    s = _scores(tiles, low, high, (t >> 1) & 1, tile, t >> 30, tile, C)
    new = gl.maximum(row_max, gl.max(s, 1) * scale_log2)
    p = weigh(s, new, scale_log2, tiles, tile, last, tile)
    weights = gl.convert_layout(p.to(rope.dtype), gl.DotOperandLayout(0, WIDE, 2))
    values = tiles.left.index(tile)
    acc, factor = _multiplied(acc, weights, values, row_max, new, bars, LEFT_FREE + tile)
    return new, row_sum * factor + gl.sum(p, 1), acc


@gluon.jit
def _multiply(row_max, acc, tiles, t):
    """Of the other one: the right half."""
    bars = tiles.bars
    tile = t & 1
    mbarrier.wait(bars.index(RIGHT + tile), (t >> 1) & 1)
    mbarrier.wait(bars.index(WEIGHED + tile), (t >> 1) & 1)
    barrier()  # racecheck believes a wait only where its warps meet after it
    fence_async_shared()
    new = tiles.exchange.index(tile).load(gl.SliceLayout(1, S))
    weights, values = tiles.rope.index(tile), tiles.right.index(tile)
    acc, _ = _multiplied(acc, weights, values, row_max, new, bars, RIGHT_FREE + tile)
    return new, acc


@gluon.jit
def _pass_on(row_sum, tiles, phase, NUMBER: gl.constexpr):
    """The sums of the consumer that scores, to the other one."""
    exchange, bars = tiles.exchange, tiles.bars
    if NUMBER == 0:
        mbarrier.wait(bars.index(SUMMED + 1), phase ^ 1)  # the last ones are read
        exchange.index(2).store(row_sum)
        arrive(bars, SUMMED)
    else:
        mbarrier.wait(bars.index(SUMMED), phase)
        barrier()  # for racecheck, as above
        row_sum = exchange.index(2).load(gl.SliceLayout(1, S))
        arrive(bars, SUMMED + 1)
    return row_sum


@gluon.jit
def _divided(acc, below, there):
    inverse = gl.where(there, 1.0 / below, 0.0)
    return acc * gl.convert_layout(inverse, gl.SliceLayout(1, WIDE))[:, None]


@gluon.jit
def _finish(acc, row_sum, row_max, part, to, C: gl.constexpr, COLUMN: gl.constexpr):
    """Rows of which all keys were this program's."""
    exists, token, head = _rows(part, C, gl.SliceLayout(1, S))
    there = row_sum != 0  # a NaN is there, and stays one
    below = gl.where(there, row_sum, 1.0)
    row = (part.first + token).to(gl.int64)
    if COLUMN == 0:
        if C.STATS:
            if C.PIECES > 0:
                at = row * to.lse_by[1] + head * to.lse_by[2]
            else:
                at = part.request.to(gl.int64) * to.lse_by[0]
                at = at + token * to.lse_by[1] + head.to(gl.int64) * to.lse_by[2]
            value = gl.where(there, row_max * LN2 + gl.log(below), float("-inf"))
            gl.store(to.lse + at, value, mask=exists)
        if C.CUT:
            gl.store(to.cuts + row * C.HEADS + head, 0, mask=exists)
    if C.HAS_SINK:
        sink = gl.load(to.sinks + head, mask=exists, other=0.0).to(gl.float32)
        below += gl.exp2(sink * LOG2E - row_max)
    o = _divided(acc, below, there).to(to.out.dtype.element_ty)
    o = gl.convert_layout(o, TURNED)
    exists, token, head = _rows(part, C, gl.SliceLayout(1, TURNED))
    row = (part.first + token).to(gl.int64)
    d = COLUMN + gl.arange(0, 256, layout=gl.SliceLayout(0, TURNED))
    at = to.out + row * to.by[0] + head.to(gl.int64) * to.by[1]
    gl.store(at[:, None] + d[None, :], o, mask=exists[:, None])


@gluon.jit
def _places(part, C: gl.constexpr, LAYOUT: gl.constexpr):
    """(exists, row and head, where its results are) of a piece's rows."""
    exists, token, head = _rows(part, C, LAYOUT)
    row = (part.first + token).to(gl.int64)
    at = part.piece * 64 + gl.arange(0, 64, layout=LAYOUT)
    if C.SPLITS > 1:
        at = (row * C.SPLITS + part.piece) * C.HEADS + head
    return exists, row * C.HEADS + head, at


@gluon.jit
def _finish_piece(acc, row_sum, row_max, part, to, C: gl.constexpr, COLUMN: gl.constexpr):
    there = row_sum != 0
    if COLUMN == 0:
        exists, row, at = _places(part, C, gl.SliceLayout(1, S))
        gl.store(to.parts[1] + at, row_max, mask=exists)
        gl.store(to.parts[2] + at, row_sum, mask=exists)
        if C.CUT:
            gl.store(to.cuts + row, at * 1024 + part.pieces, mask=exists & (part.pieces > 0))
    o = _divided(acc, gl.where(there, row_sum, 1.0), there)
    exists, _, at = _places(part, C, gl.SliceLayout(1, WIDE))
    d = COLUMN + gl.arange(0, 256, layout=gl.SliceLayout(0, WIDE))
    stored = exists & gl.convert_layout(there, gl.SliceLayout(1, WIDE))  # others are not read
    gl.store((to.parts[0] + at * 512)[:, None] + d[None, :], o, mask=stored[:, None])


@gluon.jit
def _note(tiles, i, part):
    """Leave for the consumers what the i-th item is."""
    line = gl.arange(0, 64, layout=LINE)
    noted = line * 0
    for j in gl.static_range(9):
        noted = gl.where(line == j, part[j], noted)
    tiles.places.index(2 + (i & 1)).store(noted)


@gluon.jit
def _number(noted, j: gl.constexpr):
    return gl.max(noted.slice(j, 1).load(LINE), 0)


@gluon.jit
def _noted(tiles, i):
    """What _note left."""
    noted = tiles.places.index(2 + (i & 1))
    return Part(
        _number(noted, 0),
        _number(noted, 1),
        _number(noted, 2),
        _number(noted, 3),
        _number(noted, 4),
        _number(noted, 5),
        _number(noted, 6),
        _number(noted, 7),
        _number(noted, 8),
    )


@gluon.jit
def _consumer(tiles, count, window, scale_log2, to, C: gl.constexpr, NUMBER: gl.constexpr):
    """NUMBER: 0 scores the even tiles, 1 the odd ones; C.ALONE: 0 scores all."""
    if NUMBER == 0 and C.CHAINED:
        gdc_launch_dependents()  # the merge is set up meanwhile
    bars = tiles.bars
    t = 0  # steps, or tiles where C.ALONE
    summed = 0
    for i in range(count):
        row_max, row_sum, acc = nothing_seen()
        mbarrier.wait(bars.index(QUERY), i & 1)
        part = _noted(tiles, i)
        steps = part.steps
        low, high = _seen(part, window, C, gl.SliceLayout(1, S))
        scores = steps
        if C.ALONE and NUMBER == 1:
            scores = steps * 0
        mbarrier.arrive(bars.index(QUERY_FREE), count=1, pred=scores == 0)
        if C.ALONE:
            for step in range(2 * steps):
                if NUMBER == 0:
                    last = step == 2 * steps - 1
                    row_max, row_sum, acc = _score_and_multiply(
                        row_max, row_sum, acc, low, high, scale_log2, tiles, t, last, C
                    )
                else:
                    row_max, acc = _multiply(row_max, acc, tiles, t)
                t += 1
        else:
            for step in range(steps):
                # zero, but not to the compiler: 80 descriptors made ahead of the loop would spill
                zero = step >> 30
                phase = t & 1
                s = _scores(tiles, low, high, phase, NUMBER + zero, zero, NUMBER, C)
                row_max, row_sum, acc = step_of(
                    NUMBER, s, row_max, row_sum, acc, scale_log2, tiles, zero, phase, step, steps
                )
                t += 1
        if steps > 0:
            if C.ALONE:
                row_sum = _pass_on(row_sum, tiles, summed, NUMBER)
            else:
                row_sum = total(row_sum, tiles, summed, NUMBER)
            summed = summed ^ 1
        if not (C.CUT or C.SPLITS > 1) or part.piece < 0:
            _finish(acc, row_sum, row_max, part, to, C, 256 * NUMBER)
        else:
            _finish_piece(acc, row_sum, row_max, part, to, C, 256 * NUMBER)


@gluon.jit
def _ask(base, page, slot, valid, steps, column, tile):
    """Columns `column` .. of keys into a tile; what is not valid becomes 0."""
    by_page, by_row = steps
    d = column + gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, GATHER))
    at = (base + page * by_page + slot * by_row)[:, None] + d[None, :]
    cp_async(tile, at, mask=valid[:, None])


@gluon.jit
def _named(page, pages):
    """A page; past the last one where it is none, for zeros."""
    return gl.where((page >= 0) & (page < pages), page, pages).to(gl.int32)


@gluon.jit
def _box(
    desc,
    boxes,
    bar,
    table,
    pages,
    page,
    n,
    column: gl.constexpr,
    TILE: gl.constexpr,
    C: gl.constexpr,
):
    """Half of the columns of the 64 keys from n on, or the rotary part, into `boxes` of tile TILE.
    `page` is theirs, if they lie in one."""
    BOX: gl.constexpr = desc.block_shape[1]
    WIDTH: gl.constexpr = desc.block_shape[2]
    PER: gl.constexpr = 64 // BOX
    COUNT: gl.constexpr = boxes.shape[0] // (2 * PER)
    for j in gl.static_range(PER):
        position = n + j * BOX
        if PER > 1:
            page = _named(gl.load(table + position // C.PAGE), pages)
        for c in gl.static_range(COUNT):
            to = boxes.index((TILE * COUNT + c) * PER + j)
            to = reinterpret(to, boxes.dtype, desc.block_shape, desc.layout)
            tma_load(desc, [page, position % C.PAGE, column + c * WIDTH], bar, to)


@gluon.jit
def _bring(keys, table, pages, n, phase, start, hi, tiles, TILE: gl.constexpr, C: gl.constexpr):
    """The 64 keys from n on, either half as soon as it is free."""
    left, right, rope, places, bars = tiles.left, tiles.right, tiles.rope, tiles.places, tiles.bars
    position = n + gl.arange(0, 64, layout=ROW)
    valid = (position >= start) & (position < hi)
    first = gl.load(table + n // C.PAGE, mask=n < hi, other=-1)  # for one box before it is free
    first = _named(first, pages)
    page = position * 0 + first
    if C.PAGE % 64 != 0:
        page = _named(gl.load(table + position // C.PAGE, mask=valid, other=-1), pages)
    valid = valid & (page < pages)
    page = gl.where(valid, page, 0).to(gl.int64)
    mbarrier.wait(bars.index(LEFT_FREE + TILE), phase)
    if (n >= start) & (n + 64 <= hi):
        bar = bars.index(LEFT + TILE)
        mbarrier.expect(bar, 64 * 256 * 2)
        _box(keys.latent_box, keys.left_boxes, bar, table, pages, first, n, 0, TILE, C)
        async_copy.mbarrier_arrive(bar, increment_count=False)
        bar = bars.index(RIGHT + TILE)
        mbarrier.wait(bars.index(RIGHT_FREE + TILE), phase)
        places.index(TILE).store(gl.where(valid, position, NOWHERE))
        barrier()
        mbarrier.expect(bar, 64 * (256 + C.D) * 2)
        _box(keys.latent_box, keys.right_boxes, bar, table, pages, first, n, 256, TILE, C)
        if C.D > 0:
            _box(keys.rope_box, keys.rope_boxes, bar, table, pages, first, n, 0, TILE, C)
        async_copy.mbarrier_arrive(bar, increment_count=False)
    else:
        slot = (position % C.PAGE).to(gl.int64)
        of_latent, of_rope = keys.steps
        _ask(keys.latent, page, slot, valid, of_latent, 0, left.index(TILE))
        async_copy.mbarrier_arrive(bars.index(LEFT + TILE), increment_count=False)
        mbarrier.arrive(bars.index(LEFT + TILE), count=1)
        mbarrier.wait(bars.index(RIGHT_FREE + TILE), phase)
        if C.D > 0:
            _ask(keys.rope, page, slot, valid, of_rope, 0, rope.index(TILE))
        _ask(keys.latent, page, slot, valid, of_latent, 256, right.index(TILE))
        async_copy.mbarrier_arrive(bars.index(RIGHT + TILE), increment_count=False)
        places.index(TILE).store(gl.where(valid, position, NOWHERE))
        arrive(bars, RIGHT + TILE)


@gluon.jit
def _next(item, at, left, work, of, window, C: gl.constexpr):
    """(the next item, its positions start .. lo .. hi - 1, units that it takes): what its rows see
    begins at `start`, and this program with it at lo."""
    request, first, length, used, tile = _tile(item, of, C)
    inside = request < of.requests
    kv_len = gl.load(of.seqlens_k + request, mask=inside, other=0)
    kv_len = rows.within(kv_len, of.max_kv_len)
    token = tile * 64 // C.HEADS
    stop = gl.minimum((tile * 64 + 63) // C.HEADS, used - 1)
    stop = gl.where(token < used, rows.sees(stop, used, kv_len, C.CAUSAL), 0)
    start = _low(rows.sees(token, used, kv_len, C.CAUSAL), window, C)
    lo = start // 64 * 64
    hi = stop
    units = 0
    piece = -1
    pieces = 1
    if C.SPLITS > 1:
        piece = gl.program_id(0) // (gl.num_programs(0) // C.SPLITS)
        size = ((hi - lo + C.SPLITS - 1) // C.SPLITS + 127) // 128 * 128
        lo += piece * size
        hi = gl.minimum(hi, lo + size)
    if C.CUT:
        begin, steps = _reach(used, kv_len, window, C)
        units = gl.minimum(steps + 1 - at, left)
        end = at + units
        lo = gl.maximum(lo, begin + gl.maximum(at - 1, 0) * 128)
        hi = gl.minimum(hi, begin + (end - 1) * 128)
        if (at > 0) | (end < steps + 1):
            piece = gl.program_id(0) * 2 + (at == 0).to(gl.int32)
            # the program of the group's last unit
            program = gl.program_id(0) // C.GROUP
            unit = program * work.size + gl.minimum(program, work.more) + work.left
            unit += steps - end
            longer = work.more * (work.size + 1)
            last = unit // (work.size + 1)
            if unit >= longer:
                last = work.more + (unit - longer) // gl.maximum(work.size, 1)
            pieces = gl.where(at == 0, last - program + 1, 0)
    steps = (gl.maximum(hi - lo, 0) + 127) // 128
    part = Part(request, first, length, used, kv_len, tile, steps, piece, pieces)
    return part, start, lo, hi, units


@gluon.jit
def _producer(q, q_rope, strides, keys, work, of, window, tiles, C: gl.constexpr):
    q_row, q_head, qr_row, qr_head = strides
    bars = tiles.bars
    d = gl.arange(0, 256, layout=gl.SliceLayout(0, GATHER))
    r = gl.arange(0, 64, layout=gl.SliceLayout(0, GATHER))
    item = work.item
    before = work.at
    left = work.left
    t = 0
    for i in range(work.count):
        part, start, lo, hi, units = _next(item, before, left, work, of, window, C)
        left -= units
        before = before * 0
        item += 1 if C.CUT else -gl.num_programs(0)
        # queries come as soon as both consumers have no more scores of the last ones to make
        mbarrier.wait(bars.index(QUERY_FREE), (i & 1) ^ 1)
        exists, token, head = _rows(part, C, ROW)
        row = (part.first + token).to(gl.int64)
        head = head.to(gl.int64)
        at = (q + row * q_row + head * q_head)[:, None] + d[None, :]
        cp_async(tiles.q_left.index(0), at, mask=exists[:, None])
        cp_async(tiles.q_right.index(0), at + 256, mask=exists[:, None])
        if C.D > 0:
            at = (q_rope + row * qr_row + head * qr_head)[:, None] + r[None, :]
            cp_async(tiles.q_rope.index(0), at, mask=exists[:, None])
        async_copy.mbarrier_arrive(bars.index(QUERY), increment_count=False)
        _note(tiles, i, part)
        arrive(bars, QUERY)
        table = of.table + part.request.to(gl.int64) * of.table_stride
        for step in range(part.steps):
            phase = (t & 1) ^ 1
            for TILE in gl.static_range(2):
                n = lo + step * 128 + 64 * TILE
                _bring(keys, table, of.pages, n, phase, start, hi, tiles, TILE, C)
            t += 1
    async_copy.wait_group(0)


@gluon.jit(do_not_specialize=[*rows.NUMBERS, "window", "out_head", "lse_request", "lse_head"])
def _attend(
    q,
    q_rope,
    key,
    key_rope,
    key_desc,
    rope_desc,
    seqlens_q,
    seqlens_k,
    table,
    sinks,
    out,
    lse,
    partial,
    partial_max,
    partial_sum,
    cuts,
    scale_log2,
    tokens,
    requests,
    max_kv_len,
    table_stride,
    pages,
    window,
    out_row,
    out_head,
    lse_request,
    lse_row,
    lse_head,
    strides,
    C: gl.constexpr,
):
    of = rows.Requests(
        seqlens_q, seqlens_k, table, tokens, requests, max_kv_len, table_stride, pages
    )
    work = _work(of, window, C)
    parts = (partial, partial_max, partial_sum)
    lse_by = (lse_request, lse_row, lse_head)
    to = Output(sinks, out, lse, parts, cuts, (out_row, out_head), lse_by)
    dtype: gl.constexpr = key.dtype.element_ty
    tiles = tiles_of(dtype, C.D, [4, 64], 129, 129, 129)
    BOXES: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BOX: gl.constexpr = key_desc.block_shape[1]
    WIDTH: gl.constexpr = key_desc.block_shape[2]
    q_row, q_head, qr_row, qr_head, key_page, key_row, rope_page, rope_row = strides
    keys = Keys(
        key,
        key_rope,
        ((key_page, key_row), (rope_page, rope_row)),
        key_desc,
        rope_desc,
        reinterpret(tiles.left, dtype, [32768 // (BOX * WIDTH), BOX, WIDTH], BOXES),
        reinterpret(tiles.right, dtype, [32768 // (BOX * WIDTH), BOX, WIDTH], BOXES),
        reinterpret(tiles.rope, dtype, [128 // BOX, BOX, 64], BOXES),
    )
    of_queries = (q_row, q_head, qr_row, qr_head)
    gl.warp_specialize(
        [
            (_consumer, (tiles, work.count, window, scale_log2, to, C, 0)),
            (_consumer, (tiles, work.count, window, scale_log2, to, C, 1)),
            (_producer, (q, q_rope, of_queries, keys, work, of, window, tiles, C)),
        ],
        [4, 4],
        [216, 72],
    )


def supports(q: Tensor, qr: Tensor, key: Tensor, kr: Tensor, rope: int, scale_log2: float) -> bool:
    """Latents as wide as DeepSeek's, with its rotary part or none; steps of 16 numbers, by which
    the compiler knows that rows are aligned; a scale that leaves the largest score the largest."""
    return (
        gpu.is_hopper(q.device)
        and q.shape[-1] == 512
        and key.numel() > 0
        and rope in (0, 64)
        and scale_log2 >= LEAST
        and aligned(q, qr)
        and not any(step % 16 for x in (q, qr, key, kr) for step in x.stride()[:2])
        and describable(key)
        and describable(kr)
    )


def _describe(key: Tensor, box: int, width: int) -> TensorDescriptor:
    """`width` columns of `box` keys of a page."""
    pages, page, _, size = key.shape
    return describe_box(key, [pages, page, size], [*key.stride()[:2], 1], [1, box, width])


def launch(q: Tensor, qr: Tensor, key: Tensor, kr: Tensor, items: int, C: Any, **x: Any) -> None:
    """The call of the file above, of `items` tiles of 64 rows."""
    box = math.gcd(C.PAGE, 64)
    described = [_describe(key, box, 256 if box == 64 else 64), _describe(kr, box, 64)]
    processors = gpu.num_sms(q.device)
    programs = items * C.SPLITS if C.SPLITS > 1 else min(items, processors)
    if C.CUT:
        programs = processors // C.GROUP * C.GROUP
    launches.kernel(_attend, programs)(q, qr, key, kr, *described, **x, C=C, num_warps=4)
