# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The gradient of sparse_flash_attention.py on a Hopper GPU, latents of 512 beside a rope of 64.

    kernel     what it makes                                             a program
    _weights   p and ds of every entry and head; d_query                 a row, 64 heads
    _entries   what every entry adds to its key, of all heads            a row, 288 columns

_weights keeps queries, d_out and d_query of its heads on the chip and gathers every key once.  They
leave room for one tile of 64 keys, so that the tile is a ring of nine pieces of 64 columns: a piece
is asked for again, for the next tile, as soon as its part of d_query has been added.

    warps 0-3    s of a tile, p and ds; columns   0 - 255 of d_query
    warps 4-7    dp of a tile;          columns 256 - 575 of d_query
    warps 8-11   gather

_entries keeps queries and d_out of its columns; p and ds pass by, 64 entries at a time, the even
tiles to one warpgroup and the odd ones to the other, so that one stores while the other multiplies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...common import gpu
from ...common.gluon_names import barrier, cp_async, reinterpret, tma_load
from ...common.hopper.layouts import GATHER, LINE, S
from ...common.hopper.tma import aligned, describe_box, store_box
from ...common.log2 import LOG2E
from ...runtime import launches
from .mla_consumers import TURNED, WIDE, arrive

# Heads that the plain kernels are as fast for, since a program is of 64: 16 heads, 4096 queries of
# 2048 keys 10.4 ms, plain 10.6 (H200, 2026-11)
_FEW = 32
# barriers of _weights: piece c has arrived, piece c is free, then these
PIECES = gl.constexpr(9)
QUERY, DP, DS, TAKEN = gl.constexpr(18), gl.constexpr(19), gl.constexpr(20), gl.constexpr(21)
BARRIERS = gl.constexpr(22)
# dp on its way from one consumer to the other, without bank conflicts
CROSSING = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))
# as TURNED, of 32 columns
SLIM = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 32],
    )
)
S_SLIM = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))


class Shared(NamedTuple):
    """queries and d_out in pieces; a ring of pieces of keys; p and ds, where dp crosses before."""

    q: Any
    do: Any
    ring: Any
    weights: Any
    stats: Any
    bars: Any


class Constants(NamedTuple):
    """PADDED: all heads, as many as a product wants."""

    HEADS: int
    PADDED: int
    HEADS_AT_ONCE: int
    STAGES: int


@gluon.jit
def _ask(at, valid, ring, bars, phase, c: gl.constexpr):
    mbarrier.wait(bars.index(PIECES + c), phase)
    cp_async(ring.index(c), at, mask=valid[:, None])
    async_copy.mbarrier_arrive(bars.index(c), increment_count=False)


@gluon.jit
def _gather(
    key, key_rope, slots, entries, keys, key_stride, rope_stride, tiles, shared, C: gl.constexpr
):
    ring, bars = shared.ring, shared.bars
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, GATHER))
    d = gl.arange(0, 64, layout=gl.SliceLayout(0, GATHER))
    phase = 1
    slot = gl.load(slots + row, mask=row < entries, other=keys)
    for tile in range(tiles):
        valid = slot < keys
        at = gl.where(valid, slot, 0).to(gl.int64)
        key_at = (key + at * key_stride)[:, None] + d[None, :]
        rope_at = (key_rope + at * rope_stride)[:, None] + d[None, :]
        ahead = tile * 64 + 64 + row
        slot = gl.load(slots + ahead, mask=ahead < entries, other=keys)
        for c in gl.static_range(4):
            _ask(key_at + c * 64, valid, ring, bars, phase, c)
            _ask(key_at + (c + 4) * 64, valid, ring, bars, phase, c + 4)
        _ask(rope_at, valid, ring, bars, phase, 8)
        phase = phase ^ 1
    async_copy.wait_group(0)


@gluon.jit
def _add(s, operand, shared, phase, zero, c: gl.constexpr):
    mbarrier.wait(shared.bars.index(c), phase)
    fence_async_shared()
    return warpgroup_mma(
        shared.ring.index(c + zero),
        operand.index(c + zero).permute((1, 0)),
        s,
        use_acc=c > 0,
        is_async=True,
    )


@gluon.jit
def _product(operand, shared, phase, zero, ROPE: gl.constexpr):
    """[64 keys, 64 heads] over all pieces, in the order in which they come."""
    s = gl.zeros([64, 64], gl.float32, layout=S)
    for c in gl.static_range(4):
        s = _add(s, operand, shared, phase, zero, c)
        s = _add(s, operand, shared, phase, zero, c + 4)
    if ROPE:
        s = _add(s, operand, shared, phase, zero, 8)
    return warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def _leave(acc, piece, desc, row, head, column):
    """64 columns of d_query by way of `piece`, which nothing reads any more."""
    piece.store(acc.to(piece.dtype))
    fence_async_shared()
    barrier()
    store_box(desc, [row, head, column], piece)


@gluon.jit
def _consumer0(
    shared,
    weights_desc,
    q_desc,
    slots,
    scale,
    scale_log2,
    row_at,
    local,
    head,
    entries,
    keys,
    tiles,
):
    ring, weights, bars = shared.ring, shared.weights, shared.bars
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, S))
    a0 = gl.zeros([64, 64], gl.float32, layout=S)
    a1 = gl.zeros([64, 64], gl.float32, layout=S)
    a2 = gl.zeros([64, 64], gl.float32, layout=S)
    a3 = gl.zeros([64, 64], gl.float32, layout=S)
    mbarrier.wait(bars.index(QUERY), 0)
    p_smem = weights.index(1)
    ds_smem = weights.index(0)
    crossing = reinterpret(weights, gl.float32, [64, 64], CROSSING)
    for tile in range(tiles):
        zero = tile >> 30
        phase = tile & 1
        entry = tile * 64 + row
        slot = gl.load(slots + entry, mask=entry < entries, other=keys)
        s = _product(shared.q, shared, phase, zero, True)
        lse = shared.stats.index(0).load(gl.SliceLayout(0, S))
        p = gl.exp2(s * scale_log2 - lse[None, :])
        p = gl.where((slot < keys)[:, None], p, 0.0)
        mbarrier.wait(bars.index(DP), phase)
        dp = crossing.load(S)
        delta = shared.stats.index(1).load(gl.SliceLayout(0, S))
        ds = scale * p * (dp - delta[None, :])
        barrier()
        ds_smem.store(ds.to(weights.dtype))
        fence_async_shared()
        arrive(bars, DS)
        turned = ds_smem.permute((1, 0))
        a0 = warpgroup_mma(turned, ring.index(0 + zero), a0, is_async=True)
        a1 = warpgroup_mma(turned, ring.index(1 + zero), a1, is_async=True)
        a2 = warpgroup_mma(turned, ring.index(2 + zero), a2, is_async=True)
        a3 = warpgroup_mma(turned, ring.index(3 + zero), a3, is_async=True)
        p_smem.store(p.to(weights.dtype))
        fence_async_shared()
        barrier()
        store_box(weights_desc, [local, tile * 64, 0, head], ds_smem)
        store_box(weights_desc, [local, tile * 64, 1, head], p_smem)
        a0 = warpgroup_mma_wait(3, deps=[a0])
        arrive(bars, PIECES)
        a1 = warpgroup_mma_wait(2, deps=[a1])
        arrive(bars, PIECES + 1)
        a2 = warpgroup_mma_wait(1, deps=[a2])
        arrive(bars, PIECES + 2)
        a3 = warpgroup_mma_wait(0, deps=[a3])
        arrive(bars, PIECES + 3)
        tma.store_wait(0)
        arrive(bars, TAKEN)
    _leave(a0, shared.q.index(0), q_desc, row_at, head, 0)
    _leave(a1, shared.q.index(1), q_desc, row_at, head, 64)
    _leave(a2, shared.q.index(2), q_desc, row_at, head, 128)
    _leave(a3, shared.q.index(3), q_desc, row_at, head, 192)
    tma.store_wait(0)


@gluon.jit
def _consumer1(shared, q_desc, qr_desc, row_at, head, tiles):
    ring, weights, bars = shared.ring, shared.weights, shared.bars
    a4 = gl.zeros([64, 64], gl.float32, layout=S)
    a5 = gl.zeros([64, 64], gl.float32, layout=S)
    a6 = gl.zeros([64, 64], gl.float32, layout=S)
    a7 = gl.zeros([64, 64], gl.float32, layout=S)
    a8 = gl.zeros([64, 64], gl.float32, layout=S)
    mbarrier.wait(bars.index(QUERY), 0)
    crossing = reinterpret(weights, gl.float32, [64, 64], CROSSING)
    for tile in range(tiles):
        zero = tile >> 30
        phase = tile & 1
        dp = _product(shared.do, shared, phase, zero, False)
        mbarrier.wait(bars.index(TAKEN), phase ^ 1)
        crossing.store(dp)
        arrive(bars, DP)
        mbarrier.wait(bars.index(8), phase)
        mbarrier.wait(bars.index(DS), phase)
        fence_async_shared()
        turned = weights.index(0).permute((1, 0))
        a4 = warpgroup_mma(turned, ring.index(4 + zero), a4, is_async=True)
        a5 = warpgroup_mma(turned, ring.index(5 + zero), a5, is_async=True)
        a6 = warpgroup_mma(turned, ring.index(6 + zero), a6, is_async=True)
        a7 = warpgroup_mma(turned, ring.index(7 + zero), a7, is_async=True)
        a8 = warpgroup_mma(turned, ring.index(8 + zero), a8, is_async=True)
        a4 = warpgroup_mma_wait(4, deps=[a4])
        arrive(bars, PIECES + 4)
        a5 = warpgroup_mma_wait(3, deps=[a5])
        arrive(bars, PIECES + 5)
        a6 = warpgroup_mma_wait(2, deps=[a6])
        arrive(bars, PIECES + 6)
        a7 = warpgroup_mma_wait(1, deps=[a7])
        arrive(bars, PIECES + 7)
        a8 = warpgroup_mma_wait(0, deps=[a8])
        arrive(bars, PIECES + 8)
    _leave(a4, shared.do.index(4), q_desc, row_at, head, 256)
    _leave(a5, shared.do.index(5), q_desc, row_at, head, 320)
    _leave(a6, shared.do.index(6), q_desc, row_at, head, 384)
    _leave(a7, shared.do.index(7), q_desc, row_at, head, 448)
    _leave(a8, shared.do.index(0), qr_desc, row_at, head, 0)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["first", "entries", "keys"])
def _weights(
    q,
    q_rope,
    key,
    key_rope,
    d_out,
    slots,
    softmax_max,
    softmax_sum,
    deltas,
    weights_desc,
    q_desc,
    qr_desc,
    scale,
    scale_log2,
    first,
    entries,
    keys,
    strides,
    C: gl.constexpr,
):
    q_row, q_head, qr_row, qr_head, do_row, do_head, key_stride, rope_stride = strides
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = key.dtype.element_ty
    TILES: gl.constexpr = (C.HEADS + 63) // 64
    local = gl.program_id(0) // TILES
    head = gl.program_id(0) % TILES * 64
    row = first + local
    wide_row = row.to(gl.int64)
    q_smem = gl.allocate_shared_memory(dtype, [9, 64, 64], SWIZZLED)
    do_smem = gl.allocate_shared_memory(dtype, [8, 64, 64], SWIZZLED)
    ring = gl.allocate_shared_memory(dtype, [9, 64, 64], SWIZZLED)
    weights = gl.allocate_shared_memory(dtype, [2, 64, 64], SWIZZLED)
    stats = gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bars = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    for c in gl.static_range(PIECES):
        mbarrier.init(bars.index(c), count=128)
        mbarrier.init(bars.index(PIECES + c), count=1)
    mbarrier.init(bars.index(QUERY), count=128)
    mbarrier.init(bars.index(DP), count=1)
    mbarrier.init(bars.index(DS), count=1)
    mbarrier.init(bars.index(TAKEN), count=1)
    barrier()
    h = head + gl.arange(0, 64, layout=gl.SliceLayout(1, GATHER))
    d = gl.arange(0, 64, layout=gl.SliceLayout(0, GATHER))
    mask = (h < C.HEADS)[:, None]
    wide = h.to(gl.int64)
    q_at = (q + wide_row * q_row + wide * q_head)[:, None] + d[None, :]
    do_at = (d_out + wide_row * do_row + wide * do_head)[:, None] + d[None, :]
    for c in gl.static_range(8):
        cp_async(q_smem.index(c), q_at + c * 64, mask=mask)
        cp_async(do_smem.index(c), do_at + c * 64, mask=mask)
    cp_async(
        q_smem.index(8),
        (q_rope + wide_row * qr_row + wide * qr_head)[:, None] + d[None, :],
        mask=mask,
    )
    async_copy.mbarrier_arrive(bars.index(QUERY), increment_count=False)
    # no tile lies behind the last entry that has a key
    slots += local.to(gl.int64) * entries
    column = gl.arange(0, 128, layout=LINE)
    last = column * 0
    for n in range(0, entries, 128):
        entry = n + column
        slot = gl.load(slots + entry, mask=entry < entries, other=keys)
        last = gl.where(slot < keys, entry + 1, last)
    tiles = (gl.max(last, 0) + 63) // 64
    h = gl.arange(0, 64, layout=LINE)
    h_ok = head + h < C.HEADS
    stat = wide_row * C.HEADS + head + h
    row_max = gl.load(softmax_max + stat, mask=h_ok, other=0.0)
    row_sum = gl.load(softmax_sum + stat, mask=h_ok, other=1.0)
    seeing = row_sum != 0  # a row that sees no key has max -inf and sum 0
    stats.index(0).store(
        gl.where(seeing, row_max, 0.0) * LOG2E + gl.log2(gl.where(seeing, row_sum, 1.0))
    )
    stats.index(1).store(gl.load(deltas + stat, mask=h_ok, other=0.0))
    barrier()
    shared = Shared(q_smem, do_smem, ring, weights, stats, bars)
    gl.warp_specialize(
        [
            (
                _consumer0,
                (
                    shared,
                    weights_desc,
                    q_desc,
                    slots,
                    scale,
                    scale_log2,
                    row,
                    local,
                    head,
                    entries,
                    keys,
                    tiles,
                ),
            ),
            (_consumer1, (shared, q_desc, qr_desc, row, head, tiles)),
            (
                _gather,
                (
                    key,
                    key_rope,
                    slots,
                    entries,
                    keys,
                    key_stride,
                    rope_stride,
                    tiles,
                    shared,
                    C,
                ),
            ),
        ],
        [4, 4],
        [232, 48],
    )


@gluon.jit
def _bring(weights_desc, rings, bars, local, tiles, C: gl.constexpr):
    TILE: gl.constexpr = 2 * C.PADDED // C.HEADS_AT_ONCE
    for tile in range(tiles):
        group = tile % 2
        first = group * 2 * C.STAGES
        count = tile // 2 * TILE
        for i in gl.static_range(TILE):
            stage = count % C.STAGES
            full = bars.index(first + stage)
            mbarrier.wait(bars.index(first + C.STAGES + stage), ((count // C.STAGES) & 1) ^ 1)
            mbarrier.expect(full, 64 * C.HEADS_AT_ONCE * 2)
            tma_load(
                weights_desc,
                [local, tile * 64, i // (TILE // 2), i % (TILE // 2) * C.HEADS_AT_ONCE],
                full,
                reinterpret(
                    rings.index(group * C.STAGES + stage),
                    rings.dtype,
                    weights_desc.block_shape,
                    weights_desc.layout,
                ),
            )
            count += 1


@gluon.jit
def _arrived(rings, bars, count, GROUP: gl.constexpr, C: gl.constexpr):
    """The next piece of p or ds."""
    stage = count % C.STAGES
    mbarrier.wait(bars.index(GROUP * 2 * C.STAGES + stage), (count // C.STAGES) & 1)
    return rings.index(GROUP * C.STAGES + stage)


@gluon.jit
def _multiply(
    q,
    qr,
    do,
    rings,
    bars,
    out,
    entries,
    tiles,
    part,
    GROUP: gl.constexpr,
    C: gl.constexpr,
):
    PIECES: gl.constexpr = C.PADDED // C.HEADS_AT_ONCE
    FREE: gl.constexpr = GROUP * 2 * C.STAGES + C.STAGES
    mbarrier.wait(bars.index(4 * C.STAGES), 0)
    fence_async_shared()
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, TURNED))
    d = part * 256 + gl.arange(0, 256, layout=gl.SliceLayout(0, TURNED))
    at = out + (row * 576)[:, None] + d[None, :]
    row_r = gl.arange(0, 64, layout=gl.SliceLayout(1, SLIM))
    d = 512 + part * 32 + gl.arange(0, 32, layout=gl.SliceLayout(0, SLIM))
    at_r = out + (row_r * 576)[:, None] + d[None, :]
    count = 0
    for tile in range(GROUP, tiles, 2):
        zero = tile >> 30
        acc = gl.zeros([64, 256], gl.float32, layout=WIDE)
        rope = gl.zeros([64, 32], gl.float32, layout=S_SLIM)
        for i in gl.static_range(PIECES):
            ds = _arrived(rings, bars, count + i, GROUP, C)
            rope = warpgroup_mma(ds, qr.index(i + zero), rope, use_acc=i > 0, is_async=True)
            acc = warpgroup_mma(ds, q.index(i + zero), acc, use_acc=i > 0, is_async=True)
        for i in gl.static_range(PIECES):
            p = _arrived(rings, bars, count + PIECES + i, GROUP, C)
            acc = warpgroup_mma(p, do.index(i + zero), acc, is_async=True)
        rope = warpgroup_mma_wait(PIECES, deps=[rope])
        barrier()
        for i in gl.static_range(PIECES):
            mbarrier.arrive(bars.index(FREE + (count + i) % C.STAGES), count=1)
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier()
        for i in gl.static_range(PIECES):
            mbarrier.arrive(bars.index(FREE + (count + PIECES + i) % C.STAGES), count=1)
        count += 2 * PIECES
        step = tile.to(gl.int64) * (64 * 576)
        x = gl.convert_layout(acc.to(out.dtype.element_ty), TURNED)
        gl.store(at + step, x, mask=(tile * 64 + row < entries)[:, None])
        x = gl.convert_layout(rope.to(out.dtype.element_ty), SLIM)
        gl.store(at_r + step, x, mask=(tile * 64 + row_r < entries)[:, None])


@gluon.jit(do_not_specialize=["first", "entries"])
def _entries(
    weights_desc,
    q,
    q_rope,
    d_out,
    out,
    first,
    entries,
    strides,
    C: gl.constexpr,
):
    q_row, q_head, qr_row, qr_head, do_row, do_head = strides
    H: gl.constexpr = C.HEADS_AT_ONCE
    PIECES: gl.constexpr = C.PADDED // H
    dtype: gl.constexpr = q.dtype.element_ty
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FEW: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    local = gl.program_id(0) // 2
    part = gl.program_id(0) % 2
    row = (first + local).to(gl.int64)
    q_smem = gl.allocate_shared_memory(dtype, [PIECES, H, 256], SWIZZLED)
    do_smem = gl.allocate_shared_memory(dtype, [PIECES, H, 256], SWIZZLED)
    qr_smem = gl.allocate_shared_memory(dtype, [PIECES, H, 32], gl.NVMMASharedLayout(64, 16, 2))
    rings = gl.allocate_shared_memory(
        dtype, [2 * C.STAGES, 64, H], gl.NVMMASharedLayout(2 * H, 16, 2)
    )
    bars = gl.allocate_shared_memory(gl.int64, [4 * C.STAGES + 1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4 * C.STAGES):
        mbarrier.init(bars.index(i), count=1)
    mbarrier.init(bars.index(4 * C.STAGES), count=128)
    fence_async_shared()
    barrier()
    d = part * 256 + gl.arange(0, 256, layout=gl.SliceLayout(0, GATHER))
    few = part * 32 + gl.arange(0, 32, layout=gl.SliceLayout(0, FEW))
    for i in gl.static_range(PIECES):
        h = i * H + gl.arange(0, H, layout=gl.SliceLayout(1, GATHER))
        mask = (h < C.HEADS)[:, None]
        wide = h.to(gl.int64)
        at = (q + row * q_row + wide * q_head)[:, None] + d[None, :]
        cp_async(q_smem.index(i), at, mask=mask)
        at = (d_out + row * do_row + wide * do_head)[:, None] + d[None, :]
        cp_async(do_smem.index(i), at, mask=mask)
        h = i * H + gl.arange(0, H, layout=gl.SliceLayout(1, FEW))
        at = (q_rope + row * qr_row + h.to(gl.int64) * qr_head)[:, None] + few[None, :]
        cp_async(qr_smem.index(i), at, mask=(h < C.HEADS)[:, None])
    async_copy.mbarrier_arrive(bars.index(4 * C.STAGES), increment_count=False)
    out += local.to(gl.int64) * entries * 576
    tiles = (entries + 63) // 64
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    q_smem,
                    qr_smem,
                    do_smem,
                    rings,
                    bars,
                    out,
                    entries,
                    tiles,
                    part,
                    0,
                    C,
                ),
            ),
            (
                _multiply,
                (
                    q_smem,
                    qr_smem,
                    do_smem,
                    rings,
                    bars,
                    out,
                    entries,
                    tiles,
                    part,
                    1,
                    C,
                ),
            ),
            (_bring, (weights_desc, rings, bars, local, tiles, C)),
        ],
        [4, 1],
        [240, 24],
    )


def supports(
    heads: int, value: Tensor | None, even: bool, q: Tensor, qr: Tensor, *more: Tensor
) -> bool:
    """33 to 128 heads in eights, keys that are evenly spaced and hold the values, and steps of 16
    numbers, by which the compiler knows that rows are aligned; `more`: d_out, key, key_rope."""
    given = (q, qr, *more)
    return (
        gpu.is_hopper(q.device)
        and value is None
        and even
        and heads % 8 == 0
        and _FEW < heads <= 128
        and q.shape[-1] == 512
        and qr.shape[-1] == 64
        and q.element_size() == 2
        and aligned(*given)
        and all(step % 16 == 0 for x in given for step in x.stride()[:-1])
    )


def _describe(weights: Tensor, count: int, entries: int, heads: int) -> TensorDescriptor:
    """`heads` of 64 entries, of ds or p."""
    all_heads = weights.shape[-1]
    return describe_box(
        weights,
        [count, entries, 2, all_heads],
        [entries * 2 * all_heads, 2 * all_heads, all_heads, 1],
        [1, 64, 1, heads],
    )


def _describe_rows(d_query: Tensor) -> TensorDescriptor:
    """64 columns of 64 heads."""
    sizes = [d_query.shape[:-2].numel(), *d_query.shape[-2:]]
    return describe_box(d_query, sizes, [sizes[1] * sizes[2], sizes[2], 1], [1, 64, 64])


def launch(
    q: Tensor,
    qr: Tensor,
    key: Tensor,
    kr: Tensor,
    do: Tensor,
    slots: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    deltas: Tensor,
    weights: Tensor,
    added: Tensor,
    d_query: Tensor,
    d_query_rope: Tensor,
    scale: float,
    first: int,
    count: int,
    entries: int,
    keys: int,
) -> None:
    """d_query of `count` rows from `first` on, and what every entry of theirs adds to its key."""
    heads = q.shape[1]
    padded = max(16, triton.next_power_of_2(heads))
    strides = tuple(step for x in (q, qr, do) for step in x.stride()[:2])
    launches.kernel(_weights, count * triton.cdiv(heads, 64))(
        q,
        qr,
        key,
        kr,
        do,
        slots,
        softmax_max,
        softmax_sum,
        deltas,
        _describe(weights, count, entries, 64),
        _describe_rows(d_query),
        _describe_rows(d_query_rope),
        scale,
        scale * LOG2E.value,
        first,
        entries,
        keys,
        strides=(*strides, key.stride(-3), kr.stride(-3)),
        C=Constants(heads, 64, 64, 0),
        num_warps=4,
    )
    launches.kernel(_entries, 2 * count)(
        _describe(weights, count, entries, min(padded, 64)),
        q,
        qr,
        do,
        added,
        first,
        entries,
        strides=strides,
        C=Constants(heads, padded, min(padded, 64), 5),
        num_warps=4,
    )
