# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Gradients of the gated delta rule, 64 tokens at a time on the cube.

With the letters of chunk_gated_delta_rule, A = (I + L)^-1, S the state before a chunk and E the
gradient of the state behind it:

    N = A beta (v - exp(G) (k S))                  S = exp(G_last) S + (exp(G_last - G) k)^T N
    R = A^T (scale P^T dO + exp(G_last - G) (k E))     dv = beta R
    E = exp(G_last) E + (scale exp(G) q)^T dO - (exp(G) k)^T dv
    Z = scale D (dO N^T) for j <= i                M = -beta D (R N^T) for j < i
    dq = scale exp(G) (dO S^T) + Z k
    dk = exp(G_last - G) (N E^T) - beta exp(G) (R S^T) + Z^T q + (M + M^T) k
    dbeta = R . (v - exp(G) (k S)) - rows of D (R N^T) (k k^T)

dg sums, from a token to its chunk's end, what G gets: rows less columns of Z (q k^T) + M (k k^T),
and of each product with S or E its dot product with q or k.  Nothing is divided.
A is multiplied in two parts, rounded and what that leaves: else, where keys are alike, its rounding
would be most of the error.

    walk_states   cube + vector   forward over a sequence, VALUE_TILE columns of a head: S and N
    walk_grads    cube + vector   backward: E, R and dv
    crosses       cube            by chunk: the products that the next two put together
    dots          vector cores    by chunk: what S and E give G and beta
    pairs         vector cores    by chunk: Z and M, and what they give G and beta
    inputs        cube            by chunk and KEY_TILE key columns: dq and dk of a head
    gates         vector cores    by chunk: dbeta and dg

What lies between them is laid out by chunk, in rounds of heads that fit the workspace.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import memory
from ...dispatch.common.gated_delta import kind_of_rate
from ...dispatch.ops.delta_rule.chunk_gated_delta_rule_grad import Arguments
from ..common import cores, entry, tiling, tune
from ..common.rates import of_beta
from . import chunk_gated_delta_rule
from .chunk_gated_delta_rule import CHUNK, _length, products, triangles

unsupported = chunk_gated_delta_rule.unsupported

_PART = 12288  # elements of the state's gradient that UB holds, with what is made of them


@entry.jit(do_not_specialize=["sequences", "tokens"])
def places(lengths, number, firsts, counts, sequences, tokens, VARLEN: tl.constexpr):
    """How many chunks there are; the first token of each, and its tokens.  For one program."""
    i = tl.arange(0, CHUNK)
    start = 0
    before = 0
    for n in range(0, sequences):
        length = _length(lengths, n, start, tokens, VARLEN)
        chunks = (length + CHUNK - 1) // CHUNK
        for c in range(0, chunks, CHUNK):
            first = (c + i) * CHUNK
            there = i < chunks - c
            tl.store(firsts + before + c + i, start + first, mask=there)
            tl.store(counts + before + c + i, tl.minimum(length - first, CHUNK), mask=there)
        start += length
        before += chunks
    tl.store(number, before)


@entry.jit(
    do_not_specialize=[
        "sequences", "tokens", "group", "value_heads", "state_row", "k_token", "k_head", "v_token",
        "v_head",
    ]
)  # fmt: skip
def walk_states(
    k,
    v,
    lengths,
    inverse,
    finer,
    sums,
    rates,
    initial,
    states,
    new,
    kept,
    sequences,
    tokens,
    group,
    value_heads,
    state_row,
    k_token,
    k_head,
    v_token,
    v_head,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    VARLEN: tl.constexpr,
    INITIAL: tl.constexpr,
    VALUE_TILE: tl.constexpr,
):
    """S [chunks, HV, V, K], N and exp(G_last - G) N [chunks, HV, 64, V]."""
    TILES: tl.constexpr = VALUE // VALUE_TILE
    i = tl.arange(0, CHUNK)
    d = tl.arange(0, KEY)
    c = tl.arange(0, VALUE_TILE)
    turn = tl.program_id(0)
    turns = tl.num_programs(0)
    start = 0
    before = 0
    for n in range(0, sequences):
        length = _length(lengths, n, start, tokens, VARLEN)
        chunks = (length + CHUNK - 1) // CHUNK
        for work in range(turn, value_heads * TILES, turns):
            head = work // TILES
            column = work % TILES * VALUE_TILE + c
            of_k = k + (head // group).to(tl.int64) * k_head
            of_v = v + head.to(tl.int64) * v_head
            of_state = column[:, None] * KEY + d[None]
            if INITIAL:
                whole = n.to(tl.int64) * state_row + head.to(tl.int64) * (VALUE * KEY)
                state = tl.load(initial + whole + of_state).to(tl.float32)
            else:
                state = tl.zeros((VALUE_TILE, KEY), tl.float32)
            for chunk in range(0, chunks):
                first = chunk * CHUNK
                there = (i < length - first)[:, None]
                token = (start + first + i).to(tl.int64)[:, None]
                k_tile = tl.load(of_k + token * k_token + d[None], mask=there, other=0.0)
                v_tile = tl.load(of_v + token * v_token + column[None], mask=there, other=0.0)
                place = ((before + chunk) * value_heads + head).to(tl.int64)
                at = place * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None]
                a_tile = tl.load(inverse + at)
                f_tile = tl.load(finer + at)
                total = tl.load(sums + place * CHUNK + i)
                rate = tl.load(rates + place * CHUNK + i)
                last = tl.load(sums + place * CHUNK + CHUNK - 1)
                half = state.to(k_tile.dtype)
                tl.store(states + place * (VALUE * KEY) + of_state, half)
                growth = tl.exp(total)[:, None]
                x = v_tile.to(tl.float32) - tl.dot(k_tile, tl.trans(half)) * growth
                x = (x * rate[:, None]).to(k_tile.dtype)
                n_tile = tl.dot(f_tile, x, tl.dot(a_tile, x))
                rest = (n_tile * tl.exp(last - total)[:, None]).to(k_tile.dtype)
                to = place * (CHUNK * VALUE) + i[:, None] * VALUE + column[None]
                tl.store(new + to, n_tile.to(new.dtype.element_ty))
                tl.store(kept + to, rest)
                state = state * tl.exp(last) + tl.dot(tl.trans(rest), k_tile)
        turn = ((turn - value_heads * TILES) % turns + turns) % turns
        start += length
        before += chunks


@entry.jit(
    do_not_specialize=[
        "sequences", "tokens", "group", "value_heads", "all_heads", "scale", "q_token", "q_head",
        "k_token", "k_head", "o_token", "o_head",
    ]
)  # fmt: skip
def walk_grads(
    q,
    k,
    d_out,
    lengths,
    inverse,
    finer,
    seen,
    sums,
    rates,
    d_final,
    d_initial,
    d_value,
    grads,
    back,
    steps,
    sequences,
    tokens,
    group,
    value_heads,
    all_heads,
    scale,
    q_token,
    q_head,
    k_token,
    k_head,
    o_token,
    o_head,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
):
    """dv; E [chunks, HV, V, K]; R [chunks, HV, 64, V]; of what E gets of q and of k, scale exp(G)
    dO and -exp(G) beta R [chunks, HV, 2, 64, V].  dv and the states have `all_heads`."""
    VARLEN: tl.constexpr = lengths is not None
    TILES: tl.constexpr = VALUE // VALUE_TILE
    i = tl.arange(0, CHUNK)
    d = tl.arange(0, KEY)
    c = tl.arange(0, VALUE_TILE)
    turn = tl.program_id(0)
    turns = tl.num_programs(0)
    start = 0
    before = 0
    for n in range(0, sequences):
        length = _length(lengths, n, start, tokens, VARLEN)
        chunks = (length + CHUNK - 1) // CHUNK
        for work in range(turn, value_heads * TILES, turns):
            head = work // TILES
            column = work % TILES * VALUE_TILE + c
            of_q = q + (head // group).to(tl.int64) * q_head
            of_k = k + (head // group).to(tl.int64) * k_head
            of_o = d_out + head.to(tl.int64) * o_head
            of_state = column[:, None] * KEY + d[None]
            whole = (n.to(tl.int64) * all_heads + head) * (VALUE * KEY)
            if d_final is not None:
                grad = tl.load(d_final + whole + of_state).to(tl.float32)
            else:
                grad = tl.zeros((VALUE_TILE, KEY), tl.float32)
            # counted down by the loop: triton-ascend's adapter dies now and then of `chunks - step`
            for chunk in range(chunks - 1, -1, -1):
                first = chunk * CHUNK
                there = (i < length - first)[:, None]
                token = (start + first + i).to(tl.int64)[:, None]
                q_tile = tl.load(of_q + token * q_token + d[None], mask=there, other=0.0)
                k_tile = tl.load(of_k + token * k_token + d[None], mask=there, other=0.0)
                o_tile = tl.load(of_o + token * o_token + column[None], mask=there, other=0.0)
                place = ((before + chunk) * value_heads + head).to(tl.int64)
                at = place * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None]
                a_tile = tl.load(inverse + at)
                f_tile = tl.load(finer + at)
                p_tile = tl.load(seen + at)
                total = tl.load(sums + place * CHUNK + i)
                rate = tl.load(rates + place * CHUNK + i)
                last = tl.load(sums + place * CHUNK + CHUNK - 1)
                growth = tl.exp(total)[:, None]
                half = grad.to(k_tile.dtype)
                tl.store(grads + place * (VALUE * KEY) + of_state, half)
                dn = tl.dot(k_tile, tl.trans(half)) * tl.exp(last - total)[:, None]
                dn += tl.dot(tl.trans(p_tile), o_tile) * scale
                dn = dn.to(k_tile.dtype)
                r = tl.dot(tl.trans(f_tile), dn, tl.dot(tl.trans(a_tile), dn))
                dv = r * rate[:, None]
                less = (dv * -growth).to(k_tile.dtype)
                more = (o_tile.to(tl.float32) * growth * scale).to(k_tile.dtype)
                to = d_value + (token * all_heads + head) * VALUE + column[None]
                tl.store(to, dv.to(d_value.dtype.element_ty), mask=there)
                to = place * (CHUNK * VALUE) + i[:, None] * VALUE + column[None]
                tl.store(back + to, r.to(back.dtype.element_ty))
                to = place * (2 * CHUNK * VALUE) + i[:, None] * VALUE + column[None]
                tl.store(steps + to, more)
                tl.store(steps + CHUNK * VALUE + to, less)
                gain = tl.dot(tl.trans(more), q_tile)
                gain = tl.dot(tl.trans(less), k_tile, gain)
                grad = grad * tl.exp(last) + gain
            if d_initial is not None:
                tl.store(d_initial + whole + of_state, grad.to(d_initial.dtype.element_ty))
        turn = ((turn - value_heads * TILES) % turns + turns) % turns
        start += length
        before += chunks


@entry.jit(
    do_not_specialize=[
        "group", "value_heads", "q_token", "q_head", "k_token", "k_head", "o_token", "o_head",
    ]
)  # fmt: skip
def crosses(
    q,
    k,
    d_out,
    number,
    firsts,
    counts,
    states,
    grads,
    new,
    back,
    on_new,
    on_back,
    q_states,
    k_states,
    k_grads,
    group,
    value_heads,
    q_token,
    q_head,
    k_token,
    k_head,
    o_token,
    o_head,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
):
    """dO N^T and R N^T [chunks, HV, 64, 64]; q S, k S and k E [chunks, HV, 64, V]."""
    i = tl.arange(0, CHUNK)
    d = tl.arange(0, KEY)
    c = tl.arange(0, VALUE_TILE)
    chunks = tl.load(number)
    for work in range(tl.program_id(0), chunks * value_heads, tl.num_programs(0)):
        head = work % value_heads
        chunk = work // value_heads
        there = (i < tl.load(counts + chunk))[:, None]
        token = (tl.load(firsts + chunk) + i).to(tl.int64)[:, None]
        place = work.to(tl.int64)
        of_head = (head // group).to(tl.int64)
        q_tile = tl.load(q + of_head * q_head + token * q_token + d[None], mask=there, other=0.0)
        k_tile = tl.load(k + of_head * k_head + token * k_token + d[None], mask=there, other=0.0)
        cross_o = tl.zeros((CHUNK, CHUNK), tl.float32)
        cross_r = tl.zeros((CHUNK, CHUNK), tl.float32)
        for first in range(0, VALUE, VALUE_TILE):
            column = first + c
            of_o = d_out + head.to(tl.int64) * o_head + token * o_token + column[None]
            o_tile = tl.load(of_o, mask=there, other=0.0)
            at = place * (CHUNK * VALUE) + i[:, None] * VALUE + column[None]
            n_tile = tl.load(new + at)
            cross_o = tl.dot(o_tile, tl.trans(n_tile), cross_o)
            cross_r = tl.dot(tl.load(back + at), tl.trans(n_tile), cross_r)
            of_state = place * (VALUE * KEY) + column[:, None] * KEY + d[None]
            state = tl.load(states + of_state)
            grad = tl.load(grads + of_state)
            tl.store(q_states + at, tl.dot(q_tile, tl.trans(state)).to(q_tile.dtype))
            tl.store(k_states + at, tl.dot(k_tile, tl.trans(state)).to(k_tile.dtype))
            tl.store(k_grads + at, tl.dot(k_tile, tl.trans(grad)).to(k_tile.dtype))
        tile = place * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None]
        tl.store(on_new + tile, cross_o)
        tl.store(on_back + tile, cross_r)


@entry.jit(do_not_specialize=["value_heads", "v_token", "v_head"])
def dots(
    v,
    number,
    firsts,
    counts,
    sums,
    kept,
    back,
    steps,
    q_states,
    k_states,
    k_grads,
    of_rate,
    of_total,
    of_rest,
    value_heads,
    v_token,
    v_head,
    VALUE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """By token [chunks, HV, 64]: what S gives beta, what S and E give G, and of that the part of
    exp(G_last - G)."""
    TILES: tl.constexpr = CHUNK // ROWS
    j = tl.arange(0, ROWS)
    e = tl.arange(0, VALUE)
    chunks = tl.load(number)
    for work in range(tl.program_id(0), chunks * value_heads * TILES, tl.num_programs(0)):
        i = work % TILES * ROWS + j
        place = (work // TILES).to(tl.int64)
        head = work // TILES % value_heads
        chunk = work // TILES // value_heads
        there = (i < tl.load(counts + chunk))[:, None]
        token = (tl.load(firsts + chunk) + i).to(tl.int64)[:, None]
        row = place * CHUNK + i
        at = row[:, None] * VALUE + e[None]
        of_step = steps + (place * (2 * CHUNK) + i)[:, None] * VALUE + e[None]
        of_v = v + head.to(tl.int64) * v_head + token * v_token + e[None]
        k_state = tl.load(k_states + at).to(tl.float32)
        x = tl.load(of_v, mask=there, other=0.0).to(tl.float32)
        x -= k_state * tl.exp(tl.load(sums + row))[:, None]
        tl.store(of_rate + row, tl.sum(tl.load(back + at).to(tl.float32) * x, 1))
        rest = tl.load(kept + at).to(tl.float32) * tl.load(k_grads + at).to(tl.float32)
        total = tl.load(of_step).to(tl.float32) * tl.load(q_states + at).to(tl.float32)
        total += tl.load(of_step + CHUNK * VALUE).to(tl.float32) * k_state
        tl.store(of_total + row, tl.sum(total - rest, 1))
        tl.store(of_rest + row, tl.sum(rest, 1))


@entry.jit(do_not_specialize=["group", "value_heads", "scale"])
def pairs(
    number,
    qk,
    kk,
    on_new,
    on_back,
    sums,
    rates,
    states,
    grads,
    of_rest,
    z,
    m,
    of_rate,
    of_total,
    of_column,
    group,
    value_heads,
    scale,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Z and M [chunks, HV, 64, 64]; adds to what beta and G get, and what is taken from G."""
    i = tl.arange(0, CHUNK)
    j = tl.arange(0, ROWS)
    e = tl.arange(0, 16)
    d = tl.arange(0, KEY)
    chunks = tl.load(number)
    for work in range(tl.program_id(0), chunks * value_heads, tl.num_programs(0)):
        head = work % value_heads
        pair = work // value_heads * (value_heads // group) + head // group
        place = work.to(tl.int64)
        across = tl.load(sums + place * CHUNK + i)
        last = tl.load(sums + place * CHUNK + CHUNK - 1)
        whole = tl.zeros((16, KEY), tl.float32)
        for row in range(0, VALUE, 16):
            at = place * (VALUE * KEY) + (row + e)[:, None] * KEY + d[None]
            whole += tl.load(states + at).to(tl.float32) * tl.load(grads + at).to(tl.float32)
        rest = tl.sum(tl.load(of_rest + place * CHUNK + i), 0)
        end = rest + tl.exp(last) * tl.sum(tl.sum(whole, 1), 0)
        columns = tl.zeros((CHUNK,), tl.float32)
        for row in range(0, CHUNK, ROWS):
            own = place * CHUNK + row + j
            total = tl.load(sums + own)
            rate = tl.load(rates + own)
            at = (row + j)[:, None] * CHUNK + i[None]
            of_pair = pair.to(tl.int64) * (CHUNK * CHUNK) + at
            tile = place * (CHUNK * CHUNK) + at
            later = (row + j)[:, None] > i[None]
            sees = (row + j)[:, None] >= i[None]
            fading = tl.exp(tl.where(sees, total[:, None] - across[None], 0.0))
            z_tile = tl.where(sees, tl.load(on_new + tile) * fading * scale, 0.0)
            tl.store(z + tile, z_tile.to(z.dtype.element_ty))
            m_tile = tl.where(later, tl.load(on_back + tile) * fading, 0.0)
            k_tile = tl.load(kk + of_pair)
            of_row = tl.sum(m_tile * k_tile, 1)
            tl.store(of_rate + own, tl.load(of_rate + own) - of_row)
            m_tile = m_tile * -rate[:, None]
            tl.store(m + tile, m_tile.to(m.dtype.element_ty))
            weight = z_tile * tl.load(qk + of_pair) + m_tile * k_tile
            columns += tl.sum(weight, 0)
            tl.store(of_total + own, tl.load(of_total + own) + tl.sum(weight, 1))
        # every token of the chunk sums up to its last place
        columns -= tl.where(i == CHUNK - 1, end, 0.0)
        tl.store(of_column + place * CHUNK + i, columns)


@entry.jit(
    do_not_specialize=["group", "heads", "q_token", "q_head", "k_token", "k_head", "to_token"]
)
def inputs(
    q,
    k,
    number,
    firsts,
    counts,
    states,
    grads,
    steps,
    kept,
    z,
    m,
    d_query,
    d_key,
    group,
    heads,
    q_token,
    q_head,
    k_token,
    k_head,
    to_token,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEY_TILE: tl.constexpr,
):
    """dq and dk, summed over the value heads of a head."""
    TILES: tl.constexpr = KEY // KEY_TILE
    i = tl.arange(0, CHUNK)
    d = tl.arange(0, KEY_TILE)
    e = tl.arange(0, VALUE)
    chunks = tl.load(number)
    for work in range(tl.program_id(0), chunks * heads * TILES, tl.num_programs(0)):
        column = (work % TILES * KEY_TILE + d)[None]
        head = work // TILES % heads
        chunk = work // TILES // heads
        there = (i < tl.load(counts + chunk))[:, None]
        token = (tl.load(firsts + chunk) + i).to(tl.int64)[:, None]
        of_q = q + head.to(tl.int64) * q_head + token * q_token + column
        of_k = k + head.to(tl.int64) * k_head + token * k_token + column
        q_tile = tl.load(of_q, mask=there, other=0.0)
        k_tile = tl.load(of_k, mask=there, other=0.0)
        dq = tl.zeros((CHUNK, KEY_TILE), tl.float32)
        dk = tl.zeros((CHUNK, KEY_TILE), tl.float32)
        for one in range(0, group):
            place = ((chunk * heads + head) * group + one).to(tl.int64)
            of_state = place * (VALUE * KEY) + e[:, None] * KEY + column
            of_value = place * (CHUNK * VALUE) + i[:, None] * VALUE + e[None]
            of_step = steps + of_value + place * (CHUNK * VALUE)
            tile = place * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None]
            state = tl.load(states + of_state)
            z_tile = tl.load(z + tile)
            m_tile = tl.load(m + tile)
            dq = tl.dot(tl.load(of_step), state, dq)
            dq = tl.dot(z_tile, k_tile, dq)
            dk = tl.dot(tl.load(kept + of_value), tl.load(grads + of_state), dk)
            dk = tl.dot(tl.load(of_step + CHUNK * VALUE), state, dk)
            dk = tl.dot(tl.trans(z_tile), q_tile, dk)
            dk = tl.dot(m_tile, k_tile, dk)
            dk = tl.dot(tl.trans(m_tile), k_tile, dk)
        to = token * to_token + head * KEY + column
        tl.store(d_query + to, dq.to(d_query.dtype.element_ty), mask=there)
        tl.store(d_key + to, dk.to(d_key.dtype.element_ty), mask=there)


@entry.jit(do_not_specialize=["value_heads", "beta_token", "g_token"])
def gates(
    number,
    firsts,
    counts,
    changes,
    of_rate,
    of_total,
    of_column,
    d_beta,
    d_g,
    value_heads,
    beta_token,
    g_token,
    BETA: tl.constexpr,
    GATE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
):
    """dbeta and dg in rows of heads: a column of one head is a store for every token."""
    i = tl.arange(0, CHUNK)
    h = tl.arange(0, HEAD_TILE)
    tiles = (value_heads + HEAD_TILE - 1) // HEAD_TILE
    chunks = tl.load(number)
    for work in range(tl.program_id(0), chunks * tiles, tl.num_programs(0)):
        chunk = work // tiles
        first = work % tiles * HEAD_TILE
        heads = tl.minimum(value_heads - first, HEAD_TILE)
        there = (i < tl.load(counts + chunk))[:, None] & (h < heads)[None]
        token = (tl.load(firsts + chunk) + i).to(tl.int64)[:, None]
        rates = tl.zeros((CHUNK, HEAD_TILE), tl.float32)
        totals = tl.zeros((CHUNK, HEAD_TILE), tl.float32)
        for head in range(0, heads):
            at = (chunk.to(tl.int64) * value_heads + first + head) * CHUNK + i
            if BETA:
                rate = of_beta(tl.load(of_rate + at), tl.load(changes + at), BETA)
                rates = tl.where(h[None] == head, rate[:, None], rates)
            if GATE:
                total = tl.load(of_total + at) - tl.load(of_column + at)
                total = tl.sum(tl.where(i[:, None] <= i[None], total[None], 0.0), 1)
                totals = tl.where(h[None] == head, total[:, None], totals)
        if BETA:
            to = d_beta + token * beta_token + first + h[None]
            tl.store(to, rates.to(d_beta.dtype.element_ty), mask=there)
        if GATE:
            to = d_g + token * g_token + first + h[None]
            tl.store(to, totals.to(d_g.dtype.element_ty), mask=there)


def _tile(kernel: str, size: int, other: int, most: int = 2**16) -> dict[str, Any]:
    """The widest that divides these channels; with the `other` ones, `most` elements."""
    kernel = f"chunk_gated_delta_rule_grad.{kernel}"
    fitting = [
        config
        for config in tune.TABLE[kernel]
        for tile in config.tiles.values()
        if size % tile == 0 and tile * other <= most
    ]
    return tune.choose(kernel, fitting, other).keywords


def _only(kernel: str) -> dict[str, Any]:
    return tune.only(f"chunk_gated_delta_rule_grad.{kernel}").keywords


def backward(**a: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    query, key, value, d_out = a["query"], a["key"], a["value"], a["d_out"]
    beta, g, initial_state = a["beta"], a["g"], a["initial_state"]
    actual_seq_lengths, scale = a["actual_seq_lengths"], a["scale"]
    how = a["use_beta_sigmoid_in_kernel"], a["allow_neg_eigval"]
    device, dtype, wide = value.device, value.dtype, torch.float32

    def like(x: Tensor | None) -> Tensor:
        if x is None:
            return memory.empty((0,), dtype, device)
        return memory.empty(x.shape, x.dtype, device)

    outputs = tuple(like(x) for x in (query, key, value, beta, initial_state, g))
    d_query, d_key, d_value, d_beta, d_initial, d_g = outputs
    tokens, heads, key_size = key.shape
    value_heads, value_size = value.shape[1:]
    varlen = actual_seq_lengths is not None
    sequences = actual_seq_lengths.shape[0] if actual_seq_lengths is not None else 1
    if varlen or sequences * value_heads * value_size * key_size == 0:
        for output in outputs:  # tokens behind the last sequence belong to no chunk
            output.zero_()
    if sequences * value_heads * value_size * key_size == 0:
        return d_query, d_key, d_value, d_beta, d_initial, d_g
    scale = key_size**-0.5 if scale is None else scale
    # every sequence may end in a part of a chunk
    chunks = triton.cdiv(tokens, CHUNK.value) + (sequences if varlen else 0)
    number, firsts, counts = (
        memory.empty((size,), torch.int32, device) for size in (1, chunks, chunks)
    )
    lengths = number if actual_seq_lengths is None else actual_seq_lengths
    places[(1,)](
        lengths,
        number,
        firsts,
        counts,
        sequences,
        tokens,
        VARLEN=varlen,
        **_only("places"),
    )
    group = value_heads // heads
    sizes = dict(KEY=key_size, VALUE=value_size)
    # by value head and chunk: tiles by token and channel, two states, squares of pairs
    each = 2 * (8 * CHUNK.value * value_size + 2 * value_size * key_size + 11 * CHUNK.value**2)
    at_once = tiling.at_once(heads, max(chunks, 1) * group * each)
    for first in range(0, heads, at_once):
        here = slice(first, first + at_once)
        there = slice(first * group, (first + at_once) * group)
        q, k, dq, dk = (x[:, here] for x in (query, key, d_query, d_key))
        v, o, dv = (x[:, there] for x in (value, d_out, d_value))
        rate, gate, initial, final = (
            None if x is None else x[:, there] for x in (beta, g, initial_state, a["d_final_state"])
        )
        d_rate, d_gate, d_start = (
            x if x.ndim == 1 else x[:, there] for x in (d_beta, d_g, d_initial)
        )
        some, values = q.shape[1], v.shape[1]
        if values == 1:
            rate, gate = (None if x is None else x.contiguous() for x in (rate, gate))

        def space(*shape: int, kind: torch.dtype = dtype, by: int = values) -> Tensor:
            return memory.empty((chunks, by, *shape), kind, device)

        square = (CHUNK.value, CHUNK.value)
        qk, kk = (space(*square, kind=wide, by=some) for _ in range(2))
        inverse, finer, seen = (space(*square) for _ in range(3))
        on_new, on_back = (space(*square, kind=wide) for _ in range(2))
        sums, rates, of_rate, of_total, of_rest, of_column = (
            space(CHUNK.value, kind=wide) for _ in range(6)
        )
        states, grads = (space(value_size, key_size) for _ in range(2))
        new, kept, back, q_states, k_states, k_grads = (
            space(CHUNK.value, value_size) for _ in range(6)
        )
        steps = space(2, CHUNK.value, value_size)
        of_q, of_k, of_v, of_o = (x.stride()[:2] for x in (q, k, v, o))
        products[(cores.cube(),)](
            q,
            k,
            lengths,
            qk,
            kk,
            qk,
            kk,
            sequences,
            tokens,
            some,
            *of_q,
            *of_k,
            KEY=key_size,
            VARLEN=varlen,
            FAR=False,
            **tune.only("chunk_gated_delta_rule.products").keywords,
        )
        triangles[(cores.vector(),)](
            k,
            qk,
            kk,
            qk,
            kk,
            sums if rate is None else rate,
            sums if gate is None else gate,
            lengths,
            inverse,
            finer,
            inverse,
            seen,
            seen,
            seen,
            sums,
            rates,
            sequences,
            tokens,
            group,
            0 if rate is None else rate.stride(0),
            0 if gate is None else gate.stride(0),
            *of_k,
            KEY=key_size,
            VALUE_HEADS=values,
            VARLEN=varlen,
            BETA=kind_of_rate(rate, *how),
            GATE=gate is not None,
            APART=True,
            **tune.only("chunk_gated_delta_rule.triangles").keywords,
        )
        walk_states[(cores.cube(),)](
            k,
            v,
            lengths,
            inverse,
            finer,
            sums,
            rates,
            states if initial is None else initial,
            states,
            new,
            kept,
            sequences,
            tokens,
            group,
            values,
            0 if initial is None else initial.stride(0),
            *of_k,
            *of_v,
            VARLEN=varlen,
            INITIAL=initial is not None,
            **sizes,
            **_tile("walk_states", value_size, key_size),
        )
        walk_grads[(cores.cube(),)](
            q,
            k,
            o,
            actual_seq_lengths,
            inverse,
            finer,
            seen,
            sums,
            rates,
            final,
            None if initial is None else d_start,
            dv,
            grads,
            back,
            steps,
            sequences,
            tokens,
            group,
            values,
            value_heads,
            scale,
            *of_q,
            *of_k,
            *of_o,
            **sizes,
            **_tile("walk_grads", value_size, key_size, _PART),
        )
        crosses[(cores.cube(),)](
            q,
            k,
            o,
            number,
            firsts,
            counts,
            states,
            grads,
            new,
            back,
            on_new,
            on_back,
            q_states,
            k_states,
            k_grads,
            group,
            values,
            *of_q,
            *of_k,
            *of_o,
            **sizes,
            **_tile("crosses", value_size, key_size),
        )
        dots[(cores.vector(),)](
            v,
            number,
            firsts,
            counts,
            sums,
            kept,
            back,
            steps,
            q_states,
            k_states,
            k_grads,
            of_rate,
            of_total,
            of_rest,
            values,
            *of_v,
            VALUE=value_size,
            **_only("dots"),
        )
        # P and the triangle are used up: Z and M lie in their place
        pairs[(cores.vector(),)](
            number,
            qk,
            kk,
            on_new,
            on_back,
            sums,
            rates,
            states,
            grads,
            of_rest,
            seen,
            inverse,
            of_rate,
            of_total,
            of_column,
            group,
            values,
            scale,
            **sizes,
            **_only("pairs"),
        )
        inputs[(cores.cube(),)](
            q,
            k,
            number,
            firsts,
            counts,
            states,
            grads,
            steps,
            kept,
            seen,
            inverse,
            dq,
            dk,
            group,
            some,
            *of_q,
            *of_k,
            dq.stride(0),
            **sizes,
            **_tile("inputs", key_size, value_size),
        )
        if rate is not None or gate is not None:
            gates[(cores.vector(),)](
                number,
                firsts,
                counts,
                rates,
                of_rate,
                of_total,
                of_column,
                d_rate,
                d_gate,
                values,
                d_rate.stride(0),
                d_gate.stride(0),
                BETA=kind_of_rate(rate, *how),
                GATE=gate is not None,
                **_only("gates"),
            )
    return d_query, d_key, d_value, d_beta, d_initial, d_g
