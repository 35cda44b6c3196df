# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The attention of sparse_flash_attention.py for many rows of 64 k heads on a Hopper GPU.

A program takes 64 heads of a row and its keys 128 at a time, in two tiles of 64.  A tile is
gathered once, into swizzled shared memory: wgmma reads it as K, and its first 512 columns as V.

    warps 0-3    scores of tile 0; columns   0 - 255 of the output, from both tiles
    warps 4-7    scores of tile 1; columns 256 - 511 of the output, from both tiles
    warps 8-11   gather: every half tile is asked for again as soon as both products let go of it

The two consumers hand each other their running maxima and their probabilities.  Probabilities take
the place of the tile's rotary part, which nothing reads once the scores are there.
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
# barriers: the two halves of the two tiles have arrived; are free; what the consumers exchange
LEFT0, RIGHT0, LEFT1, RIGHT1 = (gl.constexpr(i) for i in range(4))
FREE = gl.constexpr(4)
MAX0, MAX1, P0, P1, SUM0, SUM1 = (gl.constexpr(i) for i in range(8, 14))
BARRIERS = gl.constexpr(14)


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
def _producer(key, key_rope, key_stride, rope_stride, slots, lo, hi, left, right, rope, bars):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    slot0 = gl.load(slots + lo + row, mask=lo + row < hi, other=-1)
    slot1 = gl.load(slots + lo + 64 + row, mask=lo + 64 + row < hi, other=-1)
    phase = 1
    for n in range(lo, hi, 128):
        mbarrier.wait(bars.index(FREE + LEFT0), phase)
        _half(key, slot0, key_stride, left.index(0), 0, LAYOUT)
        async_copy.mbarrier_arrive(bars.index(LEFT0), increment_count=False)
        mbarrier.wait(bars.index(FREE + RIGHT1), phase)
        _half(key, slot1, key_stride, right.index(1), 256, LAYOUT)
        async_copy.mbarrier_arrive(bars.index(RIGHT1), increment_count=False)
        mbarrier.wait(bars.index(FREE + RIGHT0), phase)
        _half(key, slot0, key_stride, right.index(0), 256, LAYOUT)
        _half(key_rope, slot0, rope_stride, rope.index(0), 0, LAYOUT)
        async_copy.mbarrier_arrive(bars.index(RIGHT0), increment_count=False)
        mbarrier.wait(bars.index(FREE + LEFT1), phase)
        _half(key, slot1, key_stride, left.index(1), 0, LAYOUT)
        _half(key_rope, slot1, rope_stride, rope.index(1), 0, LAYOUT)
        async_copy.mbarrier_arrive(bars.index(LEFT1), increment_count=False)
        at = n + 128 + row
        slot0 = gl.load(slots + at, mask=at < hi, other=-1)
        slot1 = gl.load(slots + at + 64, mask=at + 64 < hi, other=-1)
        phase = phase ^ 1
    async_copy.wait_group(0)


@gluon.jit
def _scores(q_left, q_right, q_rope, left, right, rope, slot, scale_log2, S: gl.constexpr):
    """[64, 64], masked, in powers of two."""
    s = gl.zeros([64, 64], gl.float32, layout=S)
    s = warpgroup_mma(q_left, left.permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma(q_right, right.permute((1, 0)), s, is_async=True)
    s = warpgroup_mma(q_rope, rope.permute((1, 0)), s, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    slot = gl.convert_layout(slot, gl.SliceLayout(0, S))
    return gl.where((slot >= 0)[None, :], s * scale_log2, float("-inf"))


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
            gl.store(softmax_max + row * HEADS + h, top)
            gl.store(softmax_sum + row * HEADS + h, total)
        if HAS_SINK:
            below += gl.exp2(gl.load(sinks + h) * 1.4426950408889634 - row_max)
        to = out + (row * HEADS + wide) * 512
    else:
        piece = (row * SPLITS + split) * HEADS
        if COLUMN == 0:
            gl.store(part_max + piece + h, row_max)
            gl.store(part_sum + piece + h, total)
        to = part + (piece + wide) * 512
    inverse = gl.where(there, 1.0 / below, 0.0)
    o = acc * gl.convert_layout(inverse, gl.SliceLayout(1, WIDE))[:, None]
    gl.store(to[:, None] + d[None, :], o.to(to.dtype.element_ty))


@gluon.jit
def _consumer0(
    q_left, q_right, q_rope, left, right, rope, exchange, bars, slots, lo, hi, scale_log2,
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
    phase = 0
    for n in range(lo, hi, 128):
        zero = n >> 30  # unknown to the compiler: 80 descriptors made ahead of the loop would spill
        mbarrier.wait(bars.index(LEFT0), phase)
        mbarrier.wait(bars.index(RIGHT0), phase)
        fence_async_shared()
        s = _scores(
            q_left.index(zero), q_right.index(zero), q_rope.index(zero), left.index(zero),
            right.index(zero), rope.index(zero), slot,
            scale_log2, S,
        )  # fmt: skip
        at = n + 128 + column
        slot = gl.load(slots + at, mask=at < hi, other=-1)
        max0 = gl.maximum(row_max, gl.max(s, 1))
        exchange.index(0).store(max0)
        _arrive(bars, MAX0)
        p = gl.exp2(s - max0[:, None])
        alpha = gl.exp2(row_max - max0)
        row_sum = row_sum * alpha + gl.sum(p, 1)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, WIDE))[:, None]
        mine = gl.convert_layout(p.to(rope.dtype), gl.DotOperandLayout(0, WIDE, 2))
        running = warpgroup_mma(mine, left.index(zero), acc, is_async=True)
        mbarrier.wait(bars.index(MAX1), phase)
        row_max = exchange.index(1).load(ROW)
        beta = gl.exp2(max0 - row_max)
        rope.index(0).store((p * beta[:, None]).to(rope.dtype))
        fence_async_shared()
        _arrive(bars, P0)
        acc = warpgroup_mma_wait(0, deps=[running])
        _arrive(bars, FREE + LEFT0)
        row_sum = row_sum * beta
        acc = acc * gl.convert_layout(beta, gl.SliceLayout(1, WIDE))[:, None]
        mbarrier.wait(bars.index(P1), phase)
        mbarrier.wait(bars.index(LEFT1), phase)
        fence_async_shared()
        running = warpgroup_mma(rope.index(1 + zero), left.index(1 + zero), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[running])
        _arrive(bars, FREE + LEFT1)
        phase = phase ^ 1
    exchange.index(2).store(row_sum)
    _arrive(bars, SUM0)
    mbarrier.wait(bars.index(SUM1), 0)
    total = exchange.index(3).load(ROW)
    _finish(
        acc, row_sum, row_max, total, out, part, part_max, part_sum, softmax_max, softmax_sum,
        sinks, row, split, head, HEADS, SPLITS, HAS_SINK, STATS, 0, S, WIDE,
    )  # fmt: skip


@gluon.jit
def _consumer1(
    q_left, q_right, q_rope, left, right, rope, exchange, bars, slots, lo, hi, scale_log2,
    out, part, part_max, part_sum, softmax_max, softmax_sum, sinks, row, split, head,
    HEADS: gl.constexpr, SPLITS: gl.constexpr, HAS_SINK: gl.constexpr, STATS: gl.constexpr,
):  # fmt: skip
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    column = 64 + gl.arange(0, 64, layout=LINE)
    row_max = gl.full([64], LOWEST, gl.float32, layout=ROW)
    row_sum = gl.full([64], 0.0, gl.float32, layout=ROW)
    acc = gl.zeros([64, 256], gl.float32, layout=WIDE)
    slot = gl.load(slots + lo + column, mask=lo + column < hi, other=-1)
    phase = 0
    for n in range(lo, hi, 128):
        zero = n >> 30
        mbarrier.wait(bars.index(RIGHT1), phase)
        mbarrier.wait(bars.index(LEFT1), phase)
        fence_async_shared()
        s = _scores(
            q_left.index(zero), q_right.index(zero), q_rope.index(zero), left.index(1 + zero),
            right.index(1 + zero), rope.index(1 + zero), slot,
            scale_log2, S,
        )  # fmt: skip
        at = n + 128 + column
        slot = gl.load(slots + at, mask=at < hi, other=-1)
        here = gl.max(s, 1)
        mbarrier.wait(bars.index(MAX0), phase)
        max1 = gl.maximum(exchange.index(0).load(ROW), here)
        exchange.index(1).store(max1)
        _arrive(bars, MAX1)
        p = gl.exp2(s - max1[:, None])
        narrow = p.to(rope.dtype)
        rope.index(1).store(narrow)
        fence_async_shared()
        _arrive(bars, P1)
        alpha = gl.exp2(row_max - max1)
        row_sum = row_sum * alpha + gl.sum(p, 1)
        row_max = max1
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, WIDE))[:, None]
        mine = gl.convert_layout(narrow, gl.DotOperandLayout(0, WIDE, 2))
        running = warpgroup_mma(mine, right.index(1 + zero), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[running])
        _arrive(bars, FREE + RIGHT1)
        mbarrier.wait(bars.index(P0), phase)
        mbarrier.wait(bars.index(RIGHT0), phase)
        fence_async_shared()
        running = warpgroup_mma(rope.index(zero), right.index(zero), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[running])
        _arrive(bars, FREE + RIGHT0)
        phase = phase ^ 1
    exchange.index(3).store(row_sum)
    _arrive(bars, SUM1)
    mbarrier.wait(bars.index(SUM0), 0)
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
    head = program % (HEADS // 64) * 64
    split = program // (HEADS // 64) % SPLITS
    row = (program // (HEADS // 64 * SPLITS)).to(gl.int64)
    q_left = gl.allocate_shared_memory(dtype, [1, 64, 256], SWIZZLED)
    q_right = gl.allocate_shared_memory(dtype, [1, 64, 256], SWIZZLED)
    qr = gl.allocate_shared_memory(dtype, [1, 64, 64], SWIZZLED)
    left = gl.allocate_shared_memory(dtype, [2, 64, 256], SWIZZLED)
    right = gl.allocate_shared_memory(dtype, [2, 64, 256], SWIZZLED)
    rope = gl.allocate_shared_memory(dtype, [2, 64, 64], SWIZZLED)
    exchange = gl.allocate_shared_memory(gl.float32, [4, 64], FLAT)
    bars = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4):
        mbarrier.init(bars.index(i), count=128)
    for i in gl.static_range(4, BARRIERS):
        mbarrier.init(bars.index(i), count=1)
    h = head + gl.arange(0, 64, layout=gl.SliceLayout(1, LOAD))
    d = gl.arange(0, 256, layout=gl.SliceLayout(0, LOAD))
    r = gl.arange(0, 64, layout=gl.SliceLayout(0, LOAD))
    at = (q + row * q_row + h * q_head)[:, None] + d[None, :]
    async_copy.async_copy_global_to_shared(q_left.index(0), at)
    async_copy.async_copy_global_to_shared(q_right.index(0), at + 256)
    at = (q_rope + row * qr_row + h * qr_head)[:, None] + r[None, :]
    async_copy.async_copy_global_to_shared(qr.index(0), at)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()
    lo = split * per_split
    hi = gl.minimum(lo + per_split, entries)
    slots += row * entries
    gl.warp_specialize(
        [
            (_consumer0, (
                q_left, q_right, qr, left, right, rope, exchange, bars, slots, lo, hi, scale_log2,
                out, part, part_max, part_sum, softmax_max, softmax_sum, sinks, row, split, head,
                HEADS, SPLITS, HAS_SINK, STATS,
            )),
            (_consumer1, (
                q_left, q_right, qr, left, right, rope, exchange, bars, slots, lo, hi, scale_log2,
                out, part, part_max, part_sum, softmax_max, softmax_sum, sinks, row, split, head,
                HEADS, SPLITS, HAS_SINK, STATS,
            )),
            (_producer, (
                key, key_rope, key_stride, rope_stride, slots, lo, hi, left, right, rope, bars,
            )),
        ],
        [4, 4],
        [216, 72],
    )  # fmt: skip
