# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Fused attention on Hopper (Gluon): a producer warp loads by TMA, consumer warpgroups multiply.

Every tensor is a 5-D descriptor, so that one kernel serves both layouts.  Dense: (1, B, H, N, D).
Packed: (2^31, 2^31, H, 2^30, D), whose strides wrap around 2^64 such that the hardware's bounds
check ends at the sequence: row n of a sequence of length L that begins at f has the coordinates
(2^30, f + L, head, 2^30 - L + n, 0), and n >= L is out of bounds.  A tile then never shows a row of
the next sequence, and never writes one.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ....dispatch.ops.attention.fused_attention import Arguments
from ...common import gpu
from ...common.attention_tiles import Sizes, keys_of, plan, row_strides, width_of
from ...common.gluon_names import barrier, reinterpret, tma_load, tma_store
from ...common.hopper.tma import at, describable, describe
from ...common.log2 import LEAST, LN2, LOG2E
from ...runtime import launches
from .turns import seen, tile_listed, turn_of

_keys_of = gluon.jit(keys_of.fn)


class Shared(NamedTuple):
    """Tiles in shared memory, what the producer posts of them, and barriers."""

    q: Any
    k: Any
    v: Any
    o: Any
    posted: Any
    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    post_full: Any


class Constants(NamedTuple):
    """NC consumers of 64 queries, QUEUE tiles of queries, KS and VS blocks of BLOCK_N keys and
    values; queries and keys lie in pieces of W columns."""

    D: int
    V: int
    W: int
    BLOCK_N: int
    NC: int
    QUEUE: int
    KS: int
    VS: int
    GROUP: int
    CAUSAL: bool
    WINDOW: bool
    VARLEN: bool
    REGISTERS: int


@gluon.jit
def _tile_of(number, plan, tiles, outers, heads, section, rows, other_rows, VARLEN: gl.constexpr):
    """(batch, head, first row, rows, first other row, other rows, tile) of a tile number.

    Packed sequences: in the order of the list.  Dense: the tiles of the last section come longest
    first, of the one before shortest first and so on (see `_section`).
    """
    group, outer, place = turn_of(number, tiles, outers, section)
    if VARLEN:
        first, rows, other_first, other_rows, tile, _piece = tile_listed(plan, place)
        return 0, outer, first, rows, other_first, other_rows, tile
    down = ((outers + section - 1) // section - group) & 1
    tile = gl.where(down == 1, tiles - 1 - place, place)
    return outer // heads, outer % heads, 0, rows, 0, other_rows, tile


@gluon.jit
def _round_of(step, programs):
    """Number of a program's step-th tile: rounds of all programs, every second one backwards.
    (Of packed sequences, whose lengths the host does not know, it is the next of a counter.)"""
    program = gl.program_id(0)
    forth = (step & 1) == 0
    return step * programs + gl.where(forth, program, programs - 1 - program)


@gluon.jit
def _blocks_of(begin, rows, other_rows, window, BLOCK_M: gl.constexpr, C: gl.constexpr):
    """Blocks of keys that BLOCK_M rows from `begin` on see: [low, top), of which [full_low,
    full_high) are seen whole by all of them."""
    shift = other_rows - rows
    first = begin + shift
    last = gl.minimum(begin + BLOCK_M, rows) - 1 + shift
    low, high, full_low, full_high = _keys_of(first, last, other_rows, window, C.CAUSAL, C.WINDOW)
    low = gl.maximum(low, 0) // C.BLOCK_N
    top = gl.maximum(
        (high + C.BLOCK_N - 1) // C.BLOCK_N, low + 1
    )  # at least one, wholly masked if need be
    full_high = gl.minimum(gl.maximum(full_high, 0) // C.BLOCK_N, top - 1)
    full_low = gl.maximum((full_low + C.BLOCK_N - 1) // C.BLOCK_N, low)
    full_high = gl.maximum(full_high, low)
    full_low = gl.minimum(full_low, full_high)
    return low, top, full_low, full_high


@gluon.jit
def _ping_pong(BARRIER: gl.constexpr, ARRIVE: gl.constexpr):
    """Named barrier of two consumers, 256 threads: wait for one's turn, or give it to the next."""
    if ARRIVE:
        gl.inline_asm_elementwise(
            f"bar.arrive {BARRIER}, 256; mov.b32 $0, 0;", "=r", [], gl.int32, False, 1
        )
    else:
        gl.inline_asm_elementwise(
            f"bar.sync {BARRIER}, 256; mov.b32 $0, 0;", "=r", [], gl.int32, False, 1
        )


@gluon.jit
def _softmax(
    s,
    row_max,
    row_sum,
    row,
    begin,
    shift,
    columns,
    window,
    scale_log2,
    MASKED: gl.constexpr,
    C: gl.constexpr,
):
    """(p of even columns, of odd ones, row_max, row_sum, alpha) after scores s [64, BLOCK_N] of the
    keys from `begin` on; row_max is unscaled, row_sum in parts."""
    MS: gl.constexpr = s.type.layout
    if MASKED:
        # counted from the first key of the block
        column = gl.arange(0, C.BLOCK_N, layout=gl.SliceLayout(0, MS))[None, :]
        position = row + (shift - begin)
        end = columns - begin
        keep = seen(column, position, end, window, C.CAUSAL, C.WINDOW)
        s = gl.where(keep, s, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(s, 1))
    if MASKED:
        top = gl.where(new_max == float("-inf"), 0.0, new_max) * scale_log2
    else:
        top = new_max * scale_log2
    p = gl.exp2(s * scale_log2 - top[:, None])
    alpha = gl.exp2(row_max * scale_log2 - top)
    even, odd = gl.split(gl.reshape(p, [p.shape[0], p.shape[1] // 2, 2]))
    # a thread holds every fourth pair of columns: four parts of a sum need no other thread
    sums = gl.sum(gl.reshape(even + odd, [p.shape[0], p.shape[1] // 8, 4]), 1)
    row_sum = row_sum * gl.convert_layout(alpha, gl.SliceLayout(1, row_sum.type.layout))[:, None]
    row_sum = row_sum + gl.convert_layout(sums, row_sum.type.layout)
    return even, odd, new_max, row_sum, alpha


@gluon.jit
def _pairs(even, odd, HALF: gl.constexpr):
    """Neighbours rounded into one register.  A loop that carries halves by themselves takes them
    apart and packs them again at every turn (causal, heads of 64, B 4, H 16, 4096 tokens, H200,
    2026-11: 342 us, like this and with masks only where needed 293)."""
    name: gl.constexpr = "bf16x2" if gl.bfloat16 == HALF else "f16x2"
    return gl.inline_asm_elementwise(
        f"cvt.rn.{name}.f32 $0, $2, $1;", "=r,f,f", [even, odd], gl.int32, True, 1
    )


@gluon.jit
def _operand(pairs, HALF: gl.constexpr, MO: gl.constexpr):
    """Pairs [64, BLOCK_N / 2] as the left side of a product; costs no instruction."""
    even = (pairs & 65535).to(gl.int16).to(HALF, bitcast=True)
    odd = (pairs >> 16).to(gl.int16).to(HALF, bitcast=True)
    p = gl.reshape(gl.join(even, odd), [pairs.shape[0], 2 * pairs.shape[1]])
    return gl.convert_layout(p, gl.DotOperandLayout(0, MO, 2))


@gluon.jit
def _scores(s_zero, shared, place, stage, C: gl.constexpr):
    """Begins the product of a consumer's queries with a block of keys."""
    PIECES: gl.constexpr = C.D // C.W
    s = s_zero
    for i in gl.static_range(PIECES):
        q_at = shared.q.index(place * PIECES + i)
        k_at = shared.k.index(stage * PIECES + i).permute((1, 0))
        s = warpgroup_mma(q_at, k_at, s, use_acc=i > 0, is_async=True)
    return s


@gluon.jit
def _step(
    s_zero,
    acc,
    p,
    row_max,
    row_sum,
    row,
    place,
    shared,
    count,
    block,
    shift,
    columns,
    window,
    scale_log2,
    WG: gl.constexpr,
    MASKED: gl.constexpr,
    C: gl.constexpr,
):
    """Scores of block `block` while p of the block before is multiplied with its values."""
    MO: gl.constexpr = acc.type.layout
    p_at = _operand(p, shared.v.dtype, MO)
    k_stage = count % C.KS
    mbarrier.wait(shared.k_full.index(k_stage), (count // C.KS) & 1)
    _ping_pong(8 + WG, False)
    s_flight = _scores(s_zero, shared, place, k_stage, C)
    v_stage = (count - 1) % C.VS
    mbarrier.wait(shared.v_full.index(v_stage), ((count - 1) // C.VS) & 1)
    o_flight = warpgroup_mma(p_at, shared.v.index(v_stage), acc, is_async=True)
    _ping_pong(8 + (WG + 1) % C.NC, True)
    s = warpgroup_mma_wait(1, deps=[s_flight])
    mbarrier.arrive(shared.k_empty.index(k_stage))
    even, odd, row_max, row_sum, alpha = _softmax(
        s, row_max, row_sum, row, block * C.BLOCK_N, shift, columns, window, scale_log2, MASKED, C
    )
    acc = warpgroup_mma_wait(0, deps=[o_flight])
    mbarrier.arrive(shared.v_empty.index(v_stage))
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, MO))[:, None]
    p = _pairs(even, odd, shared.v.dtype)
    return acc, p, row_max, row_sum


@gluon.jit
def _meet():
    """Named barrier of the producer's warp.  Where a warp is together, Triton's own takes no
    instruction, and racecheck does not see it: with this one it reports nothing (before, every
    place that was used again)."""
    gl.inline_asm_elementwise("bar.sync 15, 32; mov.b32 $0, 0;", "=r", [], gl.int32, False, 1)


@gluon.jit
def _post(posted, full, slot, batch, head, first, rows, columns, tile):
    """Tells the consumers of a tile, in the place that its queries have in the queue: nobody reads
    there any more, since they have given back the queries.  No rows: there are no more tiles."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    values = (batch, head, first, rows, columns, tile)
    _meet()
    for i in gl.static_range(6):
        posted.index(slot * 6 + i).store(gl.full([1], values[i], gl.int32, layout=one))
    _meet()
    mbarrier.arrive(full.index(slot))


@gluon.jit
def _posted(posted, slot, WHICH: gl.constexpr):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(posted.index(slot * 6 + WHICH).load(ONE), 0)


@gluon.jit
def _next_rows(posted, full, tile_count, QUEUE: gl.constexpr):
    """Rows of the sequence of the tile to come."""
    mbarrier.wait(full.index(tile_count % QUEUE), (tile_count // QUEUE) & 1)
    barrier()  # racecheck believes the wait only where its warps meet after it
    return _posted(posted, tile_count % QUEUE, 3)


@gluon.jit
def _forward_consumer(
    shared,
    o_desc,
    lse,
    scale_log2,
    window,
    lse_batch,
    lse_head,
    lse_row,
    WG: gl.constexpr,
    C: gl.constexpr,
):
    (_q, _k, v, o, posted, q_full, q_empty, k_full, k_empty, v_full, v_empty, post_full) = shared
    BLOCK_M: gl.constexpr = 64 * C.NC
    OWN_O: gl.constexpr = C.D + C.V < 512  # else o takes the place of q
    MS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_N, 16])
    MO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.V, 16])
    SUMS: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )
    s_zero = gl.full([64, C.BLOCK_N], 0.0, gl.float32, layout=MS)
    count = 0
    tile_count = 0
    if WG == C.NC - 1:
        _ping_pong(8, True)
    rows = _next_rows(posted, post_full, 0, C.QUEUE)
    while rows > 0:
        slot = tile_count % C.QUEUE
        batch = _posted(posted, slot, 0)
        head = _posted(posted, slot, 1)
        first_q = _posted(posted, slot, 2)
        columns = _posted(posted, slot, 4)
        tile = _posted(posted, slot, 5)
        low, last, _low, _high = _blocks_of(tile * BLOCK_M, rows, columns, window, BLOCK_M, C)
        # of these blocks, from the last to the first, what the rows of this consumer see
        _begin, top, full_low, full_high = _blocks_of(
            tile * BLOCK_M + WG * 64, rows, columns, window, 64, C
        )
        top = gl.minimum(gl.maximum(top, low + 1), last)
        full_high = gl.minimum(gl.maximum(full_high, low), top - 1)
        full_low = gl.minimum(gl.maximum(full_low, low), full_high)
        for _block in range(0, last - top):  # seen by later rows alone
            k_stage = count % C.KS
            mbarrier.wait(k_full.index(k_stage), (count // C.KS) & 1)
            _ping_pong(8 + WG, False)
            _ping_pong(8 + (WG + 1) % C.NC, True)
            mbarrier.arrive(k_empty.index(k_stage))
            v_stage = count % C.VS
            mbarrier.wait(v_full.index(v_stage), (count // C.VS) & 1)
            mbarrier.arrive(v_empty.index(v_stage))
            count += 1
        row = tile * BLOCK_M + WG * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, MS))
        shift = columns - rows
        place = slot * C.NC + WG
        mbarrier.wait(q_full.index(place), (tile_count // C.QUEUE) & 1)
        k_stage = count % C.KS
        mbarrier.wait(k_full.index(k_stage), (count // C.KS) & 1)
        s_flight = _scores(s_zero, shared, place, k_stage, C)
        s = warpgroup_mma_wait(0, deps=[s_flight])
        mbarrier.arrive(k_empty.index(k_stage))
        row_max = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, MS))
        row_sum = gl.zeros([64, 4], gl.float32, layout=SUMS)
        even, odd, row_max, row_sum, _alpha = _softmax(
            s,
            row_max,
            row_sum,
            row,
            (top - 1) * C.BLOCK_N,
            shift,
            columns,
            window,
            scale_log2,
            True,
            C,
        )
        p = _pairs(even, odd, v.dtype)
        acc = gl.full([64, C.V], 0.0, gl.float32, layout=MO)
        count += 1
        for back in range(0, top - 1 - full_high):
            acc, p, row_max, row_sum = _step(
                s_zero,
                acc,
                p,
                row_max,
                row_sum,
                row,
                place,
                shared,
                count,
                top - 2 - back,
                shift,
                columns,
                window,
                scale_log2,
                WG,
                True,
                C,
            )
            count += 1
        for back in range(0, full_high - full_low):
            acc, p, row_max, row_sum = _step(
                s_zero,
                acc,
                p,
                row_max,
                row_sum,
                row,
                place,
                shared,
                count,
                full_high - 1 - back,
                shift,
                columns,
                window,
                scale_log2,
                WG,
                False,
                C,
            )
            count += 1
        if C.WINDOW:
            for back in range(0, full_low - low):
                acc, p, row_max, row_sum = _step(
                    s_zero,
                    acc,
                    p,
                    row_max,
                    row_sum,
                    row,
                    place,
                    shared,
                    count,
                    full_low - 1 - back,
                    shift,
                    columns,
                    window,
                    scale_log2,
                    WG,
                    True,
                    C,
                )
                count += 1
        v_stage = (count - 1) % C.VS
        mbarrier.wait(v_full.index(v_stage), ((count - 1) // C.VS) & 1)
        o_flight = warpgroup_mma(_operand(p, v.dtype, MO), v.index(v_stage), acc, is_async=True)
        if OWN_O:
            mbarrier.arrive(q_empty.index(place))
        acc = warpgroup_mma_wait(0, deps=[o_flight])
        mbarrier.arrive(v_empty.index(v_stage))

        row_sum = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, MS))
        valid = row_sum != 0  # a NaN is there, and stays one
        inverse = 1.0 / gl.where(valid, row_sum, 1.0)
        acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, MO))[:, None]
        if OWN_O:
            # it was read by the store of the tile before
            tma.store_wait(0)
            barrier()
        o_at = o.index(WG)
        o_at.store(acc.to(v.dtype))
        fence_async_shared()
        barrier()
        tma_store(
            o_desc,
            at(batch, head, first_q, rows, tile * BLOCK_M + WG * 64, C.VARLEN),
            reinterpret(o_at, v.dtype, o_desc.block_shape, o_desc.layout),
        )
        natural = gl.where(
            valid,
            (row_max * scale_log2 + gl.log2(gl.where(valid, row_sum, 1.0))) * LN2,
            float("-inf"),
        )
        lse_at = lse + batch.to(gl.int64) * lse_batch + head.to(gl.int64) * lse_head
        lse_at += (first_q + row).to(gl.int64) * lse_row
        gl.store(lse_at, natural, row < rows)
        if not OWN_O:
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(place))
        tile_count += 1
        rows = _next_rows(posted, post_full, tile_count, C.QUEUE)
    tma.store_wait(0)


@gluon.jit
def _forward_producer(
    shared,
    counter,
    q_desc,
    k_desc,
    v_desc,
    plan,
    window,
    tiles,
    outers,
    heads,
    section,
    n_q,
    n_k,
    total,
    C: gl.constexpr,
):
    (q, k, v, _o, posted, q_full, q_empty, k_full, k_empty, v_full, v_empty, post_full) = shared
    NC: gl.constexpr = C.NC
    BLOCK_M: gl.constexpr = 64 * NC
    PIECES: gl.constexpr = C.D // C.W
    programs = gl.num_programs(0)
    if C.VARLEN:
        tiles = gl.load(counter + 1)
        total = tiles * outers
    count = 0
    tile_count = 0
    step = 0
    number = gl.program_id(0)
    while number < total:
        # the number after this one travels ahead of everything else of this one
        step += 1
        if C.VARLEN:
            following = programs + gl.atomic_add(counter, 1)
        else:
            following = _round_of(step, programs)
        batch, head, first_q, rows, first_k, columns, tile = _tile_of(
            number, plan, tiles, outers, heads, section, n_q, n_k, C.VARLEN
        )
        if tile * BLOCK_M < rows:
            low, top, _, _ = _blocks_of(tile * BLOCK_M, rows, columns, window, BLOCK_M, C)
            kv_head = head // C.GROUP
            slot = tile_count % C.QUEUE
            # the oldest tile gives its place to this one
            for wg in gl.static_range(NC):
                mbarrier.wait(q_empty.index(slot * NC + wg), (tile_count // C.QUEUE & 1) ^ 1)
            _post(posted, post_full, slot, batch, head, first_q, rows, columns, tile)
            for wg in gl.static_range(NC):
                place = slot * NC + wg
                mbarrier.expect(q_full.index(place), 64 * C.D * 2)
                for i in gl.static_range(PIECES):
                    tma_load(
                        q_desc,
                        at(batch, head, first_q, rows, tile * BLOCK_M + wg * 64, C.VARLEN, i * C.W),
                        q_full.index(place),
                        reinterpret(
                            q.index(place * PIECES + i), q.dtype, q_desc.block_shape, q_desc.layout
                        ),
                    )
            tile_count += 1
            for back in range(0, top - low + 1):
                # the keys of a block travel ahead of the values of the block before
                if back < top - low:
                    stage = count % C.KS
                    mbarrier.wait(k_empty.index(stage), ((count // C.KS) & 1) ^ 1)
                    mbarrier.expect(k_full.index(stage), C.BLOCK_N * C.D * 2)
                    for i in gl.static_range(PIECES):
                        tma_load(
                            k_desc,
                            at(
                                batch,
                                kv_head,
                                first_k,
                                columns,
                                (top - 1 - back) * C.BLOCK_N,
                                C.VARLEN,
                                i * C.W,
                            ),
                            k_full.index(stage),
                            reinterpret(
                                k.index(stage * PIECES + i),
                                k.dtype,
                                k_desc.block_shape,
                                k_desc.layout,
                            ),
                        )
                if back > 0:
                    stage = (count - 1) % C.VS
                    mbarrier.wait(v_empty.index(stage), (((count - 1) // C.VS) & 1) ^ 1)
                    mbarrier.expect(v_full.index(stage), C.BLOCK_N * C.V * 2)
                    tma_load(
                        v_desc,
                        at(batch, kv_head, first_k, columns, (top - back) * C.BLOCK_N, C.VARLEN),
                        v_full.index(stage),
                        reinterpret(v.index(stage), v.dtype, v_desc.block_shape, v_desc.layout),
                    )
                count += 1
            count -= 1
        number = following
    slot = tile_count % C.QUEUE
    for wg in gl.static_range(NC):
        mbarrier.wait(q_empty.index(slot * NC + wg), (tile_count // C.QUEUE & 1) ^ 1)
    _post(posted, post_full, slot, 0, 0, 0, 0, 0, 0)


@gluon.jit(
    do_not_specialize=[
        "scale_log2", "window", "tiles", "outers", "heads", "section", "n_q", "n_k", "total",
        "lse_batch", "lse_head", "lse_row",
    ]
)  # fmt: skip
def _forward_hopper(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    lse,
    plan,
    counter,
    scale_log2,
    window,
    tiles,
    outers,
    heads,
    section,
    n_q,
    n_k,
    total,
    lse_batch,
    lse_head,
    lse_row,
    C: gl.constexpr,
):
    """NC consumer warpgroups of 64 rows each and a producer; programs walk over many tiles."""
    NC: gl.constexpr = C.NC
    QUEUE: gl.constexpr = C.QUEUE
    KS: gl.constexpr = C.KS
    VS: gl.constexpr = C.VS
    dtype: gl.constexpr = q_desc.dtype
    W_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, C.W], dtype)
    V_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, C.V], dtype)
    PIECES: gl.constexpr = C.D // C.W
    q = gl.allocate_shared_memory(dtype, [QUEUE * NC * PIECES, 64, C.W], W_SHARED)
    k = gl.allocate_shared_memory(dtype, [KS * PIECES, C.BLOCK_N, C.W], W_SHARED)
    v = gl.allocate_shared_memory(dtype, [VS, C.BLOCK_N, C.V], V_SHARED)
    if C.D + C.V < 512:
        o = gl.allocate_shared_memory(dtype, [NC, 64, C.V], V_SHARED)
    else:
        o = reinterpret(q, dtype, [QUEUE * NC, 64, C.V], V_SHARED)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [QUEUE * NC, 1], BAR)
    q_empty = gl.allocate_shared_memory(gl.int64, [QUEUE * NC, 1], BAR)
    k_full = gl.allocate_shared_memory(gl.int64, [KS, 1], BAR)
    k_empty = gl.allocate_shared_memory(gl.int64, [KS, 1], BAR)
    v_full = gl.allocate_shared_memory(gl.int64, [VS, 1], BAR)
    v_empty = gl.allocate_shared_memory(gl.int64, [VS, 1], BAR)
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    posted = gl.allocate_shared_memory(gl.int32, [QUEUE * 6, 1], WORDS)
    post_full = gl.allocate_shared_memory(gl.int64, [QUEUE, 1], BAR)
    for i in gl.static_range(QUEUE):
        mbarrier.init(post_full.index(i), count=1)
    for i in gl.static_range(QUEUE * NC):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(KS):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=NC)
    for i in gl.static_range(VS):
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=NC)
    fence_async_shared()
    barrier()
    shared = Shared(
        q, k, v, o, posted, q_full, q_empty, k_full, k_empty, v_full, v_empty, post_full
    )
    if NC == 2:
        gl.warp_specialize(
            [
                (
                    _forward_consumer,
                    (
                        shared,
                        o_desc,
                        lse,
                        scale_log2,
                        window,
                        lse_batch,
                        lse_head,
                        lse_row,
                        gl.constexpr(0),
                        C,
                    ),
                ),
                (
                    _forward_consumer,
                    (
                        shared,
                        o_desc,
                        lse,
                        scale_log2,
                        window,
                        lse_batch,
                        lse_head,
                        lse_row,
                        gl.constexpr(1),
                        C,
                    ),
                ),
                (
                    _forward_producer,
                    (
                        shared,
                        counter,
                        q_desc,
                        k_desc,
                        v_desc,
                        plan,
                        window,
                        tiles,
                        outers,
                        heads,
                        section,
                        n_q,
                        n_k,
                        total,
                        C,
                    ),
                ),
            ],
            [4, 1],
            [C.REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _forward_consumer,
                    (
                        shared,
                        o_desc,
                        lse,
                        scale_log2,
                        window,
                        lse_batch,
                        lse_head,
                        lse_row,
                        gl.constexpr(0),
                        C,
                    ),
                ),
                (
                    _forward_consumer,
                    (
                        shared,
                        o_desc,
                        lse,
                        scale_log2,
                        window,
                        lse_batch,
                        lse_head,
                        lse_row,
                        gl.constexpr(1),
                        C,
                    ),
                ),
                (
                    _forward_consumer,
                    (
                        shared,
                        o_desc,
                        lse,
                        scale_log2,
                        window,
                        lse_batch,
                        lse_head,
                        lse_row,
                        gl.constexpr(2),
                        C,
                    ),
                ),
                (
                    _forward_producer,
                    (
                        shared,
                        counter,
                        q_desc,
                        k_desc,
                        v_desc,
                        plan,
                        window,
                        tiles,
                        outers,
                        heads,
                        section,
                        n_q,
                        n_k,
                        total,
                        C,
                    ),
                ),
            ],
            [4, 4, 1],
            [C.REGISTERS, C.REGISTERS, 24],
        )


# Bytes of keys and values whose heads take turns, of 50 MB of L2; from half to twice as many where
# that deals tiles out better.  Causal, B 4, H 16, D 128, H200, 2026-11, before the loop became
# shorter: 4096 tokens 451 us (32 MB 473, 64 MB 510), 16384 tokens 7300 (8 MB 7808, 32 MB 7434,
# 64 MB 7895)
_SHARE = 16 * 2**20
_EVEN = 1.02  # of the mean, what the busiest program may take


def _most(costs: list[int], outers: int, section: int, programs: int) -> float:
    """The work of the busiest program over the mean, as `_tile_of` orders tiles of these costs and
    `_round_of` deals them out."""
    order: list[int] = []
    last = (outers - 1) // section
    for group in range(last + 1):
        count = min(section, outers - group * section)
        here = costs if (last - group) & 1 else costs[::-1]
        order += [cost for cost in here for _ in range(count)]
    work = [0] * programs
    for begin in range(0, len(order), 2 * programs):
        forth = order[begin : begin + programs]
        back = order[begin + programs : begin + 2 * programs]
        for program, cost in enumerate(forth):
            work[program] += cost
        for program, cost in enumerate(back):
            work[-1 - program] += cost
    return max(work) * programs / sum(work)


@cache
def _section(
    rows: int,
    n_q: int,
    n_k: int,
    kv_len: int | None,
    outers: int,
    group: int,
    wanted: int,
    programs: int,
) -> int:
    """How many heads take turns, `wanted` groups or so: where the tiles of a section are about as
    many as the programs, the same programs would take the longest of every section.  `kv_len`: keys
    that a causal row sees at most; None: tiles cost the same, or are not dealt out.

    Causal, 4096 tokens, H 16, heads of 256, H200, 2026-11: B 4 795 us (as wanted 1181, tiles taken
    by a counter 813), B 1 193 us (324, 210); heads of 192 and 128, B 1 124 us (148); heads of 128
    387 us (by a counter 398)."""
    wanted = min(wanted, triton.cdiv(outers, group))
    tiles = triton.cdiv(n_q, rows)
    if kv_len is None or not programs < tiles * outers < 256 * programs:
        return min(outers, wanted * group)
    begins = range(n_k - n_q + rows, n_k + rows, rows)
    costs = [rows + max(0, min(end, n_k, kv_len + rows)) for end in begins]
    found: list[tuple[float, int]] = []
    sizes = {wanted, *range((wanted + 1) // 2, 2 * wanted + 1, max(1, wanted // 8))}
    for size in sorted(sizes, key=lambda x: abs(x - wanted)):
        section = min(outers, size * group)
        found.append((_most(costs, outers, section, programs), section))
        if found[-1][0] < _EVEN:
            break
    return min(found, key=lambda each: each[0])[1]  # of equals the first


def _config(size: int, v_size: int, rows: int) -> dict[str, Any]:
    """Causal, 64 heads of 4096 tokens, H100, 2026-11-26: heads of 64 310 us (two consumers 329,
    blocks of 64 keys 343), of 192 and 128 578 us (blocks of 64 keys 624, with two stages of values
    and one of keys 609).

    Tiles of 192 rows are too coarse for short sequences: 512 heads of 64 and 512 tokens 82 us, with
    two consumers 67; 256 heads of 1024 tokens 116 and 102.  The queries of the next tile travel
    while this one is under way: 512 heads of 128 and 512 tokens 92 to 94 us, else 100."""
    if max(size, v_size) == 64:
        return dict(NC=2 if rows <= 1024 else 3, BLOCK_N=128, KS=3, VS=3, QUEUE=2)
    if max(size, v_size) == 128:
        return dict(NC=2, BLOCK_N=128, KS=2, VS=2, QUEUE=2)
    if size == 192 and v_size <= 128:
        return dict(NC=2, BLOCK_N=128, KS=2, VS=1, QUEUE=1)
    return dict(NC=2, BLOCK_N=64, KS=2, VS=2, QUEUE=1)


def supports(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *more: torch.Tensor
) -> bool:
    """Heads up to 256, one dtype, and tensors that TMA can describe, `more` among them."""
    if not gpu.is_hopper(q.device) or max(q.shape[-1], v.shape[-1]) > 256:
        return False
    if scale * LOG2E.value < LEAST:
        return False
    if v.dtype != q.dtype or 0 in (k.numel(), v.numel()):
        return False
    return all(describable(x) for x in (q, k, v, *more))


def launch(x: Arguments, sizes: Sizes, scale: float, o: torch.Tensor, lse: torch.Tensor) -> None:
    q, k, v, causal, window = x["q"], x["k"], x["v"], x["causal"], x["window"]
    size, v_size, varlen = width_of(q.shape[-1]), width_of(v.shape[-1]), sizes.varlen
    if 128 < q.shape[-1] <= 192:
        size = 192
    width = 64 if size == 192 else size
    config = _config(size, v_size, sizes.rows)
    keys, rows = config["BLOCK_N"], 64 * config["NC"]
    counter, outers = None, sizes.outer * sizes.heads
    listed, tiles = plan(x["cu_seqlens_q"], x["cu_seqlens_k"], sizes.n_q, sizes.n_k, rows)
    if listed is not None:
        tiles -= 1
        counter = listed[tiles, 6:]
    total = tiles * outers
    programs = min(total, gpu.num_sms(q.device))
    wanted = max(1, _SHARE // (sizes.keys * (size + v_size) * 2))
    kv_len = (window or sizes.n_k) if causal and listed is None else None
    section = _section(rows, sizes.n_q, sizes.n_k, kv_len, outers, sizes.group, wanted, programs)
    launches.kernel(_forward_hopper, programs)(
        describe(q, 64, width, varlen),
        describe(k, keys, width, varlen),
        describe(v, keys, v_size, varlen),
        describe(o, 64, v_size, varlen),
        lse,
        listed,
        counter,
        scale * LOG2E.value,
        min(window or 0, 2**30),
        tiles,
        outers,
        sizes.heads,
        section,
        sizes.n_q,
        sizes.n_k,
        total,
        *row_strides(lse),
        C=Constants(
            D=size,
            V=v_size,
            W=width,
            GROUP=sizes.group,
            CAUSAL=causal,
            WINDOW=window is not None,
            VARLEN=varlen,
            REGISTERS=240 if config["NC"] == 2 else 160,
            **config,
        ),
        num_warps=4,
    )
