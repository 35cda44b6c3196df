# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Gradients of fused attention on Hopper (Gluon): one pass over the scores for all three.

A program owns a tile of 128 keys, keeps grad_k and grad_v in registers and walks over the queries
that see it, in blocks of 64, of heads up to 64 of 128; grad_q goes by fp32 additions in memory to a
buffer that a last kernel scales and rounds.

To be deterministic, tiles of keys add to a block of queries in turn, the last keys first: of a
causal call those come to it first.  A program takes the next number as it begins, and waits for
lower numbers alone: the lowest that has not ended never waits, in whatever order programs begin.
An `_adder`, a warp of its own, does so, that the products need not wait.  Of heads wider than 128
a deterministic call makes grad_k and grad_v here, and grad_q by the plain kernel.

Heads wider than 128 leave no registers for that: tiles of 64 keys, of whose products each of two
groups of warps makes half of the columns, so that the probabilities go through shared memory.  Of
heads up to 192 the products leave out what blocks of 256 have more.

The buffer holds grad_q in tiles of 16 x 8, the shape in which a warp holds a product: each addition
of a thread is then 16 bytes, of a warp 512 in a row; those of heads of 128, and those that the
adder makes, of heads of 192 with values up to 128 always, go through shared memory and TMA.  Its
rows are padded to whole tiles of queries, and so are those of the statistics.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...common.attention_tiles import (
    Sizes,
    locate,
    padded_first,
    plan,
    queries_of,
    strides,
    width_of,
)
from ...common.gluon_names import barrier, reinterpret, tma_load, tma_store
from ...common.hopper.tma import at, describe, describe_row, load_box, store_box
from ...common.log2 import LOG2E
from ...runtime import launches
from ...runtime.private_triton import builtin, ir
from . import fused_attention
from .turns import seen, tile_listed, turn_of

# Causal, B 4, H 16, D 128, H200, 2026-11: 4096 tokens 1357 us (three stages 1354 to 1384), 16384
# tokens 20519 (21807)
_STAGES = 2

# Bytes of queries, gradients and sums of those heads whose tiles of keys take turns; of the heads
# of a group one counts.  Same, with additions of 8 bytes: 16384 tokens 20531 us (32 MB 21053, 64 MB
# 21186, 128 MB 21327)
_SHARE = 16 * 2**20

# Of a scale that lse is divided by
_LEAST = 2.0**-100

_queries_of = gluon.jit(queries_of.fn)
_padded_first = gluon.jit(padded_first.fn)


class Shared(NamedTuple):
    """Tiles in shared memory and barriers.  `ps` are probabilities, of wide heads; `part` goes to
    grad_q, and of 192 columns the last 64 are `more`.  Others stand for what is not there."""

    q: Any
    g: Any
    k: Any
    v: Any
    lse: Any
    delta: Any
    ps: Any
    ds: Any
    part: Any
    more: Any
    full: Any
    empty: Any
    kv_full: Any
    part_full: Any
    part_empty: Any


class Constants(NamedTuple):
    """SIZE and V_SIZE are the columns of D and V that are multiplied."""

    BLOCK_M: int
    BLOCK_N: int
    D: int
    V: int
    SIZE: int
    V_SIZE: int
    STAGES: int
    GROUP: int
    CAUSAL: bool
    WINDOW: bool
    VARLEN: bool
    GRAD_Q: bool
    ADDER: bool
    IN_TURN: bool


@gluon.jit
def _tile_of(ticket, plan, tiles, outers, heads, section, rows, other_rows, C: gl.constexpr):
    """(batch, key head, first key, keys, first query, queries, tile, piece) of a program."""
    number = ticket if C.IN_TURN else gl.program_id(0)
    _group, outer, tile = turn_of(number, tiles, outers, section)
    if C.VARLEN:
        first, rows, other_first, other_rows, tile, piece = tile_listed(plan, tile)
        return 0, outer, first, rows, other_first, other_rows, tile, piece
    # the first keys are seen by most queries: longest first, unless tiles add in turn
    if C.IN_TURN:
        tile = tiles - 1 - tile
    return outer // heads, outer % heads, 0, rows, 0, other_rows, tile, 0


@gluon.jit
def _blocks_of(tile, keys, rows, window, C: gl.constexpr):
    """Blocks of queries that see a tile of keys: [low, top), of which [full_low, full_high) see
    all of it."""
    last = gl.minimum(tile * C.BLOCK_N + C.BLOCK_N, keys) - 1
    low, high, full_low, full_high = _queries_of(
        tile * C.BLOCK_N, last, rows, keys - rows, window, C.CAUSAL, C.WINDOW
    )
    low = gl.maximum(low, 0) // C.BLOCK_M
    top = gl.maximum((high + C.BLOCK_M - 1) // C.BLOCK_M, low)
    # the last tile is not whole: all of it is masked
    full_low = gl.where(
        tile * C.BLOCK_N + C.BLOCK_N > keys,
        top,
        (gl.maximum(full_low, 0) + C.BLOCK_M - 1) // C.BLOCK_M,
    )
    full_low = gl.minimum(gl.maximum(full_low, low), top)
    # rows past the end have lse = +inf: only a window needs masks at the end
    full_high = gl.minimum(gl.maximum(gl.maximum(full_high, 0) // C.BLOCK_M, full_low), top)
    if not C.WINDOW:
        full_high = top
    return low, top, full_low, full_high


@gluon.jit
def _add(sums, part, BLOCK_M: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr):
    """Adds [BLOCK_M, D] in memory, to rows of WIDTH, 16 bytes a thread: row 16 a + 8 b + c, column
    2 d + e goes to place (a, d // 4, c, d % 4, b, e), as the registers of a product come.  Measured
    as above: 4096 tokens 1357 us (8 bytes a thread 1379; without any addition, for comparison,
    1239)."""
    part = gl.permute(gl.reshape(part, [BLOCK_M // 16, 2, 8, D // 2, 2]), (0, 2, 3, 1, 4))
    even, odd = gl.split(part)
    even_low, even_high = gl.split(even)
    odd_low, odd_high = gl.split(odd)
    L: gl.constexpr = even_low.type.layout
    a = gl.arange(0, BLOCK_M // 16, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    c = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    d = gl.arange(0, D // 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    at = (sums + (a * (16 * WIDTH) + d // 4 * 128 + c * 16 + d % 4 * 4)).to(gl.int64)
    gl.inline_asm_elementwise(
        "red.global.relaxed.gpu.add.v4.f32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0;",
        "=r,l,f,f,f,f",
        [at, even_low, odd_low, even_high, odd_high],
        gl.int32,
        False,
        1,
    )


@builtin
def _add_bulk(descriptor, coordinates, source, _semantic=None):
    """Adds a block of shared memory in memory, by TMA; Gluon has no name for it of its own.  B 4,
    H 16, causal, H200, 2026-11: heads of 128, 4096 tokens 1260 us (by threads 1362), 16384 tokens
    19145 (20316); heads of 64 889 (818), so those are added by threads."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, source.handle
    )


@gluon.jit
def _in_tiles(part, COLUMNS: gl.constexpr):
    """[rows, COLUMNS] in the order of `_add`, as rows of 256."""
    A: gl.constexpr = part.shape[0] // 16
    part = gl.permute(gl.reshape(part, [A, 2, 8, COLUMNS // 8, 4, 2]), (0, 3, 2, 4, 1, 5))
    return gl.reshape(part, [A * COLUMNS // 16, 256])


@gluon.jit
def _hand_over(shared, part, more, count, C: gl.constexpr):
    """Gives the adder what block `count` adds, when it has taken that of the block before."""
    COLUMNS: gl.constexpr = 128 if C.SIZE == 192 else C.SIZE
    layout: gl.constexpr = shared.part.layout
    mbarrier.wait(shared.part_empty, (count & 1) ^ 1)
    whole = reinterpret(shared.part, gl.float32, [C.BLOCK_M * COLUMNS // 256, 256], layout)
    whole.store(_in_tiles(part, COLUMNS))
    if C.SIZE == 192:
        shared.more.store(_in_tiles(more, 64))
    fence_async_shared()
    mbarrier.arrive(shared.part_full)


@gluon.jit
def _added(turn):
    """How many tiles of keys have added; what they wrote is there to be added to."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.u32 $0, [$1];", "=r,l", [turn], gl.int32, False, 1
    )


@gluon.jit
def _wait_for_turn(turn, block, tile, rows, keys, window, C: gl.constexpr):
    """Until the tiles of later keys that the block sees have added to it; how many they are."""
    position = block * C.BLOCK_M + C.BLOCK_M - 1 + keys - rows
    last = keys - 1
    if C.CAUSAL:
        last = gl.minimum(last, position)
    elif C.WINDOW:
        last = gl.minimum(last, position + window - 1)
    before = last // C.BLOCK_N - tile
    added = _added(turn)
    while added != before:
        added = _added(turn)
    return before


@gluon.jit
def _adder(
    shared,
    sums,
    ticket,
    turns,
    plan,
    window,
    tiles,
    outers,
    heads,
    section,
    n_q,
    n_k,
    padded,
    C: gl.constexpr,
):
    """The warp that adds to grad_q."""
    batch, kv_head, _, keys, first_q, rows, tile, piece = _tile_of(
        ticket, plan, tiles, outers, heads, section, n_k, n_q, C
    )
    PIECES: gl.constexpr = shared.part.shape[0]
    ROWS: gl.constexpr = shared.part.shape[1]
    if C.ADDER and tile * C.BLOCK_N < keys:
        low, top, _, _ = _blocks_of(tile, keys, rows, window, C)
        place = _padded_first(first_q, piece)
        count = 0
        for member in range(C.GROUP):
            head = (batch * heads + kv_head) * C.GROUP + member
            for block in range(low, top):
                block_at = (head * padded + place) // C.BLOCK_M + block
                mbarrier.wait(shared.part_full, count & 1)
                before = 1
                if C.IN_TURN:
                    before = _wait_for_turn(
                        turns + 1 + block_at, block, tile, rows, keys, window, C
                    )
                row = block_at * (C.BLOCK_M * C.SIZE // 256)
                if before == 0:  # the buffer is not cleared
                    tma_store(sums, [row, 0], shared.part.index(0))
                else:
                    for i in gl.static_range(PIECES):
                        _add_bulk(sums, [row + i * ROWS, 0], shared.part.index(i))
                    if C.SIZE == 192:
                        _add_bulk(sums, [row + PIECES * ROWS, 0], shared.more)
                tma.store_wait(0)
                mbarrier.arrive(shared.part_empty)
                if C.IN_TURN:
                    # store_wait: they have been read; this: they are in memory
                    gl.inline_asm_elementwise(
                        "cp.async.bulk.wait_group 0; mov.b32 $0, 0;", "=r", [], gl.int32, False, 1
                    )
                    gl.atomic_add(turns + 1 + block_at, 1, sem="release", scope="gpu")
                count += 1


@gluon.jit
def _step(
    acc_k,
    acc_v,
    zero_s,
    zero_q,
    shared,
    sums,
    count,
    grad_q,
    block,
    tile,
    rows,
    keys,
    window,
    scale_log2,
    MASKED: gl.constexpr,
    C: gl.constexpr,
):
    """One block of queries.  The scores begin at -lse / scale and the gradients of p at -delta, so
    that nothing is loaded behind the products, and no registers hold rows beside those of a block
    of 128.  The additions to grad_q run under the product for grad_k.  B 4, H 16, causal, H200,
    2026-11: heads of 128 1348 us at 4096 tokens (rows subtracted 1391), 18870 at 16384 (19860)."""
    MS: gl.constexpr = zero_s.type.layout
    MK: gl.constexpr = acc_v.type.layout
    dtype: gl.constexpr = shared.q.dtype
    stage = count % C.STAGES
    phase = (count // C.STAGES) & 1
    q_tile = shared.q.index(stage)
    g_tile = shared.g.index(stage)
    mbarrier.wait(shared.full.index(stage), phase)
    row = shared.lse.index(stage).load(gl.SliceLayout(0, MS))
    start, _ = gl.broadcast(row[None, :], zero_s)
    s_flight = warpgroup_mma(shared.k, q_tile.permute((1, 0)), start, is_async=True)
    row = shared.delta.index(stage).load(gl.SliceLayout(0, MS))
    start, _ = gl.broadcast(row[None, :], zero_s)
    p_flight = warpgroup_mma(shared.v, g_tile.permute((1, 0)), start, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s_flight])
    p = gl.exp2(s * scale_log2)
    if MASKED:
        # counted from the first key of the tile; a row past the end has p = 0 by its lse
        column = gl.arange(0, C.BLOCK_N, layout=gl.SliceLayout(1, MS))[:, None]
        position = gl.arange(0, C.BLOCK_M, layout=gl.SliceLayout(0, MS))
        position = position + (block * C.BLOCK_M + keys - rows - tile * C.BLOCK_N)
        end = keys - tile * C.BLOCK_N
        if C.CAUSAL:
            keep = column < gl.minimum(position + 1, end)[None, :]
        elif C.WINDOW:
            keep = column < gl.minimum(position + window, end)[None, :]
        else:
            keep = column < end
        if C.WINDOW:
            keep = keep & (column > (position - window)[None, :])
        p = gl.where(keep, p, 0.0)
    p_half = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, MK, 2))
    grad_p = warpgroup_mma_wait(0, deps=[p_flight])
    v_flight = warpgroup_mma(p_half, g_tile, acc_v, is_async=True)
    grad_s = (p * grad_p).to(dtype)
    shared.ds.store(grad_s)
    fence_async_shared()
    if C.D == 128 and not C.ADDER:
        tma.store_wait(0)  # the last block's additions have read `part`
    barrier()
    q_flight = warpgroup_mma(
        shared.ds.permute((1, 0)), shared.k, zero_q, use_acc=False, is_async=True
    )
    s_half = gl.convert_layout(grad_s, gl.DotOperandLayout(0, MK, 2))
    k_flight = warpgroup_mma(s_half, q_tile, acc_k, is_async=True)
    acc_v, part_q = warpgroup_mma_wait(1, deps=[v_flight, q_flight])
    if C.ADDER:
        _hand_over(shared, part_q, part_q, count, C)
    elif C.D == 128:
        shared.part.index(0).store(_in_tiles(part_q, 128))
        fence_async_shared()
        barrier()
        _add_bulk(sums, [grad_q + block * 32, 0], shared.part.index(0))
    else:
        _add(grad_q + block.to(gl.int64) * (C.BLOCK_M * C.D), part_q, C.BLOCK_M, C.D, C.D)
    acc_k = warpgroup_mma_wait(0, deps=[k_flight])
    mbarrier.arrive(shared.empty.index(stage))
    return acc_k, acc_v


@gluon.jit
def _consumer(
    shared,
    gk_desc,
    gv_desc,
    sums,
    grad_q,
    ticket,
    plan,
    scale,
    window,
    tiles,
    outers,
    heads,
    section,
    n_q,
    n_k,
    padded,
    C: gl.constexpr,
    num_warps: gl.constexpr,
):
    k, v = shared.k, shared.v
    MS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, C.BLOCK_M, 16])
    MK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, C.D, 16])
    SPLIT: gl.constexpr = num_warps * 16 // C.BLOCK_M if num_warps * 16 > C.BLOCK_M else 1
    MQ: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [num_warps // SPLIT, SPLIT], [16, C.D // SPLIT, 16]
    )
    zero_s = gl.full([C.BLOCK_N, C.BLOCK_M], 0.0, gl.float32, layout=MS)
    zero_q = gl.full([C.BLOCK_M, C.D], 0.0, gl.float32, layout=MQ)
    batch, kv_head, first_k, keys, first_q, rows, tile, piece = _tile_of(
        ticket, plan, tiles, outers, heads, section, n_k, n_q, C
    )
    if tile * C.BLOCK_N < keys:
        low, top, full_low, full_high = _blocks_of(tile, keys, rows, window, C)
        acc_k = gl.full([C.BLOCK_N, C.D], 0.0, gl.float32, layout=MK)
        acc_v = gl.full([C.BLOCK_N, C.D], 0.0, gl.float32, layout=MK)
        scale_log2 = scale * LOG2E
        place = _padded_first(first_q, piece)
        mbarrier.wait(shared.kv_full, 0)
        count = 0
        for member in range(C.GROUP):
            head = (batch * heads + kv_head) * C.GROUP + member
            if C.D == 128 and not C.ADDER:
                grad_at = (head * padded + place) // 2  # rows of 256
            else:
                grad_at = grad_q + (head.to(gl.int64) * padded + place) * C.D
            for block in range(low, full_low):
                acc_k, acc_v = _step(
                    acc_k,
                    acc_v,
                    zero_s,
                    zero_q,
                    shared,
                    sums,
                    count,
                    grad_at,
                    block,
                    tile,
                    rows,
                    keys,
                    window,
                    scale_log2,
                    True,
                    C,
                )
                count += 1
            for block in range(full_low, full_high):
                acc_k, acc_v = _step(
                    acc_k,
                    acc_v,
                    zero_s,
                    zero_q,
                    shared,
                    sums,
                    count,
                    grad_at,
                    block,
                    tile,
                    rows,
                    keys,
                    window,
                    scale_log2,
                    False,
                    C,
                )
                count += 1
            if C.WINDOW:
                for block in range(full_high, top):
                    acc_k, acc_v = _step(
                        acc_k,
                        acc_v,
                        zero_s,
                        zero_q,
                        shared,
                        sums,
                        count,
                        grad_at,
                        block,
                        tile,
                        rows,
                        keys,
                        window,
                        scale_log2,
                        True,
                        C,
                    )
                    count += 1
        barrier()
        k.store((acc_k * scale).to(k.dtype))
        v.store(acc_v.to(v.dtype))
        fence_async_shared()
        barrier()
        where = at(batch, kv_head, first_k, keys, tile * C.BLOCK_N, C.VARLEN)
        store_box(gk_desc, where, k)
        store_box(gv_desc, where, v)
        tma.store_wait(0)


@gluon.jit
def _scores(rows, columns, zero, SIZE: gl.constexpr):
    """rows [64, D] times columns [64, D], of which SIZE count; 192 takes two products."""
    if SIZE == 192:
        part = warpgroup_mma(
            rows.slice(0, 128, dim=1),
            columns.slice(0, 128, dim=1).permute((1, 0)),
            zero,
            use_acc=False,
            is_async=True,
        )
        return warpgroup_mma(
            rows.slice(128, 64, dim=1),
            columns.slice(128, 64, dim=1).permute((1, 0)),
            part,
            is_async=True,
        )
    return warpgroup_mma(rows, columns.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _gather(weights, rows, acc, more, SIZE: gl.constexpr, NEW: gl.constexpr):
    """acc + weights [64, 64] times rows [64, D]; of 192 columns the last 64 are `more`."""
    if SIZE == 192:
        acc = warpgroup_mma(weights, rows.slice(0, 128, dim=1), acc, use_acc=not NEW, is_async=True)
        more = warpgroup_mma(
            weights, rows.slice(128, 64, dim=1), more, use_acc=not NEW, is_async=True
        )
    else:
        acc = warpgroup_mma(weights, rows, acc, use_acc=not NEW, is_async=True)
    return acc, more


@gluon.jit
def _zeros(COLUMNS: gl.constexpr):
    """What a product of 64 rows by two groups of warps begins with, half of the columns each."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, COLUMNS // 2, 16])
    return gl.zeros([64, COLUMNS], gl.float32, layout=layout)


@gluon.jit
def _wide_step(
    acc_k,
    more_k,
    acc_v,
    more_v,
    zero_s,
    zero_q,
    zero_more,
    shared,
    count,
    grad_q,
    block,
    tile,
    rows,
    keys,
    window,
    scale_log2,
    MASKED: gl.constexpr,
    C: gl.constexpr,
):
    """One block of 64 queries against 64 keys.  Both groups of warps need all of p and of its
    gradient, which go through shared memory; the products for grad_k and grad_v are left in flight,
    and the scores of the next block are under way behind them."""
    MS: gl.constexpr = zero_s.type.layout
    OF_D: gl.constexpr = 2 if C.SIZE == 192 else 1  # products
    OF_V: gl.constexpr = 2 if C.V_SIZE == 192 else 1
    dtype: gl.constexpr = shared.q.dtype
    stage = count % C.STAGES
    q_tile = shared.q.index(stage)
    g_tile = shared.g.index(stage)
    mbarrier.wait(shared.full.index(stage), (count // C.STAGES) & 1)
    s_flight = _scores(q_tile, shared.k, zero_s, C.SIZE)
    p_flight = _scores(g_tile, shared.v, zero_s, C.V_SIZE)
    if C.SIZE == 192 and C.V_SIZE == 192:
        acc_k, more_k, acc_v, more_v = warpgroup_mma_wait(
            OF_D + OF_V, deps=[acc_k, more_k, acc_v, more_v]
        )
    elif C.SIZE == 192:
        acc_k, more_k, acc_v = warpgroup_mma_wait(OF_D + OF_V, deps=[acc_k, more_k, acc_v])
    elif C.V_SIZE == 192:
        acc_k, acc_v, more_v = warpgroup_mma_wait(OF_D + OF_V, deps=[acc_k, acc_v, more_v])
    else:
        acc_k, acc_v = warpgroup_mma_wait(OF_D + OF_V, deps=[acc_k, acc_v])
    # behind this, nobody reads ps and ds any more either
    mbarrier.arrive(shared.empty.index((count + C.STAGES - 1) % C.STAGES), pred=count > 0)
    s = warpgroup_mma_wait(OF_V, deps=[s_flight])
    row_lse = shared.lse.index(stage).load(gl.SliceLayout(1, MS))
    p = gl.exp2(s * scale_log2 - row_lse[:, None])
    if MASKED:
        # counted from the first key of the tile; a row past the end has p = 0 by its lse
        column = gl.arange(0, 64, layout=gl.SliceLayout(0, MS))[None, :]
        position = gl.arange(0, 64, layout=gl.SliceLayout(1, MS))
        position = position + (block * 64 + keys - rows - tile * 64)
        end = keys - tile * 64
        keep = seen(column, position, end, window, C.CAUSAL, C.WINDOW)
        p = gl.where(keep, p, 0.0)
    shared.ps.store(p.to(dtype))
    grad_p = warpgroup_mma_wait(0, deps=[p_flight])
    row_delta = shared.delta.index(stage).load(gl.SliceLayout(1, MS))
    shared.ds.store((p * (grad_p - row_delta[:, None])).to(dtype))
    fence_async_shared()
    barrier()
    if C.GRAD_Q:
        part, more = _gather(shared.ds, shared.k, zero_q, zero_more, C.SIZE, True)
    acc_v, more_v = _gather(shared.ps.permute((1, 0)), g_tile, acc_v, more_v, C.V_SIZE, False)
    acc_k, more_k = _gather(shared.ds.permute((1, 0)), q_tile, acc_k, more_k, C.SIZE, False)
    if C.GRAD_Q:
        # the additions run under the other products
        grad_q += block.to(gl.int64) * (64 * C.SIZE)
        if C.SIZE == 192:
            part, more = warpgroup_mma_wait(OF_D + OF_V, deps=[part, more])
            if C.ADDER:
                _hand_over(shared, part, more, count, C)
            else:
                _add(grad_q, part, 64, 128, 128)
                _add(grad_q + 64 * 128, more, 64, 64, 64)
        else:
            part = warpgroup_mma_wait(OF_D + OF_V, deps=[part])
            _add(grad_q, part, 64, C.SIZE, C.D)
    return acc_k, more_k, acc_v, more_v


@gluon.jit
def _give(tile, acc, more, scale, SIZE: gl.constexpr):
    if SIZE == 192:
        tile.slice(0, 128, dim=1).store((acc * scale).to(tile.dtype))
        tile.slice(128, 64, dim=1).store((more * scale).to(tile.dtype))
    else:
        tile.store((acc * scale).to(tile.dtype))


@gluon.jit
def _wide_consumer(
    shared,
    gk_desc,
    gv_desc,
    grad_q,
    ticket,
    plan,
    scale,
    window,
    tiles,
    outers,
    heads,
    section,
    n_q,
    n_k,
    padded,
    C: gl.constexpr,
):
    k, v = shared.k, shared.v
    SIZE: gl.constexpr = C.SIZE
    V_SIZE: gl.constexpr = C.V_SIZE
    FIRST: gl.constexpr = 128 if SIZE == 192 else SIZE
    V_FIRST: gl.constexpr = 128 if V_SIZE == 192 else V_SIZE
    zero_s = _zeros(64)
    zero_q = _zeros(FIRST)
    zero_more = _zeros(64)
    batch, kv_head, first_k, keys, first_q, rows, tile, piece = _tile_of(
        ticket, plan, tiles, outers, heads, section, n_k, n_q, C
    )
    if tile * 64 < keys:
        low, top, full_low, full_high = _blocks_of(tile, keys, rows, window, C)
        acc_k = warpgroup_mma_init(_zeros(FIRST))
        acc_v = warpgroup_mma_init(_zeros(V_FIRST))
        more_k = 0
        more_v = 0
        if SIZE == 192:
            more_k = warpgroup_mma_init(_zeros(64))
        if V_SIZE == 192:
            more_v = warpgroup_mma_init(_zeros(64))
        scale_log2 = scale * LOG2E
        place = _padded_first(first_q, piece)
        mbarrier.wait(shared.kv_full, 0)
        count = 0
        for member in range(C.GROUP):
            head = (batch * heads + kv_head) * C.GROUP + member
            grad_at = grad_q
            if C.GRAD_Q:
                grad_at += (head.to(gl.int64) * padded + place) * C.SIZE
            for block in range(low, full_low):
                acc_k, more_k, acc_v, more_v = _wide_step(
                    acc_k,
                    more_k,
                    acc_v,
                    more_v,
                    zero_s,
                    zero_q,
                    zero_more,
                    shared,
                    count,
                    grad_at,
                    block,
                    tile,
                    rows,
                    keys,
                    window,
                    scale_log2,
                    True,
                    C,
                )
                count += 1
            for block in range(full_low, full_high):
                acc_k, more_k, acc_v, more_v = _wide_step(
                    acc_k,
                    more_k,
                    acc_v,
                    more_v,
                    zero_s,
                    zero_q,
                    zero_more,
                    shared,
                    count,
                    grad_at,
                    block,
                    tile,
                    rows,
                    keys,
                    window,
                    scale_log2,
                    False,
                    C,
                )
                count += 1
            if C.WINDOW:
                for block in range(full_high, top):
                    acc_k, more_k, acc_v, more_v = _wide_step(
                        acc_k,
                        more_k,
                        acc_v,
                        more_v,
                        zero_s,
                        zero_q,
                        zero_more,
                        shared,
                        count,
                        grad_at,
                        block,
                        tile,
                        rows,
                        keys,
                        window,
                        scale_log2,
                        True,
                        C,
                    )
                    count += 1
        acc_k, acc_v = warpgroup_mma_wait(0, deps=[acc_k, acc_v])
        if SIZE == 192:
            more_k = warpgroup_mma_wait(0, deps=[more_k])
        if V_SIZE == 192:
            more_v = warpgroup_mma_wait(0, deps=[more_v])
        barrier()
        _give(k, acc_k, more_k, scale, SIZE)
        _give(v, acc_v, more_v, 1.0, V_SIZE)
        fence_async_shared()
        barrier()
        where = at(batch, kv_head, first_k, keys, tile * 64, C.VARLEN)
        store_box(gk_desc, where, k)
        store_box(gv_desc, where, v)
        tma.store_wait(0)


@gluon.jit
def _producer(
    shared,
    q_desc,
    g_desc,
    k_desc,
    v_desc,
    lse_desc,
    delta_desc,
    ticket,
    plan,
    window,
    tiles,
    outers,
    heads,
    section,
    n_q,
    n_k,
    padded,
    C: gl.constexpr,
):
    q, g, k, v, lse, delta = shared.q, shared.g, shared.k, shared.v, shared.lse, shared.delta
    full, empty, kv_full = shared.full, shared.empty, shared.kv_full
    batch, kv_head, first_k, keys, first_q, rows, tile, piece = _tile_of(
        ticket, plan, tiles, outers, heads, section, n_k, n_q, C
    )
    if tile * C.BLOCK_N < keys:
        low, top, _, _ = _blocks_of(tile, keys, rows, window, C)
        where = at(batch, kv_head, first_k, keys, tile * C.BLOCK_N, C.VARLEN)
        mbarrier.expect(kv_full, C.BLOCK_N * (C.D + C.V) * 2)
        load_box(k_desc, where, kv_full, k)
        load_box(v_desc, where, kv_full, v)
        place = _padded_first(first_q, piece)
        count = 0
        for member in range(C.GROUP):
            head = kv_head * C.GROUP + member
            row = (batch * heads * C.GROUP + head) * padded + place
            for block in range(low, top):
                where = at(batch, head, first_q, rows, block * C.BLOCK_M, C.VARLEN)
                stage = count % C.STAGES
                phase = ((count // C.STAGES) & 1) ^ 1
                mbarrier.wait(empty.index(stage), phase)
                mbarrier.expect(full.index(stage), C.BLOCK_M * (C.D + C.V) * 2 + C.BLOCK_M * 8)
                load_box(q_desc, where, full.index(stage), q.index(stage))
                tma_load(lse_desc, [row + block * C.BLOCK_M], full.index(stage), lse.index(stage))
                load_box(g_desc, where, full.index(stage), g.index(stage))
                tma_load(
                    delta_desc, [row + block * C.BLOCK_M], full.index(stage), delta.index(stage)
                )
                count += 1


@gluon.jit(
    do_not_specialize=[
        "scale", "window", "tiles", "outers", "heads", "section", "n_q", "n_k", "padded",
    ]
)  # fmt: skip
def _backward_hopper(
    q_desc,
    g_desc,
    k_desc,
    v_desc,
    gk_desc,
    gv_desc,
    lse_desc,
    delta_desc,
    sums,
    grad_q,
    turns,
    plan,
    scale,
    window,
    tiles,
    outers,
    heads,
    section,
    n_q,
    n_k,
    padded,
    C: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Two consumer warpgroups in step with each other, a producer, and an adder, which may have
    nothing to do; `heads` are key heads."""
    BLOCK_M: gl.constexpr = C.BLOCK_M
    BLOCK_N: gl.constexpr = C.BLOCK_N
    STAGES: gl.constexpr = C.STAGES
    dtype: gl.constexpr = q_desc.dtype
    WIDE: gl.constexpr = C.D > 128 or C.V > 128
    ticket = 0
    if C.IN_TURN:
        ticket = gl.atomic_add(turns, 1, sem="relaxed")
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, C.D], dtype)
    V_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, C.V], dtype)
    S_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], dtype)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, C.D], SHARED)
    g = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, C.V], V_SHARED)
    k = gl.allocate_shared_memory(dtype, [BLOCK_N, C.D], SHARED)
    v = gl.allocate_shared_memory(dtype, [BLOCK_N, C.V], V_SHARED)
    ds = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_M], S_SHARED)
    lse = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], lse_desc.layout)
    delta = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], lse_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    part_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    part_empty = gl.allocate_shared_memory(gl.int64, [1], BAR)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    mbarrier.init(kv_full, count=1)
    mbarrier.init(part_full, count=1)
    mbarrier.init(part_empty, count=1)
    fence_async_shared()
    barrier()
    ps = ds
    part = ds
    more = ds
    if WIDE:
        ps = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_M], S_SHARED)
    if C.ADDER and C.SIZE == 192:
        part = gl.allocate_shared_memory(gl.float32, [2, 16, 256], sums.layout)
        more = gl.allocate_shared_memory(gl.float32, [16, 256], sums.layout)
    elif C.ADDER or (C.D == 128 and not WIDE):
        part = gl.allocate_shared_memory(gl.float32, [1, BLOCK_M * C.D // 256, 256], sums.layout)
    shared = Shared(
        q, g, k, v, lse, delta, ps, ds, part, more, full, empty, kv_full, part_full, part_empty
    )
    if WIDE:
        gl.warp_specialize(
            [
                (
                    _wide_consumer,
                    (
                        shared,
                        gk_desc,
                        gv_desc,
                        grad_q,
                        ticket,
                        plan,
                        scale,
                        window,
                        tiles,
                        outers,
                        heads,
                        section,
                        n_q,
                        n_k,
                        padded,
                        C,
                    ),
                ),
                (
                    _producer,
                    (
                        shared,
                        q_desc,
                        g_desc,
                        k_desc,
                        v_desc,
                        lse_desc,
                        delta_desc,
                        ticket,
                        plan,
                        window,
                        tiles,
                        outers,
                        heads,
                        section,
                        n_q,
                        n_k,
                        padded,
                        C,
                    ),
                ),
                (
                    _adder,
                    (
                        shared,
                        sums,
                        ticket,
                        turns,
                        plan,
                        window,
                        tiles,
                        outers,
                        heads,
                        section,
                        n_q,
                        n_k,
                        padded,
                        C,
                    ),
                ),
            ],
            [1, 1],
            [24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _consumer,
                    (
                        shared,
                        gk_desc,
                        gv_desc,
                        sums,
                        grad_q,
                        ticket,
                        plan,
                        scale,
                        window,
                        tiles,
                        outers,
                        heads,
                        section,
                        n_q,
                        n_k,
                        padded,
                        C,
                        num_warps,
                    ),
                ),
                (
                    _producer,
                    (
                        shared,
                        q_desc,
                        g_desc,
                        k_desc,
                        v_desc,
                        lse_desc,
                        delta_desc,
                        ticket,
                        plan,
                        window,
                        tiles,
                        outers,
                        heads,
                        section,
                        n_q,
                        n_k,
                        padded,
                        C,
                    ),
                ),
                (
                    _adder,
                    (
                        shared,
                        sums,
                        ticket,
                        turns,
                        plan,
                        window,
                        tiles,
                        outers,
                        heads,
                        section,
                        n_q,
                        n_k,
                        padded,
                        C,
                    ),
                ),
            ],
            [1, 1],
            [24, 24],
        )


@triton.jit(do_not_specialize=["tiles", "n_q", "heads", "padded", "scale"])
def _round_kernel(
    sums,
    turns,
    grad_q,
    plan,
    scale,
    tiles,
    n_q,
    heads,
    padded,
    gq_batch,
    gq_head,
    gq_row,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    QUERIES: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """grad_q of a tile of 64 queries, from its sums in tiles of 16 x 8; of 192 columns the last 64
    lie behind the others.  Blocks of QUERIES to which nothing was added in turn are not cleared."""
    program = tl.program_id(0)
    outer = program // tiles
    batch, first_q, rows, _, _, tile, piece = locate(
        plan, program % tiles, tiles, outer // heads, n_q, n_q, VARLEN
    )
    if tile * BLOCK_M >= rows:
        return
    head = (outer % heads).to(tl.int64)
    r = tl.arange(0, BLOCK_M)
    d = tl.arange(0, 256 if WIDTH == 192 else WIDTH)
    place = padded_first(first_q, piece) + tile * BLOCK_M
    place = (batch * heads + head) * padded + place
    added = True
    if turns is not None:
        added = tl.load(turns + 1 + place // QUERIES) > 0
    place *= WIDTH
    place += (r % 8 * 16 + r // 8 % 2 * 2)[:, None] + (d // 8 * 128 + d % 8 // 2 * 4 + d % 2)[
        None, :
    ]
    if WIDTH == 192:
        place += (r // 16)[:, None] * tl.where(d < 128, 2048, 1024)[None, :]
        place += tl.where(d < 128, 0, 8192 - 2048)[None, :]
        total = tl.load(sums + place, (d < WIDTH)[None, :], 0.0) * scale
    else:
        place += (r // 16 * (16 * WIDTH))[:, None]
        total = tl.load(sums + place, added, 0.0) * scale
    row = tile * BLOCK_M + r
    out = batch * gq_batch + head * gq_head + (first_q + row) * gq_row
    tl.store(
        grad_q + out[:, None] + d[None, :],
        total.to(grad_q.dtype.element_ty),
        (row < rows)[:, None] & (d < D)[None, :],
    )


def _describe_sums(sums: torch.Tensor, count: int) -> TensorDescriptor:
    """What is added to at once, rows of 64 queries in tiles, lies in one piece: rows of 256."""
    rows = sums.numel() // 256
    layout = gl.NVMMASharedLayout(0, 32, 2)
    return TensorDescriptor(sums, [rows, 256], [256, 1], [count, 256], layout)


class Widths(NamedTuple):
    """Columns of the blocks of two head sizes, and those of them that are multiplied; `counted` are
    those of the buffer as well in which grad_q is summed."""

    size: int
    v_size: int
    counted: int
    v_counted: int

    @classmethod
    def of(cls, q: torch.Tensor, v: torch.Tensor) -> Widths:
        sizes = [width_of(x.shape[-1]) for x in (q, v)]
        if max(sizes) <= 128:
            return cls(*(max(sizes),) * 4)
        counted = (
            192 if 128 < x.shape[-1] <= 192 else size for x, size in zip((q, v), sizes, strict=True)
        )
        return cls(*sizes, *counted)

    @property
    def wide(self) -> bool:
        return max(self.size, self.v_size) > 128

    @property
    def queries(self) -> int:
        """Of a block."""
        return 128 if self.size == 64 and not self.wide else 64

    @property
    def fit_adder(self) -> bool:
        """Whether there is room for one beside wide heads."""
        return self.wide and self.counted == 192 and self.v_size <= 128


def supports(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    grad_o: torch.Tensor,
    grads: tuple[torch.Tensor, ...],
) -> bool:
    """What the forward kernel supports, with gradients that TMA can describe as well, and a scale
    by which lse can be divided."""
    return scale >= _LEAST and fused_attention.supports(q, k, v, scale, grad_o, *grads)


def launch(
    grad_o: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse2: torch.Tensor,
    delta: torch.Tensor,
    sums: torch.Tensor | None,
    turns: torch.Tensor | None,
    grads: tuple[torch.Tensor, ...],
    sizes: Sizes,
    causal: bool,
    scale: float,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    window: int | None,
) -> None:
    """Writes the three `grads`; without `sums`, all but that of q.  With `turns`, zeros, additions
    are in turn: the first counts programs, the others additions to blocks of queries."""
    varlen, padded = sizes.varlen, lse2.shape[-1]
    widths = Widths.of(q, v)
    size, v_size, wide = widths.size, widths.v_size, widths.wide
    # Causal, B 4, H 16, 4096 tokens, H200, 2026-11: heads of 192 and 128 2515 us, added to by
    # threads 2820
    adder = turns is not None or (sums is not None and widths.fit_adder)
    block, keys, stages = widths.queries, 64 if wide else 128, _STAGES
    n_q, n_k, heads, key_heads = sizes.n_q, sizes.n_k, sizes.heads, sizes.key_heads
    outers = sizes.outer * key_heads
    section = min(outers, max(1, _SHARE // (sizes.rows * size * 8)))
    listed, tiles = plan(cu_seqlens_k, cu_seqlens_q, n_k, n_q, keys, down=turns is not None)
    launches.kernel(_backward_hopper, tiles * outers)(
        describe(q, block, size, varlen),
        describe(grad_o, block, v_size, varlen),
        describe(k, keys, size, varlen),
        describe(v, keys, v_size, varlen),
        describe(grads[1], keys, size, varlen),
        describe(grads[2], keys, v_size, varlen),
        describe_row(lse2, block),
        describe_row(delta, block),
        _describe_sums(sums, 16 if wide else block * size // 256)
        if sums is not None and (adder or (size == 128 and not wide))
        else None,
        sums,
        turns,
        listed,
        scale,
        min(window or 0, 2**30),
        tiles,
        outers,
        key_heads,
        section,
        n_q,
        n_k,
        padded,
        C=Constants(
            BLOCK_M=block,
            BLOCK_N=keys,
            D=size,
            V=v_size,
            SIZE=widths.counted,
            V_SIZE=widths.v_counted,
            STAGES=stages,
            GROUP=sizes.group,
            CAUSAL=causal,
            WINDOW=window is not None,
            VARLEN=varlen,
            GRAD_Q=sums is not None,
            ADDER=adder,
            IN_TURN=turns is not None,
        ),
        num_warps=8,
    )
    if sums is None:
        return
    listed, tiles = plan(cu_seqlens_q, cu_seqlens_k, n_q, n_k, 64)
    launches.kernel(_round_kernel, tiles * sizes.outer * heads)(
        sums,
        turns,
        grads[0],
        listed,
        scale,
        tiles,
        n_q,
        heads,
        padded,
        *strides(grads[0]),
        D=q.shape[-1],
        WIDTH=widths.counted,
        BLOCK_M=64,
        QUERIES=block,
        VARLEN=varlen,
        num_warps=4,
    )
