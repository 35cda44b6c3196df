# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The last kernel of KDA's gradient on Hopper (Gluon), with the letters of chunk_kda_grad.

exp(G_i - G_j) = exp(G_i - a_I) exp(a_I - a_J) exp(a_J - G_j), where a_I is the G in the middle of a
token's block of 16.  The first and the last are in the operands of products, rounded once; what is
between is a number of a channel and two blocks.  So the later token's sum over earlier blocks is
one accumulator, faded by exp(a_I - a_I-1) in float32 before the block I adds its part, and that of
an earlier token over later blocks goes the other way.  The state in front of a chunk is a block
ahead of all, and the gradient of the state behind it one behind: the accumulators begin with their
products.  What a pair gives its later token it takes from the earlier one, of the same rounded
factors, and so the two cancel.

A program goes over a chunk and a head, some channels at a time.  Channels with a token too far from
the middle of its block are made again by a second launch, a program for each such part; what comes
last, the gradient of the norms, is left to the last of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ....dispatch.common import memory
from ...common.approximate import inverse, power
from ...common.chunks import from_head
from ...common.gluon_names import barrier, reinterpret, tma_load
from ...common.hopper.barriers import two_barriers
from ...common.hopper.tma import at, describe_matrix, forget, load_box
from ...common.kda import BOUNDED, LEAST, SOFTPLUS, log_decay
from ...common.log2 import LN2, LOG2E
from ...runtime import launches
from . import kda_walks
from .chunks import CHUNK, add
from .kda import again, again_float, place, rate_of, rows_of

# channels of the keys at a time
_WIDTH = 32
W = gl.constexpr(_WIDTH)
# of products [64, W]: they, their left operand, and what goes with their columns
_PART = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _WIDTH, 16]))
_LEFT = gl.constexpr(gl.DotOperandLayout(0, _PART.value, 2))
_COLUMNS = gl.constexpr(gl.SliceLayout(0, _PART.value))


class Shared(NamedTuple):
    """What a program has in shared memory."""

    o: Any
    n: Any
    r: Any
    state: Any
    grad: Any
    third: Any
    z: Any
    m: Any
    sums: Any
    units: Any


@gluon.jit
def _of_gate(x, speed, lower_bound, logs, GATE: gl.constexpr):
    """The derivatives of the decay's logarithm by x and by A_log."""
    if GATE == SOFTPLUS:
        slope = -speed * inverse(1.0 + power(-x * LOG2E))
        by_A = logs.load(x.type.layout) * LN2
    elif GATE == BOUNDED:
        share = inverse(1.0 + power(-speed * x * LOG2E))
        slope = lower_bound * speed * share * (1.0 - share)
        by_A = slope * x
    else:
        slope = gl.full(x.shape, 1.0, gl.float32, layout=x.type.layout)
        by_A = slope
    return slope, by_A


@gluon.jit
def _gate_input(g, to, mask, dt_bias, column, BIAS: gl.constexpr):
    x = gl.load(g + to, mask=mask, other=0.0).to(gl.float32)
    if BIAS:
        x += gl.load(dt_bias + column).to(gl.float32)[None, :]
    return x


@gluon.jit
def _of_norm(x, x_at, grad, grad_at, mask):
    """In place the gradient of rows of x from that of the rows of length 1."""
    tile = gl.load(grad + grad_at, mask=mask, other=0.0).to(gl.float32)
    x_tile = gl.load(x + x_at, mask=mask, other=0.0).to(gl.float32)
    unit = 1.0 / gl.sqrt(gl.sum(x_tile * x_tile, 1) + 1e-6)
    x_tile *= unit[:, None]
    tile = (tile - x_tile * gl.sum(x_tile * tile, 1)[:, None]) * unit[:, None]
    gl.store(grad + grad_at, tile.to(grad.dtype.element_ty), mask=mask)


@gluon.jit
def _some_rows(x, row_step, of_key, count, G: gl.constexpr):
    """Some channels of the rows."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, G)) + again(0)
    return gl.load(x + (row[:, None] * row_step + of_key), mask=(row < count)[:, None], other=0.0)


@gluon.jit
def _of_length_1(tile, unit):
    return tile.to(gl.float32) * unit.load(gl.SliceLayout(1, tile.type.layout))[:, None]


@gluon.jit
def _unit_rows(x, row_step, of_key, count, unit, G: gl.constexpr):
    """Some channels of the rows of length 1, in float32."""
    return _of_length_1(_some_rows(x, row_step, of_key, count, G), unit)


@gluon.jit
def _at_once(
    shared, apart, rate, q, q_row, k, k_row, k_tile, of_key, count, d_q, scale, C: gl.constexpr
):
    """Writes dq of some channels; returns dk, what G gets of every token, and of all before
    the next chunk: all pairs, block by block."""
    G: gl.constexpr = apart.type.layout
    dtype: gl.constexpr = shared.z.dtype
    PART: gl.constexpr = gl.NVMMASharedLayout.get_default_for([16, W], dtype)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, W], dtype)
    FLOATS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, W], gl.float32)
    zero = gl.zeros([64, W], gl.float32, layout=_PART)
    x_tile = reinterpret(shared.grad, dtype, [2, 64, W], TILE).index(0)
    y_tile = reinterpret(shared.grad, dtype, [2, 64, W], TILE).index(1)
    x_parts = reinterpret(x_tile, dtype, [4, 16, W], PART)
    y_parts = reinterpret(y_tile, dtype, [4, 16, W], PART)
    e_parts = reinterpret(shared.third, dtype, [4, 16, W], PART)
    turned = reinterpret(shared.state, gl.float32, [64, W], FLOATS)
    lists = reinterpret(shared.sums, gl.float32, [8, W], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    block = gl.arange(0, 64, layout=gl.SliceLayout(1, _PART)) // 16
    by_o = warpgroup_mma(shared.o, shared.state, zero, use_acc=False, is_async=True)
    by_r = warpgroup_mma(shared.r, shared.state, zero, use_acc=False, is_async=True)
    rising = power(apart)
    tile = _of_length_1(k_tile, shared.units.index(1))
    shared.third.store((tile * inverse(rising)).to(dtype))
    fence_async_shared()
    barrier()
    whole = _of_states(shared.state, shared.grad)
    by_o, by_r = warpgroup_mma_wait(0, deps=[by_o, by_r])
    fade = power(lists.index(0).load(_COLUMNS))
    by_o *= (fade * scale)[None, :]
    by_r *= -rate[:, None] * fade[None, :]
    q_tile = _some_rows(q, q_row, of_key, count, G)
    for step in gl.static_range(4):
        if step > 0:
            # from the middle of the block before to that of this one, for it and those behind
            fade = power(lists.index(step).load(_COLUMNS) - lists.index(step - 1).load(_COLUMNS))
            fade = gl.where((block >= step)[:, None], fade[None, :], 1.0)
            by_o *= fade
            by_r *= fade
        z = shared.z.slice(16 * step, 16, 1).load(_LEFT)
        m = shared.m.slice(16 * step, 16, 1).load(_LEFT)
        by_o = warpgroup_mma(z, e_parts.index(step), by_o, is_async=True)
        by_r = warpgroup_mma(m, e_parts.index(step), by_r, is_async=True)
        by_o, by_r = warpgroup_mma_wait(0, deps=[by_o, by_r])
    # to threads of 16 tokens each
    barrier()
    turned.store(by_o)
    x_half = (_of_length_1(q_tile, shared.units.index(0)) * rising).to(dtype)
    barrier()
    left = turned.load(G)
    barrier()
    turned.store(by_r)
    of_total = x_half.to(gl.float32) * left
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, G)) + again(0)
    to = row[:, None] * (C.HV * 128) + of_key
    left *= rising
    gl.store(d_q + to, left.to(d_q.dtype.element_ty), mask=(row < count)[:, None])
    y_half = _unit_rows(k, k_row, of_key, count, shared.units.index(1), G)
    y_half = (y_half * rising).to(dtype)
    barrier()
    left = turned.load(G)
    of_total += y_half.to(gl.float32) * left
    dk = left * rising
    by_n = warpgroup_mma(shared.n, shared.grad, zero, use_acc=False, is_async=True)
    by_n = warpgroup_mma_wait(0, deps=[by_n])
    barrier()
    x_tile.store(x_half)
    y_tile.store(y_half)
    fence_async_shared()
    barrier()
    by_n *= rate[:, None]
    # what G_last gets: of the states, and of what every token leaves
    near = gl.where(
        (block < 2)[:, None],
        lists.index(1).load(_COLUMNS)[None, :],
        lists.index(3).load(_COLUMNS)[None, :],
    )
    rest = gl.where(
        (block < 2)[:, None],
        lists.index(0).load(_COLUMNS)[None, :],
        lists.index(2).load(_COLUMNS)[None, :],
    )
    rest = gl.where((block % 2 == 0)[:, None], rest, near)
    last = lists.index(7).load(_COLUMNS)
    rest = power(last[None, :] - rest) * shared.third.load(_PART).to(gl.float32)
    end = gl.sum(rest * by_n, 0)
    end += power(last) * gl.convert_layout(whole, _COLUMNS)
    by_n *= power(last - lists.index(3).load(_COLUMNS))[None, :]
    for step in gl.static_range(4):
        if step > 0:
            fade = lists.index(4 - step).load(_COLUMNS) - lists.index(3 - step).load(_COLUMNS)
            fade = power(fade)[None, :]
            by_n *= gl.where((block <= 3 - step)[:, None], fade, 1.0)
        z = shared.z.slice(48 - 16 * step, 16).permute((1, 0)).load(_LEFT)
        m = shared.m.slice(48 - 16 * step, 16).permute((1, 0)).load(_LEFT)
        by_n = warpgroup_mma(z, x_parts.index(3 - step), by_n, is_async=True)
        by_n = warpgroup_mma(m, y_parts.index(3 - step), by_n, is_async=True)
        by_n = warpgroup_mma_wait(0, deps=[by_n])
    turned.store(by_n)
    barrier()
    left = turned.load(G)
    of_total -= shared.third.load(G).to(gl.float32) * left
    return dk + left * inverse(again_float(rising)), of_total, end


@gluon.jit
def _of_states(state, grad):
    """By channel the sum of the products of a state and its gradient."""
    BY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // W, W // 8], [4, 1], [1, 0])
    whole = gl.zeros([32, W], gl.float32, layout=BY)
    for part in gl.static_range(4):
        tile = state.slice(32 * part, 32).load(BY).to(gl.float32)
        whole += tile * grad.slice(32 * part, 32).load(BY).to(gl.float32)
    return gl.sum(whole, 0)


@gluon.jit
def _by_bits(shared, total, rate, q, q_row, k, k_row, of_key, count, d_q, scale, C: gl.constexpr):
    """The same with no factor above 1: two tokens differ in some highest bit of their places, and
    the pairs of every bit are products of their own (see chunk_kda)."""
    G: gl.constexpr = total.type.layout
    dtype: gl.constexpr = shared.z.dtype
    TILES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, W], dtype)
    FLOATS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, W], gl.float32)
    zero = gl.zeros([64, W], gl.float32, layout=_PART)
    z_tile, m_tile = shared.z, shared.m
    x_tile = reinterpret(shared.grad, dtype, [2, 64, W], TILES).index(0)
    y_tile = reinterpret(shared.grad, dtype, [2, 64, W], TILES).index(1)
    one_way = reinterpret(shared.state, gl.float32, [64, W], FLOATS)
    lists = reinterpret(shared.sums, gl.float32, [8, W], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    by_o = warpgroup_mma(shared.o, shared.state, zero, use_acc=False, is_async=True)
    by_r = warpgroup_mma(shared.r, shared.state, zero, use_acc=False, is_async=True)
    by_n = warpgroup_mma(shared.n, shared.grad, zero, use_acc=False, is_async=True)
    whole = _of_states(shared.state, shared.grad)
    own = gl.arange(0, 64, layout=gl.SliceLayout(1, _LEFT))[:, None]
    other = gl.arange(0, 64, layout=gl.SliceLayout(0, _LEFT))[None, :]
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, _PART))
    columns = gl.arange(0, 64, layout=_COLUMNS)
    by_o, by_r, by_n = warpgroup_mma_wait(0, deps=[by_o, by_r, by_n])
    barrier()
    one_way.store(total)
    x_tile.store(_unit_rows(q, q_row, of_key, count, shared.units.index(0), G).to(dtype))
    y_tile.store(_unit_rows(k, k_row, of_key, count, shared.units.index(1), G).to(dtype))
    barrier()
    sums = one_way.load(_PART)
    last = lists.index(7).load(_COLUMNS)
    q_half = x_tile.load(_PART)
    k_half = y_tile.load(_PART)
    by_o *= power(sums) * scale
    by_r *= power(sums) * -rate[:, None]
    by_n *= power(last[None, :] - sums) * rate[:, None]
    of_total = q_half.to(gl.float32) * by_o + k_half.to(gl.float32) * (by_r - by_n)
    end = gl.sum(by_n * k_half.to(gl.float32), 0)
    end += power(last) * gl.convert_layout(whole, _COLUMNS)
    # what q and k of one token give each other takes no decay
    same = gl.where(rows[:, None] == columns[None, :], z_tile.load(_PART).to(gl.float32), 0.0)
    same = gl.sum(same, 1)[:, None]
    dq = by_o + same * k_half.to(gl.float32)
    dk = by_r + by_n + same * q_half.to(gl.float32)
    for bit in range(6):
        size = 1 << bit
        middle = (rows | (2 * size - 1)) - size
        middle = gl.broadcast(middle[:, None], sums)[0]
        fading = power(-gl.abs(sums - gl.gather(sums, middle, 0)))
        # below the diagonal those of this bit; z and m have nothing above it
        pairs = ((own ^ other) >> bit) == 1
        x_half = (q_half.to(gl.float32) * fading).to(dtype)
        y_half = (k_half.to(gl.float32) * fading).to(dtype)
        barrier()
        x_tile.store(x_half)
        y_tile.store(y_half)
        fence_async_shared()
        barrier()
        z = gl.where(pairs, z_tile.load(_LEFT).to(gl.float32), 0.0).to(dtype)
        m = gl.where(pairs, m_tile.load(_LEFT).to(gl.float32), 0.0).to(dtype)
        of_q = warpgroup_mma(z, y_tile, zero, use_acc=False, is_async=True)
        of_k = warpgroup_mma(m, y_tile, zero, use_acc=False, is_async=True)
        of_q, of_k = warpgroup_mma_wait(0, deps=[of_q, of_k])
        z = gl.where(pairs, z_tile.permute((1, 0)).load(_LEFT).to(gl.float32), 0.0).to(dtype)
        m = gl.where(pairs, m_tile.permute((1, 0)).load(_LEFT).to(gl.float32), 0.0).to(dtype)
        back = warpgroup_mma(z, x_tile, zero, use_acc=False, is_async=True)
        back = warpgroup_mma(m, y_tile, back, is_async=True)
        of_total += x_half.to(gl.float32) * of_q + y_half.to(gl.float32) * of_k
        dq += of_q * fading
        back = warpgroup_mma_wait(0, deps=[back])
        of_total -= y_half.to(gl.float32) * back
        dk += (of_k + back) * fading
    barrier()
    one_way.store(dq)
    barrier()
    left = one_way.load(G)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, G)) + again(0)
    to = row[:, None] * (C.HV * 128) + of_key
    gl.store(d_q + to, left.to(d_q.dtype.element_ty), mask=(row < count)[:, None])
    barrier()
    one_way.store(dk)
    barrier()
    dk = one_way.load(G)
    barrier()
    one_way.store(of_total)
    barrier()
    return dk, one_way.load(G), end


@gluon.jit
def _either(a, b):
    return a | b


@gluon.jit
def _lowest(parts):
    """The number of the lowest of four bits."""
    one = parts & -parts
    return (one >> 1) - (one >> 3)


@gluon.jit(do_not_specialize=["T", "sequences"])
def _inputs(
    o_desc,
    n_desc,
    r_desc,
    states_desc,
    grads_desc,
    q,
    k,
    g,
    beta,
    A_log,
    dt_bias,
    bounds,
    far,
    d_q,
    d_k,
    d_v,
    d_g,
    d_beta,
    A_parts,
    bias_parts,
    T,
    sequences,
    numbers,
    strides,
    REACH: gl.constexpr,
    FINE: gl.constexpr,
    C: gl.constexpr,
    num_warps: gl.constexpr,
):
    """All gradients of a chunk and a head but those of the states; `far`: in which parts of the
    channels a factor left the reach.  FINE: one of these parts again, bit by bit."""
    scale, lower_bound = numbers
    q_by, k_by, g_by = strides[0:3], strides[3:6], strides[6:9]
    b_batch, b_row = strides[9:11]
    q_row, k_row, g_row = q_by[1], k_by[1], g_by[1]
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, M)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, M)
    # a warp has 16 tokens, a thread two channels
    G: gl.constexpr = gl.BlockedLayout([W // 4, 2], [64 // W, W // 2], [4, 1], [1, 0])
    OF_G: gl.constexpr = gl.SliceLayout(1, G)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    dtype: gl.constexpr = n_desc.dtype
    LONG: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 128], dtype)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    program = gl.program_id(0)
    left = program * 0 + (1 << 128 // W) - 1
    if FINE:
        left = 1 << program % (128 // W)
        program = program // (128 // W)
        left &= gl.load(far + program)
    h = (program % C.HV).to(gl.int64)
    chunk = program // C.HV
    batch, start, first, length, live = place(bounds, chunk, T, sequences, C.PIECES, C.VARLEN)
    long_batch = batch.to(gl.int64)
    wide = gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
    wide_columns = gl.arange(0, 128, layout=gl.SliceLayout(0, WIDE))[None, :]
    wide_token = long_batch * T + start + first + wide
    wide_mask = (first + wide < length)[:, None]
    wide_to = (wide_token * C.HV + h)[:, None] * 128 + wide_columns
    todo = live & (first < length)
    todo = todo & (left != 0)
    if todo:
        o = gl.allocate_shared_memory(dtype, [64, 128], LONG)
        n = gl.allocate_shared_memory(dtype, [64, 128], LONG)
        r = gl.allocate_shared_memory(dtype, [64, 128], LONG)
        state = gl.allocate_shared_memory(dtype, [128, W], states_desc.layout)
        grad = gl.allocate_shared_memory(dtype, [128, W], grads_desc.layout)
        third = gl.allocate_shared_memory(
            dtype, [64, W], gl.NVMMASharedLayout.get_default_for([64, W], dtype)
        )
        z_tile = gl.allocate_shared_memory(dtype, [64, 64], TILE)
        m_tile = gl.allocate_shared_memory(dtype, [64, 64], TILE)
        sums = gl.allocate_shared_memory(
            gl.float32, [8, W], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        )
        # the decays' logarithms, of which a thread reads its own again
        kept = gl.allocate_shared_memory(
            gl.float32, [64, W], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        )
        bars = two_barriers()
        ready, full = bars.index(0), bars.index(1)
        where = at(batch, program % C.HV, start, length, first, C.VARLEN)
        mbarrier.expect(ready, 3 * 64 * 128 * 2)
        load_box(o_desc, where, ready, o)
        tma_load(n_desc, [program * 64, 0], ready, n)
        tma_load(r_desc, [program * 64, 0], ready, r)
        mbarrier.expect(full, 2 * 128 * W * 2)
        tma_load(states_desc, [program * 128, _lowest(left) * W], full, state)
        tma_load(grads_desc, [program * 128, _lowest(left) * W], full, grad)
        begin = (start + first).to(gl.int64)
        count = length - first
        q = from_head(q, q_by, long_batch, begin, h)
        k = from_head(k, k_by, long_batch, begin, h)
        g = from_head(g, g_by, long_batch, begin, h)
        beta += long_batch * b_batch + begin * b_row + h
        rows = gl.arange(0, 64, layout=ROWS)
        columns = gl.arange(0, 64, layout=COLUMNS)
        rate = rate_of(beta, rows, b_row, count, C.BETA)
        of_column = gl.convert_layout(rate, COLUMNS)
        of_row = gl.convert_layout(rate, gl.SliceLayout(1, _PART))
        of_wide = gl.convert_layout(rate, gl.SliceLayout(1, WIDE))
        zero = gl.zeros([64, 64], gl.float32, layout=M)
        # the lengths of the rows
        i = gl.arange(0, 64, layout=OF_G)
        q_wide = wide[:, None] * q_row + wide_columns
        k_wide = wide[:, None] * k_row + wide_columns
        units = gl.allocate_shared_memory(
            gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0])
        )
        if C.NORM:
            x = gl.load(q + q_wide, mask=wide_mask, other=0.0).to(gl.float32)
            y = gl.load(k + k_wide, mask=wide_mask, other=0.0).to(gl.float32)
            units.index(0).store(1.0 / gl.sqrt(gl.sum(x * x, 1) + 1e-6))
            units.index(1).store(1.0 / gl.sqrt(gl.sum(y * y, 1) + 1e-6))
        else:
            unit = gl.full([64], 1.0, gl.float32, layout=gl.SliceLayout(1, WIDE))
            units.index(0).store(unit)
            units.index(1).store(unit)
        mbarrier.wait(ready, 0)
        turned = n.permute((1, 0))
        z_flight = warpgroup_mma(o, turned, zero, use_acc=False, is_async=True)
        m_flight = warpgroup_mma(r, turned, zero, use_acc=False, is_async=True)
        if not FINE:
            dv = (r.load(WIDE).to(gl.float32) * of_wide[:, None]).to(d_v.dtype.element_ty)
            gl.store(d_v + wide_to, dv, mask=wide_mask)
        z, m = warpgroup_mma_wait(0, deps=[z_flight, m_flight])
        if not FINE:
            of_rate = gl.sum(gl.where(rows[:, None] == columns[None, :], m, 0.0), 1)
            if C.BETA > 1:
                of_rate *= rate * (1.0 - rate / (C.BETA - 1.0))
            token = long_batch * T + start + first + rows
            of_rate = of_rate.to(d_beta.dtype.element_ty)
            gl.store(d_beta + token * C.HV + h, of_rate, mask=first + rows < length)
        z = gl.where(rows[:, None] >= columns[None, :], z * (of_column * scale)[None, :], 0.0)
        m *= -rate[:, None] * of_column[None, :]
        m = gl.where(rows[:, None] > columns[None, :], m, 0.0)
        z_tile.store(z.to(dtype))
        m_tile.store(m.to(dtype))
        written = ((long_batch * T + begin) * C.HV + h) * 128
        to_q = d_q + written
        to_k = d_k + written
        to_g = d_g + written
        speed = 1.0
        if C.A:
            speed = gl.exp(gl.load(A_log + h).to(gl.float32))
        shared = Shared(o, n, r, state, grad, third, z_tile, m_tile, sums, units)
        # of a block and a channel, a bit for every part of the channels
        nowhere = gl.zeros([64, W], gl.int32, layout=G)
        beyond = gl.max(gl.reshape(nowhere, [4, 16, W]), 1)
        mine = left
        turn = program * 0
        while left != 0:
            step = _lowest(left)
            left &= left - 1
            column = step * W + gl.arange(0, W, layout=gl.SliceLayout(0, G))
            of_key = column[None, :]
            to_bias = h * 128 + column
            row = (i + again(0))[:, None]
            mask = row < count
            k_tile = _some_rows(k, k_row, of_key, count, G)
            gate = _gate_input(g, row * g_row + of_key, mask, dt_bias, to_bias, C.BIAS)
            logs = log_decay(gate, speed, lower_bound, C.GATE)
            logs = gl.where(mask, gl.where(logs < LEAST, LEAST, logs), 0.0)
            if C.GATE == SOFTPLUS:
                kept.store(logs)
            total = gl.associative_scan(logs, 0, add)
            of_blocks = gl.reshape(gl.where((i % 16 == 7)[:, None], total, 0.0), [4, 16, W])
            middle = gl.sum(of_blocks, 1)
            own = gl.reshape(gl.broadcast(middle[:, None, :], of_blocks)[0], [64, W])
            apart = total - gl.convert_layout(own, G)
            ends = gl.where((i % 16 == 15)[:, None], total, 0.0)
            sums.slice(4, 4).store(gl.sum(gl.reshape(ends, [4, 16, W]), 1))
            if not FINE:
                outside = gl.where(gl.abs(apart) <= REACH, 0, 1 << step)
                beyond |= gl.max(gl.reshape(outside, [4, 16, W]), 1)
            sums.slice(0, 4).store(middle)
            mbarrier.wait(full, turn & 1)
            turn += 1
            if FINE:
                dk, of_total, end = _by_bits(
                    shared, total, of_row, q, q_row, k, k_row, of_key, count, to_q, scale, C
                )
            else:
                dk, of_total, end = _at_once(
                    shared, apart, of_row, q, q_row, k, k_row, k_tile, of_key, count, to_q, scale, C
                )
            fence_async_shared()
            barrier()
            if left != 0:
                mbarrier.expect(full, 2 * 128 * W * 2)
                tma_load(states_desc, [program * 128, _lowest(left) * W], full, state)
                tma_load(grads_desc, [program * 128, _lowest(left) * W], full, grad)
            row = (i + again(0))[:, None]
            mask = row < count
            to = row * (C.HV * 128) + of_key
            gl.store(to_k + to, dk.to(d_k.dtype.element_ty), mask=mask)
            # of this token and those behind
            dg = gl.associative_scan(of_total, 0, add, reverse=True)
            dg += gl.convert_layout(end, gl.SliceLayout(0, G))[None, :]
            gate = _gate_input(g, row * g_row + of_key, mask, dt_bias, to_bias, C.BIAS)
            slope, by_A = _of_gate(gate, speed, lower_bound, kept, C.GATE)
            place_of = program.to(gl.int64) * 128 + column
            if C.A:
                gl.store(A_parts + place_of, gl.sum(gl.where(mask, dg * by_A, 0.0), 0))
            dg *= slope
            if C.BIAS:
                gl.store(bias_parts + place_of, gl.sum(gl.where(mask, dg, 0.0), 0))
            gl.store(to_g + to, dg.to(d_g.dtype.element_ty), mask=mask)
        beyond = gl.reduce(gl.reduce(beyond, 1, _either), 0, _either)
        if FINE:
            if C.NORM:
                # the last part of a chunk and a head sees what the others have written
                barrier()
                beyond = gl.atomic_add(far + program, -mine, sem="acq_rel") - mine
        else:
            gl.store(far + program, beyond)
        if C.NORM and beyond == 0:
            # behind the barrier all has been written that is read here
            barrier()
            wide += again(0)
            mask = (wide < count)[:, None]
            to = wide[:, None] * (C.HV * 128) + wide_columns
            _of_norm(q, wide[:, None] * q_row + wide_columns, to_q, to, mask)
            _of_norm(k, wide[:, None] * k_row + wide_columns, to_k, to, mask)
        forget(bars)
    elif not FINE:
        gl.store(far + program, program * 0)
        if C.VARLEN:
            # tokens of no sequence, or no tokens at all
            nothing = gl.zeros([64, 128], gl.float32, layout=WIDE)
            gl.store(d_q + wide_to, nothing.to(d_q.dtype.element_ty), mask=wide_mask)
            gl.store(d_k + wide_to, nothing.to(d_k.dtype.element_ty), mask=wide_mask)
            gl.store(d_v + wide_to, nothing.to(d_v.dtype.element_ty), mask=wide_mask)
            gl.store(d_g + wide_to, nothing.to(d_g.dtype.element_ty), mask=wide_mask)
            none = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, WIDE))
            to_rate = d_beta + wide_token * C.HV + h
            gl.store(to_rate, none.to(d_beta.dtype.element_ty), mask=first + wide < length)
            list_of: gl.constexpr = gl.SliceLayout(0, WIDE)
            part = program.to(gl.int64) * 128 + gl.arange(0, 128, layout=list_of)
            if C.A:
                gl.store(A_parts + part, gl.zeros([128], gl.float32, layout=list_of))
            if C.BIAS:
                gl.store(bias_parts + part, gl.zeros([128], gl.float32, layout=list_of))


def supports(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, d_out: Tensor) -> bool:
    """What the walks in front of it do; and within a chunk addresses differ by 32 bits."""
    largest = max(x.stride(1) for x in (q, k, g, beta))
    return kda_walks.supports(q, v, d_out) and CHUNK * largest < 2**31


def launch(
    x: Any,
    d_out: Tensor,
    given: tuple[Tensor, ...],
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    left: tuple[Tensor, ...],
    found: tuple[Tensor, ...],
    numbers: tuple[float, float],
    reach: float,
) -> None:
    """Writes all that is `found`, from q, k, g and beta and what the walks left."""
    n, r, *states = left
    programs = x.count * x.constants.HV
    far = memory.empty((programs,), torch.int32, d_out.device)
    rows, wide = programs * CHUNK, programs * 128
    for fine in (False, True):
        launches.kernel(_inputs, programs * (128 // _WIDTH if fine else 1))(
            rows_of(d_out, x.constants.VARLEN, 128),
            *(describe_matrix(y, rows, 128, [CHUNK, 128]) for y in (n, r)),
            *(describe_matrix(y, wide, 128, [128, _WIDTH]) for y in states),
            *given,
            A_log,
            dt_bias,
            cu_seqlens,
            far,
            *found,
            d_out.shape[1],
            x.sequences,
            numbers,
            (*(s for y in given[:3] for s in y.stride()[:3]), *given[3].stride()[:2]),
            REACH=reach,
            FINE=fine,
            C=x.constants,
            num_warps=4,
        )
