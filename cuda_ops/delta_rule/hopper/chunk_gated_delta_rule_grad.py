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
from ....dispatch.ops.delta_rule.chunk_gated_delta_rule_grad import Arguments
from ...common.chunks import constants
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
    COLUMNS,
    LEFT,
    NUMBERS,
    ROWS,
    SQUARE,
    TOKENS,
    Walked,
    add,
    by_keys,
    columns_at,
    columns_of,
    decay_of,
    fading_of,
    held,
    place_of,
    place_of_state,
    put_beside,
    put_turned,
    rate_of,
    sequence_of,
    square_of,
    taken_in,
    tiles_of,
    triangles,
)

# H200, 2026-11, N 16, Nv 32, Dk = Dv = 128, bfloat16, 4096 tokens: the walks take 110 us, 117 with
# two stages and 81 without their stores; the inputs 123, 127 with three stages
_STAGES = gl.constexpr(3)
_INPUT_STAGES = gl.constexpr(2)


class Walk(NamedTuple):
    """Of a walk in shared memory: tiles that arrive, those that leave, barriers."""

    tiles: Any
    grown: Any
    left: Any
    rates: Any
    to_state: Any
    to_x: Any
    full: Any
    empty: Any


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


class Chunk(NamedTuple):
    """What a program of the last kernel has: where a chunk lies, and a head of the keys."""

    start: Any
    first: Any
    length: Any
    chunk: Any
    h: Any


@gluon.jit
def _put(state, to_state, state_desc, row, x, to_x, x_desc, where):
    """A state before its chunk, and the N or R of the chunk before it, from x^T."""
    put_beside(state, to_state, x, to_x)
    tma_store(state_desc, [row, 0], to_state)
    store_box(x_desc, where, to_x)


@gluon.jit
def _over_states(shared, state_desc, n_desc, fades, state, of, C: gl.constexpr):
    _q, k, v, t, _p = shared.tiles
    dtype: gl.constexpr = k.dtype
    zero = gl.zeros([64, 64], gl.float32, layout=SQUARE)
    chunks = (of.length + 63) // 64
    fades += (of.first_chunk.to(gl.int64) * C.NV + of.hv) * 64 + 63
    n_half = zero.to(dtype)
    for c in range(chunks):
        stage = c % _STAGES
        half = state.to(dtype)
        mbarrier.wait(shared.full.index(stage), (c // _STAGES) & 1)
        kv_mem_flight = by_keys(half, k.index(stage), zero)
        fade = gl.load(fades)
        fades += C.NV * 64
        rate = shared.rates.index(stage).load(COLUMNS)
        growth = shared.grown.index(stage).load(COLUMNS) * rate
        rest = shared.left.index(stage).load(COLUMNS)
        value = v.index(stage).permute((1, 0)).load(SQUARE).to(gl.float32) * rate[None, :]
        # rows behind the sequence are not written
        before = gl.where(c > 0, c * 64 - 64, chunks * 64)
        where = columns_of(of, before)
        row = ((of.first_chunk + c) * C.NV + of.hv) * C.DV + of.block * 64
        _put(half, shared.to_state, state_desc, row, n_half, shared.to_x, n_desc, where)
        # the state as well: ptxas would scale it, and wait for the product, before it is stored
        kv_mem, state = warpgroup_mma_wait(0, deps=[kv_mem_flight, state])
        x = value - kv_mem * growth[None, :]
        x_half = gl.convert_layout(x.to(dtype), LEFT)
        n_flight = warpgroup_mma(x_half, t.index(stage).permute((1, 0)), x, is_async=True)
        state = state * fade
        n = warpgroup_mma_wait(0, deps=[n_flight])
        state, n_half = taken_in(state, n, rest, k.index(stage))
        mbarrier.arrive(shared.empty.index(stage))
    if chunks > 0:
        where = columns_of(of, chunks * 64 - 64)
        put_turned(n_half, shared.to_x)
        store_box(n_desc, where, shared.to_x)
    tma.store_wait(0)


@gluon.jit
def _over_gradients(
    shared,
    state_desc,
    r_desc,
    fades,
    grad,
    initial,
    d_initial,
    whole_at,
    of,
    scale,
    C: gl.constexpr,
):
    q, k, o, t, p = shared.tiles
    dtype: gl.constexpr = k.dtype
    A: gl.constexpr = gl.DotOperandLayout(0, grad.type.layout, 2)
    zero = gl.zeros([64, 64], gl.float32, layout=SQUARE)
    chunks = (of.length + 63) // 64
    fades += ((of.first_chunk + chunks).to(gl.int64) * C.NV + of.hv) * 64 + 63
    r_half = zero.to(dtype)
    for step in range(chunks):
        stage = step % _STAGES
        c = chunks - 1 - step
        half = grad.to(dtype)
        mbarrier.wait(shared.full.index(stage), (step // _STAGES) & 1)
        e_flight = by_keys(half, k.index(stage), zero)
        d_out = o.index(stage).permute((1, 0))
        p_flight = warpgroup_mma(d_out, p.index(stage), zero, use_acc=False, is_async=True)
        fades -= C.NV * 64
        fade = gl.load(fades)
        growth = shared.grown.index(stage).load(COLUMNS)
        faded = d_out.load(SQUARE).to(gl.float32) * (growth * scale)[None, :]
        faded = gl.convert_layout(faded.to(dtype), A)
        # rows behind the sequence are not written
        where = columns_of(of, c * 64 + 64)
        row = ((of.first_chunk + c) * C.NV + of.hv) * C.DV + of.block * 64
        _put(half, shared.to_state, state_desc, row, r_half, shared.to_x, r_desc, where)
        q_flight = warpgroup_mma(faded, q.index(stage), grad * fade, is_async=True)
        rest = shared.left.index(stage).load(COLUMNS)
        x = warpgroup_mma_wait(2, deps=[e_flight]) * rest[None, :]
        x += warpgroup_mma_wait(1, deps=[p_flight])
        x_half = gl.convert_layout(x.to(dtype), LEFT)
        r_flight = warpgroup_mma(x_half, t.index(stage), x, is_async=True)
        grad = warpgroup_mma_wait(1, deps=[q_flight])
        by = -growth * shared.rates.index(stage).load(COLUMNS)
        r = warpgroup_mma_wait(0, deps=[r_flight])
        grad, r_half = taken_in(grad, r, by, k.index(stage))
        mbarrier.arrive(shared.empty.index(stage))
    if chunks > 0:
        put_turned(r_half, shared.to_x)
        where = columns_of(of, 0)
        store_box(r_desc, where, shared.to_x)
    if initial is not None:
        gl.store(d_initial + whole_at, grad.to(d_initial.dtype.element_ty))
    tma.store_wait(0)


@gluon.jit
def _consumer(shared, described, fades, ends, of, back, scale, C: gl.constexpr):
    n_desc, r_desc, states_desc, grads_desc = described
    initial, d_final, d_initial = ends
    head = of.sequence.to(gl.int64) * C.NV + of.hv
    whole_at = place_of_state(head, of.block, k_step=1, v_step=C.DK, DK=C.DK, DV=C.DV)
    if back == 0:
        _over_states(shared, states_desc, n_desc, fades, held(initial, whole_at), of, C)
    else:
        grad = held(d_final, whole_at)
        _over_gradients(
            shared, grads_desc, r_desc, fades, grad, initial, d_initial, whole_at, of, scale, C
        )


@gluon.jit
def _producer(shared, described, of, back, C: gl.constexpr):
    q, k, v, t, p = shared.tiles
    q_desc, k_desc, v_desc, o_desc, t_desc, p_desc, grown_desc, left_desc, rates_desc = described
    _sequence, start, length, first_chunk, hv, block = of
    chunks = (length + 63) // 64
    for step in range(chunks):
        c = gl.where(back == 0, step, chunks - 1 - step)
        stage = step % _STAGES
        ready = shared.full.index(stage)
        mbarrier.wait(shared.empty.index(stage), ((step // _STAGES) & 1) ^ 1)
        where = at(0, hv // (C.NV // C.N), start, length, c * 64, True)
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


@gluon.jit(do_not_specialize=NUMBERS)
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
):
    """N and the states of a sequence, or R and their gradients, for 64 columns of one head."""
    BLOCKS: gl.constexpr = C.DV // 64
    dtype: gl.constexpr = k_desc.dtype
    program = gl.program_id(0)
    # the longer walk first
    back = 1 - program % 2
    block = program // 2 % BLOCKS
    hv = program // (2 * BLOCKS) % C.NV
    sequence = program // (2 * BLOCKS * C.NV)
    start, length, first_chunk = sequence_of(lengths, sequence, T, sequences, C.SEQUENCES, C.VARLEN)
    tiles = tiles_of(dtype, C.DK, _STAGES)
    to_state = gl.allocate_shared_memory(dtype, [64, C.DK], states_desc.layout)
    to_x = square_of(dtype)
    grown = gl.allocate_shared_memory(gl.float32, [_STAGES, 64], grown_desc.layout)
    left = gl.allocate_shared_memory(gl.float32, [_STAGES, 64], left_desc.layout)
    rates = gl.allocate_shared_memory(gl.float32, [_STAGES, 64], rates_desc.layout)
    full, empty = in_turn(_STAGES, 1)
    shared = Walk(tiles, grown, left, rates, to_state, to_x, full, empty)
    of = Walked(sequence, start, length, first_chunk, hv, block)
    arriving = (q_desc, k_desc, v_desc, o_desc, t_desc, p_desc, grown_desc, left_desc, rates_desc)
    leaving = (n_desc, r_desc, states_desc, grads_desc)
    ends = (initial, d_final, d_initial)
    gl.warp_specialize(
        [
            (_consumer, (shared, leaving, fades, ends, of, back, scale, C)),
            (_producer, (shared, arriving, of, back, C)),
        ],
        [1],
        [24],
    )


@gluon.jit(do_not_specialize=NUMBERS)
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
    strides,
    C: gl.constexpr,
):
    """dv, Z and M + M^T of a chunk and a value head; what pairs of its tokens give G and beta."""
    b_row, g_row = strides
    VALUES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    LIST: gl.constexpr = gl.SliceLayout(1, VALUES)
    dtype: gl.constexpr = k_desc.dtype
    DK: gl.constexpr = C.DK
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, DK], dtype)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    BLOCKS: gl.constexpr = C.DV // 64
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
    start, first, length = place_of(lengths, chunk, T, sequences, C.SEQUENCES, C.VARLEN)
    i = gl.arange(0, 64, layout=TOKENS)
    j = gl.arange(0, 64, layout=gl.SliceLayout(0, VALUES))
    of_value = gl.arange(0, 64, layout=LIST)
    row = (start + first + of_value).to(gl.int64) * C.NV + hv
    if first < length:
        mbarrier.init(full, count=1)
        fence_async_shared()
        barrier()
        mbarrier.expect(full, 64 * DK * 4 + 4 * 64 * C.DV * 2)
        where = at(0, hv // (C.NV // C.N), start, length, first, True)
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
        total, _last = decay_of(g, token * g_row + hv, valid, C.GATE)
        if C.BETA:
            rate = rate_of(beta + token * b_row + hv, valid, C.BETA)
        else:
            rate = gl.where(valid, 1.0, 0.0)
        of_row = gl.convert_layout(rate, LIST)[:, None]
        zero = gl.zeros([64, 64], gl.float32, layout=SQUARE)
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
            to = d_value + row[:, None] * C.DV + block * 64 + j[None, :]
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
        turned = m_tile.permute((1, 0)).load(SQUARE).to(gl.float32)
        weight = z * qk + m * kk
        of_total = gl.convert_layout(gl.sum(weight, 1), TOKENS)
        of_total -= gl.convert_layout(gl.sum(weight, 0), TOKENS)
        barrier()
        m_tile.store((m + turned).to(dtype))
        fence_async_shared()
        barrier()
        tile = (chunk * C.NV + hv) * 64
        tma_store(z_desc, [tile, 0], z_tile)
        tma_store(m_desc, [tile, 0], m_tile)
        place = token * C.NV + hv
        gl.store(d_rate + place, of_rate, valid)
        gl.store(d_total + place, of_total, valid)
        forget(bars)
        tma.store_wait(0)
    else:
        # tokens behind the last sequence
        mask = start + first + of_value < T
        for block in gl.static_range(BLOCKS):
            to = d_value + row[:, None] * C.DV + block * 64 + j[None, :]
            gl.store(to, gl.zeros([64, 64], dtype, layout=VALUES), mask[:, None])


@gluon.jit
def _inputs_consumer(shared, beta, b_row, decays, parts, gradients, of, scale, C: gl.constexpr):
    q, k, o, n, r, z, m = shared.q, shared.k, shared.o, shared.n, shared.r, shared.z, shared.m
    states, grads, full, empty = shared.states, shared.grads, shared.full, shared.empty
    grown, left = decays
    d_rate, d_total = parts
    d_query, d_key, d_beta, d_g = gradients
    start, first, length, chunk, h = of
    DK: gl.constexpr = C.DK
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, DK // 64], [16, 64, 16])
    OF_M: gl.constexpr = gl.SliceLayout(1, M)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DK, DK // 8], [DK // 16, 1], [1, 0])
    LIST: gl.constexpr = gl.BlockedLayout([2], [32], [DK // 16], [0])
    GROUP: gl.constexpr = C.NV // C.N
    BLOCKS: gl.constexpr = C.DV // 64
    zero = gl.zeros([64, DK], gl.float32, layout=M)
    i = gl.arange(0, 64, layout=OF_M)
    valid = first + i < length
    token = (start + first + i).to(gl.int64)
    dq = zero
    dk = zero
    mbarrier.wait(shared.ready, 0)
    for one in range(GROUP):
        hv = h * GROUP + one
        by_o = zero
        by_n = zero
        by_r = zero
        whole = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, WIDE))
        for block in range(BLOCKS):
            step = one * BLOCKS + block
            stage = step % _INPUT_STAGES
            mbarrier.wait(full.index(stage), (step // _INPUT_STAGES) & 1)
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
        listed = first + gl.arange(0, 64, layout=LIST)
        row = (start + listed).to(gl.int64) * C.NV + hv
        mask = listed < length
        if C.BETA:
            found = gl.load(d_rate + row, mask, 0.0) - gl.convert_layout(of_rate, LIST)
            if C.BETA > 1:
                own = gl.convert_layout(rate, LIST)
                found *= own * (1.0 - own / (C.BETA - 1.0))
            gl.store(d_beta + row, found.to(d_beta.dtype.element_ty), mask)
        if C.GATE:
            found = gl.load(d_total + row, mask, 0.0) + gl.convert_layout(of_total, LIST)
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
def _inputs_producer(shared, by_token, by_chunk, of, C: gl.constexpr):
    q, k, o, n, r, z, m = shared.q, shared.k, shared.o, shared.n, shared.r, shared.z, shared.m
    states, grads, full, empty = shared.states, shared.grads, shared.full, shared.empty
    q_desc, k_desc, o_desc, n_desc, r_desc = by_token
    z_desc, m_desc, states_desc, grads_desc = by_chunk
    start, first, length, chunk, h = of
    GROUP: gl.constexpr = C.NV // C.N
    BLOCKS: gl.constexpr = C.DV // 64
    mbarrier.expect(shared.ready, 64 * C.DK * 4)
    where = at(0, h, start, length, first, True)
    load_box(k_desc, where, shared.ready, k)
    load_box(q_desc, where, shared.ready, q)
    for one in range(GROUP):
        hv = h * GROUP + one
        tile = chunk * C.NV + hv
        for block in range(BLOCKS):
            step = one * BLOCKS + block
            stage = step % _INPUT_STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), ((step // _INPUT_STAGES) & 1) ^ 1)
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


@gluon.jit(do_not_specialize=NUMBERS)
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
    dtype: gl.constexpr = k_desc.dtype
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, DK], dtype)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    program = gl.program_id(0)
    h = program % C.N
    chunk = program // C.N
    start, first, length = place_of(lengths, chunk, T, sequences, C.SEQUENCES, C.VARLEN)
    if first < length:
        q = gl.allocate_shared_memory(dtype, [64, DK], WIDE)
        k = gl.allocate_shared_memory(dtype, [64, DK], WIDE)
        o = gl.allocate_shared_memory(dtype, [_INPUT_STAGES, 64, 64], TILE)
        n = gl.allocate_shared_memory(dtype, [_INPUT_STAGES, 64, 64], TILE)
        r = gl.allocate_shared_memory(dtype, [_INPUT_STAGES, 64, 64], TILE)
        states = gl.allocate_shared_memory(dtype, [_INPUT_STAGES, 64, DK], states_desc.layout)
        grads = gl.allocate_shared_memory(dtype, [_INPUT_STAGES, 64, DK], grads_desc.layout)
        z = gl.allocate_shared_memory(dtype, [64, 64], TILE)
        m = gl.allocate_shared_memory(dtype, [64, 64], TILE)
        ready = gl.allocate_shared_memory(gl.int64, [1], BAR)
        pair_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
        pair_empty = gl.allocate_shared_memory(gl.int64, [1], BAR)
        mbarrier.init(ready, count=1)
        mbarrier.init(pair_full, count=1)
        mbarrier.init(pair_empty, count=1)
        full, empty = in_turn(_INPUT_STAGES, 1)
        shared = Inputs(
            q, k, o, n, r, z, m, states, grads, ready, full, empty, pair_full, pair_empty
        )
        by_token = (q_desc, k_desc, o_desc, n_desc, r_desc)
        by_chunk = (z_desc, m_desc, states_desc, grads_desc)
        decays = (grown, left)
        parts = (d_rate, d_total)
        gradients = (d_query, d_key, d_beta, d_g)
        of = Chunk(start, first, length, chunk, h)
        gl.warp_specialize(
            [
                (
                    _inputs_consumer,
                    (shared, beta, b_row, decays, parts, gradients, of, scale, C),
                ),
                (_inputs_producer, (shared, by_token, by_chunk, of, C)),
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
        for one in range(C.NV // C.N):
            row = token * C.NV + h * (C.NV // C.N) + one
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


def launch(a: Arguments, rate: int, scale: float, gradients: tuple[Tensor, ...]) -> None:
    """Writes all gradients."""
    query, key, value, beta, g = a["query"], a["key"], a["value"], a["beta"], a["g"]
    lengths, initial, d_final = a["actual_seq_lengths"], a["initial_state"], a["d_final_state"]
    d_query, d_key, d_value, d_beta, d_initial, d_g = gradients
    T = key.shape[0]
    half, device, wide = value.dtype, value.device, torch.float32
    sequences = 1 if lengths is None else lengths.shape[0]
    C = constants(key, value, lengths, rate, g, 32)
    # every sequence may end in a part of a chunk, and so may the tokens behind the last one
    chunks = triton.cdiv(T, CHUNK) + (sequences if C.VARLEN else 0)
    rows = chunks * C.NV * CHUNK
    t, p = (memory.empty((rows, CHUNK), half, device) for _ in range(2))
    grown, left, rates = (memory.empty((rows,), wide, device) for _ in range(3))
    n, r = (memory.empty((T, C.NV, C.DV), half, device) for _ in range(2))
    states, grads = (memory.empty((chunks * C.NV * C.DV, C.DK), half, device) for _ in range(2))
    parts = [memory.empty((T, C.NV), wide, device) for _ in range(2)]
    triangles(query, key, beta, lengths, scale, g, (t, p, grown, left), rates, sequences, C)
    qk = [describe(x, CHUNK, C.DK, True) for x in (query, key)]
    values = [describe(x, CHUNK, CHUNK, True) for x in (value, a["d_out"])]
    found = [describe(x, CHUNK, CHUNK, True) for x in (n, r)]
    squares = [describe_matrix(x, rows, CHUNK, [CHUNK, CHUNK]) for x in (t, p)]
    both = [describe_matrix(x, states.shape[0], C.DK, [CHUNK, C.DK]) for x in (states, grads)]
    sizes = (T, sequences, scale)
    b_row = 0 if beta is None else beta.stride(0)
    launches.kernel(_walks, 2 * sequences * C.NV * (C.DV // CHUNK))(
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
        *sizes,
        C=C,
        num_warps=4,
    )
    # T and P are used up: M + M^T and Z lie in their place
    launches.kernel(_pairs, chunks, C.NV)(
        *qk,
        *values,
        *found,
        *reversed(squares),
        beta,
        g,
        lengths,
        d_value,
        *parts,
        *sizes,
        (b_row, 0 if g is None else g.stride(0)),
        C=C,
        num_warps=4,
    )
    launches.kernel(_inputs, chunks * C.N)(
        *qk,
        values[1],
        *found,
        *reversed(squares),
        *both,
        beta,
        lengths,
        grown,
        left,
        *parts,
        d_query,
        d_key,
        d_beta,
        d_g,
        *sizes,
        b_row,
        C=C,
        num_warps=C.DK // 16,
    )
