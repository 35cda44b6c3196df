# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Gradients of the gated delta rule on Hopper (Gluon), with the letters of
chunk_gated_delta_rule_grad.

A program of the walks owns 64 columns of one head's S or E, transposed, in the registers of a
warpgroup, as in the forward's walk, and a producer warp loads ahead.  A product with T - I, which
the first kernel leaves, adds what it is of, unrounded:

    x = beta (v - exp(G) (k S));  N = x + (T - I) x;
    S = exp(G_last) S + k^T (exp(G_last - G) N)
    x = P^T dO + exp(G_last - G) (k E);  R = x + (T - I)^T x;
    E = exp(G_last) E + q^T (scale exp(G) dO) - k^T (beta exp(G) R)

Then _pairs, a program a chunk and value head, gives dv, Z and M + M^T, and _inputs, one a chunk and
head of the keys, loads the states under its products and gives the rest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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

from ....dispatch.common import memory
from ...common.gluon_names import barrier, reinterpret, tma_load, tma_store
from ...common.hopper.barriers import in_turn
from ...common.hopper.tma import (
    aligned,
    at,
    describe,
    describe_matrix,
    describe_row,
    forget,
    load_box,
    store_box,
)
from ...runtime import launches
from . import chunk_gated_delta_rule as forward
from .chunks import (
    CHUNK,
    add,
    add_lengths,
    columns_at,
    decay_of,
    fading_of,
    lengths_of,
    rate_of,
    tokens_of,
    triangles,
)

# H200, 2026-11, N 16, Nv 32, Dk = Dv = 128, bfloat16, 4096 tokens: the walks take 110 us, 117 with
# two stages and 81 without their stores; the inputs 123, 127 with three stages
_STAGES = 3
_INPUT_STAGES = 2


class Walk(NamedTuple):
    """Of a walk in shared memory: tiles that arrive, those that leave, barriers."""

    q: Any
    k: Any
    v: Any
    t: Any
    p: Any
    grown: Any
    left: Any
    rates: Any
    to_state: Any
    to_x: Any
    full: Any
    empty: Any


class WalkConstants(NamedTuple):
    NV: int
    DK: int
    DV: int
    GROUP: int
    SEQUENCES: int
    VARLEN: bool
    STAGES: int
    FINAL: bool
    INITIAL: bool


class Inputs(NamedTuple):
    """Of the last kernel in shared memory: a head's queries and keys, what passes by, a pair of
    squares, and barriers of the three."""

    q: Any
    k: Any
    o: Any
    n: Any
    r: Any
    z: Any
    m: Any
    states: Any
    grads: Any
    ready: Any
    full: Any
    empty: Any
    pair_full: Any
    pair_empty: Any


class InputConstants(NamedTuple):
    N: int
    NV: int
    DK: int
    DV: int
    GROUP: int
    SEQUENCES: int
    VARLEN: bool
    STAGES: int
    BETA: int
    GATE: bool


@gluon.jit
def _put(state, to_state, state_desc, row, x, to_x, x_desc, where):
    """A state before its chunk, and the N or R of the chunk before it, from x^T."""
    tma.store_wait(0)
    barrier()
    to_state.store(state)
    to_x.permute((1, 0)).store(x)
    fence_async_shared()
    barrier()
    tma_store(state_desc, [row, 0], to_state)
    store_box(x_desc, where, to_x)


@gluon.jit
def _over_states(
    shared,
    state_desc,
    n_desc,
    fades,
    initial,
    whole_at,
    start,
    length,
    first_chunk,
    hv,
    block,
    C: gl.constexpr,
):
    k, v, t = shared.k, shared.v, shared.t
    full, empty = shared.full, shared.empty
    DK: gl.constexpr = C.DK
    MS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DK, 16])
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, M, 2)
    AS: gl.constexpr = gl.DotOperandLayout(0, MS, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, M)
    dtype: gl.constexpr = k.dtype
    zero = gl.zeros([64, 64], gl.float32, layout=M)
    if C.INITIAL:
        state = gl.load(initial + whole_at).to(gl.float32)
    else:
        state = gl.zeros([64, DK], gl.float32, layout=MS)
    chunks = (length + 63) // 64
    fades += (first_chunk.to(gl.int64) * C.NV + hv) * 64 + 63
    n_half = zero.to(dtype)
    for c in range(chunks):
        stage = c % C.STAGES
        half = state.to(dtype)
        mbarrier.wait(full.index(stage), (c // C.STAGES) & 1)
        kv_mem_flight = warpgroup_mma(
            gl.convert_layout(half, A),
            k.index(stage).permute((1, 0)),
            zero,
            use_acc=False,
            is_async=True,
        )
        fade = gl.load(fades)
        fades += C.NV * 64
        rate = shared.rates.index(stage).load(COLUMNS)
        growth = shared.grown.index(stage).load(COLUMNS) * rate
        rest = shared.left.index(stage).load(COLUMNS)
        value = v.index(stage).permute((1, 0)).load(M).to(gl.float32) * rate[None, :]
        # rows behind the sequence are not written
        before = gl.where(c > 0, c * 64 - 64, chunks * 64)
        where = columns_at(hv, start, length, before, block)
        row = ((first_chunk + c) * C.NV + hv) * C.DV + block * 64
        _put(half, shared.to_state, state_desc, row, n_half, shared.to_x, n_desc, where)
        # the state as well: ptxas would scale it, and wait for the product, before it is stored
        kv_mem, state = warpgroup_mma_wait(0, deps=[kv_mem_flight, state])
        x = value - kv_mem * growth[None, :]
        x_half = gl.convert_layout(x.to(dtype), A)
        n_flight = warpgroup_mma(x_half, t.index(stage).permute((1, 0)), x, is_async=True)
        state = state * fade
        n = warpgroup_mma_wait(0, deps=[n_flight])
        n_left = gl.convert_layout((n * rest[None, :]).to(dtype), AS)
        s_flight = warpgroup_mma(n_left, k.index(stage), state, is_async=True)
        n_half = n.to(dtype)
        state = warpgroup_mma_wait(0, deps=[s_flight])
        mbarrier.arrive(empty.index(stage))
    if chunks > 0:
        where = columns_at(hv, start, length, chunks * 64 - 64, block)
        tma.store_wait(0)
        barrier()
        shared.to_x.permute((1, 0)).store(n_half)
        fence_async_shared()
        barrier()
        store_box(n_desc, where, shared.to_x)
    tma.store_wait(0)


@gluon.jit
def _over_gradients(
    shared,
    state_desc,
    r_desc,
    fades,
    d_final,
    d_initial,
    whole_at,
    start,
    length,
    first_chunk,
    hv,
    block,
    scale,
    C: gl.constexpr,
):
    q, k, o, t, p = shared.q, shared.k, shared.v, shared.t, shared.p
    full, empty = shared.full, shared.empty
    DK: gl.constexpr = C.DK
    MS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DK, 16])
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, M, 2)
    AS: gl.constexpr = gl.DotOperandLayout(0, MS, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, M)
    dtype: gl.constexpr = k.dtype
    zero = gl.zeros([64, 64], gl.float32, layout=M)
    if C.FINAL:
        grad = gl.load(d_final + whole_at).to(gl.float32)
    else:
        grad = gl.zeros([64, DK], gl.float32, layout=MS)
    chunks = (length + 63) // 64
    fades += ((first_chunk + chunks).to(gl.int64) * C.NV + hv) * 64 + 63
    r_half = zero.to(dtype)
    for step in range(chunks):
        stage = step % C.STAGES
        c = chunks - 1 - step
        half = grad.to(dtype)
        mbarrier.wait(full.index(stage), (step // C.STAGES) & 1)
        e_flight = warpgroup_mma(
            gl.convert_layout(half, A),
            k.index(stage).permute((1, 0)),
            zero,
            use_acc=False,
            is_async=True,
        )
        d_out = o.index(stage).permute((1, 0))
        p_flight = warpgroup_mma(d_out, p.index(stage), zero, use_acc=False, is_async=True)
        fades -= C.NV * 64
        fade = gl.load(fades)
        growth = shared.grown.index(stage).load(COLUMNS)
        faded = d_out.load(M).to(gl.float32) * (growth * scale)[None, :]
        faded = gl.convert_layout(faded.to(dtype), AS)
        # rows behind the sequence are not written
        where = columns_at(hv, start, length, c * 64 + 64, block)
        row = ((first_chunk + c) * C.NV + hv) * C.DV + block * 64
        _put(half, shared.to_state, state_desc, row, r_half, shared.to_x, r_desc, where)
        q_flight = warpgroup_mma(faded, q.index(stage), grad * fade, is_async=True)
        rest = shared.left.index(stage).load(COLUMNS)
        x = warpgroup_mma_wait(2, deps=[e_flight]) * rest[None, :]
        x += warpgroup_mma_wait(1, deps=[p_flight])
        x_half = gl.convert_layout(x.to(dtype), A)
        r_flight = warpgroup_mma(x_half, t.index(stage), x, is_async=True)
        grad = warpgroup_mma_wait(1, deps=[q_flight])
        by = -growth * shared.rates.index(stage).load(COLUMNS)
        r = warpgroup_mma_wait(0, deps=[r_flight])
        r_left = gl.convert_layout((r * by[None, :]).to(dtype), AS)
        g_flight = warpgroup_mma(r_left, k.index(stage), grad, is_async=True)
        r_half = r.to(dtype)
        grad = warpgroup_mma_wait(0, deps=[g_flight])
        mbarrier.arrive(empty.index(stage))
    if chunks > 0:
        tma.store_wait(0)
        barrier()
        shared.to_x.permute((1, 0)).store(r_half)
        fence_async_shared()
        barrier()
        where = columns_at(hv, start, length, 0, block)
        store_box(r_desc, where, shared.to_x)
    if C.INITIAL:
        gl.store(d_initial + whole_at, grad.to(d_initial.dtype.element_ty))
    tma.store_wait(0)


@gluon.jit
def _consumer(
    shared,
    n_desc,
    r_desc,
    states_desc,
    grads_desc,
    fades,
    initial,
    d_final,
    d_initial,
    start,
    length,
    first_chunk,
    sequence,
    hv,
    block,
    back,
    scale,
    C: gl.constexpr,
):
    DK: gl.constexpr = C.DK
    MS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DK, 16])
    cv = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, MS))
    ck = gl.arange(0, DK, layout=gl.SliceLayout(0, MS))
    whole_at = (sequence.to(gl.int64) * C.NV + hv) * (C.DV * DK)
    whole_at = whole_at + cv[:, None] * DK + ck[None, :]
    if back == 0:
        _over_states(
            shared,
            states_desc,
            n_desc,
            fades,
            initial,
            whole_at,
            start,
            length,
            first_chunk,
            hv,
            block,
            C,
        )
    else:
        _over_gradients(
            shared,
            grads_desc,
            r_desc,
            fades,
            d_final,
            d_initial,
            whole_at,
            start,
            length,
            first_chunk,
            hv,
            block,
            scale,
            C,
        )


@gluon.jit
def _producer(
    shared,
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    t_desc,
    p_desc,
    grown_desc,
    left_desc,
    rates_desc,
    start,
    length,
    first_chunk,
    hv,
    block,
    back,
    C: gl.constexpr,
):
    q, k, v, t, p = shared.q, shared.k, shared.v, shared.t, shared.p
    full, empty = shared.full, shared.empty
    chunks = (length + 63) // 64
    for step in range(chunks):
        c = gl.where(back == 0, step, chunks - 1 - step)
        stage = step % C.STAGES
        ready = full.index(stage)
        mbarrier.wait(empty.index(stage), ((step // C.STAGES) & 1) ^ 1)
        where = at(0, hv // C.GROUP, start, length, c * 64, True)
        of_value = columns_at(hv, start, length, c * 64, block)
        tile = ((first_chunk + c) * C.NV + hv) * 64
        into = reinterpret(v.index(stage), k.dtype, v_desc.block_shape, v_desc.layout)
        BOTH: gl.constexpr = 64 * C.DK * 2 + 2 * 64 * 64 * 2 + 3 * 64 * 4
        if back == 0:
            mbarrier.expect(ready, BOTH)
            tma_load(v_desc, of_value, ready, into)
        else:
            mbarrier.expect(ready, BOTH + 64 * C.DK * 2 + 64 * 64 * 2)
            tma_load(o_desc, of_value, ready, into)
            tma_load(p_desc, [tile, 0], ready, p.index(stage))
            load_box(q_desc, where, ready, q.index(stage))
        load_box(k_desc, where, ready, k.index(stage))
        tma_load(grown_desc, [tile], ready, shared.grown.index(stage))
        tma_load(left_desc, [tile], ready, shared.left.index(stage))
        tma_load(rates_desc, [tile], ready, shared.rates.index(stage))
        tma_load(t_desc, [tile, 0], ready, t.index(stage))


@gluon.jit(do_not_specialize=["T", "sequences", "scale"])
def _walks(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    t_desc,
    p_desc,
    grown_desc,
    left_desc,
    rates_desc,
    n_desc,
    r_desc,
    states_desc,
    grads_desc,
    fades,
    lengths,
    initial,
    d_final,
    d_initial,
    T,
    sequences,
    scale,
    C: gl.constexpr,
    num_warps: gl.constexpr,
):
    """N and the states of a sequence, or R and their gradients, for 64 columns of one head."""
    DK: gl.constexpr = C.DK
    STAGES: gl.constexpr = C.STAGES
    BLOCKS: gl.constexpr = C.DV // 64
    dtype: gl.constexpr = k_desc.dtype
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, DK], dtype)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    program = gl.program_id(0)
    # the longer walk first
    back = 1 - program % 2
    block = program // 2 % BLOCKS
    hv = program // (2 * BLOCKS) % C.NV
    sequence = program // (2 * BLOCKS * C.NV)
    start = 0
    length = T
    first_chunk = program * 0
    if C.VARLEN:
        s, each = lengths_of(lengths, T, sequences, C.SEQUENCES)
        start, length = tokens_of(s, each, s < sequence, sequence, T)
        # before a sequence with tokens; before another it may wrap, and is not used
        first_chunk = gl.sum(gl.where(s < sequence, (each + 63) // 64, 0), 0)
    q = gl.allocate_shared_memory(dtype, [STAGES, 64, DK], WIDE)
    k = gl.allocate_shared_memory(dtype, [STAGES, 64, DK], WIDE)
    v = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], TILE)
    t = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], TILE)
    p = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], TILE)
    to_state = gl.allocate_shared_memory(dtype, [64, DK], states_desc.layout)
    to_x = gl.allocate_shared_memory(dtype, [64, 64], TILE)
    grown = gl.allocate_shared_memory(gl.float32, [STAGES, 64], grown_desc.layout)
    left = gl.allocate_shared_memory(gl.float32, [STAGES, 64], left_desc.layout)
    rates = gl.allocate_shared_memory(gl.float32, [STAGES, 64], rates_desc.layout)
    full, empty = in_turn(STAGES, 1)
    shared = Walk(q, k, v, t, p, grown, left, rates, to_state, to_x, full, empty)
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    shared,
                    n_desc,
                    r_desc,
                    states_desc,
                    grads_desc,
                    fades,
                    initial,
                    d_final,
                    d_initial,
                    start,
                    length,
                    first_chunk,
                    sequence,
                    hv,
                    block,
                    back,
                    scale,
                    C,
                ),
            ),
            (
                _producer,
                (
                    shared,
                    q_desc,
                    k_desc,
                    v_desc,
                    o_desc,
                    t_desc,
                    p_desc,
                    grown_desc,
                    left_desc,
                    rates_desc,
                    start,
                    length,
                    first_chunk,
                    hv,
                    block,
                    back,
                    C,
                ),
            ),
        ],
        [1],
        [24],
    )


@gluon.jit(do_not_specialize=["T", "sequences", "scale"])
def _pairs(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    n_desc,
    r_desc,
    z_desc,
    m_desc,
    beta,
    g,
    lengths,
    d_value,
    d_rate,
    d_total,
    T,
    sequences,
    scale,
    b_row,
    g_row,
    NV: gl.constexpr,
    DK: gl.constexpr,
    DV: gl.constexpr,
    GROUP: gl.constexpr,
    SEQUENCES: gl.constexpr,
    VARLEN: gl.constexpr,
    BETA: gl.constexpr,
    GATE: gl.constexpr,
    num_warps: gl.constexpr,
):
    """dv, Z and M + M^T of a chunk and a value head; what pairs of its tokens give G and beta."""
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, 64, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, PAIRS)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, PAIRS)
    VALUES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    TOKENS: gl.constexpr = gl.BlockedLayout([2], [32], [num_warps], [0])
    LIST: gl.constexpr = gl.SliceLayout(1, VALUES)
    dtype: gl.constexpr = k_desc.dtype
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, DK], dtype)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    BLOCKS: gl.constexpr = DV // 64
    q = gl.allocate_shared_memory(dtype, [64, DK], WIDE)
    k = gl.allocate_shared_memory(dtype, [64, DK], WIDE)
    v = gl.allocate_shared_memory(dtype, [BLOCKS, 64, 64], TILE)
    o = gl.allocate_shared_memory(dtype, [BLOCKS, 64, 64], TILE)
    n = gl.allocate_shared_memory(dtype, [BLOCKS, 64, 64], TILE)
    r = gl.allocate_shared_memory(dtype, [BLOCKS, 64, 64], TILE)
    bars = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    full = bars.index(0)
    chunk = gl.program_id(0)
    hv = gl.program_id(1)
    start = chunk * 0
    first = chunk * 64
    length = T
    if VARLEN:
        s, each = lengths_of(lengths, T, sequences, SEQUENCES)
        ends = gl.associative_scan((each + 63) // 64, 0, add_lengths)
        before = ends <= chunk
        first = (chunk - gl.max(gl.where(before, ends, 0), 0)) * 64
        start, length = tokens_of(s, each, before, gl.sum(before.to(gl.int32), 0), T)
    i = gl.arange(0, 64, layout=TOKENS)
    j = gl.arange(0, 64, layout=gl.SliceLayout(0, VALUES))
    of_value = gl.arange(0, 64, layout=LIST)
    row = (start + first + of_value).to(gl.int64) * NV + hv
    if first < length:
        mbarrier.init(full, count=1)
        fence_async_shared()
        barrier()
        mbarrier.expect(full, 64 * DK * 4 + 4 * 64 * DV * 2)
        where = at(0, hv // GROUP, start, length, first, True)
        for block in gl.static_range(BLOCKS):
            of_block = columns_at(hv, start, length, first, block)
            load_box(n_desc, of_block, full, n.index(block))
            load_box(o_desc, of_block, full, o.index(block))
            load_box(r_desc, of_block, full, r.index(block))
            load_box(v_desc, of_block, full, v.index(block))
        load_box(k_desc, where, full, k)
        load_box(q_desc, where, full, q)
        valid = first + i < length
        token = (start + first + i).to(gl.int64)
        mask = first + of_value < length
        rows = gl.arange(0, 64, layout=ROWS)
        columns = gl.arange(0, 64, layout=COLUMNS)
        total, _last = decay_of(g, token * g_row + hv, valid, GATE)
        if BETA:
            rate = rate_of(beta + token * b_row + hv, valid, BETA)
        else:
            rate = gl.where(valid, 1.0, 0.0)
        of_row = gl.convert_layout(rate, LIST)[:, None]
        zero = gl.zeros([64, 64], gl.float32, layout=PAIRS)
        on_n = zero
        on_r = zero
        by_value = gl.zeros([64], gl.float32, layout=LIST)
        mbarrier.wait(full, 0)
        for block in gl.static_range(BLOCKS):
            turned = n.index(block).permute((1, 0))
            on_n = warpgroup_mma(o.index(block), turned, on_n, is_async=True)
            on_r = warpgroup_mma(r.index(block), turned, on_r, is_async=True)
        kk = warpgroup_mma(k, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        qk = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        for block in gl.static_range(BLOCKS):
            wide = r.index(block).load(VALUES).to(gl.float32)
            by_value += gl.sum(wide * v.index(block).load(VALUES).to(gl.float32), 1)
            to = d_value + row[:, None] * DV + block * 64 + j[None, :]
            gl.store(to, (wide * of_row).to(dtype), mask[:, None])
        causal, fading = fading_of(total, rows, columns)
        on_n, on_r, kk, qk = warpgroup_mma_wait(0, deps=[on_n, on_r, kk, qk])
        z = gl.where(causal, on_n * fading * scale, 0.0)
        m = gl.where(rows[:, None] > columns[None, :], -on_r * fading, 0.0)
        of_rate = gl.convert_layout(by_value, TOKENS) + gl.convert_layout(gl.sum(m * kk, 1), TOKENS)
        m *= gl.convert_layout(rate, ROWS)[:, None]
        # behind the barrier all warps have read what the tiles held
        barrier()
        z_tile = o.index(0)
        m_tile = n.index(0)
        z_tile.store(z.to(dtype))
        m_tile.store(m.to(dtype))
        barrier()
        turned = m_tile.permute((1, 0)).load(PAIRS).to(gl.float32)
        weight = z * qk + m * kk
        of_total = gl.convert_layout(gl.sum(weight, 1), TOKENS)
        of_total -= gl.convert_layout(gl.sum(weight, 0), TOKENS)
        barrier()
        m_tile.store((m + turned).to(dtype))
        fence_async_shared()
        barrier()
        tile = (chunk * NV + hv) * 64
        tma_store(z_desc, [tile, 0], z_tile)
        tma_store(m_desc, [tile, 0], m_tile)
        place = token * NV + hv
        gl.store(d_rate + place, of_rate, valid)
        gl.store(d_total + place, of_total, valid)
        forget(bars)
        tma.store_wait(0)
    else:
        # tokens behind the last sequence
        mask = start + first + of_value < T
        for block in gl.static_range(BLOCKS):
            to = d_value + row[:, None] * DV + block * 64 + j[None, :]
            gl.store(to, gl.zeros([64, 64], dtype, layout=VALUES), mask[:, None])


@gluon.jit
def _inputs_consumer(
    shared,
    beta,
    grown,
    left,
    d_rate,
    d_total,
    d_query,
    d_key,
    d_beta,
    d_g,
    start,
    first,
    length,
    chunk,
    h,
    scale,
    b_row,
    C: gl.constexpr,
):
    q, k, o, n, r, z, m = shared.q, shared.k, shared.o, shared.n, shared.r, shared.z, shared.m
    states, grads, full, empty = shared.states, shared.grads, shared.full, shared.empty
    DK: gl.constexpr = C.DK
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, DK // 64], [16, 64, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, M)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DK, DK // 8], [DK // 16, 1], [1, 0])
    TOKENS: gl.constexpr = gl.BlockedLayout([2], [32], [DK // 16], [0])
    BLOCKS: gl.constexpr = C.DV // 64
    zero = gl.zeros([64, DK], gl.float32, layout=M)
    i = gl.arange(0, 64, layout=ROWS)
    valid = first + i < length
    token = (start + first + i).to(gl.int64)
    dq = zero
    dk = zero
    mbarrier.wait(shared.ready, 0)
    for one in range(C.GROUP):
        hv = h * C.GROUP + one
        by_o = zero
        by_n = zero
        by_r = zero
        whole = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, WIDE))
        for block in range(BLOCKS):
            step = one * BLOCKS + block
            stage = step % C.STAGES
            mbarrier.wait(full.index(stage), (step // C.STAGES) & 1)
            by_o = warpgroup_mma(o.index(stage), states.index(stage), by_o, is_async=True)
            by_r = warpgroup_mma(r.index(stage), states.index(stage), by_r, is_async=True)
            by_n = warpgroup_mma(n.index(stage), grads.index(stage), by_n, is_async=True)
            state = states.index(stage).load(WIDE).to(gl.float32)
            grad = grads.index(stage).load(WIDE).to(gl.float32)
            whole += gl.sum(state * grad, 1)
            by_o, by_r, by_n = warpgroup_mma_wait(0, deps=[by_o, by_r, by_n])
            mbarrier.arrive(empty.index(stage))
        tile = (chunk * C.NV + hv).to(gl.int64) * 64
        growth = gl.load(grown + tile + i)
        rest = gl.load(left + tile + i)
        fade = gl.load(grown + tile + 63)
        if C.BETA:
            rate = rate_of(beta + token * b_row + hv, valid, C.BETA)
        else:
            rate = gl.where(valid, 1.0, 0.0)
        by_o *= (growth * scale)[:, None]
        by_r *= growth[:, None]
        by_n *= rest[:, None]
        wide = k.load(M).to(gl.float32)
        of_rate = gl.sum(by_r * wide, 1)
        of_rest = gl.sum(by_n * wide, 1)
        of_total = gl.sum(by_o * q.load(M).to(gl.float32), 1) - of_rate * rate - of_rest
        end = gl.sum(of_rest, 0) + fade * gl.sum(whole, 0)
        of_total += gl.where(first + i == gl.minimum(first + 64, length) - 1, end, 0.0)
        listed = first + gl.arange(0, 64, layout=TOKENS)
        row = (start + listed).to(gl.int64) * C.NV + hv
        mask = listed < length
        if C.BETA:
            found = gl.load(d_rate + row, mask, 0.0) - gl.convert_layout(of_rate, TOKENS)
            if C.BETA > 1:
                own = gl.convert_layout(rate, TOKENS)
                found *= own * (1.0 - own / (C.BETA - 1.0))
            gl.store(d_beta + row, found.to(d_beta.dtype.element_ty), mask)
        if C.GATE:
            found = gl.load(d_total + row, mask, 0.0) + gl.convert_layout(of_total, TOKENS)
            later = gl.associative_scan(found, 0, add, reverse=True)
            gl.store(d_g + row, later.to(d_g.dtype.element_ty), mask)
        dq += by_o
        dk += by_n - by_r * rate[:, None]
        mbarrier.wait(shared.pair_full, one & 1)
        dq = warpgroup_mma(z, k, dq, is_async=True)
        dk = warpgroup_mma(z.permute((1, 0)), q, dk, is_async=True)
        dk = warpgroup_mma(m, k, dk, is_async=True)
        dq, dk = warpgroup_mma_wait(0, deps=[dq, dk])
        mbarrier.arrive(shared.pair_empty)
    at_row = (token * C.N + h)[:, None] * DK
    at_row += gl.arange(0, DK, layout=gl.SliceLayout(0, M))[None, :]
    gl.store(d_query + at_row, dq.to(d_query.dtype.element_ty), valid[:, None])
    gl.store(d_key + at_row, dk.to(d_key.dtype.element_ty), valid[:, None])


@gluon.jit
def _inputs_producer(
    shared,
    q_desc,
    k_desc,
    o_desc,
    n_desc,
    r_desc,
    z_desc,
    m_desc,
    states_desc,
    grads_desc,
    start,
    first,
    length,
    chunk,
    h,
    C: gl.constexpr,
):
    q, k, o, n, r, z, m = shared.q, shared.k, shared.o, shared.n, shared.r, shared.z, shared.m
    states, grads, full, empty = shared.states, shared.grads, shared.full, shared.empty
    BLOCKS: gl.constexpr = C.DV // 64
    mbarrier.expect(shared.ready, 64 * C.DK * 4)
    where = at(0, h, start, length, first, True)
    load_box(k_desc, where, shared.ready, k)
    load_box(q_desc, where, shared.ready, q)
    for one in range(C.GROUP):
        hv = h * C.GROUP + one
        tile = chunk * C.NV + hv
        for block in range(BLOCKS):
            step = one * BLOCKS + block
            stage = step % C.STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), ((step // C.STAGES) & 1) ^ 1)
            mbarrier.expect(bar, 64 * C.DK * 4 + 3 * 64 * 64 * 2)
            of_value = columns_at(hv, start, length, first, block)
            of_state = [tile * C.DV + block * 64, 0]
            tma_load(states_desc, of_state, bar, states.index(stage))
            load_box(o_desc, of_value, bar, o.index(stage))
            load_box(r_desc, of_value, bar, r.index(stage))
            tma_load(grads_desc, of_state, bar, grads.index(stage))
            load_box(n_desc, of_value, bar, n.index(stage))
        mbarrier.wait(shared.pair_empty, (one & 1) ^ 1)
        mbarrier.expect(shared.pair_full, 2 * 64 * 64 * 2)
        tma_load(z_desc, [tile * 64, 0], shared.pair_full, z)
        tma_load(m_desc, [tile * 64, 0], shared.pair_full, m)


@gluon.jit(do_not_specialize=["T", "sequences", "scale"])
def _inputs(
    q_desc,
    k_desc,
    o_desc,
    n_desc,
    r_desc,
    z_desc,
    m_desc,
    states_desc,
    grads_desc,
    beta,
    lengths,
    grown,
    left,
    d_rate,
    d_total,
    d_query,
    d_key,
    d_beta,
    d_g,
    T,
    sequences,
    scale,
    b_row,
    C: gl.constexpr,
    num_warps: gl.constexpr,
):
    """dq, dk, dbeta and dg of a chunk and a head of the keys."""
    DK: gl.constexpr = C.DK
    STAGES: gl.constexpr = C.STAGES
    dtype: gl.constexpr = k_desc.dtype
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, DK], dtype)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    program = gl.program_id(0)
    h = program % C.N
    chunk = program // C.N
    start = 0
    first = chunk * 64
    length = T
    if C.VARLEN:
        s, each = lengths_of(lengths, T, sequences, C.SEQUENCES)
        ends = gl.associative_scan((each + 63) // 64, 0, add_lengths)
        before = ends <= chunk
        first = (chunk - gl.max(gl.where(before, ends, 0), 0)) * 64
        start, length = tokens_of(s, each, before, gl.sum(before.to(gl.int32), 0), T)
    if first < length:
        q = gl.allocate_shared_memory(dtype, [64, DK], WIDE)
        k = gl.allocate_shared_memory(dtype, [64, DK], WIDE)
        o = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], TILE)
        n = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], TILE)
        r = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], TILE)
        states = gl.allocate_shared_memory(dtype, [STAGES, 64, DK], states_desc.layout)
        grads = gl.allocate_shared_memory(dtype, [STAGES, 64, DK], grads_desc.layout)
        z = gl.allocate_shared_memory(dtype, [64, 64], TILE)
        m = gl.allocate_shared_memory(dtype, [64, 64], TILE)
        ready = gl.allocate_shared_memory(gl.int64, [1], BAR)
        pair_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
        pair_empty = gl.allocate_shared_memory(gl.int64, [1], BAR)
        mbarrier.init(ready, count=1)
        mbarrier.init(pair_full, count=1)
        mbarrier.init(pair_empty, count=1)
        full, empty = in_turn(STAGES, 1)
        shared = Inputs(
            q, k, o, n, r, z, m, states, grads, ready, full, empty, pair_full, pair_empty
        )
        gl.warp_specialize(
            [
                (
                    _inputs_consumer,
                    (
                        shared,
                        beta,
                        grown,
                        left,
                        d_rate,
                        d_total,
                        d_query,
                        d_key,
                        d_beta,
                        d_g,
                        start,
                        first,
                        length,
                        chunk,
                        h,
                        scale,
                        b_row,
                        C,
                    ),
                ),
                (
                    _inputs_producer,
                    (
                        shared,
                        q_desc,
                        k_desc,
                        o_desc,
                        n_desc,
                        r_desc,
                        z_desc,
                        m_desc,
                        states_desc,
                        grads_desc,
                        start,
                        first,
                        length,
                        chunk,
                        h,
                        C,
                    ),
                ),
            ],
            [1],
            [24],
        )
    else:
        # tokens behind the last sequence
        ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
        i = gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))
        j = gl.arange(0, DK, layout=gl.SliceLayout(0, ROWS))
        token = (start + first + i).to(gl.int64)
        mask = start + first + i < T
        at_row = (token * C.N + h)[:, None] * DK + j[None, :]
        nothing = gl.zeros([64, DK], dtype, layout=ROWS)
        gl.store(d_query + at_row, nothing, mask[:, None])
        gl.store(d_key + at_row, nothing, mask[:, None])
        none = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, ROWS))
        for one in range(C.GROUP):
            row = token * C.NV + h * C.GROUP + one
            if C.BETA:
                gl.store(d_beta + row, none.to(d_beta.dtype.element_ty), mask)
            if C.GATE:
                gl.store(d_g + row, none.to(d_g.dtype.element_ty), mask)


def supports(query: Tensor, key: Tensor, value: Tensor, d_out: Tensor, sequences: int) -> bool:
    """What the forward's kernels take, and gradients of such rows."""
    tokens, heads, size = value.shape
    return (
        forward.supports(query, key, value, sequences)
        and aligned(d_out)
        and all(0 < step < 2**34 and step % 8 == 0 for step in d_out.stride()[:-1])
        # the states, in rows
        and (tokens // CHUNK + sequences + 1) * heads * size < 2**31
    )


def launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    d_out: Tensor,
    d_final: Tensor | None,
    beta: Tensor | None,
    rate: int,
    initial: Tensor | None,
    lengths: Tensor | None,
    scale: float,
    g: Tensor | None,
    d_query: Tensor,
    d_key: Tensor,
    d_value: Tensor,
    d_beta: Tensor,
    d_initial: Tensor,
    d_g: Tensor,
) -> None:
    """Writes all gradients."""
    T, N, DK = key.shape
    NV, DV = value.shape[1:]
    half, device, wide = value.dtype, value.device, torch.float32
    varlen = lengths is not None
    sequences = 1 if lengths is None else lengths.shape[0]
    padded = max(32, triton.next_power_of_2(sequences))
    # every sequence may end in a part of a chunk, and so may the tokens behind the last one
    chunks = triton.cdiv(T, CHUNK) + (sequences if varlen else 0)
    rows = chunks * NV * CHUNK
    t, p = (memory.empty((rows, CHUNK), half, device) for _ in range(2))
    grown, left, rates = (memory.empty((rows,), wide, device) for _ in range(3))
    n, r = (memory.empty((T, NV, DV), half, device) for _ in range(2))
    states, grads = (memory.empty((chunks * NV * DV, DK), half, device) for _ in range(2))
    d_rate, d_total = (memory.empty((T, NV), wide, device) for _ in range(2))
    triangles(query, key, NV, beta, rate, lengths, scale, g, t, p, grown, left, rates, sequences)
    qk = [describe(x, CHUNK, DK, True) for x in (query, key)]
    values = [describe(x, CHUNK, CHUNK, True) for x in (value, d_out)]
    found = [describe(x, CHUNK, CHUNK, True) for x in (n, r)]
    squares = [describe_matrix(x, rows, CHUNK, [CHUNK, CHUNK]) for x in (t, p)]
    both = [describe_matrix(x, states.shape[0], DK, [CHUNK, DK]) for x in (states, grads)]
    sizes = dict(NV=NV, DK=DK, DV=DV, GROUP=NV // N, SEQUENCES=padded, VARLEN=varlen)
    b_row = 0 if beta is None else beta.stride(0)
    launches.kernel(_walks, 2 * sequences * NV * (DV // CHUNK))(
        *qk,
        *values,
        *squares,
        *(describe_row(x, CHUNK) for x in (grown, left, rates)),
        *found,
        *both,
        grown,
        lengths,
        initial,
        d_final,
        d_initial,
        T,
        sequences,
        scale,
        C=WalkConstants(
            STAGES=_STAGES, FINAL=d_final is not None, INITIAL=initial is not None, **sizes
        ),
        num_warps=4,
    )
    # T and P are used up: M + M^T and Z lie in their place
    launches.kernel(_pairs, chunks, NV)(
        *qk,
        *values,
        *found,
        *reversed(squares),
        beta,
        g,
        lengths,
        d_value,
        d_rate,
        d_total,
        T,
        sequences,
        scale,
        b_row,
        0 if g is None else g.stride(0),
        BETA=rate,
        GATE=g is not None,
        num_warps=4,
        **sizes,
    )
    launches.kernel(_inputs, chunks * N)(
        *qk,
        values[1],
        *found,
        *reversed(squares),
        *both,
        beta,
        lengths,
        grown,
        left,
        d_rate,
        d_total,
        d_query,
        d_key,
        d_beta,
        d_g,
        T,
        sequences,
        scale,
        b_row,
        C=InputConstants(N=N, STAGES=_INPUT_STAGES, BETA=rate, GATE=g is not None, **sizes),
        num_warps=DK // 16,
    )
