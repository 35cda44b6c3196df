# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Gradients of Kimi delta attention, 64 tokens at a time on the cube.

With the letters of chunk_kda, Q = scale q, U = (I + beta A)^-1, S the state before a chunk and E
the gradient of the state behind it:

    x = v - (exp(G) k) S        N = U beta x        n = x - A N
    S = exp(G_last) S + (exp(G_last - G) k)^T N
    R = U^T (P^T dO + (exp(G_last - G) k) E)        dv = beta R        dbeta = R n
    E = exp(G_last) E + (exp(G) Q)^T dO - (exp(G) k)^T dv
    Z = dO N^T for j <= i                           M = -dv N^T for j < i

and by channel, with F_ij = exp(G_i - G_j):

    dQ_i = exp(G_i) (dO S^T)_i + sum_j Z_ij F_ij k_j
    dk_i = -exp(G_i) (dv S^T)_i + sum_j M_ij F_ij k_j                        (of exp(G_i))
    dk_j += exp(G_last - G_j) (N E^T)_j + sum_i F_ij (Z_ij Q_i + M_ij k_i)   (of exp(-G_j))

A decay gets, from its token to the chunk's end, what G gets: Q dQ and the first part of k dk less
the second; and what G_last does.  U is multiplied in two parts, as in the gated delta rule.

    walk_states  cube + vector   forward over a sequence, VALUE_TILE columns of a head: S, N, n
    walk_grads   cube + vector   backward: E, R and dv
    squares      cube            by chunk: dO N^T and -dv N^T, and both transposed
    crosses      cube            by chunk: dO S^T, -dv S^T and N E^T
    inputs       vector cores    by ROWS tokens of a chunk: dq, dk, dbeta, and what G gets
    totals       vector cores    by chunk: what each decay's logarithm gets
    gates        vector cores    by ROWS tokens of a chunk: dg, and what A_log and dt_bias get

What lies between them is laid out by chunk, in rounds that fit the workspace: of some heads with
all their chunks, or, where those are few, of all heads with some chunks.  Then the first kernels go
through all rounds for the state that each begins with, and every kernel does from the last round
to the first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory
from ...dispatch.common.gated_delta import kind_of_rate
from ..common import cores, entry, tiling, tune, tuples
from ..common.front_end import extract_slice
from ..common.rates import of_beta, rate_of
from . import chunk_kda
from .chunk_kda import CHUNK, _here, _logarithm, _sequence

unsupported = chunk_kda.unsupported

_PART = 8192  # elements of a part of a state that UB holds, with what is made of them
# value heads of a round with all chunks; fewer leave more cores idle than it costs to go through
# the chunks twice
_FEWEST = 4


@triton.jit
def _touched(before, chunks, count, since, most):
    """Whether a walk has anything to do: `count` chunks, or the state of an empty sequence, which
    two rounds may move.  Behind the last chunk there is no other round."""
    empty = (chunks == 0) & (before >= since) & (before <= since + most)
    return (count > 0) | empty


@entry.jit(do_not_specialize=["sequences", "length", "tokens"])
def places(bounds, number, firsts, counts, sequences, length, tokens, VARLEN: tl.constexpr):
    """How many chunks there are; the first token of each, and its tokens.  For one program."""
    i = tl.arange(0, CHUNK)
    end = 0
    before = 0
    for n in range(0, sequences):
        start, size = _sequence(bounds, n, end, length, tokens, VARLEN)
        chunks = (size + CHUNK - 1) // CHUNK
        for c in range(0, chunks, CHUNK):
            first = (c + i) * CHUNK
            there = i < chunks - c
            tl.store(firsts + before + c + i, start + first, mask=there)
            tl.store(counts + before + c + i, tl.minimum(size - first, CHUNK), mask=there)
        end = start + size
        before += chunks
    tl.store(number, before)


@triton.jit
def _chunks(number, since, most):
    """Of this round, from chunk `since` on."""
    return tl.minimum(tl.maximum(tl.load(number) - since, 0), most)


class Strides(NamedTuple):
    token: int
    head: int


class Round(NamedTuple):
    since: int  # the first chunk
    most: int  # chunks
    came: int  # the state or gradient that the round begins with
    goes: int  # and the one that it leaves


class Walk(NamedTuple):
    KEY: tl.constexpr
    VALUE: tl.constexpr
    VARLEN: tl.constexpr  # sequences are packed in a row
    BETA: tl.constexpr  # what rates are made of
    INITIAL: tl.constexpr  # there are initial states
    VALUE_FIRST: tl.constexpr  # a state is [V, K], not [K, V]


@tuples.jit(["sequences", "length", "tokens", "value_heads"])
def walk_states(
    keys,
    left,
    fades,
    v,
    betas,
    bounds,
    solved,
    finer,
    alike,
    initial,
    held,
    states,
    new,
    own,
    sequences,
    length,
    tokens,
    here: Round,
    value_heads,
    v_stride: Strides,
    C: Walk,
    HELD: tl.constexpr,
    VALUE_TILE: tl.constexpr,
):
    """S [chunks, HV, V, K]; N and n [chunks, HV, 64, V].  HELD: the sequence that the round begins
    within has its state at `came` in `initial`; that which it ends within leaves it at `goes` in
    `held`, which is the same, all others behind the sequences."""
    TILES: tl.constexpr = C.VALUE // VALUE_TILE
    i = tl.arange(0, CHUNK)
    d = tl.arange(0, C.KEY)
    c = tl.arange(0, VALUE_TILE)
    turn = tl.program_id(0)
    turns = tl.num_programs(0)
    end = 0
    before = 0
    for n in range(0, sequences):
        start, size = _sequence(bounds, n, end, length, tokens, C.VARLEN)
        chunks = (size + CHUNK - 1) // CHUNK
        low, count = _here(before, chunks, here.since, here.most)
        of_first = tl.where(low == 0, n, here.came)
        of_last = tl.where(low + count == chunks, sequences, here.goes)
        works = tl.where(count > 0, value_heads * TILES, 0)
        for work in range(turn, works, turns):
            head = work // TILES
            column = work % TILES * VALUE_TILE + c
            of_v = v + head.to(tl.int64) * v_stride.head
            of_rate = betas + head.to(tl.int64) * tokens + start
            whole = (of_first * value_heads + head).to(tl.int64) * (C.VALUE * C.KEY)
            of_state = column[:, None] * C.KEY + d[None]
            if C.INITIAL:
                if C.VALUE_FIRST:
                    state = tl.load(initial + whole + of_state).to(tl.float32)
                else:
                    other = whole + d[:, None] * C.VALUE + column[None]
                    state = tl.trans(tl.load(initial + other).to(tl.float32))
            else:
                state = tl.zeros((VALUE_TILE, C.KEY), tl.float32)
            for chunk in range(low, low + count):
                first = chunk * CHUNK
                there = (i < size - first)[:, None]
                token = (start + first + i).to(tl.int64)[:, None]
                place = ((before + chunk - here.since) * value_heads + head).to(tl.int64)
                rows = place * (CHUNK * C.KEY) + i[:, None] * C.KEY + d[None]
                tile = place * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None]
                v_tile = tl.load(
                    of_v + token * v_stride.token + column[None], mask=there, other=0.0
                )
                mine = i < size - first
                rate = rate_of(tl.load(of_rate + first + i, mask=mine, other=0.0), mine, C.BETA)
                half = state.to(v_tile.dtype)
                tl.store(states + place * (C.VALUE * C.KEY) + of_state, half)
                x = v_tile.to(tl.float32) - tl.dot(tl.load(keys + rows), tl.trans(half))
                faster = (x * rate[:, None]).to(v_tile.dtype)
                u_tile = tl.trans(tl.load(solved + tile))
                f_tile = tl.trans(tl.load(finer + tile))
                n_tile = tl.dot(f_tile, faster, tl.dot(u_tile, faster)).to(v_tile.dtype)
                a_tile = tl.trans(tl.load(alike + tile).to(v_tile.dtype))
                m_tile = x - tl.dot(a_tile, n_tile)
                to = place * (CHUNK * C.VALUE) + i[:, None] * C.VALUE + column[None]
                tl.store(new + to, n_tile)
                tl.store(own + to, m_tile.to(own.dtype.element_ty))
                fade = tl.load(fades + place * C.KEY + d)
                state = state * fade[None] + tl.dot(tl.trans(n_tile), tl.load(left + rows))
            if HELD:
                whole = (of_last * value_heads + head).to(tl.int64) * (C.VALUE * C.KEY)
                if C.VALUE_FIRST:
                    tl.store(held + whole + of_state, state)
                else:
                    other = whole + d[:, None] * C.VALUE + column[None]
                    tl.store(held + other, tl.trans(state))
        turn = ((turn - works) % turns + turns) % turns
        end = start + size
        before += chunks


@tuples.jit(["sequences", "length", "tokens", "value_heads"])
def walk_grads(
    queries,
    keys,
    left,
    fades,
    d_out,
    betas,
    bounds,
    solved,
    finer,
    seen,
    d_final,
    d_initial,
    d_value,
    grads,
    back,
    drop,
    sequences,
    length,
    tokens,
    here: Round,
    value_heads,
    o_stride: Strides,
    C: Walk,
    FINAL: tl.constexpr,
    VALUE_TILE: tl.constexpr,
):
    """dv; E [chunks, HV, V, K]; R and -dv [chunks, HV, 64, V].  The sequence that the round ends
    within has its gradient at `came`, that which it begins within leaves it at `goes`."""
    TILES: tl.constexpr = C.VALUE // VALUE_TILE
    i = tl.arange(0, CHUNK)
    d = tl.arange(0, C.KEY)
    c = tl.arange(0, VALUE_TILE)
    turn = tl.program_id(0)
    turns = tl.num_programs(0)
    end = 0
    before = 0
    for n in range(0, sequences):
        start, size = _sequence(bounds, n, end, length, tokens, C.VARLEN)
        chunks = (size + CHUNK - 1) // CHUNK
        low, count = _here(before, chunks, here.since, here.most)
        of_first = tl.where(low + count == chunks, n, here.came)
        of_last = tl.where(low == 0, n, here.goes)
        works = tl.where(
            _touched(before, chunks, count, here.since, here.most), value_heads * TILES, 0
        )
        for work in range(turn, works, turns):
            head = work // TILES
            column = work % TILES * VALUE_TILE + c
            of_o = d_out + head.to(tl.int64) * o_stride.head
            of_rate = betas + head.to(tl.int64) * tokens + start
            whole = (of_first * value_heads + head).to(tl.int64) * (C.VALUE * C.KEY)
            of_state = column[:, None] * C.KEY + d[None]
            other = d[:, None] * C.VALUE + column[None]
            if FINAL:
                if C.VALUE_FIRST:
                    grad = tl.load(d_final + whole + of_state).to(tl.float32)
                else:
                    grad = tl.trans(tl.load(d_final + whole + other).to(tl.float32))
            else:
                grad = tl.zeros((VALUE_TILE, C.KEY), tl.float32)
            for chunk in range(low + count - 1, low - 1, -1):
                first = chunk * CHUNK
                there = (i < size - first)[:, None]
                token = (start + first + i).to(tl.int64)[:, None]
                place = ((before + chunk - here.since) * value_heads + head).to(tl.int64)
                rows = place * (CHUNK * C.KEY) + i[:, None] * C.KEY + d[None]
                tile = place * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None]
                o_tile = tl.load(
                    of_o + token * o_stride.token + column[None], mask=there, other=0.0
                )
                mine = i < size - first
                rate = rate_of(tl.load(of_rate + first + i, mask=mine, other=0.0), mine, C.BETA)
                half = grad.to(o_tile.dtype)
                tl.store(grads + place * (C.VALUE * C.KEY) + of_state, half)
                dn = tl.dot(tl.load(left + rows), tl.trans(half))
                dn += tl.dot(tl.load(seen + tile), o_tile)
                dn = dn.to(o_tile.dtype)
                r = tl.dot(tl.load(finer + tile), dn, tl.dot(tl.load(solved + tile), dn))
                dv = r * rate[:, None]
                less = (-dv).to(o_tile.dtype)
                to = d_value + (token * value_heads + head) * C.VALUE + column[None]
                tl.store(to, dv.to(d_value.dtype.element_ty), mask=there)
                to = place * (CHUNK * C.VALUE) + i[:, None] * C.VALUE + column[None]
                tl.store(back + to, r.to(back.dtype.element_ty))
                tl.store(drop + to, less)
                gain = tl.dot(tl.trans(o_tile), tl.load(queries + rows))
                gain = tl.dot(tl.trans(less), tl.load(keys + rows), gain)
                fade = tl.load(fades + place * C.KEY + d)
                grad = grad * fade[None] + gain
            if C.INITIAL:
                whole = (of_last * value_heads + head).to(tl.int64) * (C.VALUE * C.KEY)
                if C.VALUE_FIRST:
                    tl.store(d_initial + whole + of_state, grad.to(d_initial.dtype.element_ty))
                else:
                    turned = tl.trans(grad).to(d_initial.dtype.element_ty)
                    tl.store(d_initial + whole + other, turned)
        turn = ((turn - works) % turns + turns) % turns
        end = start + size
        before += chunks


@tuples.jit(["since", "most", "value_heads"])
def squares(
    d_out,
    number,
    firsts,
    counts,
    new,
    drop,
    of_pairs,
    since,
    most,
    value_heads,
    o_stride: Strides,
    VALUE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
):
    """dO N^T, its transpose, -dv N^T and its transpose [chunks, HV, 4, 64, 64]."""
    SQUARE: tl.constexpr = CHUNK * CHUNK
    i = tl.arange(0, CHUNK)
    c = tl.arange(0, VALUE_TILE)
    chunks = _chunks(number, since, most)
    for work in range(tl.program_id(0), chunks * value_heads, tl.num_programs(0)):
        head = work % value_heads
        chunk = since + work // value_heads
        there = (i < tl.load(counts + chunk))[:, None]
        token = (tl.load(firsts + chunk) + i).to(tl.int64)[:, None]
        place = work.to(tl.int64)
        z_tile = tl.zeros((CHUNK, CHUNK), tl.float32)
        of_z = tl.zeros((CHUNK, CHUNK), tl.float32)
        m_tile = tl.zeros((CHUNK, CHUNK), tl.float32)
        of_m = tl.zeros((CHUNK, CHUNK), tl.float32)
        for first in range(0, VALUE, VALUE_TILE):
            column = (first + c)[None]
            of_o = d_out + head.to(tl.int64) * o_stride.head + token * o_stride.token + column
            o_tile = tl.load(of_o, mask=there, other=0.0)
            at = place * (CHUNK * VALUE) + i[:, None] * VALUE + column
            n_tile = tl.load(new + at)
            d_tile = tl.load(drop + at)
            z_tile = tl.dot(o_tile, tl.trans(n_tile), z_tile)
            of_z = tl.dot(n_tile, tl.trans(o_tile), of_z)
            m_tile = tl.dot(d_tile, tl.trans(n_tile), m_tile)
            of_m = tl.dot(n_tile, tl.trans(d_tile), of_m)
        to = of_pairs + place * (4 * SQUARE) + i[:, None] * CHUNK + i[None]
        tl.store(to, z_tile)
        tl.store(to + SQUARE, of_z)
        tl.store(to + 2 * SQUARE, m_tile)
        tl.store(to + 3 * SQUARE, of_m)


@tuples.jit(["since", "most", "value_heads"])
def crosses(
    d_out,
    number,
    firsts,
    counts,
    new,
    drop,
    states,
    grads,
    of_q,
    of_k,
    of_rest,
    since,
    most,
    value_heads,
    o_stride: Strides,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
):
    """dO S^T, -dv S^T and N E^T [chunks, HV, 64, K]."""
    i = tl.arange(0, CHUNK)
    d = tl.arange(0, KEY)
    c = tl.arange(0, VALUE_TILE)
    chunks = _chunks(number, since, most)
    for work in range(tl.program_id(0), chunks * value_heads, tl.num_programs(0)):
        head = work % value_heads
        chunk = since + work // value_heads
        there = (i < tl.load(counts + chunk))[:, None]
        token = (tl.load(firsts + chunk) + i).to(tl.int64)[:, None]
        place = work.to(tl.int64)
        q_tile = tl.zeros((CHUNK, KEY), tl.float32)
        k_tile = tl.zeros((CHUNK, KEY), tl.float32)
        rest = tl.zeros((CHUNK, KEY), tl.float32)
        for first in range(0, VALUE, VALUE_TILE):
            column = first + c
            of_o = d_out + head.to(tl.int64) * o_stride.head + token * o_stride.token + column[None]
            o_tile = tl.load(of_o, mask=there, other=0.0)
            at = place * (CHUNK * VALUE) + i[:, None] * VALUE + column[None]
            of_state = place * (VALUE * KEY) + column[:, None] * KEY + d[None]
            state = tl.load(states + of_state)
            q_tile = tl.dot(o_tile, state, q_tile)
            k_tile = tl.dot(tl.load(drop + at), state, k_tile)
            rest = tl.dot(tl.load(new + at), tl.load(grads + of_state), rest)
        rows = place * (CHUNK * KEY) + i[:, None] * KEY + d[None]
        tl.store(of_q + rows, q_tile)
        tl.store(of_k + rows, k_tile)
        tl.store(of_rest + rows, rest)


@triton.jit
def _through_norm(of_x, there, grad, NORM: tl.constexpr):
    """The gradient of rows from that of the rows of length 1."""
    if NORM:
        x = tl.load(of_x, mask=there, other=0.0).to(tl.float32)
        factor = 1.0 / tl.sqrt(tl.sum(x * x, 1) + 1e-6)
        x = x * factor[:, None]
        grad = (grad - x * tl.sum(x * grad, 1)[:, None]) * factor[:, None]
    return grad


class Inputs(NamedTuple):
    KEY: tl.constexpr
    VALUE: tl.constexpr
    NORM: tl.constexpr  # of queries and keys
    BETA: tl.constexpr  # what rates are made of


@tuples.jit(["since", "most", "tokens", "group", "heads", "scale"])
def inputs(
    q,
    k,
    number,
    firsts,
    counts,
    total,
    units,
    scaled,
    of_pairs,
    of_q,
    of_k,
    of_rest,
    back,
    own,
    betas,
    d_query,
    d_key,
    d_betas,
    of_total,
    since,
    most,
    tokens,
    group,
    heads,
    scale,
    q_stride: Strides,
    k_stride: Strides,
    C: Inputs,
    ROWS: tl.constexpr,
):
    """dq and dk, summed over the value heads of a head; dbeta [HV, tokens]; what G gets of its own
    token [chunks, HV, 64, K], without what G_last does."""
    PARTS: tl.constexpr = CHUNK // ROWS
    SQUARE: tl.constexpr = CHUNK * CHUNK
    row = tl.arange(0, ROWS)
    d = tl.arange(0, C.KEY)
    e = tl.arange(0, C.VALUE)
    chunks = _chunks(number, since, most)
    for work in range(tl.program_id(0), chunks * heads * PARTS, tl.num_programs(0)):
        head = work // PARTS % heads
        chunk = work // (PARTS * heads)
        i = work % PARTS * ROWS + row
        count = tl.load(counts + since + chunk)
        there = (i < count)[:, None]
        begin = tl.load(firsts + since + chunk)
        token = (begin + i).to(tl.int64)
        dq = tl.zeros((ROWS, C.KEY), tl.float32)
        dk = tl.zeros((ROWS, C.KEY), tl.float32)
        for one in range(0, group):
            value_head = head * group + one
            place = (chunk * heads * group + value_head).to(tl.int64)
            base = place * (CHUNK * C.KEY)
            rows = base + i[:, None] * C.KEY + d[None]
            g_tile = tl.load(total + rows)
            growth = tl.exp(g_tile)
            left_q = tl.load(of_q + rows) * growth
            left_k = tl.load(of_k + rows) * growth
            right_k = tl.zeros((ROWS, C.KEY), tl.float32)
            of_place = of_pairs + place * (4 * SQUARE) + i
            for j in range(0, CHUNK):
                g_row = tl.load(total + base + j * C.KEY + d)[None]
                k_row = tl.load(units + base + j * C.KEY + d)[None]
                q_row = tl.load(scaled + base + j * C.KEY + d)[None]
                fading = tl.exp(tl.minimum(g_tile - g_row, 0.0)) * k_row
                pair = of_place + j * CHUNK
                seen = tl.where(i >= j, tl.load(pair + SQUARE), 0.0)
                alike = tl.where(i > j, tl.load(pair + 3 * SQUARE), 0.0)
                left_q += seen[:, None] * fading
                left_k += alike[:, None] * fading
                seen = tl.where(i <= j, tl.load(pair), 0.0)
                alike = tl.where(i < j, tl.load(pair + 2 * SQUARE), 0.0)
                fading = tl.exp(tl.minimum(g_row - g_tile, 0.0))
                right_k += fading * (seen[:, None] * q_row + alike[:, None] * k_row)
            last = tl.load(total + base + (CHUNK - 1) * C.KEY + d)[None]
            k_tile = tl.load(units + rows)
            dq += left_q
            gained = tl.load(scaled + rows) * left_q + k_tile * (left_k - right_k)
            rest = tl.load(of_rest + rows) * tl.exp(last - g_tile)
            tl.store(of_total + rows, gained - k_tile * rest)
            dk += left_k + right_k + rest
            values = place * (CHUNK * C.VALUE) + i[:, None] * C.VALUE + e[None]
            rate = tl.load(back + values).to(tl.float32) * tl.load(own + values).to(tl.float32)
            to = value_head.to(tl.int64) * tokens + token
            beta = tl.load(betas + to, mask=i < count, other=0.0)
            of_rate = of_beta(tl.sum(rate, 1), rate_of(beta, i < count, C.BETA), C.BETA)
            tl.store(d_betas + to, of_rate, mask=i < count)
        of_x = q + head.to(tl.int64) * q_stride.head + token[:, None] * q_stride.token + d[None]
        dq = _through_norm(of_x, there, dq * scale, C.NORM)
        of_x = k + head.to(tl.int64) * k_stride.head + token[:, None] * k_stride.token + d[None]
        dk = _through_norm(of_x, there, dk, C.NORM)
        to = (token[:, None] * heads + head) * C.KEY + d[None]
        tl.store(d_query + to, dq.to(d_query.dtype.element_ty), mask=there)
        tl.store(d_key + to, dk.to(d_key.dtype.element_ty), mask=there)


@entry.jit(do_not_specialize=["since", "most", "value_heads"])
def totals(
    number,
    total,
    units,
    of_rest,
    states,
    grads,
    of_total,
    of_log,
    since,
    most,
    value_heads,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """What the decays' logarithms get [chunks, HV, 64, K]."""
    row = tl.arange(0, ROWS)
    d = tl.arange(0, KEY)
    chunks = _chunks(number, since, most)
    for work in range(tl.program_id(0), chunks * value_heads, tl.num_programs(0)):
        place = work.to(tl.int64)
        base = place * (CHUNK * KEY)
        last = tl.load(total + base + (CHUNK - 1) * KEY + d)
        whole = tl.zeros((ROWS, KEY), tl.float32)
        for first in range(0, VALUE, ROWS):
            at = place * (VALUE * KEY) + (first + row)[:, None] * KEY + d[None]
            whole += tl.load(states + at).to(tl.float32) * tl.load(grads + at).to(tl.float32)
        whole = whole * tl.exp(last)[None]
        for first in range(0, CHUNK, ROWS):
            rows = base + (first + row)[:, None] * KEY + d[None]
            rest = tl.load(of_rest + rows) * tl.exp(last[None] - tl.load(total + rows))
            whole += rest * tl.load(units + rows)
        running = tl.sum(whole, 0)[None]
        for first in range(CHUNK - ROWS, -1, -ROWS):
            rows = base + (first + row)[:, None] * KEY + d[None]
            gained = tl.load(of_total + rows)
            for r in range(ROWS - 1, -1, -1):
                running += extract_slice(gained, (r, 0), (1, KEY), (1, 1))
                tl.store(of_log + base + (first + r) * KEY + d[None], running)


@tuples.jit(["since", "most", "value_heads", "lower_bound"])
def gates(
    g,
    A_log,
    dt_bias,
    number,
    firsts,
    counts,
    of_log,
    d_gate,
    of_A,
    of_bias,
    since,
    most,
    value_heads,
    lower_bound,
    g_stride: Strides,
    KEY: tl.constexpr,
    GATE: tl.constexpr,
    A: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """dg; what A_log and dt_bias get, by part of a chunk [chunks, HV, 64 / ROWS, K]."""
    PARTS: tl.constexpr = CHUNK // ROWS
    row = tl.arange(0, ROWS)
    d = tl.arange(0, KEY)
    one = tl.zeros((1,), tl.int32)  # a scalar of the vector unit
    chunks = _chunks(number, since, most)
    for work in range(tl.program_id(0), chunks * value_heads * PARTS, tl.num_programs(0)):
        head = work // PARTS % value_heads
        chunk = since + work // (PARTS * value_heads)
        i = work % PARTS * ROWS + row
        there = (i < tl.load(counts + chunk))[:, None]
        token = (tl.load(firsts + chunk) + i).to(tl.int64)[:, None]
        at = (work // PARTS).to(tl.int64) * (CHUNK * KEY) + i[:, None] * KEY + d[None]
        gained = tl.where(there, tl.load(of_log + at), 0.0)
        part = work.to(tl.int64) * KEY + d
        if GATE != 0:
            of_g = g + head.to(tl.int64) * g_stride.head + token * g_stride.token + d[None]
            x = tl.load(of_g, mask=there, other=0.0).to(tl.float32)
            if BIAS:
                x += tl.load(dt_bias + head * KEY + d).to(tl.float32)[None]
            rate = tl.zeros((1,), tl.float32)
            if A:
                rate += tl.load(A_log + head + one).to(tl.float32)
            rate = tl.exp(rate)[:, None]
            if GATE == 1:
                slope = -rate / (1.0 + tl.exp(-x))
                by_A = _logarithm(x, rate, lower_bound, GATE)
            else:
                share = 1.0 / (1.0 + tl.exp(-rate * x))
                slope = lower_bound * rate * share * (1.0 - share)
                by_A = slope * x
            if A:
                tl.store(of_A + part, tl.sum(gained * by_A, 0))
            gained = gained * slope
            if BIAS:
                tl.store(of_bias + part, tl.sum(gained, 0))
        to = (token * value_heads + head) * KEY + d[None]
        tl.store(d_gate + to, gained.to(d_gate.dtype.element_ty), mask=there)


def _tile(kernel: str, size: int, other: int, most: int = 2**16) -> dict[str, Any]:
    """The widest that divides these channels; with the `other` ones, `most` elements."""
    kernel = f"chunk_kda_grad.{kernel}"
    fitting = [
        config
        for config in tune.TABLE[kernel]
        for tile in config.tiles.values()
        if size % tile == 0 and tile * other <= most
    ]
    return tune.choose(kernel, fitting, other).keywords


def _only(kernel: str) -> dict[str, Any]:
    return tune.only(f"chunk_kda_grad.{kernel}").keywords


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    d_out: Tensor,
    d_final_state: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    state_layout: str,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    device, dtype, wide = v.device, v.dtype, torch.float32

    def like(x: Tensor | None) -> Tensor:
        if x is None:
            return memory.empty((0,), dtype, device)
        return memory.empty(x.shape, x.dtype, device)

    outputs = tuple(like(x) for x in (q, k, v, g, beta, initial_state, A_log, dt_bias))
    d_q, d_k, d_v, d_g, d_beta, d_initial, d_A, d_bias = outputs
    batch, length, heads, key_size = q.shape
    value_heads, value_size = v.shape[2:]
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    nothing = sequences * value_heads * value_size * key_size == 0
    if cu_seqlens is not None or nothing:
        for output in outputs:  # tokens of no sequence belong to no chunk
            output.zero_()
    if nothing:
        return d_q, d_k, d_v, d_g, d_beta, d_initial, d_A, d_bias
    group = value_heads // heads
    # by chunk and value head: tiles by channel in float32 and halves, squares of pairs, two states
    side = CHUNK.value
    each = side * (30 * key_size + 8 * value_size + 26 * side + 8 * chunk_kda.ROWS.value)
    each += 4 * value_size * key_size + 36 * key_size + 16
    count = chunk_kda.chunks_of(batch, length, cu_seqlens)
    at_once = tiling.at_once(heads, count * group * each)
    if at_once < heads and at_once * group >= _FEWEST:
        for head in range(0, heads, at_once):
            at = slice(head, head + at_once)
            there = slice(head * group, (head + at_once) * group)
            some = backward(
                q[:, :, at],
                k[:, :, at],
                v[:, :, there],
                g[:, :, there],
                beta[:, :, there],
                d_out[:, :, there],
                None if d_final_state is None else d_final_state[:, there].contiguous(),
                scale,
                None if initial_state is None else initial_state[:, there].contiguous(),
                cu_seqlens,
                use_qk_l2norm_in_kernel,
                use_gate_in_kernel,
                None if A_log is None else A_log[there],
                None if dt_bias is None else dt_bias.view(value_heads, key_size)[there],
                lower_bound,
                state_layout,
                use_beta_sigmoid_in_kernel,
                allow_neg_eigval,
            )
            into = (
                *(x[:, :, at] for x in (d_q, d_k)),
                *(x[:, :, there] for x in (d_v, d_g, d_beta)),
                d_initial if initial_state is None else d_initial[:, there],
                d_A if A_log is None else d_A[there],
                d_bias if dt_bias is None else d_bias.view(value_heads, key_size)[there],
            )
            for place, grad in zip(into, some, strict=True):
                place.copy_(grad)
        return d_q, d_k, d_v, d_g, d_beta, d_initial, d_A, d_bias
    # all tokens in one row
    q, k, v, g, beta, d_out = (x.flatten(0, 1) for x in (q, k, v, g, beta, d_out))
    gate, tokens, varlen = chunk_kda.gate_of(use_gate_in_kernel, lower_bound), len(q), cu_seqlens
    norm, scale = use_qk_l2norm_in_kernel, key_size**-0.5 if scale is None else scale
    value_first = state_layout == "vk"
    most = chunk_kda.at_once(count, value_heads * each)
    rate = kind_of_rate(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)

    def space(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return memory.empty((most, value_heads, *shape), kind, device)

    of_q, of_k, of_rest = (space(side, key_size, kind=wide) for _ in range(3))
    of_pairs = space(4, side, side, kind=wide)
    # what `fill` needs for itself lies where two gradients will
    upper, lower = of_q.view(dtype), of_pairs.view(dtype)
    x = chunk_kda.laid_out(most, q, beta, rate, cu_seqlens, upper, lower, grad=True)
    number, firsts, counts = (
        memory.empty((size,), torch.int32, device) for size in (1, count, count)
    )
    places[(1,)](
        x.bounds,
        number,
        firsts,
        counts,
        sequences,
        length,
        tokens,
        VARLEN=varlen is not None,
        **_only("places"),
    )
    states, grads = (space(value_size, key_size) for _ in range(2))
    new, own, back, drop = (space(side, value_size) for _ in range(4))
    parts = [space(side // _only("gates")["ROWS"], key_size, kind=wide).zero_() for _ in range(2)]
    d_betas = memory.empty((value_heads, tokens), wide, device)
    if varlen is not None:
        d_betas.zero_()
    in_rounds, rounds = most < count, range(0, count, most)
    first, last, d_first = initial_state, d_final_state, d_initial
    if in_rounds:  # behind those of the sequences the states that rounds begin with, and end with
        last_two = (value_size, key_size) if value_first else (key_size, value_size)
        first, last = (
            memory.empty((sequences + more, value_heads, *last_two), wide, device)
            for more in (len(rounds) + 1, 2)
        )
        for held, given in ((first, initial_state), (last, d_final_state)):
            if given is None:
                held.zero_()
            else:
                held[:sequences].copy_(given)
        d_first = last
    of_A, of_bias = (
        None if x is None else memory.empty((value_heads, *more), wide, device).zero_()
        for x, more in ((A_log, ()), (dt_bias, (key_size,)))
    )
    sizes = dict(KEY=key_size, VALUE=value_size)
    walked = dict(**sizes, VARLEN=varlen is not None, BETA=rate, VALUE_FIRST=value_first)

    def forward(turn: int) -> None:
        since = rounds[turn]
        chunk_kda.fill(
            x,
            since,
            q,
            k,
            g,
            sequences,
            length,
            scale,
            varlen is not None,
            norm,
            gate,
            A_log,
            dt_bias,
            lower_bound,
            grad=True,
        )
        at = sequences + 1 + turn
        walk_states[(cores.cube(),)](
            x.keys,
            x.left,
            x.fades,
            v,
            x.betas,
            x.bounds,
            x.solved,
            x.finer,
            x.alike,
            states if first is None else first,
            states if first is None else first,
            states,
            new,
            own,
            sequences,
            length,
            tokens,
            since,
            most,
            at - 1,
            at,
            value_heads,
            *v.stride()[:2],
            **walked,
            INITIAL=first is not None,
            HELD=in_rounds,
            **_tile("walk_states", value_size, key_size, _PART),
        )

    for turn in range(len(rounds) - 1):
        forward(turn)
    came, goes = sequences, sequences + 1
    # from the last round on: what a round leaves alone of `parts` is 0
    for turn in reversed(range(len(rounds))):
        forward(turn)
        here = (rounds[turn], most)
        walk_grads[(cores.cube(),)](
            x.queries,
            x.keys,
            x.left,
            x.fades,
            d_out,
            x.betas,
            x.bounds,
            x.solved,
            x.finer,
            x.seen,
            grads if last is None else last,
            d_first,
            d_v,
            grads,
            back,
            drop,
            sequences,
            length,
            tokens,
            *here,
            came,
            goes,
            value_heads,
            *d_out.stride()[:2],
            **walked,
            INITIAL=first is not None,
            FINAL=last is not None,
            **_tile("walk_grads", value_size, key_size, _PART),
        )
        came, goes = goes, came
        squares[(cores.cube(),)](
            d_out,
            number,
            firsts,
            counts,
            new,
            drop,
            of_pairs,
            *here,
            value_heads,
            *d_out.stride()[:2],
            VALUE=value_size,
            **_tile("squares", value_size, 1),
        )
        crosses[(cores.cube(),)](
            d_out,
            number,
            firsts,
            counts,
            new,
            drop,
            states,
            grads,
            of_q,
            of_k,
            of_rest,
            *here,
            value_heads,
            *d_out.stride()[:2],
            **sizes,
            **_tile("crosses", value_size, key_size),
        )
        # what G gets lies where of_q does, a row once that is read
        inputs[(cores.vector(),)](
            q,
            k,
            number,
            firsts,
            counts,
            x.total,
            x.units,
            x.scaled,
            of_pairs,
            of_q,
            of_k,
            of_rest,
            back,
            own,
            x.betas,
            d_q,
            d_k,
            d_betas,
            of_q,
            *here,
            tokens,
            group,
            heads,
            scale,
            *q.stride()[:2],
            *k.stride()[:2],
            **sizes,
            NORM=norm,
            BETA=rate,
            **_only("inputs"),
        )
        # what `scaled` was for is done
        totals[(cores.vector(),)](
            number,
            x.total,
            x.units,
            of_rest,
            states,
            grads,
            of_q,
            x.scaled,
            *here,
            value_heads,
            **sizes,
            **_only("totals"),
        )
        gates[(cores.vector(),)](
            g,
            parts[0] if A_log is None else A_log,
            parts[1] if dt_bias is None else dt_bias,
            number,
            firsts,
            counts,
            x.scaled,
            d_g,
            *parts,
            *here,
            value_heads,
            0.0 if lower_bound is None else lower_bound,
            *g.stride()[:2],
            KEY=key_size,
            GATE=gate,
            A=A_log is not None,
            BIAS=dt_bias is not None,
            **_only("gates"),
        )
        if of_A is not None:
            of_A += parts[0].sum((0, 2, 3))
        if of_bias is not None:
            of_bias += parts[1].sum((0, 2))
    d_beta.copy_(d_betas.mT.view(d_beta.shape))
    if in_rounds and initial_state is not None:
        d_initial.copy_(d_first[:sequences])
    if of_A is not None:
        d_A.copy_(of_A)
    if of_bias is not None:
        d_bias.copy_(of_bias.view(d_bias.shape))
    return d_q, d_k, d_v, d_g, d_beta, d_initial, d_A, d_bias
