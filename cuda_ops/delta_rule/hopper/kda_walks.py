# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The walks of KDA's gradient on Hopper (Gluon), with the letters of chunk_kda_grad.

As those of the gated delta rule: a program owns 64 columns of one head's S or E, transposed, in the
registers of a warpgroup, and a producer warp loads ahead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...common import gpu
from ...common.gluon_names import reinterpret, tma_load, tma_store
from ...common.hopper.barriers import in_turn
from ...common.hopper.tma import aligned, at, describe_matrix, describe_row
from ...runtime import launches
from .chunks import (
    CHUNK,
    COLUMNS,
    LEFT,
    SQUARE,
    by_keys,
    held,
    place_of_state,
    put_beside,
    put_turned,
    taken_in,
)
from .kda import pieces, rows_of

_STAGES = gl.constexpr(2)


class Walk(NamedTuple):
    """Of a walk in shared memory: tiles that arrive, those that leave, barriers."""

    qs: Any
    ks: Any
    kg: Any
    v: Any
    t: Any
    p: Any
    fades: Any
    rates: Any
    to_state: Any
    to_x: Any
    full: Any
    empty: Any


class WalkConstants(NamedTuple):
    HV: int
    PIECES: int
    VARLEN: bool


class Walked(NamedTuple):
    """What a program has: where its sequence lies, a head and 64 of its columns."""

    sequence: Any
    batch: Any
    start: Any
    length: Any
    chunks: Any
    first_chunk: Any
    nowhere: Any
    hv: Any
    block: Any


@gluon.jit
def _put(half, to_state, state_desc, row, x, to_x, x_desc, x_row, block):
    """A state beside its chunk, and the n or R of the chunk before it, from x^T."""
    put_beside(half, to_state, x, to_x)
    tma_store(state_desc, [row, 0], to_state)
    tma_store(x_desc, [x_row, block * 64], to_x)


@gluon.jit
def _over_states(shared, state_desc, n_desc, state, of, C: gl.constexpr):
    dtype: gl.constexpr = shared.kg.dtype
    zero = gl.zeros([64, 64], gl.float32, layout=SQUARE)
    n_half = zero.to(dtype)
    for c in range(of.chunks):
        stage = c % _STAGES
        half = state.to(dtype)
        mbarrier.wait(shared.full.index(stage), (c // _STAGES) & 1)
        known = by_keys(half, shared.kg.index(stage), zero)
        rate = shared.rates.index(stage).load(COLUMNS)
        value = shared.v.index(stage).permute((1, 0)).load(SQUARE).to(gl.float32)
        number = (of.first_chunk + c) * C.HV + of.hv
        x_row = gl.where(c > 0, (number - C.HV) * 64, of.nowhere)
        row = number * 128 + of.block * 64
        _put(half, shared.to_state, state_desc, row, n_half, shared.to_x, n_desc, x_row, of.block)
        # the state as well: ptxas would scale it, and wait for the product, before it is stored
        known, state = warpgroup_mma_wait(0, deps=[known, state])
        x = value - known
        x_half = gl.convert_layout((x * rate[None, :]).to(dtype), LEFT)
        n = warpgroup_mma(x_half, shared.t.index(stage).permute((1, 0)), x, is_async=True)
        state = (
            state * shared.fades.index(stage).load(gl.SliceLayout(0, state.type.layout))[None, :]
        )
        n = warpgroup_mma_wait(0, deps=[n])
        state, n_half = taken_in(state, n, rate, shared.ks.index(stage))
        mbarrier.arrive(shared.empty.index(stage))
    if of.chunks > 0:
        _put_last(
            n_half,
            shared.to_x,
            n_desc,
            ((of.first_chunk + of.chunks - 1) * C.HV + of.hv) * 64,
            of.block,
        )
    tma.store_wait(0)


@gluon.jit
def _put_last(x, to_x, x_desc, x_row, block):
    put_turned(x, to_x)
    tma_store(x_desc, [x_row, block * 64], to_x)


@gluon.jit
def _over_gradients(
    shared, state_desc, r_desc, grad, initial, d_initial, whole_at, of, C: gl.constexpr
):
    dtype: gl.constexpr = shared.kg.dtype
    zero = gl.zeros([64, 64], gl.float32, layout=SQUARE)
    r_half = zero.to(dtype)
    for step in range(of.chunks):
        stage = step % _STAGES
        c = of.chunks - 1 - step
        half = grad.to(dtype)
        mbarrier.wait(shared.full.index(stage), (step // _STAGES) & 1)
        d_out = shared.v.index(stage).permute((1, 0))
        x = warpgroup_mma(d_out, shared.p.index(stage), zero, use_acc=False, is_async=True)
        x = warpgroup_mma(
            gl.convert_layout(half, LEFT),
            shared.ks.index(stage).permute((1, 0)),
            x,
            is_async=True,
        )
        number = (of.first_chunk + c) * C.HV + of.hv
        x_row = gl.where(step > 0, (number + C.HV) * 64, of.nowhere)
        row = number * 128 + of.block * 64
        _put(half, shared.to_state, state_desc, row, r_half, shared.to_x, r_desc, x_row, of.block)
        grad = grad * shared.fades.index(stage).load(gl.SliceLayout(0, grad.type.layout))[None, :]
        q_flight = warpgroup_mma(d_out, shared.qs.index(stage), grad, is_async=True)
        rate = shared.rates.index(stage).load(COLUMNS)
        x = warpgroup_mma_wait(1, deps=[x])
        x_half = gl.convert_layout((x * rate[None, :]).to(dtype), LEFT)
        r_flight = warpgroup_mma(x_half, shared.t.index(stage), x, is_async=True)
        grad = warpgroup_mma_wait(1, deps=[q_flight])
        r = warpgroup_mma_wait(0, deps=[r_flight])
        grad, r_half = taken_in(grad, r, -rate, shared.kg.index(stage))
        mbarrier.arrive(shared.empty.index(stage))
    if of.chunks > 0:
        _put_last(r_half, shared.to_x, r_desc, (of.first_chunk * C.HV + of.hv) * 64, of.block)
    if initial is not None:
        gl.store(d_initial + whole_at, grad.to(d_initial.dtype.element_ty))
    tma.store_wait(0)


@gluon.jit
def _consumer(shared, described, ends, of, back, steps, C: gl.constexpr):
    n_desc, r_desc, states_desc, grads_desc = described
    initial, d_final, d_initial = ends
    k_step, v_step = steps
    head = of.sequence.to(gl.int64) * C.HV + of.hv
    whole_at = place_of_state(head, of.block, k_step, v_step, 128, 128)
    if back == 0:
        _over_states(shared, states_desc, n_desc, held(initial, whole_at), of, C)
    else:
        grad = held(d_final, whole_at)
        _over_gradients(shared, grads_desc, r_desc, grad, initial, d_initial, whole_at, of, C)


@gluon.jit
def _producer(shared, described, of, back, C: gl.constexpr):
    v_desc, o_desc, qs_desc, ks_desc, kg_desc, t_desc, p_desc, fades_desc, rates_desc = described
    _sequence, batch, start, length, chunks, first_chunk, _nowhere, hv, block = of
    dtype: gl.constexpr = shared.kg.dtype
    for step in range(chunks):
        c = gl.where(back == 0, step, chunks - 1 - step)
        stage = step % _STAGES
        ready = shared.full.index(stage)
        mbarrier.wait(shared.empty.index(stage), ((step // _STAGES) & 1) ^ 1)
        where = at(batch, hv, start, length, c * 64, C.VARLEN, block * 64)
        number = (first_chunk + c) * C.HV + hv
        tile = number * 64
        into = reinterpret(shared.v.index(stage), dtype, v_desc.block_shape, v_desc.layout)
        BOTH: gl.constexpr = 2 * 64 * 128 * 2 + 2 * 64 * 64 * 2 + 128 * 4 + 64 * 4
        if back == 0:
            mbarrier.expect(ready, BOTH)
            tma_load(kg_desc, [tile, 0], ready, shared.kg.index(stage))
            tma_load(v_desc, where, ready, into)
            tma_load(rates_desc, [tile], ready, shared.rates.index(stage))
            tma_load(t_desc, [tile, 0], ready, shared.t.index(stage))
            tma_load(fades_desc, [number * 128], ready, shared.fades.index(stage))
            tma_load(ks_desc, [tile, 0], ready, shared.ks.index(stage))
        else:
            mbarrier.expect(ready, BOTH + 64 * 128 * 2 + 64 * 64 * 2)
            tma_load(o_desc, where, ready, into)
            tma_load(p_desc, [tile, 0], ready, shared.p.index(stage))
            tma_load(ks_desc, [tile, 0], ready, shared.ks.index(stage))
            tma_load(fades_desc, [number * 128], ready, shared.fades.index(stage))
            tma_load(qs_desc, [tile, 0], ready, shared.qs.index(stage))
            tma_load(rates_desc, [tile], ready, shared.rates.index(stage))
            tma_load(t_desc, [tile, 0], ready, shared.t.index(stage))
            tma_load(kg_desc, [tile, 0], ready, shared.kg.index(stage))


@gluon.jit(do_not_specialize=["T", "sequences"])
def _walks(
    v_desc,
    o_desc,
    qs_desc,
    ks_desc,
    kg_desc,
    t_desc,
    p_desc,
    fades_desc,
    rates_desc,
    n_desc,
    r_desc,
    states_desc,
    grads_desc,
    bounds,
    initial,
    d_final,
    d_initial,
    T,
    sequences,
    nowhere,
    k_step,
    v_step,
    C: gl.constexpr,
):
    """n and the states of a sequence, or R and their gradients, for 64 columns of one head."""
    dtype: gl.constexpr = kg_desc.dtype
    LONG: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 128], dtype)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    program = gl.program_id(0)
    # the longer walk first
    back = 1 - program % 2
    block = program // 2 % 2
    hv = program // 4 % C.HV
    sequence = program // (4 * C.HV)
    start = program * 0
    length = T
    batch = sequence
    if C.VARLEN:
        s, begin, end = pieces(bounds, T, sequences, C.PIECES)
        mine = s == sequence + 1
        start = gl.sum(gl.where(mine, begin, 0), 0)
        length = gl.sum(gl.where(mine, end - begin, 0), 0)
        first_chunk = gl.sum(gl.where(s <= sequence, (end - begin + 63) // 64, 0), 0)
        batch = program * 0
    else:
        first_chunk = sequence * ((T + 63) // 64)
    chunks = (length + 63) // 64
    qs = gl.allocate_shared_memory(dtype, [_STAGES, 64, 128], LONG)
    ks = gl.allocate_shared_memory(dtype, [_STAGES, 64, 128], LONG)
    kg = gl.allocate_shared_memory(dtype, [_STAGES, 64, 128], LONG)
    v = gl.allocate_shared_memory(dtype, [_STAGES, 64, 64], TILE)
    t = gl.allocate_shared_memory(dtype, [_STAGES, 64, 64], TILE)
    p = gl.allocate_shared_memory(dtype, [_STAGES, 64, 64], TILE)
    to_state = gl.allocate_shared_memory(dtype, [64, 128], LONG)
    to_x = gl.allocate_shared_memory(dtype, [64, 64], TILE)
    fades = gl.allocate_shared_memory(gl.float32, [_STAGES, 128], fades_desc.layout)
    rates = gl.allocate_shared_memory(gl.float32, [_STAGES, 64], rates_desc.layout)
    full, empty = in_turn(_STAGES, 1)
    shared = Walk(qs, ks, kg, v, t, p, fades, rates, to_state, to_x, full, empty)
    arriving = (v_desc, o_desc, qs_desc, ks_desc, kg_desc, t_desc, p_desc, fades_desc, rates_desc)
    leaving = (n_desc, r_desc, states_desc, grads_desc)
    ends = (initial, d_final, d_initial)
    of = Walked(sequence, batch, start, length, chunks, first_chunk, nowhere, hv, block)
    gl.warp_specialize(
        [
            (_consumer, (shared, leaving, ends, of, back, (k_step, v_step), C)),
            (_producer, (shared, arriving, of, back, C)),
        ],
        [1],
        [24],
    )


def supports(q: Tensor, v: Tensor, d_out: Tensor) -> bool:
    """What the kernels here take: as many heads of keys as of values, of 128 channels, and v and
    d_out in rows of whole 16-byte units."""
    return (
        gpu.is_hopper(v.device)
        and q.shape[2:] == v.shape[2:]
        and q.shape[-1] == 128
        and q.numel() > 0
        and aligned(v, d_out)
        and all(0 < step < 2**34 and step % 8 == 0 for x in (v, d_out) for step in x.stride()[:-1])
    )


def launch(
    x: Any,
    v: Tensor,
    d_out: Tensor,
    cu_seqlens: Tensor | None,
    initial: Tensor | None,
    d_final: Tensor | None,
    n: Tensor,
    r: Tensor,
    states: Tensor,
    state_grads: Tensor,
    d_initial: Tensor,
    k_step: int,
    v_step: int,
) -> None:
    """Writes n, r, the states, their gradients, and `d_initial`."""
    C = x.constants
    rows = x.count * C.HV * CHUNK
    launches.kernel(_walks, 4 * x.sequences * C.HV)(
        *(rows_of(y, C.VARLEN, CHUNK) for y in (v, d_out)),
        *(describe_matrix(y, rows, 128, [CHUNK, 128]) for y in (x.qs, x.ks, x.w)),
        *(describe_matrix(y, rows, CHUNK, [CHUNK, CHUNK]) for y in (x.u, x.p)),
        describe_row(x.fades, 128),
        describe_row(x.rates, CHUNK),
        *(describe_matrix(y, rows, 128, [CHUNK, CHUNK]) for y in (n, r)),
        *(describe_matrix(y, 2 * rows, 128, [CHUNK, 128]) for y in (states, state_grads)),
        cu_seqlens,
        initial,
        d_final,
        d_initial,
        v.shape[1],
        x.sequences,
        rows,
        k_step,
        v_step,
        C=WalkConstants(C.HV, C.PIECES, C.VARLEN),
        num_warps=4,
    )
