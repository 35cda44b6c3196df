# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Gradients of Kimi delta attention, 64 tokens at a time on tensor cores.

With the letters of chunk_kda, V = -A T, E the gradient of the state behind a chunk, x = v - exp(G)
k S and N = beta n, the walk and the gradient's are

    n = x + V (beta x)                             S = exp(G_last) S + (exp(G_last - G) k)^T N
    dN = P^T dO + (exp(G_last - G) k) E            R = dN + V^T (beta dN)     dv = beta R
    E = exp(G_last) E + (scale exp(G) q)^T dO - (exp(G) k)^T dv

and each chunk then has, with Z_ij = scale dO_i N_j for j <= i and M_ij = -dv_i N_j for j < i,

    dq = scale exp(G) (dO S^T) + Z k       dk = -exp(G) (dv S^T) + M k     (of exp(G_i))
    dk += exp(G_last - G) (N E^T) + Z^T q + M^T k                          (of exp(-G_j))
    dbeta = R n

where products with Z and M go bit by bit, as A and P were made; but before, those with pairs of the
largest blocks in which no token is far from the middle go at once, as exp(G_i - R) exp(R - G_j) of
one R.  dg is the sum, from a token to its
chunk's end, of what G gets: q dq + k (dk of the first line less dk of the second), and of what
G_last gets.  Nothing is divided, and no exponent is above 0 where g is not.

The walks are one launch, half of its programs forward over S and half backward over E, and keep
both for every chunk in the dtype of q: 2 (T / 64 + sequences) HV K V numbers.  No sum depends on
the order of programs: equal runs give equal gradients.

    condition                               kernels
    Hopper, K = V = 128, H = HV, v and      chunk_kda.py then hopper/kda_walks.py then
      d_out in rows of whole 16 bytes       hopper/chunk_kda_grad.py
    the same, and A_log or dt_bias          chunk_kda.py then hopper/kda_walks.py then
                                            hopper/chunk_kda_grad.py then _sums_kernel
    norm in kernel, and A_log or dt_bias    chunk_kda.py then _walks_kernel then _inputs_kernel
                                            then _norms_kernel then _sums_kernel
    norm in kernel                          chunk_kda.py then _walks_kernel then _inputs_kernel
                                            then _norms_kernel
    A_log or dt_bias                        chunk_kda.py then _walks_kernel then _inputs_kernel
                                            then _sums_kernel
    else                                    chunk_kda.py then _walks_kernel then _inputs_kernel
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import gated_delta, memory
from ...dispatch.ops.delta_rule.chunk_kda_grad import Arguments
from ..common.chunks import CHUNK, chunk_rows, from_head, of_beta, rate_of
from ..common.kda import (
    BOUNDED,
    SOFTPLUS,
    from_middle,
    gate_input,
    limited,
    log_decay,
    pairs_of_bit,
    place,
    steps,
    unit_norm,
    walked,
)
from ..common.log2 import LN2
from ..runtime import launches
from .chunk_kda import chunks, unsupported
from .hopper import chunk_kda_grad as hopper
from .hopper import kda_walks

__all__ = ["backward", "unsupported"]

# columns of the values and the keys in a tile of the chunks' kernel
_BLOCK_V, _BLOCK_K = 64, 64
_TOKENS = 16  # rows in a tile of the norms' kernel
# how far, to base 2, a factor of both signs may be from 1: other factors stand beside it in the
# dtype of q, whose products must neither overflow nor lose bits
_REACH = {torch.bfloat16: 60.0, torch.float16: 4.0}


@triton.jit
def _columns(base, token, row, columns, valid, SIZE: tl.constexpr):
    """[columns, tokens] of rows; zeros behind SIZE and where there is no token."""
    mask = valid[None, :] & (columns < SIZE)[:, None]
    return tl.load(base + token[None, :] * row + columns[:, None], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["T", "sequences"])
def _walks_kernel(
    v,
    d_out,
    beta,
    qs,
    ks,
    p,
    fades,
    t,
    kg,
    bounds,
    initial,
    d_final,
    n,
    r,
    states,
    grads,
    d_initial,
    T,
    sequences,
    strides,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    INITIAL: tl.constexpr,
    FINAL: tl.constexpr,
    C: tl.constexpr,
):
    """n and the states of a sequence, or R and their gradients, for some columns of one head.

    The state is held transposed, [BLOCK_V, K]: the left operand of every product then comes from
    registers."""
    v_batch, v_row, v_head, o_batch, o_row, o_head, b_batch, b_row, k_step, v_step = strides
    BLOCKS: tl.constexpr = C.V_PAD // BLOCK_V
    program = tl.program_id(0)
    back = program % 2
    block = program // 2 % BLOCKS
    head = program // (2 * BLOCKS) % C.HV
    hv = head.to(tl.int64)
    sequence = program // (2 * BLOCKS * C.HV)
    batch, start, length, chunk = walked(bounds, sequence, T, sequences, C.PIECES, C.VARLEN)
    count = (length + CHUNK - 1) // CHUNK
    ck = tl.arange(0, C.K_PAD)
    cv = block * BLOCK_V + tl.arange(0, BLOCK_V)
    i = tl.arange(0, CHUNK)
    mask = (cv < C.V)[:, None] & (ck < C.K)[None, :]
    whole_at = (sequence.to(tl.int64) * C.HV + hv) * (C.K * C.V)
    whole_at += cv[:, None] * v_step + ck[None, :] * k_step
    inner = cv[:, None] * C.K_PAD + ck[None, :]
    wide = i[:, None] * C.K_PAD + ck[None, :]
    square = i[:, None] * CHUNK + i[None, :]
    v += batch * v_batch + start * v_row + hv * v_head
    d_out += batch * o_batch + start * o_row + hv * o_head
    beta += batch * b_batch + start * b_row + hv
    element = qs.dtype.element_ty
    if back == 0:
        if INITIAL:
            state = tl.load(initial + whole_at, mask=mask, other=0.0).to(tl.float32)
        else:
            state = tl.full([BLOCK_V, C.K_PAD], 0.0, tl.float32)
        for c in tl.range(0, count, num_stages=STAGES):
            token = (i + c * CHUNK).to(tl.int64)
            valid = token < length
            number = (chunk + c).to(tl.int64) * C.HV + hv
            k_tile = tl.load(kg + number * (CHUNK * C.K_PAD) + wide)
            l_tile = tl.load(ks + number * (CHUNK * C.K_PAD) + wide)
            t_tile = tl.load(t + number * (CHUNK * CHUNK) + square)
            v_tile = _columns(v, token, v_row, cv, valid, C.V)
            rate = rate_of(tl.load(beta + token * b_row, mask=valid, other=0.0), valid, C.BETA)
            fade = tl.load(fades + number * C.K_PAD + ck)
            half = state.to(element)
            tl.store(states + number * (C.V_PAD * C.K_PAD) + inner, half)
            x = v_tile.to(tl.float32) - tl.dot(half, k_tile.T)
            new = tl.dot((x * rate[None, :]).to(element), t_tile.T, x)
            to = (number * CHUNK + i)[None, :] * C.V_PAD + cv[:, None]
            tl.store(n + to, new.to(element))
            state = tl.dot((new * rate[None, :]).to(element), l_tile, state * fade[None, :])
    else:
        if FINAL:
            grad = tl.load(d_final + whole_at, mask=mask, other=0.0).to(tl.float32)
        else:
            grad = tl.full([BLOCK_V, C.K_PAD], 0.0, tl.float32)
        for step in tl.range(0, count, num_stages=STAGES):
            c = count - 1 - step
            token = (i + c * CHUNK).to(tl.int64)
            valid = token < length
            number = (chunk + c).to(tl.int64) * C.HV + hv
            q_tile = tl.load(qs + number * (CHUNK * C.K_PAD) + wide)
            k_tile = tl.load(kg + number * (CHUNK * C.K_PAD) + wide)
            l_tile = tl.load(ks + number * (CHUNK * C.K_PAD) + wide)
            t_tile = tl.load(t + number * (CHUNK * CHUNK) + square)
            p_tile = tl.load(p + number * (CHUNK * CHUNK) + square)
            o_tile = _columns(d_out, token, o_row, cv, valid, C.V)
            rate = rate_of(tl.load(beta + token * b_row, mask=valid, other=0.0), valid, C.BETA)
            fade = tl.load(fades + number * C.K_PAD + ck)
            half = grad.to(element)
            tl.store(grads + number * (C.V_PAD * C.K_PAD) + inner, half)
            dn = tl.dot(o_tile, p_tile) + tl.dot(half, l_tile.T)
            rr = tl.dot((dn * rate[None, :]).to(element), t_tile, dn)
            to = (number * CHUNK + i)[None, :] * C.V_PAD + cv[:, None]
            tl.store(r + to, rr.to(element))
            grad = tl.dot(o_tile, q_tile, grad * fade[None, :])
            grad = tl.dot((rr * -rate[None, :]).to(element), k_tile, grad)
        if INITIAL:
            tl.store(d_initial + whole_at, grad.to(d_initial.dtype.element_ty), mask=mask)


@triton.jit
def _of_gate(x, speed, lower_bound, GATE: tl.constexpr):
    """The derivatives of the decay's logarithm by x and by A_log."""
    if GATE == SOFTPLUS:
        slope = -speed / (1.0 + tl.exp(-x))
        by_A = log_decay(x, speed, lower_bound, GATE) * LN2
    elif GATE == BOUNDED:
        share = 1.0 / (1.0 + tl.exp(-speed * x))
        slope = lower_bound * speed * share * (1.0 - share)
        by_A = slope * x
    else:
        slope = tl.full(x.shape, 1.0, tl.float32)
        by_A = slope
    return slope, by_A


@triton.jit
def _of_pairs(q_wide, k_wide, z, m, pairs, rising, falling, element: tl.constexpr):
    """What pairs of tokens give q, k and G, [64, K] each: exp(G_i - G_j) is the later token's
    `rising` times the earlier one's `falling`."""
    x_tile = (q_wide * rising).to(element)
    y_tile = (k_wide * rising).to(element)
    earlier = (k_wide * falling).to(element)
    z_tile = tl.where(pairs, z, 0.0).to(element)
    m_tile = tl.where(pairs, m, 0.0).to(element)
    of_x = tl.dot(z_tile, earlier)
    of_y = tl.dot(m_tile, earlier)
    to_earlier = tl.dot(m_tile.T, y_tile, tl.dot(z_tile.T, x_tile))
    # of the rounded factors: what a pair gives its later token it takes from the earlier one, and
    # before both the two must cancel
    of_total = x_tile.to(tl.float32) * of_x + y_tile.to(tl.float32) * of_y
    of_total -= earlier.to(tl.float32) * to_earlier
    return of_x * rising, of_y * rising + to_earlier * falling, of_total


@triton.jit(do_not_specialize=["T", "sequences"])
def _inputs_kernel(
    q,
    k,
    g,
    beta,
    d_out,
    A_log,
    dt_bias,
    bounds,
    n,
    r,
    states,
    grads,
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
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    REACH: tl.constexpr,
    C: tl.constexpr,
):
    """Of a chunk and a head some columns of dq, dk (of the rows as the norm leaves them) and dg,
    and what they give A_log and dt_bias; with the first columns dv and dbeta."""
    scale, lower_bound = numbers
    q_by, k_by, g_by, o_by = strides[0:3], strides[3:6], strides[6:9], strides[9:12]
    b_batch, b_row = strides[12:14]
    q_row, k_row, g_row, o_row = q_by[1], k_by[1], g_by[1], o_by[1]
    GROUP: tl.constexpr = C.HV // C.H
    BLOCKS: tl.constexpr = C.K_PAD // BLOCK_K
    EDGE: tl.constexpr = BLOCK_K if C.K == C.K_PAD else C.K
    V_EDGE: tl.constexpr = BLOCK_V if C.V == C.V_PAD else C.V
    program = tl.program_id(0)
    block = program % BLOCKS
    head = program // BLOCKS % C.H
    h = head.to(tl.int64)
    chunk = program // (BLOCKS * C.H)
    batch, start, first, length, live = place(bounds, chunk, T, sequences, C.PIECES, C.VARLEN)
    i = tl.arange(0, CHUNK)
    valid = first + i < length
    ck = block * BLOCK_K + tl.arange(0, BLOCK_K)
    token = batch * T + start + first + i
    mask = valid[:, None] & (ck < C.K)[None, :]
    to_g = (token * C.HV + h * GROUP)[:, None] * C.K + ck[None, :]
    to_v = (token * C.HV + h * GROUP) * C.V
    if live & (first < length):
        q = from_head(q, q_by, batch, start, h)
        k = from_head(k, k_by, batch, start, h)
        q_unit = unit_norm(q, first, length, q_row, C.K, C.K_PAD, C.NORM)
        k_unit = unit_norm(k, first, length, k_row, C.K, C.K_PAD, C.NORM)
        q_wide = (
            chunk_rows(q, first, length, q_row, ck, EDGE, BLOCK_K).to(tl.float32) * q_unit[:, None]
        )
        k_wide = (
            chunk_rows(k, first, length, k_row, ck, EDGE, BLOCK_K).to(tl.float32) * k_unit[:, None]
        )
        element = n.dtype.element_ty
        dq = tl.zeros([CHUNK, BLOCK_K], tl.float32)
        dk = tl.zeros([CHUNK, BLOCK_K], tl.float32)
        for one in range(0, GROUP):
            hv = h * GROUP + one
            number = chunk.to(tl.int64) * C.HV + hv
            to_rate = beta + batch * b_batch + (start + first + i) * b_row + hv
            rate = rate_of(tl.load(to_rate, mask=valid, other=0.0), valid, C.BETA)
            of_out = from_head(d_out, o_by, batch, start, hv)
            left_q = tl.zeros([CHUNK, BLOCK_K], tl.float32)
            left_k = tl.zeros([CHUNK, BLOCK_K], tl.float32)
            right_k = tl.zeros([CHUNK, BLOCK_K], tl.float32)
            z = tl.zeros([CHUNK, CHUNK], tl.float32)
            m = tl.zeros([CHUNK, CHUNK], tl.float32)
            whole = tl.zeros([BLOCK_K], tl.float32)
            for cv0 in range(0, C.V_PAD, BLOCK_V):
                cv = cv0 + tl.arange(0, BLOCK_V)
                inner = number * (C.V_PAD * C.K_PAD) + cv[:, None] * C.K_PAD + ck[None, :]
                state = tl.load(states + inner)
                grad = tl.load(grads + inner)
                o_tile = chunk_rows(of_out, first, length, o_row, cv, V_EDGE, BLOCK_V)
                at = (number * CHUNK + i)[:, None] * C.V_PAD + cv[None, :]
                n_tile = tl.load(n + at)
                r_tile = tl.load(r + at)
                left_q = tl.dot(o_tile, state, left_q)
                left_k = tl.dot(r_tile, state, left_k)
                right_k = tl.dot(n_tile, grad, right_k)
                z = tl.dot(o_tile, n_tile.T, z)
                m = tl.dot(r_tile, n_tile.T, m)
                whole += tl.sum(state.to(tl.float32) * grad.to(tl.float32), 0)
                if block == 0:
                    of_v = d_v + (to_v + one * C.V)[:, None] + cv[None, :]
                    dv = (r_tile.to(tl.float32) * rate[:, None]).to(d_v.dtype.element_ty)
                    tl.store(of_v, dv, mask=valid[:, None] & (cv < C.V)[None, :])
            same = i[:, None] == i[None, :]
            if block == 0:
                of_rate = tl.sum(tl.where(same, m, 0.0), 1)
                of_rate = of_beta(of_rate, rate, C.BETA).to(d_beta.dtype.element_ty)
                tl.store(d_beta + token * C.HV + hv, of_rate, mask=valid)
            z *= rate[None, :] * scale
            m *= -rate[:, None] * rate[None, :]
            of_g = from_head(g, g_by, batch, start, hv)
            speed = tl.exp(tl.load(A_log + hv).to(tl.float32)) if C.A else 1.0
            x = gate_input(of_g, dt_bias, hv, first, length, g_row, ck, C.K, EDGE, BLOCK_K, C.BIAS)
            total = tl.cumsum(limited(log_decay(x, speed, lower_bound, C.GATE), valid), 0)
            last = tl.sum(tl.where((i == CHUNK - 1)[:, None], total, 0.0), 0)
            growth = tl.exp2(total)
            left_q *= growth * scale
            left_k *= growth * -rate[:, None]
            right_k *= tl.exp2(last[None, :] - total) * rate[:, None]
            end = tl.sum(right_k * k_wide, 0) + tl.exp2(last) * whole
            of_total = q_wide * left_q + k_wide * (left_k - right_k)
            dq += left_q
            dk += left_k + right_k
            level = 6
            apart = from_middle(total, level)
            # a NaN is never near
            while (level > 0) & (tl.max(tl.max(tl.where(tl.abs(apart) <= REACH, 0, 1), 1), 0) > 0):
                level -= 1
                apart = from_middle(total, level)
            if level > 0:
                inside = (i[:, None] >> level) == (i[None, :] >> level)
                pairs = inside & (i[:, None] > i[None, :])
                of_q, of_k, of_both = _of_pairs(
                    q_wide, k_wide, z, m, pairs, tl.exp2(apart), tl.exp2(-apart), element
                )
                dq += of_q
                dk += of_k
                of_total += of_both
            for bit in range(level, 6):
                fading = tl.exp2(-tl.abs(from_middle(total, bit + 1)))
                pairs = pairs_of_bit(1 << bit, CHUNK)
                of_q, of_k, of_both = _of_pairs(
                    q_wide, k_wide, z, m, pairs, fading, fading, element
                )
                dq += of_q
                dk += of_k
                of_total += of_both
            # what q and k of one token give each other takes no decay
            own = tl.sum(tl.where(same, z, 0.0), 1)[:, None]
            dq += own * k_wide
            dk += own * q_wide
            dg = tl.cumsum(of_total, 0, reverse=True) + end[None, :]
            slope, by_A = _of_gate(x, speed, lower_bound, C.GATE)
            part = number * C.K_PAD + ck
            if C.A:
                tl.store(A_parts + part, tl.sum(tl.where(valid[:, None], dg * by_A, 0.0), 0))
            dg *= slope
            if C.BIAS:
                tl.store(bias_parts + part, tl.sum(tl.where(valid[:, None], dg, 0.0), 0))
            tl.store(d_g + to_g + one * C.K, dg.to(d_g.dtype.element_ty), mask=mask)
        to = (token * C.H + h)[:, None] * C.K + ck[None, :]
        tl.store(d_q + to, dq.to(d_q.dtype.element_ty), mask=mask)
        tl.store(d_k + to, dk.to(d_k.dtype.element_ty), mask=mask)
    elif C.VARLEN:
        # tokens of no sequence, or no tokens at all
        nothing = tl.zeros([CHUNK, BLOCK_K], tl.float32)
        to = (token * C.H + h)[:, None] * C.K + ck[None, :]
        tl.store(d_q + to, nothing.to(d_q.dtype.element_ty), mask=mask)
        tl.store(d_k + to, nothing.to(d_k.dtype.element_ty), mask=mask)
        for one in range(0, GROUP):
            hv = h * GROUP + one
            tl.store(d_g + to_g + one * C.K, nothing.to(d_g.dtype.element_ty), mask=mask)
            part = (chunk.to(tl.int64) * C.HV + hv) * C.K_PAD + ck
            if C.A:
                tl.store(A_parts + part, tl.zeros([BLOCK_K], tl.float32))
            if C.BIAS:
                tl.store(bias_parts + part, tl.zeros([BLOCK_K], tl.float32))
            if block == 0:
                none = tl.zeros([CHUNK], d_beta.dtype.element_ty)
                tl.store(d_beta + token * C.HV + hv, none, mask=valid)
                for cv0 in range(0, C.V_PAD, BLOCK_V):
                    cv = cv0 + tl.arange(0, BLOCK_V)
                    of_v = d_v + (to_v + one * C.V)[:, None] + cv[None, :]
                    empty = tl.zeros([CHUNK, BLOCK_V], d_v.dtype.element_ty)
                    tl.store(of_v, empty, mask=valid[:, None] & (cv < C.V)[None, :])


@triton.jit
def _of_norm(x, grad, at, valid, row, K: tl.constexpr, K_PAD: tl.constexpr):
    """In place the gradient of rows of x from that of the rows of length 1; at [rows]: where they
    begin in `grad`, row: in x."""
    c = tl.arange(0, K_PAD)
    mask = valid[:, None] & (c < K)[None, :]
    to = grad + at[:, None] + c[None, :]
    tile = tl.load(to, mask=mask, other=0.0).to(tl.float32)
    # nothing stays nothing: a token of no sequence may hold anything
    some = mask & (tl.max((tile != 0).to(tl.int32), 1) > 0)[:, None]
    x_tile = tl.load(x + row[:, None] + c[None, :], mask=some, other=0.0).to(tl.float32)
    unit = 1.0 / tl.sqrt(tl.sum(x_tile * x_tile, 1) + 1e-6)
    x_tile *= unit[:, None]
    tile = (tile - x_tile * tl.sum(x_tile * tile, 1)[:, None]) * unit[:, None]
    tl.store(to, tile.to(grad.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "rows"])
def _norms_kernel(
    q,
    k,
    d_q,
    d_k,
    T,
    rows,
    q_batch,
    q_row,
    q_head,
    k_batch,
    k_row,
    k_head,
    ROWS: tl.constexpr,
    C: tl.constexpr,
):
    """dq and dk of some tokens and a head, through the norm."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    h = row % C.H
    token = row // C.H
    batch = token // T
    token -= batch * T
    _of_norm(q, d_q, row * C.K, valid, batch * q_batch + token * q_row + h * q_head, C.K, C.K_PAD)
    _of_norm(k, d_k, row * C.K, valid, batch * k_batch + token * k_row + h * k_head, C.K, C.K_PAD)


@triton.jit(do_not_specialize=["count"])
def _sums_kernel(A_parts, bias_parts, d_A, d_bias, count, C: tl.constexpr):
    """dA_log and ddt_bias of a head, from the parts of the chunks."""
    hv = tl.program_id(0)
    i = tl.arange(0, CHUNK)
    c = tl.arange(0, C.K_PAD)
    of_A = tl.full([CHUNK, C.K_PAD], 0.0, tl.float32)
    of_bias = tl.full([CHUNK, C.K_PAD], 0.0, tl.float32)
    for first in range(0, count, CHUNK):
        at = ((first + i).to(tl.int64) * C.HV + hv)[:, None] * C.K_PAD + c[None, :]
        mask = (first + i < count)[:, None] & (c < C.K)[None, :]
        if C.A:
            of_A += tl.load(A_parts + at, mask=mask, other=0.0)
        if C.BIAS:
            of_bias += tl.load(bias_parts + at, mask=mask, other=0.0)
    if C.A:
        tl.store(d_A + hv, tl.sum(tl.sum(of_A, 0), 0).to(d_A.dtype.element_ty))
    if C.BIAS:
        whole = tl.sum(of_bias, 0).to(d_bias.dtype.element_ty)
        tl.store(d_bias + hv * C.K + c, whole, mask=c < C.K)


def backward(
    **a: Unpack[Arguments],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v, g, beta, d_out = a["q"], a["k"], a["v"], a["g"], a["beta"], a["d_out"]
    scale, initial_state, cu_seqlens = a["scale"], a["initial_state"], a["cu_seqlens"]
    A_log, dt_bias, lower_bound = a["A_log"], a["dt_bias"], a["lower_bound"]
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    half, device, wide = v.dtype, v.device, torch.float32

    def like(x: Tensor | None) -> Tensor:
        return (
            memory.empty((0,), half, device)
            if x is None
            else memory.empty(x.shape, x.dtype, device)
        )

    grads = tuple(like(x) for x in (q, k, v, g, beta, initial_state, A_log, dt_bias))
    d_q, d_k, d_v, d_g, d_beta, d_initial, d_A, d_bias = grads
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if sequences * HV * K * V == 0:
        for grad in grads:
            grad.zero_()
        return d_q, d_k, d_v, d_g, d_beta, d_initial, d_A, d_bias
    scale = K**-0.5 if scale is None else scale
    norm, gated = a["use_qk_l2norm_in_kernel"], a["use_gate_in_kernel"]
    rate = gated_delta.kind_of_rate(beta, a["use_beta_sigmoid_in_kernel"], a["allow_neg_eigval"])
    x = chunks(
        *(q, k, v, g, beta), scale, cu_seqlens, norm, A_log, dt_bias, lower_bound, gated, rate, None
    )
    programs, side = x.count * HV, CHUNK.value
    K_PAD, V_PAD = x.constants.K_PAD, x.constants.V_PAD
    BLOCK_K = min(_BLOCK_K, K_PAD)
    # no wider over the values than over the keys: in tiles of 32 by 64 ptxas 12.8 takes a wrong
    # register for a wgmma descriptor (see chunk_kda)
    BLOCK_V = min(_BLOCK_V, V_PAD, BLOCK_K)
    n, r = (memory.empty((programs, side, V_PAD), half, device) for _ in range(2))
    states, state_grads = (memory.empty((programs, V_PAD, K_PAD), half, device) for _ in range(2))
    A, bias = A_log is not None, dt_bias is not None
    A_parts, bias_parts = (
        memory.empty((programs if used else 0, K_PAD), wide, device) for used in (A, bias)
    )
    o_by, b_by = d_out.stride()[:3], beta.stride()[:2]
    fast = hopper.supports(q, k, v, g, beta, d_out)
    by = steps(a["state_layout"], K, V)
    left = (n, r, states, state_grads)  # by the walks
    walk = (cu_seqlens, initial_state, a["d_final_state"], *left, d_initial)
    if fast:
        kda_walks.launch(x, v, d_out, *walk, *by)
    else:
        launches.kernel(_walks_kernel, 2 * sequences * HV * (V_PAD // BLOCK_V))(
            v,
            d_out,
            beta,
            *x.walked,
            *walk,
            T,
            sequences,
            (*v.stride()[:3], *o_by, *b_by, *by),
            BLOCK_V=BLOCK_V,
            STAGES=2,
            INITIAL=initial_state is not None,
            FINAL=a["d_final_state"] is not None,
            C=x.constants,
            num_warps=4,
        )
    numbers = (scale, 0.0 if lower_bound is None else lower_bound)
    given = (q, k, g, beta)
    found = (d_q, d_k, d_v, d_g, d_beta, A_parts, bias_parts)
    if fast:
        hopper.launch(
            x, d_out, given, A_log, dt_bias, cu_seqlens, left, found, numbers, _REACH[half]
        )
    elif programs > 0:
        launches.kernel(_inputs_kernel, x.count * H * (K_PAD // BLOCK_K))(
            *given,
            d_out,
            A_log,
            dt_bias,
            cu_seqlens,
            *left,
            *found,
            T,
            sequences,
            numbers,
            (*q.stride()[:3], *k.stride()[:3], *g.stride()[:3], *o_by, *b_by),
            BLOCK_K=BLOCK_K,
            BLOCK_V=BLOCK_V,
            REACH=_REACH[half],
            C=x.constants,
            num_warps=8,
            num_stages=1,
        )
        if norm:
            launches.kernel(_norms_kernel, triton.cdiv(B * T * H, _TOKENS))(
                q,
                k,
                d_q,
                d_k,
                T,
                B * T * H,
                *q.stride()[:3],
                *k.stride()[:3],
                ROWS=_TOKENS,
                C=x.constants,
                num_warps=4,
            )
    if A or bias:
        launches.kernel(_sums_kernel, HV)(
            A_parts,
            bias_parts,
            d_A,
            d_bias,
            x.count,
            C=x.constants,
            num_warps=4,
        )
    return d_q, d_k, d_v, d_g, d_beta, d_initial, d_A, d_bias
