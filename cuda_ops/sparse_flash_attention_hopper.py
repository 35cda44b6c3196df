# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The attention of sparse_flash_attention.py for many rows, on a Hopper GPU.

A program takes 64 heads of a row (fewer are padded: then the gather is what takes the time) and
its keys 128 at a time, in two tiles of 64.  A tile is gathered once, into swizzled shared memory:
wgmma reads it as K, and its first 512 columns as V.

    warps 0-3    scores of the even tiles; columns   0 - 255 of the output, from every tile
    warps 4-7    scores of the odd tiles;  columns 256 - 511 of the output, from every tile
    warps 8-11   gather: every half tile is asked for again as soon as both products let go of it

The tiles take turns: while one is scored and weighed the other one's probabilities are multiplied,
and its successor is on its way.  Both products of a tile come before the next scores, so that both
halves are free early: to multiply the odd tile's after the next even scores took 9 % longer in
prefill and 20 % in decode (H200, 2026-11).  Probabilities travel between the two consumers in the
place of the tile's rotary part, which nothing reads once the scores are there.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LOWEST = gl.constexpr(-1e30)
# barriers, for tile 0 and the next one for tile 1: the left half has arrived, the right one has;
# the left half is free, the right one is; the probabilities are there; so is the last sum
LEFT, RIGHT, LEFT_FREE, RIGHT_FREE, WEIGHED, SUMMED = (gl.constexpr(i) for i in range(0, 12, 2))
QUERY = gl.constexpr(12)
BARRIERS = gl.constexpr(13)


@gluon.jit
def _arrive(bars, which: gl.constexpr):
    """After every warp of the group is here."""
    gl.thread_barrier()
    mbarrier.arrive(bars.index(which), count=1)


@gluon.jit
def _half(base, slot, stride, tile, column: gl.constexpr, LAYOUT: gl.constexpr):
    """Ask for columns `column` .. of the rows `slot`; absent rows become 0."""
    d = column + gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    at = (base + gl.maximum(slot, 0).to(gl.int64) * stride)[:, None] + d[None, :]
    async_copy.async_copy_global_to_shared(tile, at, mask=(slot >= 0)[:, None])


@gluon.jit
def _producer(key, key_rope, key_stride, rope_stride, slots, lo, hi, stop, left, right, rope, bars):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    slot0 = gl.load(slots + lo + row, mask=lo + row < hi, other=-1)
    slot1 = gl.load(slots + lo + 64 + row, mask=lo + 64 + row < hi, other=-1)
    phase = 1
    for n in range(lo, stop, 128):
        mbarrier.wait(bars.index(LEFT_FREE), phase)
        _half(key, slot0, key_stride, left.index(0), 0, LAYOUT)
        async_copy.mbarrier_arrive(bars.index(LEFT), increment_count=False)
        mbarrier.wait(bars.index(RIGHT_FREE), phase)  # the odd consumer has read the weights too
        _half(key_rope, slot0, rope_stride, rope.index(0), 0, LAYOUT)
        _half(key, slot0, key_stride, right.index(0), 256, LAYOUT)
        async_copy.mbarrier_arrive(bars.index(RIGHT), increment_count=False)
        mbarrier.wait(bars.index(LEFT_FREE + 1), phase)
        _half(key_rope, slot1, rope_stride, rope.index(1), 0, LAYOUT)
        _half(key, slot1, key_stride, left.index(1), 0, LAYOUT)
        async_copy.mbarrier_arrive(bars.index(LEFT + 1), increment_count=False)
        mbarrier.wait(bars.index(RIGHT_FREE + 1), phase)
        _half(key, slot1, key_stride, right.index(1), 256, LAYOUT)
        async_copy.mbarrier_arrive(bars.index(RIGHT + 1), increment_count=False)
        at = n + 128 + row
        slot0 = gl.load(slots + at, mask=at < hi, other=-1)
        slot1 = gl.load(slots + at + 64, mask=at + 64 < hi, other=-1)
        phase = phase ^ 1
    async_copy.wait_group(0)


@gluon.jit
def _scores(
    q_left, q_right, q_rope, left, right, rope, bars, slot, scale_log2, phase, tile, zero,
    TILE: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """[64, 64] scores of a tile, once it is there; masked, in powers of two."""
    mbarrier.wait(bars.index(LEFT + TILE), phase)
    mbarrier.wait(bars.index(RIGHT + TILE), phase)
    fence_async_shared()
    s = gl.zeros([64, 64], gl.float32, layout=S)
    s = warpgroup_mma(
        q_left.index(zero), left.index(tile).permute((1, 0)), s, use_acc=False, is_async=True
    )
    s = warpgroup_mma(q_right.index(zero), right.index(tile).permute((1, 0)), s, is_async=True)
    s = warpgroup_mma(q_rope.index(zero), rope.index(tile).permute((1, 0)), s, is_async=True)
    slot = gl.convert_layout(slot, gl.SliceLayout(0, S))
    s = warpgroup_mma_wait(0, deps=[s])
    return gl.where((slot >= 0)[None, :], s * scale_log2, float("-inf"))


@gluon.jit
def _weigh(s, row_max, rope, exchange, bars, tile, TILE: gl.constexpr):
    """(probabilities, their maxima), also left for the other consumer."""
    row_max = gl.maximum(row_max, gl.max(s, 1))
    p = gl.exp2(s - row_max[:, None])
    rope.index(tile).store(p.to(rope.dtype))
    exchange.index(TILE).store(row_max)
    fence_async_shared()
    _arrive(bars, WEIGHED + TILE)
    return p, row_max


@gluon.jit
def _scaled(acc, row_sum, row_max, new_max, WIDE: gl.constexpr):
    factor = gl.exp2(row_max - new_max)
    return acc * gl.convert_layout(factor, gl.SliceLayout(1, WIDE))[:, None], row_sum * factor


@gluon.jit
def _finish(
    acc, row_sum, row_max, total, out, part, part_max, part_sum, softmax_max, softmax_sum, sinks,
    row, split, head, HEADS: gl.constexpr, SPLITS: gl.constexpr, HAS_SINK: gl.constexpr,
    STATS: gl.constexpr, COLUMN: gl.constexpr, S: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    h = head + gl.arange(0, 64, layout=gl.SliceLayout(1, S))
    total = row_sum + total
    there = total > 0
    d = COLUMN + gl.arange(0, 256, layout=gl.SliceLayout(0, WIDE))
    wide = head + gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
    below = gl.where(there, total, 1.0)
    if SPLITS == 1:
        if STATS and COLUMN == 0:
            top = gl.where(there, row_max * 0.6931471805599453, float("-inf"))
            gl.store(softmax_max + row * HEADS + h, top, mask=h < HEADS)
            gl.store(softmax_sum + row * HEADS + h, total, mask=h < HEADS)
        if HAS_SINK:
            below += gl.exp2(
                gl.load(sinks + h, mask=h < HEADS, other=0.0) * 1.4426950408889634 - row_max
            )
        to = out + (row * HEADS + wide) * 512
    else:
        piece = (row * SPLITS + split) * HEADS
        if COLUMN == 0:
            gl.store(part_max + piece + h, row_max, mask=h < HEADS)
            gl.store(part_sum + piece + h, total, mask=h < HEADS)
        to = part + (piece + wide) * 512
    inverse = gl.where(there, 1.0 / below, 0.0)
    o = acc * gl.convert_layout(inverse, gl.SliceLayout(1, WIDE))[:, None]
    gl.store(to[:, None] + d[None, :], o.to(to.dtype.element_ty), mask=(wide < HEADS)[:, None])


@gluon.jit
def _even(
    q_left, q_right, q_rope, left, right, rope, exchange, bars, slots, lo, hi, stop, scale_log2,
    out, part, part_max, part_sum, softmax_max, softmax_sum, sinks, row, split, head,
    HEADS: gl.constexpr, SPLITS: gl.constexpr, HAS_SINK: gl.constexpr, STATS: gl.constexpr,
):  # fmt: skip
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    # one slot a thread until it is asked for: sixteen of them would spill
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    column = gl.arange(0, 64, layout=LINE)
    row_max = gl.full([64], LOWEST, gl.float32, layout=ROW)
    row_sum = gl.full([64], 0.0, gl.float32, layout=ROW)
    acc = gl.zeros([64, 256], gl.float32, layout=WIDE)
    slot = gl.load(slots + lo + column, mask=lo + column < hi, other=-1)
    mbarrier.wait(bars.index(QUERY), 0)
    phase = 0
    for n in range(lo, stop, 128):
        # zero, but not to the compiler: 80 descriptors made ahead of the loop would spill
        zero = n >> 30
        s = _scores(
            q_left, q_right, q_rope, left, right, rope, bars, slot, scale_log2, phase, zero, zero,
            0, S,
        )  # fmt: skip
        at = n + 128 + column
        slot = gl.load(slots + at, mask=at < hi, other=-1)
        p, new_max = _weigh(s, row_max, rope, exchange, bars, zero, 0)
        mine = gl.convert_layout(p.to(rope.dtype), gl.DotOperandLayout(0, WIDE, 2))
        acc, row_sum = _scaled(acc, row_sum, row_max, new_max, WIDE)
        row_sum += gl.sum(p, 1)
        running = warpgroup_mma(mine, left.index(zero), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[running])
        _arrive(bars, LEFT_FREE)
        mbarrier.wait(bars.index(WEIGHED + 1), phase)
        mbarrier.wait(bars.index(LEFT + 1), phase)
        fence_async_shared()
        row_max = exchange.index(1).load(ROW)
        acc, row_sum = _scaled(acc, row_sum, new_max, row_max, WIDE)
        running = warpgroup_mma(rope.index(1 + zero), left.index(1 + zero), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[running])
        _arrive(bars, LEFT_FREE + 1)
        phase = phase ^ 1
    exchange.index(2).store(row_sum)
    _arrive(bars, SUMMED)
    mbarrier.wait(bars.index(SUMMED + 1), 0)
    total = exchange.index(3).load(ROW)
    _finish(
        acc, row_sum, row_max, total, out, part, part_max, part_sum, softmax_max, softmax_sum,
        sinks, row, split, head, HEADS, SPLITS, HAS_SINK, STATS, 0, S, WIDE,
    )  # fmt: skip


@gluon.jit
def _odd(
    q_left, q_right, q_rope, left, right, rope, exchange, bars, slots, lo, hi, stop, scale_log2,
    out, part, part_max, part_sum, softmax_max, softmax_sum, sinks, row, split, head,
    HEADS: gl.constexpr, SPLITS: gl.constexpr, HAS_SINK: gl.constexpr, STATS: gl.constexpr,
):  # fmt: skip
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    # one slot a thread until it is asked for: sixteen of them would spill
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    column = 64 + gl.arange(0, 64, layout=LINE)
    row_max = gl.full([64], LOWEST, gl.float32, layout=ROW)
    row_sum = gl.full([64], 0.0, gl.float32, layout=ROW)
    acc = gl.zeros([64, 256], gl.float32, layout=WIDE)
    slot = gl.load(slots + lo + column, mask=lo + column < hi, other=-1)
    mbarrier.wait(bars.index(QUERY), 0)
    phase = 0
    for n in range(lo, stop, 128):
        zero = n >> 30
        s = _scores(
            q_left, q_right, q_rope, left, right, rope, bars, slot, scale_log2, phase, 1 + zero,
            zero, 1, S,
        )  # fmt: skip
        at = n + 128 + column
        slot = gl.load(slots + at, mask=at < hi, other=-1)
        mbarrier.wait(bars.index(WEIGHED), phase)
        mbarrier.wait(bars.index(RIGHT), phase)
        fence_async_shared()
        other_max = exchange.index(0).load(ROW)
        acc, row_sum = _scaled(acc, row_sum, row_max, other_max, WIDE)
        running = warpgroup_mma(rope.index(zero), right.index(zero), acc, is_async=True)
        p, row_max = _weigh(s, other_max, rope, exchange, bars, 1 + zero, 1)
        mine = gl.convert_layout(p.to(rope.dtype), gl.DotOperandLayout(0, WIDE, 2))
        acc = warpgroup_mma_wait(0, deps=[running])
        _arrive(bars, RIGHT_FREE)
        acc, row_sum = _scaled(acc, row_sum, other_max, row_max, WIDE)
        row_sum += gl.sum(p, 1)
        running = warpgroup_mma(mine, right.index(1 + zero), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[running])
        _arrive(bars, RIGHT_FREE + 1)
        phase = phase ^ 1
    exchange.index(3).store(row_sum)
    _arrive(bars, SUMMED + 1)
    mbarrier.wait(bars.index(SUMMED), 0)
    total = exchange.index(2).load(ROW)
    _finish(
        acc, row_sum, row_max, total, out, part, part_max, part_sum, softmax_max, softmax_sum,
        sinks, row, split, head, HEADS, SPLITS, HAS_SINK, STATS, 256, S, WIDE,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["entries", "per_split"])
def attend(
    q, q_rope, key, key_rope, slots, sinks, out, part, part_max, part_sum, softmax_max,
    softmax_sum, scale_log2, entries, per_split, q_row, q_head, qr_row, qr_head, key_stride,
    rope_stride, HEADS: gl.constexpr, SPLITS: gl.constexpr, HAS_SINK: gl.constexpr,
    STATS: gl.constexpr,
):  # fmt: skip
    """slots [rows, entries] int32: rows of `key` seen as [.., 512], negative where absent."""
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = key.dtype.element_ty
    program = gl.program_id(0)
    TILES: gl.constexpr = (HEADS + 63) // 64
    head = program % TILES * 64
    split = program // TILES % SPLITS
    row = (program // (TILES * SPLITS)).to(gl.int64)
    q_left = gl.allocate_shared_memory(dtype, [1, 64, 256], SWIZZLED)
    q_right = gl.allocate_shared_memory(dtype, [1, 64, 256], SWIZZLED)
    qr = gl.allocate_shared_memory(dtype, [1, 64, 64], SWIZZLED)
    left = gl.allocate_shared_memory(dtype, [2, 64, 256], SWIZZLED)
    right = gl.allocate_shared_memory(dtype, [2, 64, 256], SWIZZLED)
    rope = gl.allocate_shared_memory(dtype, [2, 64, 64], SWIZZLED)
    exchange = gl.allocate_shared_memory(gl.float32, [4, 64], FLAT)
    bars = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(LEFT_FREE):
        mbarrier.init(bars.index(i), count=128)
    for i in gl.static_range(LEFT_FREE, QUERY):
        mbarrier.init(bars.index(i), count=1)
    mbarrier.init(bars.index(QUERY), count=128)
    gl.thread_barrier()
    h = head + gl.arange(0, 64, layout=gl.SliceLayout(1, LOAD))
    d = gl.arange(0, 256, layout=gl.SliceLayout(0, LOAD))
    r = gl.arange(0, 64, layout=gl.SliceLayout(0, LOAD))
    real = (h < HEADS)[:, None]
    at = (q + row * q_row + h * q_head)[:, None] + d[None, :]
    async_copy.async_copy_global_to_shared(q_left.index(0), at, mask=real)
    async_copy.async_copy_global_to_shared(q_right.index(0), at + 256, mask=real)
    at = (q_rope + row * qr_row + h * qr_head)[:, None] + r[None, :]
    async_copy.async_copy_global_to_shared(qr.index(0), at, mask=real)
    async_copy.mbarrier_arrive(bars.index(QUERY), increment_count=False)
    lo = split * per_split
    # a split past the last entry still makes one step, of absent keys
    hi = gl.minimum(lo + per_split, entries)
    stop = gl.maximum(hi, lo + 1)
    slots += row * entries
    # the tuples stand here in full: through a variable their constexprs would become tensors
    gl.warp_specialize(
        [
            (
                _even,
                (
                    q_left, q_right, qr, left, right, rope, exchange, bars, slots, lo, hi, stop,
                    scale_log2, out, part, part_max, part_sum, softmax_max, softmax_sum, sinks,
                    row, split, head, HEADS, SPLITS, HAS_SINK, STATS,
                ),
            ),
            (
                _odd,
                (
                    q_left, q_right, qr, left, right, rope, exchange, bars, slots, lo, hi, stop,
                    scale_log2, out, part, part_max, part_sum, softmax_max, softmax_sum, sinks,
                    row, split, head, HEADS, SPLITS, HAS_SINK, STATS,
                ),
            ),
            (
                _producer,
                (
                    key, key_rope, key_stride, rope_stride, slots, lo, hi, stop, left, right, rope,
                    bars,
                ),
            ),
        ],
        [4, 4],
        [216, 72],
    )  # fmt: skip
