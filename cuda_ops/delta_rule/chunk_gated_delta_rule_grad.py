# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Gradients of the gated delta rule, 64 tokens at a time on tensor cores.

With the letters of chunk_gated_delta_rule, S the state before a chunk and E the gradient of the
state behind it, the forward walk and the gradient's are

    N = T beta (v - exp(G) (k S))                  S = exp(G_last) S + (exp(G_last - G) k)^T N
    R = T^T (P^T dO + exp(G_last - G) (k E))       dv = beta R
    E = exp(G_last) E + (scale exp(G) q)^T dO - (exp(G) k)^T dv

and each chunk then has, with Z = scale D (dO N^T) for j <= i and M = -beta D (R N^T) for j < i,

    dq = scale exp(G) (dO S^T) + Z k
    dk = exp(G_last - G) (N E^T) - beta exp(G) (R S^T) + Z^T q + (M + M^T) k
    dbeta = R . (v - exp(G) (k S)) - rows of D (R N^T) (k k^T)

and dg as the sum, from a token to its chunk's end, of what G gets: rows less columns of
Z (q k^T) + M (k k^T), and of each product with S or E its dot product with q or k.  Nothing is
divided, and no exponent is above 0 where g is not.

The first kernel makes T - I and P of all chunks.  The second walks, half of its programs forward
over S and half backward over E, neither of which needs the other; it keeps both for every chunk, in
the dtype of the query: 2 (T / 64 + sequences) Nv Dk Dv numbers.  The others run over chunks: Z and
M, gradients of q, k and v, those of beta and g.  No sum depends on the order of programs: equal
runs give equal gradients.

    condition                                       kernels
    as of the forward, and d_out in aligned rows    hopper/chunk_gated_delta_rule_grad.py
    no beta, no g                                   _triangles_kernel then _walks_kernel then
                                                    _pairs_kernel then _inputs_kernel
    else                                            _triangles_kernel then _walks_kernel then
                                                    _pairs_kernel then _inputs_kernel then
                                                    _gates_kernel
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import gated_delta, memory
from ...dispatch.ops.delta_rule.chunk_gated_delta_rule_grad import Arguments
from ..common import gpu
from ..common.chunks import (
    CHUNK,
    chunk_rows,
    constants,
    heads_of,
    of_beta,
    rate_of,
    sequence_lengths,
    unit_inverse,
)
from ..runtime import launches
from . import chunk_gated_delta_rule
from .hopper import chunk_gated_delta_rule_grad as hopper

# a pass of Triton 3.6 and 3.7 fails in _inputs_kernel, at every shape
_BREAKS_ON_SM_100 = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)

# columns of the values and the keys in a tile of the chunks' kernels
_BLOCK_V, _BLOCK_K = 64, 64


@triton.jit
def _place(lengths, chunk, T, sequences, SEQUENCES: tl.constexpr, VARLEN: tl.constexpr):
    """(start, first, length, inside) of a chunk: its sequence's first token, its own first token
    there, the sequence's length, and how much of it is a sequence's at all: the tokens behind the
    last sequence are one more, of which 0 are."""
    if VARLEN:
        s, each = sequence_lengths(lengths, T, sequences, SEQUENCES)
        ends = tl.cumsum((each + CHUNK - 1) // CHUNK, 0)
        before = (ends <= chunk) & (s < sequences)
        first = (chunk - tl.max(tl.where(before, ends, 0), 0).to(tl.int32)) * CHUNK
        start = tl.minimum(tl.sum(tl.where(before, each, 0), 0), T)
        sequence = tl.sum(before.to(tl.int32), 0)
        inside = tl.sum(tl.where(s == sequence, each, 0), 0).to(tl.int32)
        left = (T - start).to(tl.int32)
        inside = tl.minimum(inside, left)
        length = tl.where(sequence < sequences, inside, left)
    else:
        start, first, length = chunk.to(tl.int64) * 0, chunk * CHUNK, T
        inside = length
    return start, first, length, inside


@triton.jit
def _vector(base, token, row, valid):
    """Of 64 tokens, in float32; 0 where there is none."""
    return tl.load(base + token * row, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def _grown(g, token, g_row, valid, GATE: tl.constexpr):
    """(running sum [64] of the decay's logarithm, D [64, 64] with ones above the diagonal)."""
    if GATE:
        total = tl.cumsum(_vector(g, token, g_row, valid), 0)
    else:
        total = tl.zeros([CHUNK], tl.float32)
    i = tl.arange(0, CHUNK)
    causal = i[:, None] >= i[None, :]
    return total, tl.exp(tl.where(causal, total[:, None] - total[None, :], 0.0))


@triton.jit
def _rate(beta, token, b_row, valid, BETA: tl.constexpr):
    if BETA:
        return rate_of(_vector(beta, token, b_row, valid), valid, BETA)
    else:
        return tl.where(valid, 1.0, 0.0)


@triton.jit(do_not_specialize=["T", "sequences"])
def _triangles_kernel(
    query,
    key,
    beta,
    g,
    lengths,
    t,
    p,
    grown,
    left,
    T,
    sequences,
    scale,
    strides,
    DK_PAD: tl.constexpr,
    PRECISION: tl.constexpr,
    C: tl.constexpr,
):
    """T - I, P, exp(G) and exp(G_last - G) of a chunk and a value head."""
    q_row, q_head, k_row, k_head, b_row, g_row = strides
    chunk = tl.program_id(0)
    h, hv = heads_of(tl.program_id(1), C.NV // C.N)
    start, first, _length, inside = _place(lengths, chunk, T, sequences, C.SEQUENCES, C.VARLEN)
    if first < inside:
        i = tl.arange(0, CHUNK)
        valid = first + i < inside
        token = start + first + i
        ck = tl.arange(0, DK_PAD)
        key += start * k_row + h * k_head
        query += start * q_row + h * q_head
        tile = (chunk.to(tl.int64) * C.NV + hv) * CHUNK
        at = (tile + i)[:, None] * CHUNK + i[None, :]
        total, fading = _grown(g + hv, token, g_row, valid, C.GATE)
        rate = _rate(beta + hv, token, b_row, valid, C.BETA)
        last = tl.sum(tl.where(i == CHUNK - 1, total, 0.0), 0)
        tl.store(grown + tile + i, tl.exp(total))
        tl.store(left + tile + i, tl.exp(last - total))
        k = chunk_rows(key, first, inside, k_row, ck, C.DK, DK_PAD)
        q = chunk_rows(query, first, inside, q_row, ck, C.DK, DK_PAD)
        causal = i[:, None] >= i[None, :]
        attention = tl.where(causal, tl.dot(q, k.T) * fading * scale, 0.0)
        tl.store(p + at, attention.to(p.dtype.element_ty))
        lower = tl.dot(k, k.T) * fading * rate[:, None]
        lower = tl.where(i[:, None] > i[None, :], lower, 0.0)
        # its diagonal is 1: what is stored is what a product adds to its right side, unrounded
        below = tl.where(i[:, None] > i[None, :], unit_inverse(lower, PRECISION), 0.0)
        tl.store(t + at, below.to(t.dtype.element_ty))


@triton.jit
def _columns(base, first, length, row, columns, SIZE: tl.constexpr, PAD: tl.constexpr):
    """[PAD, 64]: `_rows`, transposed."""
    i = first + tl.arange(0, CHUNK)
    mask = (i < length)[None, :]
    if SIZE != PAD:
        mask = mask & (columns < SIZE)[:, None]
    return tl.load(base + i.to(tl.int64)[None, :] * row + columns[:, None], mask=mask, other=0.0)


@triton.jit
def _put_columns(base, first, length, row, columns, x, SIZE: tl.constexpr):
    """x [PAD, 64] into rows."""
    i = first + tl.arange(0, CHUNK)
    at = base + i.to(tl.int64)[None, :] * row + columns[:, None]
    tl.store(at, x, mask=(i < length)[None, :] & (columns < SIZE)[:, None])


@triton.jit(do_not_specialize=["T", "sequences"])
def _walks_kernel(
    query,
    key,
    value,
    d_out,
    beta,
    t,
    p,
    grown,
    left,
    lengths,
    initial,
    d_final,
    n,
    r,
    states,
    grads,
    d_initial,
    T,
    sequences,
    scale,
    strides,
    DK_PAD: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    INITIAL: tl.constexpr,
    FINAL: tl.constexpr,
    C: tl.constexpr,
):
    """N and the states of a sequence, or R and their gradients, for some columns of one head.

    The state is held transposed, [BLOCK_V, Dk]: the left operand of every product then comes from
    registers."""
    q_row, q_head, k_row, k_head, v_row, v_head, o_row, o_head, b_row = strides
    BLOCKS: tl.constexpr = (C.DV + BLOCK_V - 1) // BLOCK_V
    WHOLE: tl.constexpr = C.DV if BLOCKS * BLOCK_V != C.DV else BLOCK_V
    program = tl.program_id(0)
    back = program % 2
    block = program // 2 % BLOCKS
    h, hv = heads_of(program // (2 * BLOCKS) % C.NV, C.NV // C.N)
    sequence = program // (2 * BLOCKS * C.NV)
    if C.VARLEN:
        s, each = sequence_lengths(lengths, T, sequences, C.SEQUENCES)
        earlier = s < sequence
        start = tl.minimum(tl.sum(tl.where(earlier, each, 0), 0), T)
        length = tl.sum(tl.where(s == sequence, each, 0), 0)
        length = tl.minimum(length, T - start).to(tl.int32)
        chunks_before = tl.sum(tl.where(earlier, (each + CHUNK - 1) // CHUNK, 0), 0)
        first_chunk = chunks_before.to(tl.int32)
    else:
        start = program.to(tl.int64) * 0
        length = T
        first_chunk = program * 0
    chunks = (length + CHUNK - 1) // CHUNK
    ck = tl.arange(0, DK_PAD)
    cv = block * BLOCK_V + tl.arange(0, BLOCK_V)
    i = tl.arange(0, CHUNK)
    inner = cv[:, None] * C.DK + ck[None, :]
    mask = (cv < C.DV)[:, None] & (ck < C.DK)[None, :]
    whole_at = (sequence.to(tl.int64) * C.NV + hv) * (C.DV * C.DK) + inner
    query += start * q_row + h * q_head
    key += start * k_row + h * k_head
    value += start * v_row + hv * v_head
    d_out += start * o_row + hv * o_head
    beta += start * b_row + hv
    row0 = (start * C.NV + hv) * C.DV
    element = t.dtype.element_ty
    if back == 0:
        if INITIAL:
            state = tl.load(initial + whole_at, mask=mask, other=0.0).to(tl.float32)
        else:
            state = tl.zeros([BLOCK_V, DK_PAD], tl.float32)
        for c in tl.range(0, chunks, num_stages=STAGES):
            first = c * CHUNK
            number = (first_chunk + c).to(tl.int64) * C.NV + hv
            tile = number * CHUNK
            k_tile = chunk_rows(key, first, length, k_row, ck, C.DK, DK_PAD)
            t_tile = tl.load(t + (tile + i)[:, None] * CHUNK + i[None, :])
            v_tile = _columns(value, first, length, v_row, cv, WHOLE, BLOCK_V)
            growth = tl.load(grown + tile + i)
            rest = tl.load(left + tile + i)
            fade = tl.load(grown + tile + CHUNK - 1)
            rate = _rate(beta, (first + i).to(tl.int64), b_row, first + i < length, C.BETA)
            half = state.to(element)
            tl.store(states + number * (C.DV * C.DK) + inner, half, mask=mask)
            kv_mem = tl.dot(half, k_tile.T)
            x = (v_tile.to(tl.float32) - kv_mem * growth[None, :]) * rate[None, :]
            new = tl.dot(x.to(element), t_tile.T, x)
            _put_columns(n + row0, first, length, C.NV * C.DV, cv, new.to(element), C.DV)
            state = tl.dot((new * rest[None, :]).to(element), k_tile, state * fade)
    else:
        if FINAL:
            grad = tl.load(d_final + whole_at, mask=mask, other=0.0).to(tl.float32)
        else:
            grad = tl.zeros([BLOCK_V, DK_PAD], tl.float32)
        for step in tl.range(0, chunks, num_stages=STAGES):
            c = chunks - 1 - step
            first = c * CHUNK
            number = (first_chunk + c).to(tl.int64) * C.NV + hv
            tile = number * CHUNK
            k_tile = chunk_rows(key, first, length, k_row, ck, C.DK, DK_PAD)
            q_tile = chunk_rows(query, first, length, q_row, ck, C.DK, DK_PAD)
            square = (tile + i)[:, None] * CHUNK + i[None, :]
            t_tile = tl.load(t + square)
            p_tile = tl.load(p + square)
            o_tile = _columns(d_out, first, length, o_row, cv, WHOLE, BLOCK_V)
            growth = tl.load(grown + tile + i)
            rest = tl.load(left + tile + i)
            fade = tl.load(grown + tile + CHUNK - 1)
            rate = _rate(beta, (first + i).to(tl.int64), b_row, first + i < length, C.BETA)
            half = grad.to(element)
            tl.store(grads + number * (C.DV * C.DK) + inner, half, mask=mask)
            dn = tl.dot(o_tile, p_tile) + tl.dot(half, k_tile.T) * rest[None, :]
            rr = tl.dot(dn.to(element), t_tile, dn)
            _put_columns(r + row0, first, length, C.NV * C.DV, cv, rr.to(element), C.DV)
            scaled = (o_tile.to(tl.float32) * (growth * scale)[None, :]).to(element)
            grad = tl.dot(scaled, q_tile, grad * fade)
            grad = tl.dot((rr * (-rate * growth)[None, :]).to(element), k_tile, grad)
        if INITIAL:
            tl.store(d_initial + whole_at, grad.to(d_initial.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "sequences"])
def _pairs_kernel(
    query,
    key,
    value,
    d_out,
    beta,
    g,
    lengths,
    n,
    r,
    z,
    m,
    d_value,
    d_rate,
    d_total,
    T,
    sequences,
    scale,
    strides,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    C: tl.constexpr,
):
    """dv, Z and M + M^T of a chunk and a value head; what pairs of its tokens give G and beta."""
    q_row, q_head, k_row, k_head, v_row, v_head, o_row, o_head, b_row, g_row = strides
    chunk = tl.program_id(0)
    h, hv = heads_of(tl.program_id(1), C.NV // C.N)
    start, first, length, inside = _place(lengths, chunk, T, sequences, C.SEQUENCES, C.VARLEN)
    if first < length:
        i = tl.arange(0, CHUNK)
        valid = first + i < inside
        token = start + first + i
        key += start * k_row + h * k_head
        query += start * q_row + h * q_head
        value += start * v_row + hv * v_head
        d_out += start * o_row + hv * o_head
        row0 = (start * C.NV + hv) * C.DV
        element = z.dtype.element_ty
        rate = _rate(beta + hv, token, b_row, valid, C.BETA)
        on_n = tl.zeros([CHUNK, CHUNK], tl.float32)
        on_r = tl.zeros([CHUNK, CHUNK], tl.float32)
        by_value = tl.zeros([CHUNK], tl.float32)
        for cv0 in range(0, C.DV, BLOCK_V):
            cv = cv0 + tl.arange(0, BLOCK_V)
            EDGE: tl.constexpr = BLOCK_V if C.DV % BLOCK_V == 0 else C.DV
            o_tile = chunk_rows(d_out, first, inside, o_row, cv, EDGE, BLOCK_V)
            n_tile = chunk_rows(n + row0, first, inside, C.NV * C.DV, cv, EDGE, BLOCK_V)
            r_tile = chunk_rows(r + row0, first, inside, C.NV * C.DV, cv, EDGE, BLOCK_V)
            on_n = tl.dot(o_tile, n_tile.T, on_n)
            on_r = tl.dot(r_tile, n_tile.T, on_r)
            v_tile = chunk_rows(value, first, inside, v_row, cv, EDGE, BLOCK_V)
            wide = r_tile.to(tl.float32)
            by_value += tl.sum(wide * v_tile.to(tl.float32), 1)
            at = d_value + row0 + (first + i).to(tl.int64)[:, None] * (C.NV * C.DV) + cv[None, :]
            mask = (first + i < length)[:, None] & (cv < C.DV)[None, :]
            tl.store(at, (wide * rate[:, None]).to(d_value.dtype.element_ty), mask=mask)
        qk = tl.zeros([CHUNK, CHUNK], tl.float32)
        kk = tl.zeros([CHUNK, CHUNK], tl.float32)
        for ck0 in range(0, C.DK, BLOCK_K):
            ck = ck0 + tl.arange(0, BLOCK_K)
            EDGE: tl.constexpr = BLOCK_K if C.DK % BLOCK_K == 0 else C.DK
            k_tile = chunk_rows(key, first, inside, k_row, ck, EDGE, BLOCK_K)
            q_tile = chunk_rows(query, first, inside, q_row, ck, EDGE, BLOCK_K)
            kk = tl.dot(k_tile, k_tile.T, kk)
            qk = tl.dot(q_tile, k_tile.T, qk)
        _total, fading = _grown(g + hv, token, g_row, valid, C.GATE)
        z_tile = tl.where(i[:, None] >= i[None, :], on_n * fading * scale, 0.0)
        m_tile = tl.where(i[:, None] > i[None, :], -on_r * fading, 0.0)
        of_rate = by_value + tl.sum(m_tile * kk, 1)
        m_tile *= rate[:, None]
        weight = z_tile * qk + m_tile * kk
        row = token * C.NV + hv
        tl.store(d_rate + row, of_rate, mask=first + i < length)
        tl.store(d_total + row, tl.sum(weight, 1) - tl.sum(weight, 0), mask=first + i < length)
        tile = (chunk.to(tl.int64) * C.NV + hv) * CHUNK
        square = (tile + i)[:, None] * CHUNK + i[None, :]
        tl.store(z + square, z_tile.to(element))
        tl.store(m + square, (m_tile + m_tile.T).to(element))


@triton.jit(do_not_specialize=["T", "sequences"])
def _inputs_kernel(
    query,
    key,
    d_out,
    beta,
    lengths,
    n,
    r,
    z,
    m,
    grown,
    left,
    states,
    grads,
    d_query,
    d_key,
    rate_parts,
    total_parts,
    T,
    sequences,
    scale,
    strides,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    C: tl.constexpr,
):
    """Some columns of dq and dk of a chunk and a head; what they give G and beta."""
    q_row, q_head, k_row, k_head, o_row, o_head, b_row = strides
    GROUP: tl.constexpr = C.NV // C.N
    BLOCKS: tl.constexpr = (C.DK + BLOCK_K - 1) // BLOCK_K
    program = tl.program_id(0)
    block = program % BLOCKS
    head = program // BLOCKS % C.N
    h = head.to(tl.int64)
    chunk = program // (BLOCKS * C.N)
    start, first, length, inside = _place(lengths, chunk, T, sequences, C.SEQUENCES, C.VARLEN)
    if first < length:
        i = tl.arange(0, CHUNK)
        valid = first + i < inside
        token = start + first + i
        ck = block * BLOCK_K + tl.arange(0, BLOCK_K)
        EDGE: tl.constexpr = BLOCK_K if C.DK % BLOCK_K == 0 else C.DK
        q_tile = chunk_rows(
            query + start * q_row + h * q_head, first, inside, q_row, ck, EDGE, BLOCK_K
        )
        k_tile = chunk_rows(
            key + start * k_row + h * k_head, first, inside, k_row, ck, EDGE, BLOCK_K
        )
        d_out += start * o_row
        dq = tl.zeros([CHUNK, BLOCK_K], tl.float32)
        dk = tl.zeros([CHUNK, BLOCK_K], tl.float32)
        for one in range(0, GROUP):
            hv = head * GROUP + one
            row0 = (start * C.NV + hv) * C.DV
            number = chunk.to(tl.int64) * C.NV + hv
            tile = number * CHUNK
            growth = tl.load(grown + tile + i, mask=valid, other=0.0)
            rest = tl.load(left + tile + i, mask=valid, other=0.0)
            fade = tl.load(grown + tile + CHUNK - 1, mask=first < inside, other=0.0)
            rate = _rate(beta + hv, token, b_row, valid, C.BETA)
            by_o = tl.zeros([CHUNK, BLOCK_K], tl.float32)
            by_n = tl.zeros([CHUNK, BLOCK_K], tl.float32)
            by_r = tl.zeros([CHUNK, BLOCK_K], tl.float32)
            whole = tl.zeros([BLOCK_V], tl.float32)
            for cv0 in range(0, C.DV, BLOCK_V):
                cv = cv0 + tl.arange(0, BLOCK_V)
                EDGE_V: tl.constexpr = BLOCK_V if C.DV % BLOCK_V == 0 else C.DV
                at = number * (C.DV * C.DK) + cv[:, None] * C.DK + ck[None, :]
                mask = (cv < C.DV)[:, None] & (ck < C.DK)[None, :] & (first < inside)
                state = tl.load(states + at, mask=mask, other=0.0)
                grad = tl.load(grads + at, mask=mask, other=0.0)
                o_tile = chunk_rows(
                    d_out + hv.to(tl.int64) * o_head, first, inside, o_row, cv, EDGE_V, BLOCK_V
                )
                n_tile = chunk_rows(n + row0, first, inside, C.NV * C.DV, cv, EDGE_V, BLOCK_V)
                r_tile = chunk_rows(r + row0, first, inside, C.NV * C.DV, cv, EDGE_V, BLOCK_V)
                by_o = tl.dot(o_tile, state, by_o)
                by_r = tl.dot(r_tile, state, by_r)
                by_n = tl.dot(n_tile, grad, by_n)
                whole += tl.sum(state.to(tl.float32) * grad.to(tl.float32), 1)
            by_o *= (growth * scale)[:, None]
            by_r *= growth[:, None]
            by_n *= rest[:, None]
            of_rate = tl.sum(by_r * k_tile.to(tl.float32), 1)
            of_rest = tl.sum(by_n * k_tile.to(tl.float32), 1)
            of_total = tl.sum(by_o * q_tile.to(tl.float32), 1) - of_rate * rate - of_rest
            end = tl.sum(of_rest, 0) + fade * tl.sum(whole, 0)
            of_total += tl.where(first + i == tl.minimum(first + CHUNK, inside) - 1, end, 0.0)
            row = (block * T.to(tl.int64) + token) * C.NV + hv
            tl.store(rate_parts + row, -of_rate, mask=first + i < length)
            tl.store(total_parts + row, of_total, mask=first + i < length)
            dq += by_o
            dk += by_n - by_r * rate[:, None]
            square = (tile + i)[:, None] * CHUNK + i[None, :]
            mask = (first < inside) & (i >= 0)[:, None] & (i >= 0)[None, :]
            z_tile = tl.load(z + square, mask=mask, other=0.0)
            m_tile = tl.load(m + square, mask=mask, other=0.0)
            dq = tl.dot(z_tile, k_tile, dq)
            dk = tl.dot(z_tile.T, q_tile, dk)
            dk = tl.dot(m_tile, k_tile, dk)
        at = (token * C.N + h)[:, None] * C.DK + ck[None, :]
        mask = (first + i < length)[:, None] & (ck < C.DK)[None, :]
        tl.store(d_query + at, dq.to(d_query.dtype.element_ty), mask=mask)
        tl.store(d_key + at, dk.to(d_key.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "sequences"])
def _gates_kernel(
    beta,
    lengths,
    d_rate,
    d_total,
    rate_parts,
    total_parts,
    d_beta,
    d_g,
    T,
    sequences,
    b_row,
    BLOCKS: tl.constexpr,
    HEADS: tl.constexpr,
    C: tl.constexpr,
):
    """dbeta and dg of a chunk and some value heads, from the parts."""
    chunk = tl.program_id(0)
    hv = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    start, first, length, inside = _place(lengths, chunk, T, sequences, C.SEQUENCES, C.VARLEN)
    if first < length:
        i = tl.arange(0, CHUNK)
        at = (start + first + i)[:, None] * C.NV + hv[None, :]
        mask = (first + i < length)[:, None] & (hv < C.NV)[None, :]
        if C.BETA:
            of_rate = tl.load(d_rate + at, mask=mask, other=0.0)
            for block in range(0, BLOCKS):
                of_rate += tl.load(rate_parts + block * T.to(tl.int64) * C.NV + at, mask, 0.0)
            if C.BETA > 1:
                to_rate = beta + (start + first + i)[:, None] * b_row + hv[None, :]
                # behind the last sequence beta may be anything
                valid = mask & (first + i < inside)[:, None]
                rate = rate_of(tl.load(to_rate, mask=valid, other=0.0), valid, C.BETA)
                of_rate = of_beta(of_rate, rate, C.BETA)
            tl.store(d_beta + at, of_rate.to(d_beta.dtype.element_ty), mask=mask)
        if C.GATE:
            total = tl.load(d_total + at, mask=mask, other=0.0)
            for block in range(0, BLOCKS):
                total += tl.load(total_parts + block * T.to(tl.int64) * C.NV + at, mask, 0.0)
            later = tl.cumsum(total, 0, reverse=True)
            tl.store(d_g + at, later.to(d_g.dtype.element_ty), mask=mask)


def walk_tile(size: int) -> int:
    """Columns of a walk's state; `size` is Dk, padded.  Of 64 the states of Dk 256 alone would take
    all of a B200's tensor memory."""
    return 64 if size <= 128 else 32


unsupported = chunk_gated_delta_rule.unsupported


def unsupported_on(device: torch.device) -> str | None:
    if gpu.has_tensor_memory(device) and _BREAKS_ON_SM_100:
        major, minor = gpu.capability(device)
        return (
            f"triton {triton.__version__} cannot compile this gradient for Blackwell data center "
            f"GPUs (sm_{major}{minor}); pip install 'triton>=3.8'"
        )
    return None


def backward(**a: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    query, key, value = a["query"], a["key"], a["value"]
    actual_seq_lengths, scale = a["actual_seq_lengths"], a["scale"]
    DK = key.shape[-1]
    NV, DV = value.shape[1:]
    half, device = value.dtype, value.device

    def like(x: Tensor | None) -> Tensor:
        return (
            memory.empty((0,), half, device)
            if x is None
            else memory.empty(x.shape, x.dtype, device)
        )

    grads = tuple(like(x) for x in (query, key, value, a["beta"], a["initial_state"], a["g"]))
    d_query, d_key, d_value, d_beta, d_initial, d_g = grads
    sequences = 1 if actual_seq_lengths is None else actual_seq_lengths.shape[0]
    if sequences * NV * DV * DK == 0:
        for grad in grads:
            grad.zero_()
        return d_query, d_key, d_value, d_beta, d_initial, d_g
    scale = DK**-0.5 if scale is None else scale
    rate = gated_delta.kind_of_rate(
        a["beta"], a["use_beta_sigmoid_in_kernel"], a["allow_neg_eigval"]
    )
    fast = hopper.supports(query, key, value, a["d_out"], sequences)
    (hopper.launch if fast else _plain)(a, rate, scale, grads)
    return d_query, d_key, d_value, d_beta, d_initial, d_g


def _plain(a: Arguments, kind: int, scale: float, gradients: tuple[Tensor, ...]) -> None:
    """Writes all gradients."""
    query, key, value, d_out, beta = a["query"], a["key"], a["value"], a["d_out"], a["beta"]
    g, lengths, initial_state = a["g"], a["actual_seq_lengths"], a["initial_state"]
    d_query, d_key, d_value, d_beta, d_initial, d_g = gradients
    T, N, DK = key.shape
    NV, DV = value.shape[1:]
    half, device, wide = value.dtype, value.device, torch.float32
    varlen = lengths is not None
    sequences = 1 if lengths is None else lengths.shape[0]
    # every sequence may end in a part of a chunk, and so may the tokens behind the last one
    chunks = triton.cdiv(T, CHUNK.value) + (sequences if varlen else 0)
    t, p = (memory.empty((chunks, NV, CHUNK.value, CHUNK.value), half, device) for _ in range(2))
    grown, left = (memory.empty((chunks, NV, CHUNK.value), wide, device) for _ in range(2))
    n, r = (memory.empty((T, NV, DV), half, device) for _ in range(2))
    states, state_grads = (memory.empty((chunks, NV, DV, DK), half, device) for _ in range(2))
    DK_PAD = max(16, triton.next_power_of_2(DK))
    DV_PAD = max(16, triton.next_power_of_2(DV))
    BLOCK_K, BLOCK_V = min(_BLOCK_K, DK_PAD), min(_BLOCK_V, DV_PAD)
    walked = min(walk_tile(DK_PAD), DV_PAD)
    blocks = triton.cdiv(DK, BLOCK_K)
    d_rate, d_total = (memory.empty((T, NV), wide, device) for _ in range(2))
    rate_parts, total_parts = (memory.empty((blocks, T, NV), wide, device) for _ in range(2))
    q_by, k_by, v_by, o_by = (x.stride()[:2] for x in (query, key, value, d_out))
    b_row = 0 if beta is None else beta.stride(0)
    g_row = 0 if g is None else g.stride(0)
    # a pointer is needed where there is nothing to point at
    rate, gate = grown if beta is None else beta, grown if g is None else g
    C = constants(key, value, lengths, kind, g)
    if chunks > 0:
        launches.kernel(_triangles_kernel, chunks, NV)(
            query,
            key,
            rate,
            gate,
            lengths,
            t,
            p,
            grown,
            left,
            T,
            sequences,
            scale,
            (*q_by, *k_by, b_row, g_row),
            DK_PAD=DK_PAD,
            PRECISION="tf32" if half is torch.bfloat16 else "tf32x3",
            C=C,
            num_warps=2,
        )
    launches.kernel(_walks_kernel, 2 * sequences * NV * triton.cdiv(DV, walked))(
        query,
        key,
        value,
        d_out,
        rate,
        t,
        p,
        grown,
        left,
        lengths,
        initial_state,
        a["d_final_state"],
        n,
        r,
        states,
        state_grads,
        d_initial,
        T,
        sequences,
        scale,
        (*q_by, *k_by, *v_by, *o_by, b_row),
        DK_PAD=DK_PAD,
        BLOCK_V=walked,
        STAGES=2,
        INITIAL=initial_state is not None,
        FINAL=a["d_final_state"] is not None,
        C=C,
        num_warps=4,
    )
    if chunks > 0:
        # T and P are used up: Z and M lie in their place
        launches.kernel(_pairs_kernel, chunks, NV)(
            query,
            key,
            value,
            d_out,
            rate,
            gate,
            lengths,
            n,
            r,
            p,
            t,
            d_value,
            d_rate,
            d_total,
            T,
            sequences,
            scale,
            (*q_by, *k_by, *v_by, *o_by, b_row, g_row),
            BLOCK_K=BLOCK_K,
            BLOCK_V=BLOCK_V,
            C=C,
            num_warps=4,
            num_stages=2,
        )
        launches.kernel(_inputs_kernel, chunks * N * blocks)(
            query,
            key,
            d_out,
            rate,
            lengths,
            n,
            r,
            p,
            t,
            grown,
            left,
            states,
            state_grads,
            d_query,
            d_key,
            rate_parts,
            total_parts,
            T,
            sequences,
            scale,
            (*q_by, *k_by, *o_by, b_row),
            BLOCK_K=BLOCK_K,
            BLOCK_V=BLOCK_V,
            C=C,
            num_warps=4,
            num_stages=2,
        )
        if beta is not None or g is not None:
            heads = min(32, triton.next_power_of_2(NV))
            launches.kernel(_gates_kernel, chunks, triton.cdiv(NV, heads))(
                beta,
                lengths,
                d_rate,
                d_total,
                rate_parts,
                total_parts,
                d_beta,
                d_g,
                T,
                sequences,
                b_row,
                BLOCKS=blocks,
                HEADS=heads,
                C=C,
                num_warps=4,
            )
