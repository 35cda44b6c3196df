# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What the gated delta rule over whole sequences and its gradient share on Hopper (Gluon): where a
sequence lies, decays within a chunk of 64 tokens, and the first kernel, that of the triangles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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

from ...common.chunks import Constants
from ...common.gluon_names import barrier, reinterpret, tma_store
from ...common.hopper.tma import at, describe, describe_matrix, forget, load_box
from ...runtime import launches

CHUNK = 64

# of products [64, 64] of four warps: they, their left operand, what goes with their rows and
# columns; and of lists of tokens
SQUARE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, SQUARE.value, 2))
ROWS = gl.constexpr(gl.SliceLayout(1, SQUARE.value))
COLUMNS = gl.constexpr(gl.SliceLayout(0, SQUARE.value))
TOKENS = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))

# of the kernels: what none is compiled anew for
NUMBERS = ["T", "sequences", "scale"]


class Tiles(NamedTuple):
    """Places of chunks in shared memory that a producer fills ahead of a walk."""

    q: Any
    k: Any
    v: Any
    t: Any
    p: Any


class Walked(NamedTuple):
    """What a program of a walk has: its sequence, where that lies, a head and 64 of its columns."""

    sequence: Any
    start: Any
    length: Any
    first_chunk: Any
    hv: Any
    block: Any


@gluon.jit
def tiles_of(dtype: gl.constexpr, DK: gl.constexpr, STAGES: gl.constexpr):
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, DK], dtype)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    q = gl.allocate_shared_memory(dtype, [STAGES, 64, DK], WIDE)
    k = gl.allocate_shared_memory(dtype, [STAGES, 64, DK], WIDE)
    v = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], TILE)
    t = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], TILE)
    p = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], TILE)
    return Tiles(q, k, v, t, p)


@gluon.jit
def square_of(dtype: gl.constexpr):
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    return gl.allocate_shared_memory(dtype, [64, 64], TILE)


@gluon.jit
def place_of_state(head, block, k_step, v_step, DK: gl.constexpr, DV: gl.constexpr):
    """Where 64 columns of the state of a head [DV, DK] lie, from column 64 `block` on."""
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DK, 16])
    cv = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, STATE))
    ck = gl.arange(0, DK, layout=gl.SliceLayout(0, STATE))
    return head * (DV * DK) + cv[:, None] * v_step + ck[None, :] * k_step


@gluon.jit
def held(base, at):
    """A state in float32; zeros where there is none."""
    if base is not None:
        state = gl.load(base + at).to(gl.float32)
    else:
        LAYOUT: gl.constexpr = at.type.layout
        state = gl.zeros(at.shape, gl.float32, layout=LAYOUT)
    return state


@gluon.jit
def by_keys(state, k, zero):
    """k S of a chunk, transposed, begun."""
    turned = gl.convert_layout(state, LEFT)
    return warpgroup_mma(turned, k.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def taken_in(state, x, factor, k):
    """(S + k^T (factor x), transposed; x in 16 bits)."""
    A: gl.constexpr = gl.DotOperandLayout(0, state.type.layout, 2)
    left = gl.convert_layout((x * factor[None, :]).to(k.dtype), A)
    flight = warpgroup_mma(left, k, state, is_async=True)
    half = x.to(k.dtype)
    return warpgroup_mma_wait(0, deps=[flight]), half


@gluon.jit
def put_turned(x, place):
    """x^T into `place`, once what was there has been copied."""
    tma.store_wait(0)
    barrier()
    place.permute((1, 0)).store(x.to(place.dtype))
    fence_async_shared()
    barrier()


@gluon.jit
def put_beside(state, to_state, x, place):
    """The same, and a state into `to_state`."""
    tma.store_wait(0)
    barrier()
    to_state.store(state)
    place.permute((1, 0)).store(x)
    fence_async_shared()
    barrier()


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def add_lengths(a, b):
    """Of numbers from 0, in 32 bits: beyond them it is the largest, which is beyond the tokens."""
    return a + gl.minimum(b, 2147483647 - a)


@gluon.jit
def lengths_of(lengths, T, sequences, SEQUENCES: gl.constexpr):
    """By sequence [SEQUENCES]: its number and length."""
    LIST: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    s = gl.arange(0, SEQUENCES, layout=LIST)
    each = gl.load(lengths + s, mask=s < sequences, other=0)
    # before it is cast: what does not fit 32 bits wraps
    return s, gl.minimum(gl.maximum(each, 0), T).to(gl.int32)


@gluon.jit
def tokens_of(s, each, before, sequence, T):
    """(first token, length) of a sequence, behind those that are `before` it."""
    # the largest and a sum are instructions of a warp: what other reductions give is to ptxas not
    # the same in all threads, and the walk would spill
    ends = gl.associative_scan(each, 0, add_lengths)
    start = gl.minimum(gl.max(gl.where(before, ends, 0), 0), T)
    length = gl.sum(gl.where(s == sequence, each, 0), 0)
    return start, gl.minimum(length, T - start)


@gluon.jit
def place_of(lengths, chunk, T, sequences, SEQUENCES: gl.constexpr, VARLEN: gl.constexpr):
    """(start, first, length) of a chunk: its sequence's first token, its own first token there, and
    the sequence's length."""
    start = chunk * 0
    first = chunk * 64
    length = T
    if VARLEN:
        s, each = lengths_of(lengths, T, sequences, SEQUENCES)
        ends = gl.associative_scan((each + 63) // 64, 0, add_lengths)
        before = ends <= chunk
        first = (chunk - gl.max(gl.where(before, ends, 0), 0)) * 64
        start, length = tokens_of(s, each, before, gl.sum(before.to(gl.int32), 0), T)
    return start, first, length


@gluon.jit
def _terms(x, TWO: gl.constexpr):
    """x of float32 as the sum of two bfloat16, its upper half and what that leaves; or in float16,
    11 bits of it."""
    if TWO:
        high = (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
        return high.to(gl.bfloat16), (x - high).to(gl.bfloat16)
    else:
        high = x.to(gl.float16)
        return high, high  # Triton 3.6 returns no None


@gluon.jit
def _put(x, high, low, TWO: gl.constexpr):
    x_high, x_low = _terms(x, TWO)
    high.store(x_high)
    if TWO:
        low.store(x_low)


@gluon.jit
def _left(x, TWO: gl.constexpr):
    """x, to be multiplied from the left."""
    A: gl.constexpr = gl.DotOperandLayout(0, x.type.layout, 2)
    high, low = _terms(x, TWO)
    high = gl.convert_layout(high, A)
    if TWO:
        low = gl.convert_layout(low, A)
    return high, low


@gluon.jit
def _product(a_high, a_low, b_high, b_low, zero, TWO: gl.constexpr):
    """a b of [64, 64] matrices; of sums of two 16 bits and more are right."""
    if TWO:
        acc = warpgroup_mma(a_low, b_high, zero, use_acc=False, is_async=True)
        acc = warpgroup_mma(a_high, b_low, acc, is_async=True)
        acc = warpgroup_mma(a_high, b_high, acc, is_async=True)
    else:
        acc = warpgroup_mma(a_high, b_high, zero, use_acc=False, is_async=True)
    return acc


@gluon.jit
def inverse_of(
    lower, rows, columns, diagonal, dt_high, dt_low, b_high, b_low, zero, TWO: gl.constexpr
):
    """(I + lower)^-1 of a strictly lower [64, 64] matrix.

    Blocks of 16 on the diagonal by forward substitution, a column of the inverse to a thread, which
    stays right where keys are alike and a power series would cancel: D.  Then twice
    [[A, 0], [B, C]]^-1 = [[A^-1, 0], [-C^-1 B A^-1, C^-1]], written for the whole matrix: with
    Z = D B, of which Z1 is inside blocks of 32 and Z2 below them,
    D' = (I - Z1) D,  W = (I - Z1) Z2,  inverse = (I - W) D'.  TWO: of sums of two bfloat16, else of
    float16, eight times as fine as the bfloat16 that the result is rounded to."""
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
    _put(gl.reshape(whole, [64, 64]), dt_high, dt_low, TWO)
    _put(gl.where(inside, 0.0, lower), b_high, b_low, TWO)
    fence_async_shared()
    barrier()
    d_high = dt_high.permute((1, 0))
    d_low = dt_low.permute((1, 0)) if TWO else None
    z = warpgroup_mma_wait(0, deps=[_product(d_high, d_low, b_high, b_low, zero, TWO)])
    near = rows[:, None] // 32 == columns[None, :] // 32
    eye = gl.where(rows[:, None] == columns[None, :], 1.0, 0.0)
    barrier()
    _put(gl.where(near, 0.0, z), b_high, b_low, TWO)
    a_high, a_low = _left(eye - gl.where(near, z, 0.0), TWO)
    fence_async_shared()
    barrier()
    wide_flight = _product(a_high, a_low, b_high, b_low, zero, TWO)
    d_flight = _product(a_high, a_low, d_high, d_low, zero, TWO)
    wide = warpgroup_mma_wait(3 if TWO else 1, deps=[wide_flight])
    a_high, a_low = _left(eye - wide, TWO)
    doubled = warpgroup_mma_wait(0, deps=[d_flight])
    barrier()
    _put(doubled, b_high, b_low, TWO)
    fence_async_shared()
    barrier()
    return warpgroup_mma_wait(0, deps=[_product(a_high, a_low, b_high, b_low, zero, TWO)])


@gluon.jit
def decay_of(g, at, valid, GATE: gl.constexpr):
    """(running sum [64] of the decay's logarithm, all of it)."""
    if GATE:
        gate = gl.load(g + at, mask=valid, other=0.0).to(gl.float32)
    else:
        LIST: gl.constexpr = valid.type.layout
        gate = gl.zeros([64], gl.float32, layout=LIST)
    return gl.associative_scan(gate, 0, add), gl.sum(gate, 0)


@gluon.jit
def fading_of(total, rows, columns):
    """(row i sees column j, what is left of column j by then)."""
    causal = rows[:, None] >= columns[None, :]
    of_row = gl.convert_layout(total, rows.type.layout)[:, None]
    of_column = gl.convert_layout(total, columns.type.layout)[None, :]
    return causal, gl.exp(gl.where(causal, of_row - of_column, 0.0))


@gluon.jit
def rate_of(beta, valid, BETA: gl.constexpr):
    """How much of its key's value a token changes, in float32; 0 where there is none."""
    rate = gl.load(beta, mask=valid, other=0.0).to(gl.float32)
    if BETA > 1:
        rate = gl.where(valid, (BETA - 1.0) / (1.0 + gl.exp(-rate)), 0.0)
    return rate


@gluon.jit(do_not_specialize=NUMBERS)
def _prepare(
    q_desc,
    k_desc,
    t_desc,
    p_desc,
    beta,
    g,
    lengths,
    grown,
    left,
    rates,
    T,
    sequences,
    scale,
    strides,
    C: gl.constexpr,
):
    """T' and P of a chunk and a value head; where `rates` are wanted, T - I instead of T'."""
    b_row, g_row = strides
    dtype: gl.constexpr = q_desc.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    HALVES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    DK: gl.constexpr = C.DK
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, DK], dtype)
    q = gl.allocate_shared_memory(dtype, [64, DK], WIDE)
    k = gl.allocate_shared_memory(dtype, [64, DK], WIDE)
    bars = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    full = bars.index(0)
    chunk = gl.program_id(0)
    hv = gl.program_id(1)
    h = hv // (C.NV // C.N)
    start, first, length = place_of(lengths, chunk, T, sequences, C.SEQUENCES, C.VARLEN)
    if first < length:
        mbarrier.init(full, count=1)
        fence_async_shared()
        barrier()
        mbarrier.expect(full, 64 * DK * 4)
        where = at(0, h, start, length, first, True)
        load_box(k_desc, where, full, k)
        load_box(q_desc, where, full, q)
        diagonal = gl.allocate_shared_memory(
            gl.float32, [16, 4, 16], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        )
        dt_low = gl.allocate_shared_memory(gl.bfloat16, [64, 64], HALVES)
        rows = gl.arange(0, 64, layout=ROWS)
        columns = gl.arange(0, 64, layout=COLUMNS)
        i = gl.arange(0, 64, layout=TOKENS)
        valid = first + i < length
        token = (start + first + i).to(gl.int64)
        zero = gl.zeros([64, 64], gl.float32, layout=SQUARE)
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
        place = (chunk * C.NV + hv) * 64
        total, last = decay_of(g, token * g_row + hv, valid, C.GATE)
        gl.store(grown + place.to(gl.int64) + i, gl.exp(total))
        gl.store(left + place.to(gl.int64) + i, gl.exp(last - total))
        causal, fading = fading_of(total, rows, columns)
        attention = gl.where(causal, qk * fading * scale, 0.0)
        tma.store_wait(0)
        barrier()
        tile.store(attention.to(dtype))
        fence_async_shared()
        barrier()
        tma_store(p_desc, [place, 0], tile)
        # made again: nothing but k k^T is held while P is written
        total, _last = decay_of(g, token * g_row + hv, valid, C.GATE)
        if C.BETA:
            rate = rate_of(beta + token * b_row + hv, valid, C.BETA)
        else:
            rate = gl.where(valid, 1.0, 0.0)
        _seen, fading = fading_of(total, rows, columns)
        lower = kk * fading * gl.convert_layout(rate, ROWS)[:, None]
        lower = gl.where(rows[:, None] > columns[None, :], lower, 0.0)
        inverse = inverse_of(
            lower, rows, columns, diagonal, dt_high, dt_low, b_high, b_low, zero, True
        )
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
        forget(bars)
        tma.store_wait(0)


@gluon.jit
def sequence_of(lengths, sequence, T, sequences, SEQUENCES: gl.constexpr, VARLEN: gl.constexpr):
    """(first token, length, first chunk) of a sequence."""
    start = 0
    length = T
    first_chunk = sequence * 0
    if VARLEN:
        s, each = lengths_of(lengths, T, sequences, SEQUENCES)
        start, length = tokens_of(s, each, s < sequence, sequence, T)
        # before a sequence with tokens; before another it may wrap, and is not used
        first_chunk = gl.sum(gl.where(s < sequence, (each + 63) // 64, 0), 0)
    return start, length, first_chunk


@gluon.jit
def columns_at(head, first, count, row, block):
    """Coordinates of row `row` of a sequence, from column 64 `block` on."""
    where = at(0, head, first, count, row, True)
    return [where[0], where[1], where[2], where[3], block * 64]


@gluon.jit
def columns_of(of, row):
    """The same of what a program of a walk has."""
    return columns_at(of.hv, of.start, of.length, row, of.block)


def triangles(
    query: Tensor,
    key: Tensor,
    beta: Tensor | None,
    lengths: Tensor | None,
    scale: float,
    g: Tensor | None,
    made: tuple[Tensor, ...],
    rates: Tensor | None,
    sequences: int,
    C: Constants,
) -> None:
    """Writes what was `made` for it: T', or T - I and `rates`, P, exp(G) and exp(G_last - G) of all
    chunks."""
    t, p, *listed = made
    rows = t.shape[0]
    # 128 registers: four programs a multiprocessor.  H200, 4096 tokens of 32 heads: 60 us; for all
    # value heads of a key head at once, with two products shared, it took 8 more
    launches.kernel(_prepare, rows // (C.NV * CHUNK), C.NV)(
        *(describe(x, CHUNK, C.DK, True) for x in (query, key)),
        *(describe_matrix(x, rows, CHUNK, [CHUNK, CHUNK]) for x in (t, p)),
        beta,
        g,
        lengths,
        *listed,
        rates,
        key.shape[0],
        sequences,
        scale,
        tuple(0 if x is None else x.stride(0) for x in (beta, g)),
        C=C,
        num_warps=4,
        maxnreg=128,
    )
