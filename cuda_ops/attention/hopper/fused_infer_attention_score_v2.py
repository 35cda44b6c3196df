# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The attention of fused_infer_attention_score_v2.py on a Hopper GPU, over latents of 512 channels
with a rotary part of 64 or without.

A program takes 64 rows of a request, heads of its tokens in order, and a part of its keys, 128 at a
time, in two tiles of 64: sparse_attention's mla_consumers.py has what its warps do.  A whole tile
comes by TMA, in boxes of as many keys as divide 64 and a page; one at an end of what is seen comes
key by key, and what no row sees as zeros.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents

from ...common import gpu, rows
from ...common.gluon_names import barrier, cp_async, reinterpret, tma_load
from ...common.hopper.tma import aligned, describable, describe_box
from ...common.log2 import LEAST, LN2, LOG2E
from ...runtime import launches
from ...sparse_attention.hopper.mla_consumers import (
    GATHER,
    LEFT,
    LEFT_FREE,
    LINE,
    QUERY,
    RIGHT,
    RIGHT_FREE,
    TURNED,
    WIDE,
    S,
    arrive,
    even_step,
    nothing_seen,
    odd_step,
    products,
    tiles_of,
    total,
)

NOWHERE = gl.constexpr(2**31 - 1)  # the place of a key that no row sees
ROW = gl.constexpr(gl.SliceLayout(1, GATHER))


class Part(NamedTuple):
    """What a program does: its request, the first row of the query that the request has, its
    tokens, those of them that see keys, its keys; the tile of its rows; the positions start ..
    hi - 1 that are seen at all, of which it begins at lo, in so many steps of 128; the window."""

    request: Any
    first: Any
    length: Any
    used: Any
    kv_len: Any
    tile: Any
    split: Any
    start: Any
    lo: Any
    hi: Any
    steps: Any
    window: Any


class Output(NamedTuple):
    sinks: Any
    out: Any
    lse: Any
    partial: Any
    partial_max: Any
    partial_sum: Any
    out_row: Any
    out_head: Any
    lse_request: Any
    lse_row: Any
    lse_head: Any


@gluon.jit
def _later(a, b):
    return gl.maximum(a, b)


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def _tile(item, seqlens_q, tokens, requests, C: gl.constexpr):
    """`_tile` of the file above."""
    if C.PIECES > 0:
        r = gl.arange(0, C.PIECES, layout=LINE)
        end = rows.within(gl.load(seqlens_q + r, mask=r < requests, other=0), tokens)
        begin = rows.within(
            gl.load(seqlens_q + r - 1, mask=(r > 0) & (r <= requests), other=0), tokens
        )
        end = gl.associative_scan(gl.where(r < requests, end, tokens), 0, _later)
        begin = gl.where(r > requests, tokens, gl.associative_scan(begin, 0, _later))
        tiles = gl.associative_scan(((end - begin) * C.HEADS + 63) // 64, 0, _plus)
        request = gl.sum((tiles <= item).to(gl.int32), 0)
        here = r == request
        first = gl.sum(gl.where(here, begin, 0), 0)
        length = gl.sum(gl.where(here, end - begin, 0), 0)
        used = gl.where(request < requests, length, 0)
        tile = item - gl.max(gl.where(r < request, tiles, 0), 0)
    else:
        each = (tokens * C.HEADS + 63) // 64
        request = item // each
        first = request * tokens
        length = tokens
        used = tokens
        if C.HAS_Q:
            used = rows.within(gl.load(seqlens_q + request), tokens)
        tile = item % each
    return request, first, length, used, tile


@gluon.jit
def _rows(part, C: gl.constexpr, LAYOUT: gl.constexpr):
    """(exists, token, head) of the tile's rows."""
    m = part.tile * 64 + gl.arange(0, 64, layout=LAYOUT)
    return m < part.length * C.HEADS, m // C.HEADS, m % C.HEADS


@gluon.jit
def _seen(part, C: gl.constexpr, LAYOUT: gl.constexpr):
    """A row sees the positions low .. high - 1."""
    exists, token, _ = _rows(part, C, LAYOUT)
    high = gl.where(exists, rows.sees(token, part.used, part.kv_len, C.CAUSAL), 0)
    low = high * 0
    if C.WINDOW:
        low = gl.maximum(high - 1 - part.window, 0)
    return low, high


@gluon.jit
def _scores(tiles, low, high, phase, tile, zero, TILE: gl.constexpr, C: gl.constexpr):
    """[64, 64] scores of a tile; masked, not yet scaled."""
    s = products(tiles, phase, tile, zero, TILE, C.D)
    place = tiles.places.index(TILE).load(gl.SliceLayout(0, S))
    s = warpgroup_mma_wait(0, deps=[s])
    seen = place[None, :] < high[:, None]
    if C.WINDOW:
        seen = seen & (place[None, :] >= low[:, None])
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def _finish(acc, row_sum, row_max, part, to, C: gl.constexpr, COLUMN: gl.constexpr):
    exists, token, head = _rows(part, C, gl.SliceLayout(1, S))
    there = row_sum != 0  # a NaN is there, and stays one
    below = gl.where(there, row_sum, 1.0)
    row = (part.first + token).to(gl.int64)
    if C.SPLITS == 1:
        if C.STATS and COLUMN == 0:
            if C.PIECES > 0:
                at = row * to.lse_row + head * to.lse_head
            else:
                at = part.request.to(gl.int64) * to.lse_request
                at = at + token * to.lse_row + head.to(gl.int64) * to.lse_head
            value = gl.where(there, row_max * LN2 + gl.log(below), float("-inf"))
            gl.store(to.lse + at, value, mask=exists)
        if C.HAS_SINK:
            sink = gl.load(to.sinks + head, mask=exists, other=0.0).to(gl.float32)
            below += gl.exp2(sink * LOG2E - row_max)
    elif COLUMN == 0:
        piece = (row * C.SPLITS + part.split) * C.HEADS + head
        gl.store(to.partial_max + piece, row_max, mask=exists)
        gl.store(to.partial_sum + piece, row_sum, mask=exists)
    inverse = gl.where(there, 1.0 / below, 0.0)
    o = acc * gl.convert_layout(inverse, gl.SliceLayout(1, WIDE))[:, None]
    if C.SPLITS == 1:
        o = gl.convert_layout(o.to(to.out.dtype.element_ty), TURNED)
        exists, token, head = _rows(part, C, gl.SliceLayout(1, TURNED))
        row = (part.first + token).to(gl.int64)
        d = COLUMN + gl.arange(0, 256, layout=gl.SliceLayout(0, TURNED))
        at = to.out + row * to.out_row + head.to(gl.int64) * to.out_head
        gl.store(at[:, None] + d[None, :], o, mask=exists[:, None])
    else:
        exists, token, head = _rows(part, C, gl.SliceLayout(1, WIDE))
        row = (part.first + token).to(gl.int64)
        stored = exists & gl.convert_layout(there, gl.SliceLayout(1, WIDE))  # others are not read
        d = COLUMN + gl.arange(0, 256, layout=gl.SliceLayout(0, WIDE))
        at = to.partial + ((row * C.SPLITS + part.split) * C.HEADS + head) * 512
        gl.store(at[:, None] + d[None, :], o, mask=stored[:, None])


@gluon.jit
def _consumer(tiles, part, scale_log2, to, C: gl.constexpr, NUMBER: gl.constexpr):
    """NUMBER: 0 scores the even tiles, 1 the odd ones."""
    if NUMBER == 0 and C.CHAINED:
        gdc_launch_dependents()  # the merge is set up meanwhile
    low, high = _seen(part, C, gl.SliceLayout(1, S))
    row_max, row_sum, acc = nothing_seen()
    mbarrier.wait(tiles.bars.index(QUERY), 0)
    for step in range(part.steps):
        # zero, but not to the compiler: 80 descriptors made ahead of the loop would spill
        zero = step >> 30
        phase = step & 1
        s = _scores(tiles, low, high, phase, NUMBER + zero, zero, NUMBER, C)
        if NUMBER == 0:
            row_max, row_sum, acc = even_step(
                s, row_max, row_sum, acc, scale_log2, tiles, zero, phase, step, None
            )
        else:
            row_max, row_sum, acc = odd_step(
                s, row_max, row_sum, acc, scale_log2, tiles, zero, phase, step, None
            )
    row_sum = total(row_sum, tiles, 0, NUMBER)
    _finish(acc, row_sum, row_max, part, to, C, 256 * NUMBER)


@gluon.jit
def _ask(base, page, slot, valid, steps, column, tile):
    """Columns `column` .. of keys into a tile; what is not valid becomes 0."""
    by_page, by_row = steps
    d = column + gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, GATHER))
    at = (base + page * by_page + slot * by_row)[:, None] + d[None, :]
    cp_async(tile, at, mask=valid[:, None])


@gluon.jit
def _box(
    desc,
    boxes,
    bar,
    table,
    n,
    column: gl.constexpr,
    FIRST,
    COUNT: gl.constexpr,
    BOX: gl.constexpr,
    C: gl.constexpr,
    pages,
):
    """64 keys from n on, COUNT times 64 columns, into `boxes` from number FIRST on."""
    PER: gl.constexpr = 64 // BOX
    for j in gl.static_range(PER):
        position = n + j * BOX
        page = gl.load(table + position // C.PAGE)
        page = gl.where((page >= 0) & (page < pages), page, pages).to(gl.int32)  # read as zeros
        for c in gl.static_range(COUNT):
            to = boxes.index(FIRST + c * PER + j)
            to = reinterpret(to, boxes.dtype, desc.block_shape, desc.layout)
            tma_load(desc, [page, position % C.PAGE, column + c * 64], bar, to)


@gluon.jit
def _bring(
    key,
    key_rope,
    key_desc,
    rope_desc,
    table,
    pages,
    n,
    phase,
    part,
    strides,
    boxes,
    tiles,
    TILE: gl.constexpr,
    BOX: gl.constexpr,
    C: gl.constexpr,
):
    """The 64 keys from n on, either half as soon as it is free."""
    left, right, rope, places, bars = tiles.left, tiles.right, tiles.rope, tiles.places, tiles.bars
    position = n + gl.arange(0, 64, layout=ROW)
    valid = (position >= part.start) & (position < part.hi)
    page = gl.load(table + position // C.PAGE, mask=valid, other=-1).to(gl.int64)
    valid = valid & (page >= 0) & (page < pages)
    page = gl.where(valid, page, 0)
    mbarrier.wait(bars.index(LEFT_FREE + TILE), phase)
    if (n >= part.start) & (n + 64 <= part.hi):
        left_boxes, right_boxes, rope_boxes = boxes
        PER: gl.constexpr = 64 // BOX
        mbarrier.expect(bars.index(LEFT + TILE), 64 * 256 * 2)
        _box(
            key_desc,
            left_boxes,
            bars.index(LEFT + TILE),
            table,
            n,
            0,
            TILE * 4 * PER,
            4,
            BOX,
            C,
            pages,
        )
        async_copy.mbarrier_arrive(bars.index(LEFT + TILE), increment_count=False)
        mbarrier.wait(bars.index(RIGHT_FREE + TILE), phase)
        places.index(TILE).store(gl.where(valid, position, NOWHERE))
        barrier()
        mbarrier.expect(bars.index(RIGHT + TILE), 64 * (256 + C.D) * 2)
        if C.D > 0:
            _box(
                rope_desc,
                rope_boxes,
                bars.index(RIGHT + TILE),
                table,
                n,
                0,
                TILE * PER,
                1,
                BOX,
                C,
                pages,
            )
        _box(
            key_desc,
            right_boxes,
            bars.index(RIGHT + TILE),
            table,
            n,
            256,
            TILE * 4 * PER,
            4,
            BOX,
            C,
            pages,
        )
        async_copy.mbarrier_arrive(bars.index(RIGHT + TILE), increment_count=False)
    else:
        slot = (position % C.PAGE).to(gl.int64)
        key_page, key_row, rope_page, rope_row = strides
        _ask(key, page, slot, valid, (key_page, key_row), 0, left.index(TILE))
        async_copy.mbarrier_arrive(bars.index(LEFT + TILE), increment_count=False)
        mbarrier.arrive(bars.index(LEFT + TILE), count=1)
        mbarrier.wait(bars.index(RIGHT_FREE + TILE), phase)
        if C.D > 0:
            _ask(key_rope, page, slot, valid, (rope_page, rope_row), 0, rope.index(TILE))
        _ask(key, page, slot, valid, (key_page, key_row), 256, right.index(TILE))
        async_copy.mbarrier_arrive(bars.index(RIGHT + TILE), increment_count=False)
        places.index(TILE).store(gl.where(valid, position, NOWHERE))
        arrive(bars, RIGHT + TILE)


@gluon.jit
def _producer(
    q,
    q_rope,
    key,
    key_rope,
    key_desc,
    rope_desc,
    table,
    pages,
    part,
    strides,
    boxes,
    tiles,
    BOX: gl.constexpr,
    C: gl.constexpr,
):
    q_row, q_head, qr_row, qr_head, key_page, key_row, rope_page, rope_row = strides
    bars = tiles.bars
    exists, token, head = _rows(part, C, ROW)
    row = (part.first + token).to(gl.int64)
    head = head.to(gl.int64)
    d = gl.arange(0, 256, layout=gl.SliceLayout(0, GATHER))
    at = (q + row * q_row + head * q_head)[:, None] + d[None, :]
    cp_async(tiles.q_left.index(0), at, mask=exists[:, None])
    cp_async(tiles.q_right.index(0), at + 256, mask=exists[:, None])
    if C.D > 0:
        r = gl.arange(0, 64, layout=gl.SliceLayout(0, GATHER))
        at = (q_rope + row * qr_row + head * qr_head)[:, None] + r[None, :]
        cp_async(tiles.q_rope.index(0), at, mask=exists[:, None])
    async_copy.mbarrier_arrive(bars.index(QUERY), increment_count=False)
    of_keys = (key_page, key_row, rope_page, rope_row)
    for step in range(part.steps):
        n = part.lo + step * 128
        phase = (step & 1) ^ 1
        _bring(
            key,
            key_rope,
            key_desc,
            rope_desc,
            table,
            pages,
            n,
            phase,
            part,
            of_keys,
            boxes,
            tiles,
            0,
            BOX,
            C,
        )
        _bring(
            key,
            key_rope,
            key_desc,
            rope_desc,
            table,
            pages,
            n + 64,
            phase,
            part,
            of_keys,
            boxes,
            tiles,
            1,
            BOX,
            C,
        )
    async_copy.wait_group(0)


@gluon.jit(
    do_not_specialize=[
        "tokens",
        "requests",
        "max_kv_len",
        "table_stride",
        "pages",
        "window",
        "out_head",
        "lse_request",
        "lse_head",
    ]
)
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
    BOX: gl.constexpr,
    C: gl.constexpr,
):
    program = gl.program_id(0)
    items = gl.num_programs(0) // C.SPLITS
    # tiles of one request and part are neighbours, and share its keys in L2; the last come first
    item = items - 1 - program % items
    split = program // items
    request, first, length, used, tile = _tile(item, seqlens_q, tokens, requests, C)
    inside = request < requests
    kv_len = rows.within(gl.load(seqlens_k + request, mask=inside, other=0), max_kv_len)
    part = Part(request, first, length, used, kv_len, tile, split, 0, 0, 0, 0, window)
    low, high = _seen(part, C, gl.SliceLayout(1, S))
    stop = gl.max(high, 0)
    start = gl.min(gl.where(high > 0, low, stop), 0)
    begin = start // 64 * 64
    size = ((stop - begin + C.SPLITS - 1) // C.SPLITS + 127) // 128 * 128
    lo = begin + split * size
    hi = gl.minimum(lo + size, stop)
    steps = (gl.maximum(hi - lo, 0) + 127) // 128
    part = Part(request, first, length, used, kv_len, tile, split, start, lo, hi, steps, window)
    to = Output(
        sinks,
        out,
        lse,
        partial,
        partial_max,
        partial_sum,
        out_row,
        out_head,
        lse_request,
        lse_row,
        lse_head,
    )
    dtype: gl.constexpr = key.dtype.element_ty
    tiles = tiles_of(dtype, C.D, [2, 64], 129, 129, 128)
    BOXES: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    boxes = (
        reinterpret(tiles.left, dtype, [512 // BOX, BOX, 64], BOXES),
        reinterpret(tiles.right, dtype, [512 // BOX, BOX, 64], BOXES),
        reinterpret(tiles.rope, dtype, [128 // BOX, BOX, 64], BOXES),
    )
    of_request = table + request.to(gl.int64) * table_stride
    gl.warp_specialize(
        [
            (_consumer, (tiles, part, scale_log2, to, C, 0)),
            (_consumer, (tiles, part, scale_log2, to, C, 1)),
            (
                _producer,
                (
                    q,
                    q_rope,
                    key,
                    key_rope,
                    key_desc,
                    rope_desc,
                    of_request,
                    pages,
                    part,
                    strides,
                    boxes,
                    tiles,
                    BOX,
                    C,
                ),
            ),
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


def _describe(key: Tensor, box: int) -> TensorDescriptor:
    """64 columns of `box` keys of a page."""
    pages, page, _, width = key.shape
    return describe_box(key, [pages, page, width], [*key.stride()[:2], 1], [1, box, 64])


def launch(q: Tensor, qr: Tensor, key: Tensor, kr: Tensor, items: int, C: Any, **x: Any) -> None:
    """The call of the file above, of `items` tiles of 64 rows."""
    box = math.gcd(C.PAGE, 64)
    described = [_describe(each, box) for each in (key, kr)]
    launches.kernel(_attend, items * C.SPLITS)(
        q, qr, key, kr, *described, **x, BOX=box, C=C, num_warps=4
    )
