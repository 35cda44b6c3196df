# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What chunk_kda's first kernel makes of a chunk and a head, on Hopper (Gluon), with its letters.

exp(G_i - G_j) = exp(G_i - a_I) exp(a_I - a_J) exp(a_J - G_j), where a_I is the G in the middle of a
token's block of 16.  The first and the last are in the operands of products, rounded once.  The
products go over blocks of earlier tokens, the last first: between two of them the operands of all
later tokens, which are in registers, fade by exp(a_J+1 - a_J), a number of a channel.

A warp has a block of 16 tokens, so sums of logarithms within a block are a thread's own.  Where a
channel has a token too far from the middle of its block, its factors are taken from the block's
begin and to its end.  None is above 1, and for tokens of different blocks they serve as well; what
the channel gives pairs of tokens within the block is added number by number.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
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

from ...common import gpu
from ...common.approximate import power
from ...common.gluon_names import barrier, reinterpret, tma_store
from ...common.hopper.barriers import two_barriers
from ...common.hopper.tma import aligned, at, describe_matrix, forget, load_box
from ...common.kda import GIVEN, LEAST, log_decay
from ...runtime import launches
from .chunks import CHUNK, add, inverse_of
from .kda import place, rate_of, rows_of

EVERY_NAN = gl.constexpr(tl.PropagateNan.ALL)
# of exponents to base 2, from the middle of a block: factors stay in the range of bfloat16.  Over a
# block in which a channel leaves it, it fades by more than this, and products of factors from the
# begin and to the end give next to nothing of what the number by number form gives in whole
_REACH = gl.constexpr(60.0)
SMALLEST = gl.constexpr(2.0**-126)
# [4, 16, 64]: a warp has a block of 16 tokens, a thread two channels
PARTS = gl.constexpr(gl.BlockedLayout([1, 16, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0]))


class Shared(NamedTuple):
    """What a program has in shared memory.  By half of the channels: tiles of q, of k, and in `z`
    of the earlier tokens' operand and of exp(G) k."""

    q: Any
    k: Any
    z: Any
    sums: Any
    ends: Any
    fades: Any
    units: Any


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b, propagate_nan=EVERY_NAN)


@gluon.jit
def _units(shared, NORM: gl.constexpr):
    """What the rows of q and k are multiplied with."""
    if NORM:
        M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
        rows = gl.arange(0, 64, layout=gl.SliceLayout(1, M))
        same = rows[:, None] == gl.arange(0, 64, layout=gl.SliceLayout(0, M))[None, :]
        zero = gl.zeros([64, 64], gl.float32, layout=M)
        for n in gl.static_range(2):
            x = (shared.q, shared.k)[n]
            y = warpgroup_mma(
                x.index(0), x.index(0).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            y = warpgroup_mma(x.index(1), x.index(1).permute((1, 0)), y, is_async=True)
            y = warpgroup_mma_wait(0, deps=[y])
            square = gl.sum(gl.where(same, y, 0.0), 1)
            shared.units.index(n).store(gl.reshape(1.0 / gl.sqrt(square + 1e-6), [4, 16]))


@gluon.jit
def _in_parts(tile):
    G: gl.constexpr = gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0])
    return gl.convert_layout(gl.reshape(tile.load(G), [4, 16, 64]), PARTS)


@gluon.jit
def _of_length_1(x, unit, NORM: gl.constexpr):
    wide = x.to(gl.float32)
    if NORM:
        wide *= unit.load(gl.SliceLayout(2, PARTS))[:, :, None]
    return wide


@gluon.jit
def _by_channel(memory, x):
    """Puts [4, 16, 64] there, the channels in front."""
    WHOLE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    PART: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    reinterpret(memory, x.dtype, [64, 4, 16], WHOLE).store(gl.permute(x, (2, 0, 1)))
    return reinterpret(memory, x.dtype, [64, 4, 16], PART)


@gluon.jit
def _number_by_number(
    shared,
    which,
    near,
    total,
    of_q,
    of_k,
    half,
    C: gl.constexpr,
):
    """Adds to P and A within blocks what channels of a half give where they are not `near`; a bit
    of `which` for each that is not in some block."""
    PAIRS: gl.constexpr = of_q.type.layout
    OWN: gl.constexpr = gl.SliceLayout(2, PAIRS)
    OTHER: gl.constexpr = gl.SliceLayout(1, PAIRS)
    dtype: gl.constexpr = shared.z.dtype
    q_tile = _in_parts(shared.q.index(half))
    k_tile = _in_parts(shared.k.index(half))
    q = _of_length_1(q_tile, shared.units.index(0), C.NORM).to(dtype)
    k = _of_length_1(k_tile, shared.units.index(1), C.NORM)
    k = gl.where(near[:, None, :], 0.0, k).to(dtype)
    barrier()
    FLOATS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    pairs_of = reinterpret(shared.z, gl.float32, [2, 64, 4, 16], FLOATS)
    totals = _by_channel(pairs_of.index(half), total)
    queries = _by_channel(shared.q.index(half), q)
    keys = _by_channel(shared.k.index(half), k)
    barrier()
    for c in range(64):
        if ((which >> c) & 1) != 0:
            own = totals.index(c).load(OWN)[:, :, None]
            other = totals.index(c).load(OTHER)[:, None, :]
            # where the other token is the later one, what this gives is not used
            faded = power(own - other) * keys.index(c).load(OTHER).to(gl.float32)[:, None, :]
            of_q += faded * queries.index(c).load(OWN).to(gl.float32)[:, :, None]
            of_k += faded * keys.index(c).load(OWN).to(gl.float32)[:, :, None]
    barrier()
    shared.q.index(half).store(gl.reshape(q_tile, [64, 64]))
    shared.k.index(half).store(gl.reshape(k_tile, [64, 64]))
    return of_q, of_k


@gluon.jit
def _operands(
    shared, gate, i, speed, numbers, to, of_q, of_k, half, BACKWARD: gl.constexpr, C: gl.constexpr
):
    """Of 64 channels the operands of products and what the walk reads.  Channels with a token
    beyond the reach of its block's middle have the block's begin as anchor of the later token, and
    its end of the earlier one, which serves pairs of tokens of different blocks; what those of the
    block give is added to `of_q` and `of_k`."""
    qs, ks, w, fades = to
    scale, lower_bound = numbers
    TABLE: gl.constexpr = gl.SliceLayout(1, PARTS)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, TABLE)
    dtype: gl.constexpr = shared.z.dtype
    logs = log_decay(gate, speed, lower_bound, C.GATE)
    logs = gl.where(logs < LEAST, LEAST, logs)
    total = gl.associative_scan(logs, 1, add)
    middle = gl.sum(gl.where(i == 7, total, 0.0), 1)
    end = gl.sum(gl.where(i == 15, total, 0.0), 1)
    near = gl.reduce(gl.abs(total - middle[:, None, :]), 1, _larger) <= _REACH
    begin = gl.where(near, middle, 0.0)
    finish = gl.where(near, middle, end)
    shared.sums.index(2 * half).store(begin)
    shared.sums.index(2 * half + 1).store(finish)
    shared.ends.index(half).store(end)
    barrier()
    ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    anchors = reinterpret(shared.sums, gl.float32, [16, 64], ROW)
    ends = reinterpret(shared.ends, gl.float32, [8, 64], ROW)
    block = gl.arange(0, 4, layout=gl.SliceLayout(1, TABLE))[:, None]
    channel = gl.arange(0, 64, layout=COLUMNS)
    which = gl.zeros([64], gl.int64, layout=COLUMNS)
    whole = gl.zeros([64], gl.float32, layout=COLUMNS)
    before = begin
    behind = end - finish
    for j in gl.static_range(4):
        here = anchors.index(8 * half + 4 + j).load(COLUMNS)
        which |= (anchors.index(8 * half + j).load(COLUMNS) != here).to(gl.int64)
        of_block = ends.index(4 * half + j).load(COLUMNS)
        whole += of_block
        before += gl.where(block > j, of_block[None, :], 0.0)
        behind += gl.where(block < j, of_block[None, :], 0.0)
        if j < 3:
            # from the anchor of this block's earlier tokens to the next's, of later ones for it
            of_next = anchors.index(8 * half + j + 1).load(COLUMNS)
            of_rest = anchors.index(8 * half + 4 + j + 1).load(COLUMNS)
            fade = gl.where(block == j + 1, of_next[None, :], of_rest[None, :])
            fade = power(fade + (of_block - here)[None, :])
            shared.fades.index(3 * half + j).store(gl.where(block > j, fade, 1.0).to(dtype))
    which = gl.sum(which << channel.to(gl.int64), 0)
    if which != 0:
        of_q, of_k = _number_by_number(shared, which, near, total, of_q, of_k, half, C)
    gl.store(fades + half * 64 + channel, power(whole))
    grow = power(before)[:, None, :]
    left = power(behind)[:, None, :]
    rising = power(total - begin[:, None, :])
    falling = power(finish[:, None, :] - total)
    at = 64 * half + block[:, None, :] * (16 * 128) + channel[None, None, :]
    q = _in_parts(shared.q.index(half))
    x = _of_length_1(q, shared.units.index(0), C.NORM) * rising
    gl.store((qs + at) + i * 128, (x * (grow * scale)).to(dtype))
    shared.q.index(half).store(gl.reshape(x.to(dtype), [64, 64]))
    k = _in_parts(shared.k.index(half))
    k = _of_length_1(k, shared.units.index(1), C.NORM)
    z = k * falling
    gl.store((ks + at) + i * 128, (z * left).to(dtype))
    shared.z.index(2 * half).store(gl.reshape(z.to(dtype), [64, 64]))
    y = k * rising
    shared.k.index(half).store(gl.reshape(y.to(dtype), [64, 64]))
    grown = (y * grow).to(dtype)
    if BACKWARD:
        gl.store((w + at) + i * 128, grown)
    else:
        shared.z.index(2 * half + 1).store(gl.reshape(grown, [64, 64]))
    return of_q, of_k


@gluon.jit
def _faded(x, fade):
    """[64, 64] by what a block and a channel have [4, 64]."""
    parts = gl.reshape(x, [4, 16, 64])
    parts = parts * fade.load(gl.SliceLayout(1, parts.type.layout))[:, None, :]
    return gl.convert_layout(gl.reshape(parts, [64, 64]), x.type.layout)


@gluon.jit
def _pairs(shared, near_q, near_k, scale):
    """Puts P in the place of the first half of q's operand, A, in float32, in that of k's."""
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, M, 2)
    dtype: gl.constexpr = shared.z.dtype
    PART: gl.constexpr = gl.NVMMASharedLayout.get_default_for([16, 64], dtype)
    FLOATS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float32)
    x_0 = shared.q.index(0).load(LEFT)
    x_1 = shared.q.index(1).load(LEFT)
    y_0 = shared.k.index(0).load(LEFT)
    y_1 = shared.k.index(1).load(LEFT)
    z_parts = reinterpret(shared.z, dtype, [16, 16, 64], PART)
    near_q = gl.convert_layout(gl.reshape(near_q, [64, 16]), M)
    near_k = gl.convert_layout(gl.reshape(near_k, [64, 16]), M)
    p = shared.q.index(0)
    alike = reinterpret(shared.k, gl.float32, [64, 64], FLOATS)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, M))[:, None]
    column = gl.arange(0, 16, layout=gl.SliceLayout(0, M))[None, :]
    block = row // 16
    barrier()
    for j in gl.static_range(3, -1, -1):
        if j < 3:
            x_0 = _faded(x_0, shared.fades.index(j))
            y_0 = _faded(y_0, shared.fades.index(j))
            x_1 = _faded(x_1, shared.fades.index(3 + j))
            y_1 = _faded(y_1, shared.fades.index(3 + j))
        z_0 = z_parts.index(j).permute((1, 0))
        z_1 = z_parts.index(8 + j).permute((1, 0))
        of_q = warpgroup_mma(x_0, z_0, gl.where(block == j, near_q, 0.0), is_async=True)
        of_k = warpgroup_mma(y_0, z_0, gl.where(block == j, near_k, 0.0), is_async=True)
        of_q = warpgroup_mma(x_1, z_1, of_q, is_async=True)
        of_k = warpgroup_mma(y_1, z_1, of_k, is_async=True)
        of_q, of_k = warpgroup_mma_wait(0, deps=[of_q, of_k])
        behind = row - column - 16 * j
        p.slice(16 * j, 16, 1).store(gl.where(behind >= 0, of_q * scale, 0.0).to(dtype))
        alike.slice(16 * j, 16, 1).store(gl.where(behind > 0, of_k, 0.0))


@gluon.jit(do_not_specialize=["T", "sequences"])
def _chunks(
    q_desc,
    k_desc,
    v_desc,
    p_desc,
    u_desc,
    w_desc,
    g,
    beta,
    A_log,
    dt_bias,
    bounds,
    qs,
    ks,
    w,
    fades,
    rates,
    out,
    T,
    sequences,
    numbers,
    strides,
    BACKWARD: gl.constexpr,
    C: gl.constexpr,
    num_warps: gl.constexpr,
):
    """All that chunk_kda's _chunks_kernel makes."""
    g_batch, g_row, g_head, b_batch, b_row = strides
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, M, 2)
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 16, 2], [4, 1, 1], [2, 1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, M)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, M)
    dtype: gl.constexpr = p_desc.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    TABLE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    program = gl.program_id(0)
    hv = program % C.HV
    chunk = program // C.HV
    batch, start, first, length, live = place(bounds, chunk, T, sequences, C.PIECES, C.VARLEN)
    if live & (first < length):
        q = gl.allocate_shared_memory(dtype, [2, 64, 64], TILE)
        k = gl.allocate_shared_memory(dtype, [2, 64, 64], TILE)
        z = gl.allocate_shared_memory(dtype, [4, 64, 64], TILE)
        sums = gl.allocate_shared_memory(gl.float32, [4, 4, 64], TABLE)
        ends = gl.allocate_shared_memory(gl.float32, [2, 4, 64], TABLE)
        between = gl.allocate_shared_memory(dtype, [6, 4, 64], TABLE)
        units = gl.allocate_shared_memory(gl.float32, [2, 4, 16], TABLE)
        bars = two_barriers()
        full, ready = bars.index(0), bars.index(1)
        where = at(batch, hv // (C.HV // C.H), start, length, first, C.VARLEN)
        mbarrier.expect(full, 2 * 64 * 128 * 2)
        load_box(k_desc, where, full, k)
        load_box(q_desc, where, full, q)
        long_hv = hv.to(gl.int64)
        begin = (start + first).to(gl.int64)
        count = length - first
        g += batch.to(gl.int64) * g_batch + begin * g_row + long_hv * g_head
        beta += batch.to(gl.int64) * b_batch + begin * b_row + long_hv
        OF_BLOCK: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, PARTS))
        block = gl.arange(0, 4, layout=OF_BLOCK)[:, None, None]
        i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, PARTS)))[None, :, None]
        column = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, PARTS)))
        mask = i < count - 16 * block
        # behind the last token there is no decay
        EMPTY: gl.constexpr = 0.0 if C.GATE == GIVEN else -float("inf")
        rows = gl.arange(0, 64, layout=ROWS)
        columns = gl.arange(0, 64, layout=COLUMNS)
        rate = rate_of(beta, rows, b_row, count, C.BETA)
        speed = 1.0
        if C.A:
            speed = gl.exp(gl.load(A_log + long_hv).to(gl.float32))
            # times minus infinity, it is to remain infinite
            speed = gl.where(speed < SMALLEST, SMALLEST, speed)
        shared = Shared(q, k, z, sums, ends, between, units)
        tile = program.to(gl.int64) * 64
        qs += tile * 128
        ks += tile * 128
        w += tile * 128
        fades += program.to(gl.int64) * 128
        places = (qs, ks, w, fades)
        mbarrier.wait(full, 0)
        _units(shared, C.NORM)
        barrier()
        of_q = gl.zeros([4, 16, 16], gl.float32, layout=PAIRS)
        of_k = of_q
        for half in range(2):
            channel = half * 64 + column
            # constants, as are a thread's tokens, are to be added last
            to = (g + (16 * block * g_row + channel[None, None, :])) + i * g_row
            gate = gl.load(to, mask=mask, other=EMPTY).to(gl.float32)
            if C.BIAS:
                gate += gl.load(dt_bias + hv * 128 + channel).to(gl.float32)[None, None, :]
            of_q, of_k = _operands(
                shared, gate, i, speed, numbers, places, of_q, of_k, half, BACKWARD, C
            )
        fence_async_shared()
        barrier()
        _pairs(shared, of_q, of_k, numbers[0])
        fence_async_shared()
        barrier()
        tma_store(p_desc, [program * 64, 0], q.index(0))
        FLOATS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float32)
        alike = reinterpret(k, gl.float32, [64, 64], FLOATS)
        lower = alike.load(M) * rate[:, None]
        if not BACKWARD:
            # values in the place of A
            fence_async_shared()
            barrier()
            where = at(batch, hv, start, length, first, C.VARLEN)
            mbarrier.expect(ready, 64 * 128 * 2)
            load_box(v_desc, where, ready, k)
        diagonal = reinterpret(
            sums, gl.float32, [16, 4, 16], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        )
        HALVES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
        one = reinterpret(z.index(0), gl.float16, [64, 64], HALVES)
        two = reinterpret(z.index(2), gl.float16, [64, 64], HALVES)
        zero = gl.zeros([64, 64], gl.float32, layout=M)
        solved = inverse_of(lower, rows, columns, diagonal, one, None, two, None, zero, False)
        # behind the barrier all warps have read what the inverse was made of, and P is written
        tma.store_wait(0)
        barrier()
        if BACKWARD:
            one.store(solved.to(gl.float16))
            fence_async_shared()
            barrier()
            left = gl.convert_layout((-alike.load(M)).to(gl.float16), LEFT)
            flight = warpgroup_mma(left, one, zero, use_acc=False, is_async=True)
            gl.store(rates + tile + rows, rate)
            u = warpgroup_mma_wait(0, deps=[flight])
            q.index(0).store(u.to(dtype))
            fence_async_shared()
            barrier()
            tma_store(u_desc, [program * 64, 0], q.index(0))
        else:
            solved *= gl.convert_layout(rate, COLUMNS)[None, :]
            left = gl.convert_layout(solved.to(dtype), LEFT)
            w_0 = warpgroup_mma(left, z.index(1), zero, use_acc=False, is_async=True)
            w_1 = warpgroup_mma(left, z.index(3), zero, use_acc=False, is_async=True)
            w_0, w_1 = warpgroup_mma_wait(0, deps=[w_0, w_1])
            z.index(0).store(w_0.to(dtype))
            z.index(2).store(w_1.to(dtype))
            mbarrier.wait(ready, 0)
            u_0 = warpgroup_mma(left, k.index(0), zero, use_acc=False, is_async=True)
            u_1 = warpgroup_mma(left, k.index(1), zero, use_acc=False, is_async=True)
            fence_async_shared()
            barrier()
            tma_store(w_desc, [program * 64, 0], z.index(0))
            tma_store(w_desc, [program * 64, 64], z.index(2))
            u_0, u_1 = warpgroup_mma_wait(0, deps=[u_0, u_1])
            q.index(0).store(u_0.to(dtype))
            q.index(1).store(u_1.to(dtype))
            fence_async_shared()
            barrier()
            tma_store(u_desc, [program * 64, 0], q.index(0))
            tma_store(u_desc, [program * 64, 64], q.index(1))
        forget(bars)
        tma.store_wait(0)
    elif C.VARLEN and not BACKWARD:
        # tokens of no sequence
        WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
        token = gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
        channel = gl.arange(0, 128, layout=gl.SliceLayout(0, WIDE))
        to = out + ((start + first + token).to(gl.int64) * C.HV + hv)[:, None] * 128
        empty = gl.zeros([64, 128], gl.float32, layout=WIDE).to(out.dtype.element_ty)
        gl.store(to + channel[None, :], empty, mask=(first + token < length)[:, None])


def supports(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> bool:
    """128 channels of both; q, k and v in rows of whole 16-byte units, and within a chunk addresses
    that differ by 32 bits."""
    return (
        gpu.is_hopper(v.device)
        and q.dtype is torch.bfloat16
        and q.shape[-1] == v.shape[-1] == 128
        and v.numel() > 0
        and aligned(q, k, v)
        and all(0 < step < 2**34 and step % 8 == 0 for x in (q, k, v) for step in x.stride()[:-1])
        and CHUNK * max(g.stride(1), beta.stride(1)) < 2**31
    )


def launch(
    x: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    out: Tensor | None,
    scale: float,
    lower_bound: float | None,
) -> None:
    """Writes all of `x`, and to `out` zeros for tokens of no sequence; None: for the gradient."""
    C = x.constants
    programs = x.count * C.HV
    rows, tile = programs * CHUNK, [CHUNK, CHUNK]
    launches.kernel(_chunks, programs)(
        *(rows_of(y, C.VARLEN, 128) for y in (q, k, v)),
        describe_matrix(x.p, rows, CHUNK, tile),
        describe_matrix(x.u, rows, CHUNK if out is None else 128, tile),
        describe_matrix(x.w, rows, 128, tile),
        g,
        beta,
        A_log,
        dt_bias,
        cu_seqlens,
        x.qs,
        x.ks,
        x.w,
        x.fades,
        x.rates,
        out,
        q.shape[1],
        x.sequences,
        (scale, 0.0 if lower_bound is None else lower_bound),
        (*g.stride()[:3], *beta.stride()[:2]),
        BACKWARD=out is None,
        C=C,
        num_warps=4,
        maxnreg=168,
    )
