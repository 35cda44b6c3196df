# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Gated delta rule over whole sequences on Hopper (Gluon), 64 tokens at a time.

With the letters of chunk_gated_delta_rule, but U and W are never made: what the walk needs of them
is T' = T beta, since U - W S = T' (v - exp(G) (k S)), and the keys are there anyway.  So the first
kernel leaves T' and P of every chunk, [64, 64] each, and the second walks over the chunks:

    R = v - exp(G) (k S);  N = T' R;  out = scale exp(G) (q S) + P N;
    S = exp(G_last) S + k^T (exp(G_last - G) N)

A program of the walk owns 64 columns of one head's state, transposed, in the registers of a
warpgroup: S^T, R^T and N^T are then the left operands of their products, which wgmma takes from
registers, and nothing on the chain from chunk to chunk goes through shared memory.  A producer
warp loads ahead.  Descriptors end at the sequence (see fused_attention.py): rows behind it are
zeros, and are not written.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...dispatch.common import memory
from ..common import gpu, launches
from ..common.gluon_names import barrier, reinterpret, tma_load, tma_store
from .tma import aligned, at, describe, describe_matrix, describe_row

CHUNK = 64

# H200, 2026-11, N 16, Nv 32, Dk = Dv = 128, bfloat16, 4096 / 65536 tokens: 139 / 2076 us, of which
# the walk takes 74 / 1112; with two stages it takes 83 / 1240.  For all value heads of a key head
# at once the first kernel shares two products, and takes 71 us instead of 63 at 4096 tokens.
_STAGES = 3


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _add_lengths(a, b):
    """Of numbers from 0, in 32 bits: beyond them it is the largest, which is beyond the tokens."""
    return a + gl.minimum(b, 2147483647 - a)


@gluon.jit
def _lengths(lengths, T, sequences, SEQUENCES: gl.constexpr):
    """By sequence [SEQUENCES]: its number and length."""
    LIST: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    s = gl.arange(0, SEQUENCES, layout=LIST)
    each = gl.load(lengths + s, mask=s < sequences, other=0)
    # before it is cast: what does not fit 32 bits wraps
    return s, gl.minimum(gl.maximum(each, 0), T).to(gl.int32)


@gluon.jit
def _tokens(s, each, before, sequence, T):
    """(first token, length) of a sequence, behind those that are `before` it."""
    # the largest and a sum are instructions of a warp: what other reductions give is to ptxas not
    # the same in all threads, and the walk would spill
    ends = gl.associative_scan(each, 0, _add_lengths)
    start = gl.minimum(gl.max(gl.where(before, ends, 0), 0), T)
    length = gl.sum(gl.where(s == sequence, each, 0), 0)
    return start, gl.minimum(length, T - start)


@gluon.jit
def _halves(x):
    """x of float32 as the sum of two bfloat16: its upper half, and what that leaves."""
    high = (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
    return high.to(gl.bfloat16), (x - high).to(gl.bfloat16)


@gluon.jit
def _product(a_high, a_low, b_high, b_low, zero):
    """a b of [64, 64] matrices, each the sum of two: 16 bits and more are right."""
    acc = warpgroup_mma(a_low, b_high, zero, use_acc=False, is_async=True)
    acc = warpgroup_mma(a_high, b_low, acc, is_async=True)
    return warpgroup_mma(a_high, b_high, acc, is_async=True)


@gluon.jit
def _inverse(lower, rows, columns, diagonal, dt_high, dt_low, b_high, b_low, zero):
    """(I + lower)^-1 of a strictly lower [64, 64] matrix, as a pending product.

    Blocks of 16 on the diagonal by forward substitution, a column of the inverse to a thread, which
    stays right where keys are alike and a power series would cancel: D.  Then twice
    [[A, 0], [B, C]]^-1 = [[A^-1, 0], [-C^-1 B A^-1, C^-1]], written for the whole matrix: with
    Z = D B, of which Z1 is inside blocks of 32 and Z2 below them,
    D' = (I - Z1) D,  W = (I - Z1) Z2,  inverse = (I - W) D'."""
    M: gl.constexpr = lower.type.layout
    A: gl.constexpr = gl.DotOperandLayout(0, M, 2)
    WIDE: gl.constexpr = gl.BlockedLayout(
        [1, 1, 4, 16], [2, 16, 1, 1], [gl.num_warps(), 1, 1, 1], [3, 2, 1, 0]
    )
    X: gl.constexpr = gl.SliceLayout(2, WIDE)
    inside = rows[:, None] // 16 == columns[None, :] // 16
    parts = gl.reshape(gl.where(inside, lower, 0.0), [4, 16, 4, 16])
    diagonal.store(gl.permute(gl.sum(parts, 2), (1, 0, 2)))
    by_row = reinterpret(
        diagonal, gl.float32, [16, 4, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    barrier()
    column = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, X)))[None, :, None]
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, X)))[None, None, :]
    # x [block, column, row]
    x = gl.zeros([4, 16, 16], gl.float32, layout=X) + gl.where(row == column, 1.0, 0.0)
    for r in gl.static_range(1, 16):
        factors = by_row.index(r).load(gl.SliceLayout(1, X))
        new = gl.sum(factors[:, None, :] * x, 2)
        x = gl.where(row == r, x - new[:, :, None], x)
    B4: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, WIDE)))
    R4: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, WIDE)))
    block = gl.arange(0, 4, layout=B4)[:, None][:, :, None][:, :, :, None]
    other = gl.arange(0, 4, layout=R4)[None, :][:, None, :][:, :, :, None]
    whole = gl.where(block == other, x[:, :, None, :], 0.0)
    high, low = _halves(gl.reshape(whole, [64, 64]))
    dt_high.store(high)
    dt_low.store(low)
    high, low = _halves(gl.where(inside, 0.0, lower))
    b_high.store(high)
    b_low.store(low)
    fence_async_shared()
    barrier()
    d_high = dt_high.permute((1, 0))
    d_low = dt_low.permute((1, 0))
    z = warpgroup_mma_wait(0, deps=[_product(d_high, d_low, b_high, b_low, zero)])
    near = rows[:, None] // 32 == columns[None, :] // 32
    eye = gl.where(rows[:, None] == columns[None, :], 1.0, 0.0)
    high, low = _halves(gl.where(near, 0.0, z))
    barrier()
    b_high.store(high)
    b_low.store(low)
    high, low = _halves(eye - gl.where(near, z, 0.0))
    a_high = gl.convert_layout(high, A)
    a_low = gl.convert_layout(low, A)
    fence_async_shared()
    barrier()
    wide_flight = _product(a_high, a_low, b_high, b_low, zero)
    d_flight = _product(a_high, a_low, d_high, d_low, zero)
    wide = warpgroup_mma_wait(3, deps=[wide_flight])
    high, low = _halves(eye - wide)
    a_high = gl.convert_layout(high, A)
    a_low = gl.convert_layout(low, A)
    doubled = warpgroup_mma_wait(0, deps=[d_flight])
    high, low = _halves(doubled)
    barrier()
    b_high.store(high)
    b_low.store(low)
    fence_async_shared()
    barrier()
    return warpgroup_mma_wait(0, deps=[_product(a_high, a_low, b_high, b_low, zero)])


@gluon.jit
def _decay(g, at, there, GATE: gl.constexpr):
    """(running sum [64] of the decay's logarithm, all of it)."""
    if GATE:
        gate = gl.load(g + at, mask=there, other=0.0).to(gl.float32)
    else:
        LIST: gl.constexpr = there.type.layout
        gate = gl.zeros([64], gl.float32, layout=LIST)
    return gl.associative_scan(gate, 0, _add), gl.sum(gate, 0)


@gluon.jit
def _fading(total, rows, columns):
    """(row i sees column j, what is left of column j by then)."""
    seen = rows[:, None] >= columns[None, :]
    of_row = gl.convert_layout(total, rows.type.layout)[:, None]
    of_column = gl.convert_layout(total, columns.type.layout)[None, :]
    return seen, gl.exp(gl.where(seen, of_row - of_column, 0.0))


@gluon.jit(do_not_specialize=["T", "sequences", "scale"])
def _prepare(
    q_desc, k_desc, t_desc, p_desc, beta, g, lengths, grown, left, rates, T, sequences, scale,
    b_row, g_row,
    NV: gl.constexpr, DK: gl.constexpr, GROUP: gl.constexpr, SEQUENCES: gl.constexpr,
    VARLEN: gl.constexpr, BETA: gl.constexpr, GATE: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """T' and P of a chunk and a value head; where `rates` are wanted, T - I instead of T'."""
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, 64, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, M)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, M)
    TOKENS: gl.constexpr = gl.BlockedLayout([2], [32], [num_warps], [0])
    dtype: gl.constexpr = q_desc.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    HALVES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, DK], dtype)
    q = gl.allocate_shared_memory(dtype, [64, DK], WIDE)
    k = gl.allocate_shared_memory(dtype, [64, DK], WIDE)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    chunk = gl.program_id(0)
    hv = gl.program_id(1)
    h = hv // GROUP
    start = 0
    first = chunk * 64
    length = T
    if VARLEN:
        s, each = _lengths(lengths, T, sequences, SEQUENCES)
        ends = gl.associative_scan((each + 63) // 64, 0, _add_lengths)
        before = ends <= chunk
        first = (chunk - gl.max(gl.where(before, ends, 0), 0)) * 64
        start, length = _tokens(s, each, before, gl.sum(before.to(gl.int32), 0), T)
    if first < length:
        mbarrier.init(full, count=1)
        fence_async_shared()
        barrier()
        mbarrier.expect(full, 64 * DK * 4)
        where = at(0, h, start, length, first, True)
        tma_load(k_desc, where, full, reinterpret(k, dtype, k_desc.block_shape, k_desc.layout))
        tma_load(q_desc, where, full, reinterpret(q, dtype, q_desc.block_shape, q_desc.layout))
        diagonal = gl.allocate_shared_memory(
            gl.float32, [16, 4, 16], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        )
        dt_low = gl.allocate_shared_memory(gl.bfloat16, [64, 64], HALVES)
        rows = gl.arange(0, 64, layout=ROWS)
        columns = gl.arange(0, 64, layout=COLUMNS)
        i = gl.arange(0, 64, layout=TOKENS)
        there = first + i < length
        token = (start + first + i).to(gl.int64)
        zero = gl.zeros([64, 64], gl.float32, layout=M)
        mbarrier.wait(full, 0)
        kk = warpgroup_mma(k, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        qk = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        kk = warpgroup_mma_wait(1, deps=[kk])
        qk = warpgroup_mma_wait(0, deps=[qk])
        # behind the barrier all warps have read the queries and keys
        tile = reinterpret(q, dtype, [DK // 64, 64, 64], TILE).index(0)
        b_high = reinterpret(k, gl.bfloat16, [DK // 64, 64, 64], HALVES).index(0)
        if DK == 128:
            dt_high = reinterpret(q, gl.bfloat16, [DK // 64, 64, 64], HALVES).index(1)
            b_low = reinterpret(k, gl.bfloat16, [DK // 64, 64, 64], HALVES).index(1)
        else:
            dt_high = gl.allocate_shared_memory(gl.bfloat16, [64, 64], HALVES)
            b_low = gl.allocate_shared_memory(gl.bfloat16, [64, 64], HALVES)
        place = (chunk * NV + hv) * 64
        total, last = _decay(g, token * g_row + hv, there, GATE)
        gl.store(grown + place.to(gl.int64) + i, gl.exp(total))
        gl.store(left + place.to(gl.int64) + i, gl.exp(last - total))
        seen, fading = _fading(total, rows, columns)
        attention = gl.where(seen, qk * fading * scale, 0.0)
        tma.store_wait(0)
        barrier()
        tile.store(attention.to(dtype))
        fence_async_shared()
        barrier()
        tma_store(p_desc, [place, 0], tile)
        # made again: nothing but k k^T is held while P is written
        total, _last = _decay(g, token * g_row + hv, there, GATE)
        if BETA:
            rate = gl.load(beta + token * b_row + hv, mask=there, other=0.0).to(gl.float32)
        else:
            rate = gl.where(there, 1.0, 0.0)
        _seen, fading = _fading(total, rows, columns)
        lower = kk * fading * gl.convert_layout(rate, ROWS)[:, None]
        lower = gl.where(rows[:, None] > columns[None, :], lower, 0.0)
        inverse = _inverse(lower, rows, columns, diagonal, dt_high, dt_low, b_high, b_low, zero)
        # T' takes the place of P: were that not used again, the compiler would give it to others
        # before its copy is over
        tma.store_wait(0)
        barrier()
        if rates is None:
            result = inverse * gl.convert_layout(rate, COLUMNS)[None, :]
        else:
            gl.store(rates + place.to(gl.int64) + i, rate)
            result = gl.where(rows[:, None] > columns[None, :], inverse, 0.0)
        tile.store(result.to(dtype))
        fence_async_shared()
        barrier()
        tma_store(t_desc, [place, 0], tile)
        tma.store_wait(0)


@gluon.jit
def _columns_at(head, first, count, row, block):
    """Coordinates of row `row` of a sequence, from column 64 `block` on."""
    where = at(0, head, first, count, row, True)
    return [where[0], where[1], where[2], where[3], block * 64]


@gluon.jit
def _put(o, place, o_desc, where):
    """Rows `where` of the output, from o^T."""
    tma.store_wait(0)
    barrier()
    place.permute((1, 0)).store(o)
    fence_async_shared()
    barrier()
    tma_store(o_desc, where, reinterpret(place, place.dtype, o_desc.block_shape, o_desc.layout))


@gluon.jit
def _consumer(
    q, k, v, t, p, grown, left, o, full, empty, o_desc, grown_from, initial, final, out,
    start, length, tokens, first_chunk, sequence, hv, block, scale,
    NV: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr,
    INITIAL: gl.constexpr,
):  # fmt: skip
    MS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DK, 16])
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, M, 2)
    AS: gl.constexpr = gl.DotOperandLayout(0, MS, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, M)
    dtype: gl.constexpr = k.dtype
    zero = gl.zeros([64, 64], gl.float32, layout=M)
    cv = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, MS))
    ck = gl.arange(0, DK, layout=gl.SliceLayout(0, MS))
    state_at = (sequence.to(gl.int64) * NV + hv) * (DV * DK) + cv[:, None] * DK + ck[None, :]
    if INITIAL:
        state = gl.load(initial + state_at).to(gl.float32)
    else:
        state = gl.zeros([64, DK], gl.float32, layout=MS)
    chunks = (length + 63) // 64
    grown_from += (first_chunk.to(gl.int64) * NV + hv) * 64 + 63
    fade = gl.load(grown_from, mask=chunks > 0, other=1.0)
    half = gl.convert_layout(state.to(dtype), A)
    o_done = zero.to(dtype)
    for c in range(chunks):
        stage = c % STAGES
        mbarrier.wait(full.index(stage), (c // STAGES) & 1)
        r_flight = warpgroup_mma(
            half, k.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        q_flight = warpgroup_mma(
            half, q.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        grown_from += NV * 64
        fade_next = gl.load(grown_from, mask=c + 1 < chunks, other=1.0)
        growth = grown.index(stage).load(COLUMNS)
        rest = left.index(stage).load(COLUMNS)
        value = v.index(stage).permute((1, 0)).load(M).to(gl.float32)
        # the output of the chunk before; rows behind the sequence are not written
        before = gl.where(c > 0, c * 64 - 64, chunks * 64)
        _put(o_done, o, o_desc, _columns_at(hv, start, length, before, block))
        r, state = warpgroup_mma_wait(1, deps=[r_flight, state])
        r_half = gl.convert_layout((value - r * growth[None, :]).to(dtype), A)
        n_flight = warpgroup_mma(
            r_half, t.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        state = state * fade
        fade = fade_next
        acc = warpgroup_mma_wait(1, deps=[q_flight])
        acc = acc * (growth * scale)[None, :]
        n = warpgroup_mma_wait(0, deps=[n_flight])
        n_left = gl.convert_layout((n * rest[None, :]).to(dtype), AS)
        s_flight = warpgroup_mma(n_left, k.index(stage), state, is_async=True)
        n_half = gl.convert_layout(n.to(dtype), A)
        o_flight = warpgroup_mma(n_half, p.index(stage).permute((1, 0)), acc, is_async=True)
        state = warpgroup_mma_wait(1, deps=[s_flight])
        half = gl.convert_layout(state.to(dtype), A)
        o_done = warpgroup_mma_wait(0, deps=[o_flight]).to(dtype)
        mbarrier.arrive(empty.index(stage))
    if chunks > 0:
        _put(o_done, o, o_desc, _columns_at(hv, start, length, chunks * 64 - 64, block))
    gl.store(final + state_at, state.to(final.dtype.element_ty))
    # tokens behind the last sequence; `tokens` is `length` for the others
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))
    j = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, ROWS))
    for first in range(length, tokens, 64):
        row = (start + first + i).to(gl.int64) * NV + hv
        nothing = gl.zeros([64, 64], dtype, layout=ROWS)
        gl.store(out + row[:, None] * DV + j[None, :], nothing, (first + i < tokens)[:, None])
    tma.store_wait(0)


@gluon.jit
def _producer(
    q, k, v, t, p, grown, left, full, empty, q_desc, k_desc, v_desc, t_desc, p_desc, grown_desc,
    left_desc, start, length, first_chunk, hv, block,
    NV: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = k.dtype
    for c in range((length + 63) // 64):
        stage = c % STAGES
        ready = full.index(stage)
        mbarrier.wait(empty.index(stage), ((c // STAGES) & 1) ^ 1)
        mbarrier.expect(ready, 64 * DK * 4 + 3 * 64 * 64 * 2 + 2 * 64 * 4)
        where = at(0, hv // GROUP, start, length, c * 64, True)
        tma_load(
            k_desc, where, ready,
            reinterpret(k.index(stage), dtype, k_desc.block_shape, k_desc.layout),
        )  # fmt: skip
        of_value = _columns_at(hv, start, length, c * 64, block)
        tma_load(
            v_desc, of_value, ready,
            reinterpret(v.index(stage), dtype, v_desc.block_shape, v_desc.layout),
        )  # fmt: skip
        tile = ((first_chunk + c) * NV + hv) * 64
        tma_load(grown_desc, [tile], ready, grown.index(stage))
        tma_load(left_desc, [tile], ready, left.index(stage))
        tma_load(t_desc, [tile, 0], ready, t.index(stage))
        tma_load(
            q_desc, where, ready,
            reinterpret(q.index(stage), dtype, q_desc.block_shape, q_desc.layout),
        )  # fmt: skip
        tma_load(p_desc, [tile, 0], ready, p.index(stage))


@gluon.jit(do_not_specialize=["T", "sequences", "scale"])
def _walk(
    q_desc, k_desc, v_desc, t_desc, p_desc, grown_desc, left_desc, o_desc, grown, lengths, initial,
    final, out, T, sequences, scale,
    NV: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, GROUP: gl.constexpr,
    SEQUENCES: gl.constexpr, STAGES: gl.constexpr, VARLEN: gl.constexpr, INITIAL: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Outputs and the final state of a sequence, for 64 columns of one head."""
    BLOCKS: gl.constexpr = DV // 64
    dtype: gl.constexpr = k_desc.dtype
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, DK], dtype)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    program = gl.program_id(0)
    block = program % BLOCKS
    hv = program // BLOCKS % NV
    sequence = program // (BLOCKS * NV)
    start = 0
    length = T
    tokens = T
    first_chunk = program * 0
    if VARLEN:
        s, each = _lengths(lengths, T, sequences, SEQUENCES)
        start, length = _tokens(s, each, s < sequence, sequence, T)
        # before a sequence with tokens; before another it may wrap, and is not used
        first_chunk = gl.sum(gl.where(s < sequence, (each + 63) // 64, 0), 0)
        tokens = gl.where(sequence == sequences - 1, T - start, length)
    q = gl.allocate_shared_memory(dtype, [STAGES, 64, DK], WIDE)
    k = gl.allocate_shared_memory(dtype, [STAGES, 64, DK], WIDE)
    v = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], TILE)
    t = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], TILE)
    p = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], TILE)
    o = gl.allocate_shared_memory(dtype, [64, 64], TILE)
    grown_tile = gl.allocate_shared_memory(gl.float32, [STAGES, 64], grown_desc.layout)
    left_tile = gl.allocate_shared_memory(gl.float32, [STAGES, 64], left_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (_consumer, (
                q, k, v, t, p, grown_tile, left_tile, o, full, empty, o_desc, grown, initial,
                final, out, start, length, tokens, first_chunk, sequence, hv, block, scale,
                NV, DK, DV, STAGES, INITIAL,
            )),
            (_producer, (
                q, k, v, t, p, grown_tile, left_tile, full, empty, q_desc, k_desc, v_desc, t_desc,
                p_desc, grown_desc, left_desc, start, length, first_chunk, hv, block,
                NV, DK, DV, GROUP, STAGES,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip


def supports(query: Tensor, key: Tensor, value: Tensor, sequences: int) -> bool:
    """Dk 64 or 128, Dv in whole columns of 64, and rows of whole 16-byte units."""
    given = (query, key, value)
    tokens, heads, size = value.shape
    return (
        gpu.is_hopper(value.device)
        and key.shape[-1] in (64, 128)
        and size % 64 == 0
        # its scratch, in rows: a coordinate of TMA has 32 bits
        and tokens > 0
        and (tokens + CHUNK * (sequences + 1)) * heads < 2**31
        and aligned(*given)
        and all(0 < step < 2**34 and step % 8 == 0 for x in given for step in x.stride()[:-1])
    )


def triangles(
    query: Tensor,
    key: Tensor,
    NV: int,
    beta: Tensor | None,
    lengths: Tensor | None,
    scale: float,
    g: Tensor | None,
    t: Tensor,
    p: Tensor,
    grown: Tensor,
    left: Tensor,
    rates: Tensor | None,
    sequences: int,
) -> None:
    """Writes T', or T - I and `rates`, P, exp(G) and exp(G_last - G) of all chunks."""
    T, N, DK = key.shape
    chunks = grown.numel() // (NV * CHUNK)
    q_desc, k_desc = (describe(x, CHUNK, DK, True) for x in (query, key))
    t_desc, p_desc = (describe_matrix(x, grown.numel(), CHUNK, [CHUNK, CHUNK]) for x in (t, p))
    launches.kernel(_prepare, chunks, NV)(
        q_desc, k_desc, t_desc, p_desc, beta, g, lengths, grown, left, rates, T, sequences, scale,
        0 if beta is None else beta.stride(0), 0 if g is None else g.stride(0),
        NV=NV, DK=DK, GROUP=NV // N, SEQUENCES=max(32, triton.next_power_of_2(sequences)),
        VARLEN=lengths is not None, BETA=beta is not None, GATE=g is not None, num_warps=4,
        maxnreg=128,
    )  # fmt: skip


def launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor | None,
    initial_state: Tensor | None,
    actual_seq_lengths: Tensor | None,
    scale: float,
    g: Tensor | None,
    out: Tensor,
    final: Tensor,
) -> None:
    """Writes `out` and `final`."""
    T, N, DK = key.shape
    NV, DV = value.shape[1:]
    varlen = actual_seq_lengths is not None
    sequences = final.shape[0]
    # every sequence may end in a part of a chunk
    chunks = triton.cdiv(T, CHUNK) + (sequences if varlen else 0)
    padded = max(32, triton.next_power_of_2(sequences))
    rows = chunks * NV * CHUNK
    t, p = (memory.empty((rows, CHUNK), value.dtype, value.device) for _ in range(2))
    grown, left = (memory.empty((rows,), torch.float32, value.device) for _ in range(2))
    triangles(
        query, key, NV, beta, actual_seq_lengths, scale, g, t, p, grown, left, None, sequences
    )
    q_desc, k_desc = (describe(x, CHUNK, DK, True) for x in (query, key))
    t_desc, p_desc = (describe_matrix(x, rows, CHUNK, [CHUNK, CHUNK]) for x in (t, p))
    launches.kernel(_walk, sequences * NV * (DV // 64))(
        q_desc, k_desc, describe(value, CHUNK, CHUNK, True), t_desc, p_desc,
        describe_row(grown, CHUNK), describe_row(left, CHUNK), describe(out, CHUNK, CHUNK, True),
        grown, actual_seq_lengths, initial_state, final, out, T, sequences, scale,
        NV=NV, DK=DK, DV=DV, GROUP=NV // N, SEQUENCES=padded, STAGES=_STAGES, VARLEN=varlen,
        INITIAL=initial_state is not None, num_warps=4,
    )  # fmt: skip
