# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Kimi delta attention over whole sequences on the cube: 64 tokens at a time, the walk 128.

    G_i [K] = sum of the decay's logarithm up to i, within a chunk
    A_ij = sum over channels of k_i k_j exp(G_i - G_j) for j < i     T = (I + beta A)^-1 beta
    P_ij = scale q_i k_j exp(G_i - G_j) for j <= i
    by chunk:  N = T (v - (exp(G) k) S);  out = (scale exp(G) q) S + P N;
    S = exp(G_last) S + (exp(G_last - G) k)^T N

exp(G_i - G_j) is no product of a number of i and one of j that stay in range.  A chunk is four
parts of 16 tokens.  With R the G in the middle of i's part, it is exp(G_i - R) exp(R - G_j), which
the cube multiplies.  A channel that goes further from there than REACH has the part's begin for R
as i's, and its end as j's: then no exponent is above 0, pairs within the part get too little, and
the vector cores make the rest of them, one token j at a time.  Bounded gates never go so far.

Of a pair of chunks, A and B, all of it holds as of one chunk of 128 tokens, with
P_BA = (scale exp(G) q)_B (exp(G_last - G) k)_A^T and T_BA = -T_B A_BA T_A, A_BA alike of keys.
A sequence may end in a chunk without a second, and so may a round.

    factors    vector cores    by pair: what the cube multiplies, here and in the walk; of parts
                               with a channel that goes far, what is left of A and P
    products   cube            by chunk: A and P
    triangles  vector cores    by chunk: both with what was left, and T, by elimination
    crosses    cube            by pair: P_BA and T_BA
    walk       cube + vector   over a sequence, VALUE_TILE columns of a head: S and N
    outputs    cube            by pair

A, P and T lie transposed, as they are made; P and T in squares of pairs.  In the walk the cube
stores and loads what it makes of v and the state, and the vector units have the state alone, in
float32: two hand-offs a pair.  Both products with the state do not fit L0C, so outputs are a launch
of their own.  What lies between the kernels is laid out by chunk, in rounds of chunks that fit the
workspace; the state of the sequence that a round ends within is carried to the next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory
from ...dispatch.common.gated_delta import kind_of_rate
from ..common import cores, entry, tiling, tune, tuples
from ..common.front_end import extract_slice, insert_slice
from ..common.lengths import within
from ..common.rates import rate_of

CHUNK = tl.constexpr(64)
ROWS = tl.constexpr(16)  # tokens of a part of a chunk
LOWER = tl.constexpr(160)  # rows of `lower` of a chunk: the parts up to each of its four
LARGEST = 128  # key size; of values twice as much
# exp() of it is 0 in float32; minus infinity times 0 would be none
_LEAST = tl.constexpr(-100.0)
ALL = tl.constexpr(tl.PropagateNan.ALL)
GIVEN, SOFTPLUS, BOUNDED = 0, 1, 2  # what `g` is


@triton.jit
def _sequence(bounds, n, end, length, tokens, VARLEN: tl.constexpr):
    """(first token, tokens) of sequence n; it begins where all before it have ended."""
    start = n * length
    if VARLEN:
        start = tl.maximum(within(bounds + n, tokens), end)
        length = tl.maximum(within(bounds + n + 1, tokens), start) - start
    return start, length


@triton.jit
def _here(before, chunks, since, most):
    """Of the chunks of a sequence behind `before` others: the first that is among the `most` of
    this round from chunk `since` on, and how many are."""
    low = tl.minimum(tl.maximum(since - before, 0), chunks)
    high = tl.minimum(tl.maximum(since + most - before, 0), chunks)
    return low, high - low


@triton.jit
def _place(chunk, head, most, value_heads, GRAD: tl.constexpr):
    """Where a chunk of the round and a head lie: by head, for a gradient by chunk."""
    if GRAD:
        place = chunk.to(tl.int64) * value_heads + head
    else:
        place = head.to(tl.int64) * most + chunk
    return place


@triton.jit
def _inner(chunk, head, most, value_heads):
    """Where, behind all chunks, what the pair from `chunk` on has for its crosses lies."""
    return value_heads.to(tl.int64) * most + head * (most // 2) + chunk // 2


@triton.jit
def _logarithm(x, rate, lower_bound, GATE: tl.constexpr):
    """The decay's, not below that of what is 0 in float32.  Behind 20 softplus is its argument, to
    the last bit."""
    if GATE == 1:
        e = tl.exp(-tl.abs(x))
        u = e + 1.0
        # log(1 + e), with what u has been rounded by
        rest = tl.log(u) + (e - (u - 1.0))
        x = (tl.maximum(x, 0.0, propagate_nan=ALL) + rest) * -rate
    elif GATE == 2:
        x = lower_bound / (1.0 + tl.exp(-rate * x))
    return tl.maximum(x, _LEAST, propagate_nan=ALL)


@triton.jit
def _unit(x, scale, NORM: tl.constexpr):
    """Rows of length `scale`, or multiplied by it."""
    if NORM:
        x = x * (scale / tl.sqrt(tl.sum(x * x, 1) + 1e-6))[:, None]
    else:
        x = x * scale
    return x


@triton.jit
def _sums(x, KEY: tl.constexpr):
    """Of a part's rows up to each."""
    for step in tl.static_range(4):
        more = extract_slice(x, (2**step, 0), (ROWS - 2**step, KEY), (1, 1))
        more += extract_slice(x, (0, 0), (ROWS - 2**step, KEY), (1, 1))
        x = insert_slice(x, more, (2**step, 0), (ROWS - 2**step, KEY), (1, 1))
    return x


class Given(NamedTuple):
    q: Tensor
    k: Tensor
    g: Tensor
    A_log: Tensor
    dt_bias: Tensor


class Strides(NamedTuple):
    token: int
    head: int


class Round(NamedTuple):
    """Of which tokens, and which of their chunks."""

    sequences: int
    length: int
    tokens: int
    since: int
    most: int


class Factors(NamedTuple):
    """What the cube multiplies."""

    upper: Tensor
    lower: Tensor
    queries: Tensor
    keys: Tensor
    left: Tensor
    fades: Tensor
    strong: Tensor


class Whole(NamedTuple):
    """What a gradient needs besides."""

    total: Tensor
    units: Tensor
    scaled: Tensor


@triton.jit
def _near(q_tile, k_tile, since, weight, alike, seen, START: tl.constexpr, KEY: tl.constexpr):
    """Of a part's A and P what its tokens from START to START + 8 are to those from START on, with
    a weight by channel: one exponential a pair.  Of tokens before them it may be infinite, and is
    not taken."""
    HALF: tl.constexpr = ROWS // 2
    LEFT: tl.constexpr = ROWS - START
    q_here = extract_slice(q_tile, (START, 0), (LEFT, KEY), (1, 1))
    k_here = extract_slice(k_tile, (START, 0), (LEFT, KEY), (1, 1))
    g_here = extract_slice(since, (START, 0), (LEFT, KEY), (1, 1))
    for r in range(START, START + HALF):
        g_row = extract_slice(since, (r, 0), (1, KEY), (1, 1))
        k_row = extract_slice(k_tile, (r, 0), (1, KEY), (1, 1))
        faded = tl.exp(g_here - g_row) * (k_row * weight)
        on_q = tl.sum(q_here * faded, 1)
        on_k = tl.sum(k_here * faded, 1)
        seen = insert_slice(seen, on_q[None], (r, START), (1, LEFT), (1, 1))
        alike = insert_slice(alike, on_k[None], (r, START), (1, LEFT), (1, 1))
    return alike, seen


@tuples.jit(["group", "value_heads", "scale", "lower_bound"])
def factors(
    given: Given,
    bounds,
    near_alike,
    near_seen,
    to: Factors,
    whole: Whole,
    of: Round,
    group,
    value_heads,
    scale,
    lower_bound,
    q_stride: Strides,
    k_stride: Strides,
    g_stride: Strides,
    KEY: tl.constexpr,
    VARLEN: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    A: tl.constexpr,
    BIAS: tl.constexpr,
    GRAD: tl.constexpr,
    multibuffer: tl.constexpr,
):
    """Of every chunk what `products` multiplies; with the G of the pair scale exp(G) q, -exp(G) k
    and exp(G_last - G) k [HV, chunks, 64, K], and of a pair at its first exp(G_last) [HV, chunks,
    K].  Behind them with the G of the chunk, by pair, what `crosses` multiplies: the first two of
    its second, and the last of its first.  By parts of 16 tokens whether a channel goes far
    [HV, chunks, 4], and what is then left of A and P [HV, chunks, 64, 16].  For a gradient
    [chunks, HV, ..], exp(G) k, no pairs, and in float32 G, k and scale q."""
    PARTS: tl.constexpr = CHUNK // ROWS
    ABSENT: tl.constexpr = float("-inf") if GATE else 0.0
    # two of them in float32, and in halves; what bounded gates reach is 40
    half: tl.constexpr = to.upper.dtype.element_ty
    REACH: tl.constexpr = 43.0 if to.upper.dtype.element_ty == tl.bfloat16 else 4.0
    row = tl.arange(0, ROWS)
    d = tl.arange(0, KEY)
    one = tl.zeros((1,), tl.int32)  # a scalar of the vector unit
    turn = tl.program_id(0)
    turns = tl.num_programs(0)
    end = 0
    before = 0
    for n in range(0, of.sequences):
        start, size = _sequence(bounds, n, end, of.length, of.tokens, VARLEN)
        chunks = (size + CHUNK - 1) // CHUNK
        low, count = _here(before, chunks, of.since, of.most)
        pairs = (count + 1) // 2
        for work in range(turn, pairs * value_heads, turns):
            head = work % value_heads
            begin = low + work // value_heads * 2
            of_q = given.q + (head // group).to(tl.int64) * q_stride.head
            of_k = given.k + (head // group).to(tl.int64) * k_stride.head
            of_g = given.g + head.to(tl.int64) * g_stride.head
            rate = tl.zeros((1,), tl.float32)
            if A:
                rate += tl.load(given.A_log + head + one).to(tl.float32)
            rate = tl.exp(rate)[:, None]
            of_pair = before + begin - of.since
            inner = _inner(of_pair, head, of.most, value_heads)
            fore = tl.zeros((1, KEY), tl.float32)  # of the pair's first
            for chunk in range(begin, tl.minimum(begin + 2, low + count)):
                first = chunk * CHUNK
                place = _place(before + chunk - of.since, head, of.most, value_heads, GRAD)
                second = chunk - begin
                of_left = place
                if not GRAD:
                    of_left = tl.where(
                        tl.minimum(low + count - chunk, 2) - second > 1, inner, place
                    )
                running = tl.zeros((1, KEY), tl.float32)
                # a tile that is the same in every turn would stay in UB
                rest = tl.broadcast_to(first.to(tl.float32) * 0.0, (CHUNK - ROWS, KEY))
                older = tl.zeros((1, KEY), tl.float32)
                newer = tl.zeros((1, KEY), tl.float32)
                for part in range(0, CHUNK, ROWS):
                    i = part + row
                    there = (i < size - first)[:, None]
                    token = (start + first + i).to(tl.int64)[:, None]
                    rows = place * (CHUNK * KEY) + i[:, None] * KEY + d[None]
                    # no decay where there is no token
                    x = tl.load(of_g + token * g_stride.token + d[None], mask=there, other=ABSENT)
                    x = x.to(tl.float32)
                    if BIAS:
                        x += tl.load(given.dt_bias + head * KEY + d).to(tl.float32)[None]
                    decay = _logarithm(x, rate, lower_bound, GATE)
                    since = _sums(decay, KEY)  # up to each token, from the part's first on
                    gained = extract_slice(since, (ROWS - 1, 0), (1, KEY), (1, 1))
                    k_tile = tl.load(of_k + token * k_stride.token + d[None], mask=there, other=0.0)
                    k_tile = _unit(k_tile.to(tl.float32), 1.0, NORM)
                    q_tile = tl.load(of_q + token * q_stride.token + d[None], mask=there, other=0.0)
                    q_tile = _unit(q_tile.to(tl.float32), scale, NORM)
                    if GRAD:
                        tl.store(whole.total + rows, running + since)
                        tl.store(whole.units + rows, k_tile)
                        tl.store(whole.scaled + rows, q_tile)
                    # anchors: the part's middle; its begin and end for channels that go far from it
                    middle = extract_slice(since, (ROWS // 2 - 1, 0), (1, KEY), (1, 1))
                    far = tl.where(
                        tl.minimum(middle, gained - middle, propagate_nan=ALL) < -REACH, 1.0, 0.0
                    )
                    upper = middle - middle * far
                    under = middle + (gained - middle) * far
                    # pairs of such channels, which the cube takes exp(under - upper) of, one by one
                    strong = tl.max(far, 1).to(tl.int32)
                    tl.store(to.strong + place * PARTS + part // ROWS + one, strong)
                    if tl.max(strong, 0) > 0:
                        weight = far * (1.0 - tl.exp(gained))
                        on_k = tl.zeros((ROWS, ROWS), tl.float32)
                        on_q = tl.zeros((ROWS, ROWS), tl.float32)
                        # a row of a tile is taken out of what made the tile, unless it was put
                        # there
                        zero = tl.minimum(work, 0)
                        k_rows = insert_slice(decay, k_tile, (zero, 0), (ROWS, KEY), (1, 1))
                        on_k, on_q = _near(q_tile, k_rows, since, weight, on_k, on_q, 0, KEY)
                        on_k, on_q = _near(
                            q_tile, k_rows, since, weight, on_k, on_q, ROWS // 2, KEY
                        )
                        of_near = (place * CHUNK + i[:, None]) * ROWS + row[None]
                        tl.store(near_seen + of_near, on_q)
                        tl.store(near_alike + of_near, on_k)
                    growth = tl.exp(since - upper)
                    q_up = q_tile * growth
                    k_up = k_tile * growth
                    at = (place * CHUNK + part) * (2 * KEY) + row[:, None] * KEY + d[None]
                    tl.store(to.upper + at, q_up.to(half))
                    tl.store(to.upper + at + ROWS * KEY, k_up.to(half))
                    grown = tl.exp(running + upper)
                    if GRAD:
                        tl.store(to.queries + rows, (q_up * grown).to(half))
                        tl.store(to.keys + rows, (k_up * grown).to(half))
                    else:
                        for since_begin in range(0, 1 + second):
                            at = tl.where(since_begin < second, inner, place) * CHUNK + part
                            at = (at + row)[:, None] * KEY + d[None]
                            tl.store(to.queries + at, (q_up * grown).to(half))
                            tl.store(to.keys + at, (k_up * -grown).to(half))
                            grown = grown * tl.exp(fore)
                    # of the parts before, on to this one's anchor
                    base = place * LOWER + part // ROWS * (part + ROWS) // 2
                    for earlier in range(0, part - ROWS, ROWS):
                        known = extract_slice(rest, (earlier, 0), (ROWS, KEY), (1, 1))
                        known = known * tl.exp(older + upper)
                        rest = insert_slice(rest, known, (earlier, 0), (ROWS, KEY), (1, 1))
                        at = (base + earlier + row)[:, None] * KEY + d[None]
                        tl.store(to.lower + at, known.to(half))
                    for earlier in range(tl.maximum(part - ROWS, 0), part, ROWS):  # once, or not
                        known = extract_slice(rest, (earlier, 0), (ROWS, KEY), (1, 1))
                        known = known * tl.exp(newer + upper)
                        rest = insert_slice(rest, known, (earlier, 0), (ROWS, KEY), (1, 1))
                        at = (base + earlier + row)[:, None] * KEY + d[None]
                        tl.store(to.lower + at, known.to(half))
                    known = k_tile * tl.exp(under - since)
                    at = (base + part + row)[:, None] * KEY + d[None]
                    tl.store(to.lower + at, known.to(half))
                    older = gained - upper
                    newer = gained - under
                    for here in range(part, CHUNK - ROWS, CHUNK):  # once, or not
                        rest = insert_slice(rest, known, (here, 0), (ROWS, KEY), (1, 1))
                    for last in range(CHUNK - ROWS, part + 1):  # once, or not
                        at = (of_left * CHUNK + last + row)[:, None] * KEY + d[None]
                        tl.store(to.left + at, (known * tl.exp(newer)).to(half))
                    running += gained
                for earlier in range(0, CHUNK - ROWS, ROWS):
                    known = extract_slice(rest, (earlier, 0), (ROWS, KEY), (1, 1)) * tl.exp(older)
                    at = (of_left * CHUNK + earlier + row)[:, None] * KEY + d[None]
                    tl.store(to.left + at, known.to(to.left.dtype.element_ty))
                if GRAD:
                    tl.store(to.fades + place * KEY + d[None], tl.exp(running))
                else:
                    for part in range(0, second * CHUNK, ROWS // 2):
                        at = (part + tl.arange(0, ROWS // 2))[:, None] * KEY + d[None]
                        known = tl.load(to.left + inner * (CHUNK * KEY) + at).to(tl.float32)
                        known = (known * tl.exp(running)).to(half)
                        tl.store(to.left + (place - 1) * (CHUNK * KEY) + at, known)
                    fore += running
                    tl.store(to.fades + (place - second) * KEY + d[None], tl.exp(fore))
        turn = ((turn - pairs * value_heads) % turns + turns) % turns
        end = start + size
        before += chunks


@triton.jit
def _square(place, chunk, j, i, GRAD: tl.constexpr):
    """Rows j and columns i of a chunk's square; without a gradient, within its pair's."""
    if GRAD:
        at = place * (CHUNK * CHUNK) + j[:, None] * CHUNK + i[None]
    else:
        at = (place * CHUNK + j[:, None]) * (2 * CHUNK) + chunk % 2 * CHUNK + i[None]
    return at


@tuples.jit(["value_heads"])
def products(
    upper,
    lower,
    bounds,
    alike,
    seen,
    of: Round,
    value_heads,
    KEY: tl.constexpr,
    VARLEN: tl.constexpr,
    GRAD: tl.constexpr,
):
    """A [HV, chunks, 64, 64] and P; of tokens that a token does not see, anything."""
    PARTS: tl.constexpr = CHUNK // ROWS
    row = tl.arange(0, ROWS)
    d = tl.arange(0, KEY)
    turn = tl.program_id(0)
    turns = tl.num_programs(0)
    end = 0
    before = 0
    for n in range(0, of.sequences):
        start, size = _sequence(bounds, n, end, of.length, of.tokens, VARLEN)
        chunks = (size + CHUNK - 1) // CHUNK
        low, count = _here(before, chunks, of.since, of.most)
        for work in range(turn, count * value_heads, turns):
            chunk = work // value_heads
            place = before + low - of.since + chunk
            place = _place(place, work % value_heads, of.most, value_heads, GRAD)
            for part in tl.static_range(0, PARTS):
                j = tl.arange(0, part * ROWS + ROWS)
                of_lower = place * LOWER + part * (part + 1) // 2 * ROWS
                of_lower = (of_lower + j)[:, None] * KEY + d[None]
                of_upper = (
                    place * (2 * CHUNK * KEY) + (2 * part * ROWS + row)[:, None] * KEY + d[None]
                )
                k_earlier = tl.load(lower + of_lower)
                q_tile = tl.load(upper + of_upper)
                k_tile = tl.load(upper + of_upper + ROWS * KEY)
                tile = place * (CHUNK * CHUNK) + j[:, None] * CHUNK + part * ROWS + row[None]
                on_q = tl.dot(k_earlier, tl.trans(q_tile))
                of_seen = _square(place, chunk, j, part * ROWS + row, GRAD)
                tl.store(seen + of_seen, on_q.to(seen.dtype.element_ty))
                tl.store(alike + tile, tl.dot(k_earlier, tl.trans(k_tile)))
        turn = ((turn - count * value_heads) % turns + turns) % turns
        end = start + size
        before += chunks


@entry.jit(
    do_not_specialize=[
        "sequences", "length", "tokens", "since", "most", "value_heads", "beta_head",
    ]
)  # fmt: skip
def triangles(
    alike,
    seen,
    near_alike,
    near_seen,
    strong,
    beta,
    bounds,
    solved,
    finer,
    sequences,
    length,
    tokens,
    since,
    most,
    value_heads,
    beta_head,
    VARLEN: tl.constexpr,
    GRAD: tl.constexpr,
    BETA: tl.constexpr,
    multibuffer: tl.constexpr,
):
    """T; P with what `factors` left, 0 of tokens that a token does not see; beta [HV, tokens].
    Both in squares of pairs [HV, chunks, 64, 128], with zeros where a first would see its second.
    For a gradient (I + beta A)^-1, what its rounding leaves, and A like P [chunks, HV, 64, 64]."""
    PARTS: tl.constexpr = CHUNK // ROWS
    i = tl.arange(0, CHUNK)
    f = i.to(tl.float32)  # which the vector unit compares as they are
    row = tl.arange(0, ROWS)
    turn = tl.program_id(0)
    turns = tl.num_programs(0)
    end = 0
    before = 0
    for n in range(0, sequences):
        start, size = _sequence(bounds, n, end, length, tokens, VARLEN)
        chunks = (size + CHUNK - 1) // CHUNK
        low, count = _here(before, chunks, since, most)
        for work in range(turn, count * value_heads, turns):
            head = work % value_heads
            first = (low + work // value_heads) * CHUNK
            of_beta = beta + head.to(tl.int64) * beta_head + start + first + i
            there = i < size - first
            rate = rate_of(tl.load(of_beta, mask=there, other=0.0), there, BETA)
            chunk = work // value_heads
            place = _place(before + low - since + chunk, head, most, value_heads, GRAD)
            tile = place * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None]
            square = _square(place, chunk, i, i, GRAD)
            upper = tl.load(alike + tile)
            p = tl.load(seen + square).to(tl.float32)
            for part in tl.static_range(0, CHUNK, ROWS):
                many = tl.where(tl.load(strong + place * PARTS + part // ROWS) > 0, ROWS, 0)
                at = (place * CHUNK + part + row)[:, None] * ROWS + row[None]
                mine = (row < many)[:, None]
                block = extract_slice(upper, (part, part), (ROWS, ROWS), (1, 1))
                block += tl.load(near_alike + at, mask=mine, other=0.0)
                upper = insert_slice(upper, block, (part, part), (ROWS, ROWS), (1, 1))
                block = extract_slice(p, (part, part), (ROWS, ROWS), (1, 1))
                block += tl.load(near_seen + at, mask=mine, other=0.0)
                p = insert_slice(p, block, (part, part), (ROWS, ROWS), (1, 1))
            p = tl.where(f[:, None] <= f[None], p, 0.0)
            upper = tl.where(f[:, None] < f[None], upper, 0.0)
            tl.store(seen + square, p.to(seen.dtype.element_ty))
            if GRAD:
                tl.store(alike + tile, upper)
            upper = upper * rate[None]
            x = tl.where(i[:, None] == i[None], 1.0, 0.0)
            if not GRAD:  # noqa: SIM102 (a constexpr, decided before the rest is compiled)
                if chunk % 2 == 1:  # tokens of a pair's first see none of its second
                    nothing = (x * 0.0).to(seen.dtype.element_ty)
                    tl.store(seen + square - CHUNK, nothing)
                    tl.store(solved + square - CHUNK, nothing)
            # column r is done: take it out of the columns behind; rows join with their own columns;
            # a column of a tile is taken out of what made the tile, unless it was put there
            zero = tl.minimum(work, 0)
            for part in tl.static_range(0, CHUNK, ROWS):
                columns = extract_slice(x, (0, part), (part + ROWS, CHUNK - part), (1, 1))
                columns = insert_slice(
                    columns, columns, (zero, 0), (part + ROWS, CHUNK - part), (1, 1)
                )
                for r in range(0, ROWS):
                    factor = extract_slice(upper, (part + r, part), (1, CHUNK - part), (1, 1))
                    done = extract_slice(columns, (0, r), (part + ROWS, 1), (1, 1))
                    columns = columns - factor * done
                x = insert_slice(x, columns, (0, part), (part + ROWS, CHUNK - part), (1, 1))
            if GRAD:
                whole = x.to(solved.dtype.element_ty)
                tl.store(solved + tile, whole)
                tl.store(finer + tile, (x - whole.to(tl.float32)).to(finer.dtype.element_ty))
            else:
                tl.store(solved + square, (x * rate[:, None]).to(solved.dtype.element_ty))
        turn = ((turn - count * value_heads) % turns + turns) % turns
        end = start + size
        before += chunks


@tuples.jit(["value_heads"])
def crosses(
    keys,
    queries,
    left,
    bounds,
    between,
    solved,
    seen,
    of: Round,
    value_heads,
    KEY: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """P_BA and T_BA of every pair."""
    i = tl.arange(0, CHUNK)
    d = tl.arange(0, KEY)
    turn = tl.program_id(0)
    turns = tl.num_programs(0)
    end = 0
    before = 0
    for n in range(0, of.sequences):
        start, size = _sequence(bounds, n, end, of.length, of.tokens, VARLEN)
        chunks = (size + CHUNK - 1) // CHUNK
        low, count = _here(before, chunks, of.since, of.most)
        works = count // 2 * value_heads
        for work in range(turn, works, turns):
            head = work % value_heads
            pair = before + low - of.since + work // value_heads * 2
            inner = _inner(pair, head, of.most, value_heads)
            rows = (inner * CHUNK + i[:, None]) * KEY + d[None]
            k_tile = tl.load(keys + rows)
            q_tile = tl.load(queries + rows)
            k_first = tl.load(left + rows)
            place = _place(pair, head, of.most, value_heads, False)
            first = _square(place, 0, i, i, False)
            x = tl.dot(k_first, tl.trans(q_tile))
            tl.store(seen + first + CHUNK, x.to(seen.dtype.element_ty))
            x = tl.dot(k_first, tl.trans(k_tile))
            of_x = between + place * (2 * CHUNK * CHUNK) + i[:, None] * CHUNK + i[None]
            tl.store(of_x, x.to(between.dtype.element_ty))
            x = tl.dot(tl.load(solved + first), tl.load(of_x))
            of_x += CHUNK * CHUNK
            tl.store(of_x, x.to(between.dtype.element_ty))
            t_tile = tl.load(solved + first + (2 * CHUNK + 1) * CHUNK)
            x = tl.dot(tl.load(of_x), t_tile)
            tl.store(solved + first + CHUNK, x.to(solved.dtype.element_ty))
        turn = ((turn - works) % turns + turns) % turns
        end = start + size
        before += chunks


@entry.jit(
    do_not_specialize=[
        "sequences", "length", "tokens", "since", "most", "came", "goes", "value_heads", "v_token",
        "v_head",
    ]
)  # fmt: skip
def walk(
    keys,
    left,
    fades,
    v,
    bounds,
    solved,
    initial,
    states,
    back,
    new,
    final,
    sequences,
    length,
    tokens,
    since,
    most,
    came,
    goes,
    value_heads,
    v_token,
    v_head,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    VARLEN: tl.constexpr,
    VALUE_TILE: tl.constexpr,
):
    """N [HV, chunks, 64, V], S before each pair at its first [HV, chunks, V, K], and final states.
    The sequence that the round begins within has its state at `came` in `initial`, that which it
    ends within leaves it at `goes` in `final`: [V, K] of a head."""
    TILES: tl.constexpr = VALUE // VALUE_TILE
    PAIR: tl.constexpr = 2 * CHUNK
    i = tl.arange(0, PAIR)
    d = tl.arange(0, KEY)
    c = tl.arange(0, VALUE_TILE)
    turn = tl.program_id(0)
    turns = tl.num_programs(0)
    end = 0
    before = 0
    for n in range(0, sequences):
        start, size = _sequence(bounds, n, end, length, tokens, VARLEN)
        chunks = (size + CHUNK - 1) // CHUNK
        low, count = _here(before, chunks, since, most)
        of_first = tl.where(low == 0, n, came)
        of_last = tl.where(low + count == chunks, n, goes)
        # the state of an empty sequence stays where it is
        works = tl.where(count > 0, value_heads * TILES, 0)
        for work in range(turn, works, turns):
            head = work // TILES
            column = work % TILES * VALUE_TILE + c
            of_v = v + head.to(tl.int64) * v_head
            of_state = column[:, None] * KEY + d[None]
            whole = (of_first * value_heads + head).to(tl.int64) * (VALUE * KEY)
            state = tl.load(initial + whole + of_state)
            for chunk in range(low, low + count, 2):
                first = chunk * CHUNK
                # a round of a sequence may end in a chunk without a second
                made = i < tl.minimum(low + count - chunk, 2) * CHUNK
                there = (i < tl.minimum(size, (low + count) * CHUNK) - first)[:, None]
                token = (start + first + i).to(tl.int64)[:, None]
                place = _place(before + chunk - since, head, most, value_heads, False)
                row = place * CHUNK + i[:, None]
                of_square = solved + row * PAIR + i[None]
                v_tile = tl.load(of_v + token * v_token + column[None], mask=there, other=0.0)
                half = state.to(v_tile.dtype)
                tl.store(states + place * (VALUE * KEY) + of_state, half)
                t_tile = tl.load(of_square, mask=made[:, None] & made[None], other=0.0)
                t_tile = tl.trans(t_tile)
                made = made[:, None]
                k_tile = tl.load(keys + row * KEY + d[None], mask=made, other=0.0)
                e_tile = tl.load(left + row * KEY + d[None], mask=made, other=0.0)
                # stored and loaded by the cube: the vector units take no part in it
                at = row * VALUE + column[None]
                x = tl.dot(k_tile, tl.trans(half))
                tl.store(back + at, x.to(back.dtype.element_ty), mask=made)
                x_tile = tl.load(back + at, mask=made, other=0.0)
                x = tl.dot(t_tile, x_tile, tl.dot(t_tile, v_tile))
                tl.store(new + at, x.to(new.dtype.element_ty), mask=made)
                n_tile = tl.load(new + at, mask=made, other=0.0)
                fade = tl.load(fades + place * KEY + d)
                state = state * fade[None] + tl.dot(tl.trans(n_tile), e_tile)
            whole = (of_last * value_heads + head).to(tl.int64) * (VALUE * KEY)
            tl.store(final + whole + of_state, state)
        turn = ((turn - works) % turns + turns) % turns
        end = start + size
        before += chunks


@tuples.jit(["value_heads"])
def outputs(
    queries,
    bounds,
    seen,
    states,
    new,
    out,
    of: Round,
    value_heads,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    VARLEN: tl.constexpr,
    VALUE_TILE: tl.constexpr,
):
    """What the tokens of every pair read: of the state before it, and of N."""
    TILES: tl.constexpr = VALUE // VALUE_TILE
    PAIR: tl.constexpr = 2 * CHUNK
    i = tl.arange(0, PAIR)
    d = tl.arange(0, KEY)
    c = tl.arange(0, VALUE_TILE)
    turn = tl.program_id(0)
    turns = tl.num_programs(0)
    end = 0
    before = 0
    for n in range(0, of.sequences):
        start, size = _sequence(bounds, n, end, of.length, of.tokens, VARLEN)
        chunks = (size + CHUNK - 1) // CHUNK
        low, count = _here(before, chunks, of.since, of.most)
        works = (count + 1) // 2 * value_heads * TILES
        for work in range(turn, works, turns):
            column = work % TILES * VALUE_TILE + c
            head = work // TILES % value_heads
            chunk = low + work // TILES // value_heads * 2
            first = chunk * CHUNK
            made = i < tl.minimum(low + count - chunk, 2) * CHUNK
            there = (i < tl.minimum(size, (low + count) * CHUNK) - first)[:, None]
            token = (start + first + i).to(tl.int64)[:, None]
            place = _place(before + chunk - of.since, head, of.most, value_heads, False)
            row = place * CHUNK + i[:, None]
            of_square = seen + row * PAIR + i[None]
            p_tile = tl.load(of_square, mask=made[:, None] & made[None], other=0.0)
            made = made[:, None]
            q_tile = tl.load(queries + row * KEY + d[None], mask=made, other=0.0)
            n_tile = tl.load(new + row * VALUE + column[None], mask=made, other=0.0)
            s_tile = tl.load(states + place * (VALUE * KEY) + column[:, None] * KEY + d[None])
            o = tl.dot(tl.trans(p_tile), n_tile, tl.dot(q_tile, tl.trans(s_tile)))
            to = (token * value_heads + head) * VALUE + column[None]
            tl.store(out + to, o.to(out.dtype.element_ty), mask=there)
        turn = ((turn - works) % turns + turns) % turns
        end = start + size
        before += chunks


def _tile(name: str, value_size: int) -> dict[str, Any]:
    """The widest that divides the value channels."""
    kernel = f"chunk_kda.{name}"
    dividing = [c for c in tune.TABLE[kernel] if value_size % c.tiles["VALUE_TILE"] == 0]
    return tune.choose(kernel, dividing).keywords


def unsupported(q: Tensor, v: Tensor, **_: Any) -> str | None:
    if reason := tiling.not_multiplied(q=q):
        return reason
    key, value = q.shape[-1], v.shape[-1]
    if key % 16 or not 16 <= key <= LARGEST or value % 16 or not 16 <= value <= 2 * LARGEST:
        return (
            f"head sizes {key} and {value}, expected multiples of 16 up to {LARGEST} and "
            f"{2 * LARGEST}"
        )
    return None


def chunks_of(batch: int, length: int, cu_seqlens: Tensor | None) -> int:
    """All chunks, at the most; never none, since a sequence without a token has a state."""
    if cu_seqlens is None:
        return max(batch * triton.cdiv(length, CHUNK.value), 1)
    # every sequence may end in a part of one
    ends = (CHUNK.value - 1) * (cu_seqlens.shape[0] - 1)
    return max((batch * length + ends) // CHUNK.value, 1)


def at_once(count: int, each: int) -> int:
    """How many of so many chunks go in a round, if one takes `each` bytes; rounds are alike."""
    return triton.cdiv(count, triton.cdiv(count, tiling.at_once(count, each)))


@dataclass(frozen=True)
class Chunks:
    """What is made of the tokens of a round, by chunk and value head, before any state is known."""

    most: int
    bounds: Tensor
    alike: Tensor
    seen: Tensor
    solved: Tensor
    finer: Tensor
    upper: Tensor
    lower: Tensor
    queries: Tensor
    keys: Tensor
    left: Tensor
    fades: Tensor
    strong: Tensor
    near_alike: Tensor
    near_seen: Tensor
    total: Tensor
    units: Tensor
    scaled: Tensor
    betas: Tensor  # [HV, tokens]
    kind: int  # of rates that they make


def laid_out(
    most: int,
    q: Tensor,
    beta: Tensor,
    kind: int,
    cu_seqlens: Tensor | None,
    upper: Tensor,
    lower: Tensor,
    grad: bool,
) -> Chunks:
    """`upper` and `lower` are free again behind `products`: 128 and 160 rows of K numbers, by
    chunk."""
    value_heads, key_size = beta.shape[-1], q.shape[-1]
    square = (CHUNK.value, CHUNK.value)

    def space(*shape: int, dtype: torch.dtype = q.dtype) -> Tensor:
        return memory.empty((most, value_heads, *shape), dtype, q.device)

    alike = space(*square, dtype=torch.float32)
    side = CHUNK.value
    seen, solved = (space(side, side if grad else 2 * side) for _ in range(2))
    # behind those of chunks what pairs have for their crosses
    places = value_heads * (most if grad else most + most // 2)
    queries, keys, left = (
        memory.empty((places, side, key_size), q.dtype, q.device) for _ in range(3)
    )
    fades = space(key_size, dtype=torch.float32)
    strong = space(CHUNK.value // ROWS.value, dtype=torch.int32)
    near_alike, near_seen = (space(CHUNK.value, ROWS.value, dtype=torch.float32) for _ in range(2))
    # a tensor stands for one that is not there, and is not touched
    total, units, scaled = (
        space(CHUNK.value, key_size, dtype=torch.float32) if grad else fades for _ in range(3)
    )
    finer = space(*square) if grad else solved
    return Chunks(
        most,
        fades if cu_seqlens is None else cu_seqlens,
        alike,
        seen,
        solved,
        finer,
        upper,
        lower,
        queries,
        keys,
        left,
        fades,
        strong,
        near_alike,
        near_seen,
        total,
        units,
        scaled,
        beta.mT.contiguous(),  # loads with a stride are padded in UB
        kind,
    )


def gate_of(use_gate_in_kernel: bool, lower_bound: float | None) -> int:
    return GIVEN if not use_gate_in_kernel else SOFTPLUS if lower_bound is None else BOUNDED


def fill(
    x: Chunks,
    since: int,
    q: Tensor,
    k: Tensor,
    g: Tensor,
    sequences: int,
    length: int,
    scale: float | None,
    varlen: bool,
    norm: bool,
    gate: int,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    grad: bool,
) -> None:
    """From chunk `since` on, of all tokens in one row."""
    tokens, heads, key_size = q.shape
    value_heads = g.shape[1]
    here = (sequences, length, tokens, since, x.most)
    group = value_heads // heads
    constants = dict(KEY=key_size, VARLEN=varlen)
    factors[(cores.vector(),)](
        q,
        k,
        g,
        x.fades if A_log is None else A_log,
        x.fades if dt_bias is None else dt_bias,
        x.bounds,
        x.near_alike,
        x.near_seen,
        x.upper,
        x.lower,
        x.queries,
        x.keys,
        x.left,
        x.fades,
        x.strong,
        x.total,
        x.units,
        x.scaled,
        *here,
        group,
        value_heads,
        key_size**-0.5 if scale is None else scale,
        0.0 if lower_bound is None else lower_bound,
        *q.stride()[:2],
        *k.stride()[:2],
        *g.stride()[:2],
        **constants,
        NORM=norm,
        GATE=gate,
        A=A_log is not None,
        BIAS=dt_bias is not None,
        GRAD=grad,
        **tune.only("chunk_kda.factors").keywords,
    )
    products[(cores.cube(),)](
        x.upper,
        x.lower,
        x.bounds,
        x.alike,
        x.seen,
        *here,
        value_heads,
        **constants,
        GRAD=grad,
        **tune.only("chunk_kda.products").keywords,
    )
    triangles[(cores.vector(),)](
        x.alike,
        x.seen,
        x.near_alike,
        x.near_seen,
        x.strong,
        x.betas,
        x.bounds,
        x.solved,
        x.finer,
        *here,
        value_heads,
        x.betas.stride(0),
        VARLEN=varlen,
        GRAD=grad,
        BETA=x.kind,
        **tune.only("chunk_kda.triangles").keywords,
    )


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
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
) -> tuple[Tensor, Tensor]:
    batch, length, _, key_size = q.shape
    value_heads, value_size = v.shape[2:]
    varlen = cu_seqlens is not None
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1

    def by_column(state: Tensor) -> Tensor:
        return state if state_layout == "vk" else state.mT

    out = memory.empty(v.shape, v.dtype, v.device)
    kind = torch.float32 if initial_state is None else initial_state.dtype
    sizes = (key_size, value_size) if state_layout == "kv" else (value_size, key_size)
    final = memory.empty((sequences, value_heads, *sizes), kind, v.device)
    if varlen or final.numel() == 0:
        out.zero_()  # tokens of no sequence belong to no chunk
    if final.numel() == 0:
        return out, final
    # all tokens in one row
    q, k, v, g, beta = (x.flatten(0, 1) for x in (q, k, v, g, beta))
    count = chunks_of(batch, length, cu_seqlens)
    # three tiles by channel, and half as many for the crosses; P and T of pairs, A in float32;
    # factors of pairs of tokens, which make room for N, what it is made of, and states
    side, widest = CHUNK.value, max(key_size, value_size)
    each = side * (9 * key_size + 9 * widest + 12 * side + 8 * ROWS.value) + 4 * key_size + 16
    most = at_once(count, value_heads * each)
    upper, lower = (
        memory.empty((most * value_heads * rows * widest,), q.dtype, q.device)
        for rows in (2 * side, LOWER.value)
    )
    back, new = upper.chunk(2)
    states = lower
    rate = kind_of_rate(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    x = laid_out(most, q, beta, rate, cu_seqlens, upper, lower, grad=False)
    # the last two are of sequences that rounds end within
    whole = (sequences + 2, value_heads, value_size, key_size)
    state = memory.empty(whole, torch.float32, v.device)
    if initial_state is None:
        state.zero_()
    else:
        state[:sequences].copy_(by_column(initial_state))
    came, goes = sequences, sequences + 1
    for since in range(0, count, most):
        fill(
            x,
            since,
            q,
            k,
            g,
            sequences,
            length,
            scale,
            varlen,
            use_qk_l2norm_in_kernel,
            gate_of(use_gate_in_kernel, lower_bound),
            A_log,
            dt_bias,
            lower_bound,
            grad=False,
        )
        here = (sequences, length, batch * length, since, most)
        constants = dict(KEY=key_size, VARLEN=varlen)
        crosses[(cores.cube(),)](
            x.keys,
            x.queries,
            x.left,
            x.bounds,
            x.alike.view(q.dtype),
            x.solved,
            x.seen,
            *here,
            value_heads,
            **constants,
            **tune.only("chunk_kda.crosses").keywords,
        )
        walk[(cores.cube(),)](
            x.keys,
            x.left,
            x.fades,
            v,
            x.bounds,
            x.solved,
            state,
            states,
            back,
            new,
            state,
            *here,
            came,
            goes,
            value_heads,
            *v.stride()[:2],
            **constants,
            VALUE=value_size,
            **_tile("walk", value_size),
        )
        outputs[(cores.cube(),)](
            x.queries,
            x.bounds,
            x.seen,
            states,
            new,
            out,
            *here,
            value_heads,
            **constants,
            VALUE=value_size,
            **_tile("outputs", value_size),
        )
        came, goes = goes, came
    final.copy_(by_column(state[:sequences]))
    return out, final
