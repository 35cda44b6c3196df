# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What the kernels of sparse attention over latents share on Hopper, whatever their keys are made
of: the work tiles of a program, and the two warpgroups of both products and the softmax.

One persistent program per SM: a work tile is 64 heads of a row (fewer are padded: then the gather
is what takes the time) and a part of its keys, 128 at a time, in two tiles of 64.  A tile of keys
is gathered once, into swizzled shared memory: wgmma reads it as K, and its first 512 columns as V.

    warps 0-3    scores of the even tiles; columns   0 - 255 of the output, from every tile
    warps 4-7    scores of the odd tiles;  columns 256 - 511 of the output, from every tile
    warps 8-11   an op's own: where the selected keys lie, a step ahead; every half tile as soon as
                 both products let go of it, and the queries of the next work tile as soon as
                 the last scores of this one are there

The tiles alternate: while one is scored and its softmax taken, the other one's probabilities are
multiplied by V, and its successor is on its way.  Both products of a tile come before the next
scores, so that both halves are free early: to multiply the odd tile's after the next even scores
took 9 % longer in prefill and 20 % in decode (H200, 2026-11).  Probabilities travel between the two
consumers in the place of the tile's rotary part, which nothing reads once the scores are there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from ...common import gpu
from ...common.combine import Parts, combine
from ...common.gluon_names import barrier, cp_async
from ...common.hopper.layouts import GATHER, LINE, S
from ...common.hopper.tma import aligned
from ...common.log2 import LEAST, LN2, LOG2E
from ...common.selection import Attention
from ...common.tiling import cdiv
from ...runtime import launches

LOWEST = gl.constexpr(-1e30)
# barriers, for tile 0 and the next one for tile 1: the left half has arrived, the right one has;
# the left half is free, the right one is; the probabilities are there; so is the last sum.  For
# even steps and the next one for odd steps: the places of the keys are known.
LEFT, RIGHT, LEFT_FREE, RIGHT_FREE, WEIGHED, SUMMED, PLACED = (
    gl.constexpr(i) for i in range(0, 14, 2)
)
QUERY, QUERY_FREE = gl.constexpr(14), gl.constexpr(15)
BARRIERS = gl.constexpr(16)
# half of the output's columns; the same with 64 neighbouring bytes of a row in a quad of threads,
# where wgmma leaves 16: the stores of an item then cost 3 us less (H200, 2026-11)
WIDE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
TURNED = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [0, 128], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 256],
    )
)
FETCH = gl.constexpr("""{
    .reg .pred there;
    setp.ne.s32 there, $2, 0;
    @there cp.async.bulk.prefetch.L2.global [$1], 1024;
    mov.b32 $0, 0;
}""")


class Tiles(NamedTuple):
    """Shared memory: queries, two tiles of keys (two halves of the latents, and the rope, where
    weights travel later), statistics that the consumers exchange, where the keys lie."""

    q_left: Any
    q_right: Any
    q_rope: Any
    left: Any
    right: Any
    rope: Any
    exchange: Any
    places: Any
    bars: Any


class Output(NamedTuple):
    results: Any
    softmax_max: Any
    softmax_sum: Any
    sinks: Any


class Constants(NamedTuple):
    """ROPE: columns of keys that are no values, 64 or 0.  COUNTED: the steps of an item depend on
    its row, and the gathering warps leave their number behind the places.  LSE: one statistic, the
    log-sum-exp."""

    HEADS: int
    SPLITS: int
    SPARSE_BLOCK: int
    HAS_SINK: bool
    STATS: bool
    ROPE: int = 64
    COUNTED: bool = False
    LSE: bool = False


@gluon.jit
def tiles_of(
    dtype: gl.constexpr,
    ROPE: gl.constexpr,
    PLACES: gl.constexpr,
    LEFTS: gl.constexpr,
    RIGHTS: gl.constexpr,
    QUERIES: gl.constexpr,
):
    """Shared memory with PLACES [steps, keys], and barriers for which LEFTS and RIGHTS arrivals are
    half a tile of keys, QUERIES the queries."""
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_left = gl.allocate_shared_memory(dtype, [1, 64, 256], SWIZZLED)
    q_right = gl.allocate_shared_memory(dtype, [1, 64, 256], SWIZZLED)
    q_rope = q_left
    if ROPE > 0:
        q_rope = gl.allocate_shared_memory(dtype, [1, 64, 64], SWIZZLED)
    left = gl.allocate_shared_memory(dtype, [2, 64, 256], SWIZZLED)
    right = gl.allocate_shared_memory(dtype, [2, 64, 256], SWIZZLED)
    rope = gl.allocate_shared_memory(dtype, [2, 64, 64], SWIZZLED)
    exchange = gl.allocate_shared_memory(gl.float32, [4, 64], FLAT)
    places = gl.allocate_shared_memory(gl.int32, PLACES, FLAT)
    bars = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(QUERY):
        mbarrier.init(bars.index(i), count=LEFTS if i < RIGHT else RIGHTS if i < LEFT_FREE else 1)
    mbarrier.init(bars.index(QUERY), count=QUERIES)
    mbarrier.init(bars.index(QUERY_FREE), count=2)
    barrier()
    return Tiles(q_left, q_right, q_rope, left, right, rope, exchange, places, bars)


@gluon.jit
def arrive(bars, which):
    """After every warp of the group is here."""
    barrier()
    mbarrier.arrive(bars.index(which), count=1)


@gluon.jit
def gather(base, slot, stride, tile, column: gl.constexpr):
    """Ask for columns `column` .. of the rows `slot`; absent rows become 0."""
    d = column + gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, GATHER))
    at = (base + gl.maximum(slot, 0).to(gl.int64) * stride)[:, None] + d[None, :]
    cp_async(tile, at, mask=(slot >= 0)[:, None])


@gluon.jit
def fetch(at, there):
    """Rows of 1 KB into L2, one a thread."""
    gl.inline_asm_elementwise(
        FETCH, "=r,l,r", [at.to(gl.int64, bitcast=True), there.to(gl.int32)], gl.int32, False, 1
    )


@gluon.jit
def item(number, HEADS: gl.constexpr, SPLITS: gl.constexpr):
    """(row, split, first head)."""
    TILES: gl.constexpr = (HEADS + 63) // 64
    split = number // TILES % SPLITS
    row = (number // (TILES * SPLITS)).to(gl.int64)
    return row, split, number % TILES * 64


@gluon.jit
def products(tiles, phase, tile, zero, TILE, ROPE: gl.constexpr):
    """[64, 64] products of the queries and a tile of keys, on their way once it is there."""
    q_left, q_right, q_rope, left, right, rope, _exchange, _places, bars = tiles
    mbarrier.wait(bars.index(LEFT + TILE), phase)
    fence_async_shared()
    s = gl.zeros([64, 64], gl.float32, layout=S)
    s = warpgroup_mma(
        q_left.index(zero), left.index(tile).permute((1, 0)), s, use_acc=False, is_async=True
    )
    mbarrier.wait(bars.index(RIGHT + TILE), phase)
    fence_async_shared()
    s = warpgroup_mma(q_right.index(zero), right.index(tile).permute((1, 0)), s, is_async=True)
    if ROPE > 0:
        s = warpgroup_mma(q_rope.index(zero), rope.index(tile).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _scores(tiles, t, tile, zero, TILE: gl.constexpr, C: gl.constexpr):
    """[64, 64] scores of a tile; masked, not yet scaled."""
    s = products(tiles, t & 1, tile, zero, TILE, C.ROPE)
    mbarrier.wait(tiles.bars.index(PLACED + (t & 1)), (t >> 1) & 1)
    slot = tiles.places.index(t & 1).slice(64 * TILE, 64).load(gl.SliceLayout(0, S))
    s = warpgroup_mma_wait(0, deps=[s])
    return gl.where((slot >= 0)[None, :], s, float("-inf"))


@gluon.jit
def _count(tiles):
    """Steps of the item whose queries are there."""
    return gl.max(tiles.places.index(2).slice(0, 1).load(LINE), 0)


@gluon.jit
def _scaled(acc, row_sum, old, new):
    """From the maxima `old` to `new`."""
    factor = gl.exp2(old - new)
    acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, WIDE))[:, None]
    return acc, row_sum * factor


@gluon.jit
def weigh(s, row_max, scale_log2, tiles, tile, last, kept):
    """Probabilities, also left for the other consumer, with the maxima that they are relative to.
    The heaviest is 1 and stays 1 when it is rounded."""
    rope, bars = tiles.rope, tiles.bars
    p = gl.exp2(s * scale_log2 - row_max[:, None])
    rope.index(tile).store(p.to(rope.dtype))
    tiles.exchange.index(kept).store(row_max)
    fence_async_shared()
    arrive(bars, WEIGHED + kept)
    mbarrier.arrive(bars.index(QUERY_FREE), count=1, pred=last)
    return p


@gluon.jit
def total(row_sum, tiles, query_phase, TILE: gl.constexpr):
    """Sums over the tiles of both consumers."""
    exchange, bars = tiles.exchange, tiles.bars
    exchange.index(2 + TILE).store(row_sum)
    arrive(bars, SUMMED + TILE)
    mbarrier.wait(bars.index(SUMMED + 1 - TILE), query_phase)
    barrier()  # racecheck believes the wait only where its warps meet after it
    return row_sum + exchange.index(3 - TILE).load(gl.SliceLayout(1, S))


@gluon.jit
def _finish(acc, row_sum, row_max, to, row, split, head, C: gl.constexpr, COLUMN: gl.constexpr):
    h = head + gl.arange(0, 64, layout=gl.SliceLayout(1, S))
    valid = row_sum != 0  # a NaN is there, and stays one
    below = gl.where(valid, row_sum, 1.0)
    if C.SPLITS == 1:
        if C.STATS and COLUMN == 0:
            top = row_max * LN2
            if C.LSE:
                top += gl.log(below)
            else:
                gl.store(to.softmax_sum + row * C.HEADS + h, row_sum, mask=h < C.HEADS)
            top = gl.where(valid, top, float("-inf"))
            gl.store(to.softmax_max + row * C.HEADS + h, top, mask=h < C.HEADS)
        if C.HAS_SINK:
            sink = gl.load(to.sinks + h, mask=h < C.HEADS, other=0.0)
            below += gl.exp2(sink * LOG2E - row_max)
    else:
        piece = (row * C.SPLITS + split) * C.HEADS
        if COLUMN == 0:
            gl.store(to.results.partial_max + piece + h, row_max, mask=h < C.HEADS)
            gl.store(to.results.partial_sum + piece + h, row_sum, mask=h < C.HEADS)
    inverse = gl.where(valid, 1.0 / below, 0.0)
    o = acc * gl.convert_layout(inverse, gl.SliceLayout(1, WIDE))[:, None]
    if C.SPLITS == 1:
        o = gl.convert_layout(o.to(to.results.out.dtype.element_ty), TURNED)
        d = COLUMN + gl.arange(0, 256, layout=gl.SliceLayout(0, TURNED))
        wide = head + gl.arange(0, 64, layout=gl.SliceLayout(1, TURNED))
        at = to.results.out + (row * C.HEADS + wide) * 512
        gl.store(at[:, None] + d[None, :], o, mask=(wide < C.HEADS)[:, None])
    else:
        d = COLUMN + gl.arange(0, 256, layout=gl.SliceLayout(0, WIDE))
        wide = head + gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
        at = to.results.partial + (piece + wide) * 512
        gl.store(at[:, None] + d[None, :], o, mask=(wide < C.HEADS)[:, None])


@gluon.jit
def nothing_seen():
    """(maxima, sums, columns of the output) of 64 rows before their first key."""
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    row_max = gl.full([64], LOWEST, gl.float32, layout=ROW)
    row_sum = gl.full([64], 0.0, gl.float32, layout=ROW)
    return row_max, row_sum, gl.zeros([64, 256], gl.float32, layout=WIDE)


@gluon.jit
def _is_last(step, steps):
    last = False
    if steps is not None:
        last = step == steps - 1
    return last


@gluon.jit
def even_step(s, row_max, row_sum, acc, scale_log2, tiles, zero, phase, step, steps):
    """Of the even consumer: its own tile's scores `s`, and the odd one's probabilities.  After the
    last of `steps` its queries are free; None: they stay."""
    left, rope, bars = tiles.left, tiles.rope, tiles.bars
    mine = gl.maximum(row_max, gl.max(s, 1) * scale_log2)
    acc, row_sum = _scaled(acc, row_sum, row_max, mine)
    last = _is_last(step, steps)
    p = weigh(s, mine, scale_log2, tiles, zero, last, 0)
    row_sum += gl.sum(p, 1)
    weights = gl.convert_layout(p.to(rope.dtype), gl.DotOperandLayout(0, WIDE, 2))
    running = warpgroup_mma(weights, left.index(zero), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[running])
    arrive(bars, LEFT_FREE)
    mbarrier.wait(bars.index(WEIGHED + 1), phase)
    mbarrier.wait(bars.index(LEFT + 1), phase)
    fence_async_shared()
    row_max = tiles.exchange.index(1).load(gl.SliceLayout(1, S))
    acc, row_sum = _scaled(acc, row_sum, mine, row_max)
    running = warpgroup_mma(rope.index(1 + zero), left.index(1 + zero), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[running])
    arrive(bars, LEFT_FREE + 1)
    return row_max, row_sum, acc


@gluon.jit
def odd_step(s, row_max, row_sum, acc, scale_log2, tiles, zero, phase, step, steps):
    """Of the odd consumer: the even one's probabilities, and its own tile's scores `s`."""
    right, rope, bars = tiles.right, tiles.rope, tiles.bars
    mbarrier.wait(bars.index(WEIGHED), phase)
    mbarrier.wait(bars.index(RIGHT), phase)
    fence_async_shared()
    other = tiles.exchange.index(0).load(gl.SliceLayout(1, S))
    acc, row_sum = _scaled(acc, row_sum, row_max, other)
    running = warpgroup_mma(rope.index(zero), right.index(zero), acc, is_async=True)
    row_max = gl.maximum(other, gl.max(s, 1) * scale_log2)
    last = _is_last(step, steps)
    p = weigh(s, row_max, scale_log2, tiles, 1 + zero, last, 1)
    weights = gl.convert_layout(p.to(rope.dtype), gl.DotOperandLayout(0, WIDE, 2))
    acc = warpgroup_mma_wait(0, deps=[running])
    arrive(bars, RIGHT_FREE)
    acc, row_sum = _scaled(acc, row_sum, other, row_max)
    row_sum += gl.sum(p, 1)
    running = warpgroup_mma(weights, right.index(1 + zero), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[running])
    arrive(bars, RIGHT_FREE + 1)
    return row_max, row_sum, acc


@gluon.jit
def step_of(
    NUMBER: gl.constexpr, s, row_max, row_sum, acc, scale_log2, tiles, zero, phase, step, steps
):
    """Of the consumer of the even tiles, or of the odd ones."""
    if NUMBER == 0:
        return even_step(s, row_max, row_sum, acc, scale_log2, tiles, zero, phase, step, steps)
    else:
        return odd_step(s, row_max, row_sum, acc, scale_log2, tiles, zero, phase, step, steps)


@gluon.jit
def consumer(tiles, per_split, items, scale_log2, to, C: gl.constexpr, NUMBER: gl.constexpr):
    """NUMBER: 0 scores the even tiles, 1 the odd ones."""
    if NUMBER == 0 and C.SPLITS > 1:
        gdc_launch_dependents()  # the merge is set up meanwhile
    steps = per_split // 128
    t = 0
    query_phase = 0
    for each in range(gl.program_id(0), items, gl.num_programs(0)):
        row_max, row_sum, acc = nothing_seen()
        mbarrier.wait(tiles.bars.index(QUERY), query_phase)
        if C.COUNTED:
            steps = _count(tiles)
        for step in range(steps):
            # zero, but not to the compiler: 80 descriptors made ahead of the loop would spill
            zero = step >> 30
            phase = t & 1
            s = _scores(tiles, t, NUMBER + zero, zero, NUMBER, C)
            row_max, row_sum, acc = step_of(
                NUMBER, s, row_max, row_sum, acc, scale_log2, tiles, zero, phase, step, steps
            )
            t += 1
        row_sum = total(row_sum, tiles, query_phase, NUMBER)
        query_phase = query_phase ^ 1
        row, split, head = item(each, C.HEADS, C.SPLITS)
        _finish(acc, row_sum, row_max, to, row, split, head, C, 256 * NUMBER)


def strides(call: Attention) -> tuple[int, ...]:
    """Strides: (row, head) of both parts of a query, of a key, of its rope, of a row of indices."""
    keys = call.key.stride(-3), call.kr.stride(-3)
    return (*call.query_strides, *keys, call.index.stride(0))


def splits_of(count: int, heads: int, entries: int, processors: int) -> int:
    """Until every multiprocessor has its program, while the parts stay small: 128 heads and 4 rows
    took 18 us in 8 splits and 24 in 16 (H200, 2026-11)."""
    items, splits = count * cdiv(heads, 64), 1
    small = count * heads
    while (
        items * splits * 2 <= processors and splits * 256 <= entries and small * splits**2 < 2**15
    ):
        splits *= 2
    return splits


def fits(call: Attention, *ropes: int) -> bool:
    """Latents as wide as DeepSeek's beside a rope of `ropes`, tensors that begin at whole pieces of
    16 bytes, and a scale that leaves the largest score the largest."""
    return (
        gpu.is_hopper(call.q.device)
        and call.entries > 0
        and call.scale_log2 >= LEAST
        and call.q.shape[-1] == 512
        and call.rope in ropes
        and aligned(call.q, call.qr, call.key, call.kr)
    )


def run(kernel: Any, call: Attention, strides: tuple[int, ...], **more: Any) -> None:
    """`kernel` with what every one of these kernels takes, and `more`; then the parts together."""
    count, heads, rank = call.q.shape
    processors = gpu.num_sms(call.q.device)
    splits = splits_of(count, heads, call.entries, processors)
    parts = Parts.of(splits, count * heads, rank, call.softmax_max)
    items = count * splits * cdiv(heads, 64)
    launches.kernel(kernel, min(items, processors))(
        call.q,
        call.qr,
        call.key,
        call.kr,
        call.index,
        **call.arguments(parts, cdiv(cdiv(call.entries, splits), 128) * 128),
        strides=strides,
        items=items,
        LAYOUT=call.plan.layout,
        C=Constants(
            HEADS=heads,
            SPLITS=splits,
            SPARSE_BLOCK=call.span,
            HAS_SINK=call.sinks is not None,
            STATS=call.softmax_max.numel() > 0,
            ROPE=call.rope,
        ),
        num_warps=4,
        **more,
    )
    if splits > 1:
        combine(parts, call.sinks, call.out, call.softmax_max, call.softmax_sum)
