# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The gated delta rule over whole sequences, on the cube: 64 tokens at a time, the walk 128.

    G_i = sum of g up to i, within a chunk     D_ij = exp(G_i - G_j) for j <= i
    L_ij = beta_i D_ij (k_i . k_j) for j < i     T = (I + L)^-1 beta     P_ij = D_ij (q_i . k_j)
    W = T exp(G) k;  E = exp(G_last - G) k;  N = T v - W S;  S = exp(G_last) S + E^T N
    out = scale (exp(G) (q S) + P N), with the S before the chunk

Of a pair of chunks, A and B, all of it holds as of one chunk of 128 tokens, with
T_BA = -T_B D_BA (k_B . k_A) T_A and W_B = T_B exp(G) k_B - T_B D_BA (k_B . k_A) W_A.  A sequence
may end in a pair without its second.

    products   cube            by chunk: q k^T and k k^T; those of a pair's second and first
    triangles  vector cores    by chunk: T, P, exp(G), E, and what k is multiplied by in W
    weights    cube            by pair: -W, T_BA
    walk       cube + vector   over a sequence, VALUE_TILE columns of a head's state: S and N
    outputs    cube + vector   by pair

Only the walk is serial.  N stays with the cube; the vector units add to the state in float32, which
goes from them to the cube and back once a pair.  The triangle is inverted by elimination on the
vector cores: in powers of L, which the cube could multiply, what cancels is 1e17 times as large as
the result where keys are alike.  What lies between the kernels is laid out by chunk or by pair, in
rounds of tokens that fit the workspace.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory
from ...dispatch.common.gated_delta import kind_of_rate
from ..common import cores, entry, tiling, tune
from ..common.front_end import extract_slice, insert_slice
from ..common.lengths import within
from ..common.rates import rate_of

CHUNK = tl.constexpr(64)
LARGEST = 256  # key and value size
MOST_HEADS = 128  # rows of gates are loaded whole
_STATE = 16384  # elements of a state that UB holds, with what is made of them


@triton.jit
def _length(lengths, n, start, tokens, VARLEN: tl.constexpr):
    """Tokens of sequence n, which begins at `start`; those behind the last are not there."""
    length = tokens
    if VARLEN:
        length = within(lengths + n, tokens - start)
    return length


@entry.jit(
    do_not_specialize=["sequences", "tokens", "heads", "q_token", "q_head", "k_token", "k_head"]
)
def products(
    q,
    k,
    lengths,
    qk,
    kk,
    qk_far,
    kk_far,
    sequences,
    tokens,
    heads,
    q_token,
    q_head,
    k_token,
    k_head,
    KEY: tl.constexpr,
    VARLEN: tl.constexpr,
    FAR: tl.constexpr,
):
    """q k^T and k k^T [chunks, H, 64, 64] of every chunk.  FAR: and of a pair's second with the
    keys of its first [pairs, H, 64, 64]."""
    i = tl.arange(0, CHUNK)
    d = tl.arange(0, KEY)
    turn = tl.program_id(0)
    turns = tl.num_programs(0)
    start = 0
    before = 0
    pairs = 0
    for n in range(0, sequences):
        length = _length(lengths, n, start, tokens, VARLEN)
        chunks = (length + CHUNK - 1) // CHUNK
        for work in range(turn, chunks * heads, turns):
            head = (work % heads).to(tl.int64)
            first = work // heads * CHUNK
            there = (i < length - first)[:, None]
            token = (start + first + i).to(tl.int64)[:, None]
            of_q = q + head * q_head + token * q_token
            of_k = k + head * k_head + token * k_token
            q_tile = tl.load(of_q + d[None], mask=there, other=0.0)
            k_tile = tl.load(of_k + d[None], mask=there, other=0.0)
            tile = (before * heads + work).to(tl.int64) * (CHUNK * CHUNK)
            tile += i[:, None] * CHUNK + i[None]
            tl.store(qk + tile, tl.dot(q_tile, tl.trans(k_tile)))
            tl.store(kk + tile, tl.dot(k_tile, tl.trans(k_tile)))
            if FAR:  # noqa: SIM102 (a constexpr, decided before the rest is compiled)
                if work // heads % 2 == 1:
                    k_first = tl.load(of_k - CHUNK * k_token + d[None])
                    far = ((pairs + work // heads // 2) * heads + head) * (CHUNK * CHUNK)
                    far += i[:, None] * CHUNK + i[None]
                    tl.store(qk_far + far, tl.dot(q_tile, tl.trans(k_first)))
                    tl.store(kk_far + far, tl.dot(k_tile, tl.trans(k_first)))
        turn = ((turn - chunks * heads) % turns + turns) % turns
        start += length
        before += chunks
        pairs += (chunks + 1) // 2


@triton.jit
def _column(gates, rows, head, there, HEADS: tl.constexpr):
    """[64] numbers of one head, out of whole rows: loads with a stride are padded in UB."""
    if HEADS == 1:
        column = tl.load(gates + rows, mask=there, other=0.0).to(tl.float32)
    else:
        h = tl.arange(0, HEADS)
        tile = tl.load(gates + rows[:, None] + h[None], mask=there[:, None], other=0.0)
        column = tl.sum(tl.where(h[None] == head, tile.to(tl.float32), 0.0), 1)
    return column


@entry.jit(
    do_not_specialize=[
        "sequences", "tokens", "group", "beta_token", "g_token", "k_token", "k_head",
    ]
)  # fmt: skip
def triangles(
    k,
    qk,
    kk,
    qk_far,
    kk_far,
    beta,
    g,
    lengths,
    solved,
    finer,
    faded,
    seen,
    seen_far,
    lower_far,
    sums,
    rates,
    sequences,
    tokens,
    group,
    beta_token,
    g_token,
    k_token,
    k_head,
    KEY: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    VARLEN: tl.constexpr,
    BETA: tl.constexpr,
    GATE: tl.constexpr,
    APART: tl.constexpr,
    multibuffer: tl.constexpr,
):
    """Of every chunk P and, in `finer`, -T exp(G) [chunks, HV, 64, 64], and exp(G) [chunks, HV,
    64]; T in its place and zeros where a pair's first would see its second [pairs, HV, 128, 128]; E
    [pairs, HV, 128, K]; of a pair's second with its first P and -D (k . k) [pairs, HV, 64, 64].  G
    is that of the pair in exp(G) and E.  APART: none of pairs, (I + L)^-1 instead of T, what
    rounding leaves of it in `finer`, G, and beta in `rates`."""
    PART: tl.constexpr = CHUNK // 4
    i = tl.arange(0, CHUNK)
    f = i.to(tl.float32)  # which the vector unit compares as they are
    d = tl.arange(0, KEY)
    turn = tl.program_id(0)
    turns = tl.num_programs(0)
    start = 0
    before = 0
    pairs = 0
    for n in range(0, sequences):
        length = _length(lengths, n, start, tokens, VARLEN)
        chunks = (length + CHUNK - 1) // CHUNK
        for work in range(turn, chunks * VALUE_HEADS, turns):
            head = work % VALUE_HEADS
            first = work // VALUE_HEADS * CHUNK
            there = i < length - first
            token = (start + first + i).to(tl.int64)
            if BETA:
                rate = _column(
                    beta,
                    token if VALUE_HEADS == 1 else token * beta_token,
                    head,
                    there,
                    VALUE_HEADS,
                )
                rate = rate_of(rate, there, BETA)
            else:
                rate = tl.where(there, 1.0, 0.0)
            sees = f[:, None] >= f[None]
            at = i[:, None] * CHUNK + i[None]
            if GATE:
                gate = _column(
                    g, token if VALUE_HEADS == 1 else token * g_token, head, there, VALUE_HEADS
                )
            else:
                gate = rate * 0.0  # a constant, and what follows, would stay in UB
            total = tl.sum(tl.where(sees, gate[None], 0.0), 1)
            across = tl.sum(tl.where(f[:, None] <= f[None], gate[:, None], 0.0), 0)
            if not APART:
                second = work // VALUE_HEADS % 2
                # of the pair's other chunk
                aside = CHUNK - second * (2 * CHUNK)
                if GATE:
                    other = i < length - first - aside
                    rows = (start + first + aside + i).to(tl.int64)
                    if VALUE_HEADS > 1:
                        rows = rows * g_token
                    others = _column(g, rows, head, other, VALUE_HEADS)
                else:
                    others = gate
                whole = tl.sum(others[None], 1)
                fore = whole * second.to(tl.float32)
                both = pairs + work // VALUE_HEADS // 2
                of_both = (both * VALUE_HEADS + head).to(tl.int64) * (CHUNK * CHUNK)
                if second == 1:
                    behind = tl.sum(tl.where(f[:, None] > f[None], others[:, None], 0.0), 0)
                    far = tl.exp(total)[:, None] * tl.exp(behind)[None]
                    of_far = both * (VALUE_HEADS // group) + head // group
                    of_far = of_far.to(tl.int64) * (CHUNK * CHUNK) + at
                    p_far = tl.load(qk_far + of_far) * far
                    tl.store(seen_far + of_both + at, p_far.to(seen_far.dtype.element_ty))
                    l_far = tl.load(kk_far + of_far) * -far
                    tl.store(lower_far + of_both + at, l_far.to(lower_far.dtype.element_ty))
            fading = tl.exp(tl.where(sees, total[:, None] - across[None], 0.0))
            pair = (before + work // VALUE_HEADS) * (VALUE_HEADS // group) + head // group
            of_pair = pair.to(tl.int64) * (CHUNK * CHUNK) + at
            place = (before * VALUE_HEADS + work).to(tl.int64)
            tile = place * (CHUNK * CHUNK) + at
            p = tl.where(sees, tl.load(qk + of_pair) * fading, 0.0)
            tl.store(seen + tile, p.to(seen.dtype.element_ty))
            tl.store(sums + place * CHUNK + i, total if APART else tl.exp(total + fore))
            lower = tl.load(kk + of_pair) * fading * rate[:, None]
            lower = tl.where(f[:, None] > f[None], lower, 0.0)
            x = tl.where(f[:, None] == f[None], 1.0, 0.0)
            if not APART:
                fade = tl.exp(tl.sum(gate[None], 1) - total + (whole - fore))[:, None]
                of_k = k + (head // group).to(tl.int64) * k_head
                # in parts, for the sake of UB
                for r in range(0, CHUNK, PART):
                    row = r + tl.arange(0, PART)
                    present = (row < length - first)[:, None]
                    from_k = (start + first + row).to(tl.int64)[:, None] * k_token + d[None]
                    e_tile = tl.load(of_k + from_k, mask=present, other=0.0).to(tl.float32)
                    e_tile = e_tile * extract_slice(fade, (r, 0), (PART, 1), (1, 1))
                    to = (of_both // (CHUNK // 2) + second * CHUNK + row)[:, None] * KEY + d[None]
                    tl.store(faded + to, e_tile.to(faded.dtype.element_ty))
                    if second == 0:  # tokens of the first do not see those of the second
                        nothing = extract_slice(x, (r, 0), (PART, CHUNK), (1, 1)) * 0.0
                        corner = of_both * 4 + row[:, None] * (2 * CHUNK) + CHUNK + i[None]
                        tl.store(solved + corner, nothing.to(solved.dtype.element_ty))
            # row r is done: take it out of the rows below; columns join with their own rows;
            # a row of a tile is taken out of what made the tile, unless it was put there
            zero = tl.minimum(work, 0)
            for part in tl.static_range(0, CHUNK, PART):
                rows = extract_slice(x, (part, 0), (CHUNK - part, part + PART), (1, 1))
                rows = insert_slice(rows, rows, (zero, 0), (CHUNK - part, part + PART), (1, 1))
                for r in range(0, PART):
                    factor = extract_slice(lower, (part, part + r), (CHUNK - part, 1), (1, 1))
                    done = extract_slice(rows, (r, 0), (1, part + PART), (1, 1))
                    rows = rows - factor * done
                x = insert_slice(x, rows, (part, 0), (CHUNK - part, part + PART), (1, 1))
            if APART:
                half = x.to(solved.dtype.element_ty)
                tl.store(solved + tile, half)
                tl.store(finer + tile, (x - half.to(tl.float32)).to(half.dtype))
                tl.store(rates + place * CHUNK + i, rate)
            else:
                x = x * rate[None]
                to = of_both * 4 + second * ((2 * CHUNK + 1) * CHUNK)
                to += i[:, None] * (2 * CHUNK) + i[None]
                tl.store(solved + to, x.to(solved.dtype.element_ty))
                x = x * -tl.exp(across + fore)[None]
                tl.store(finer + tile, x.to(finer.dtype.element_ty))
        turn = ((turn - chunks * VALUE_HEADS) % turns + turns) % turns
        start += length
        before += chunks
        pairs += (chunks + 1) // 2


@entry.jit(do_not_specialize=["sequences", "tokens", "group", "value_heads", "k_token", "k_head"])
def weights(
    k,
    lengths,
    solved,
    grown,
    lower_far,
    cross,
    taken,
    sequences,
    tokens,
    group,
    value_heads,
    k_token,
    k_head,
    KEY: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """Of every pair -W [pairs, HV, 128, K] and the rest of T [pairs, HV, 128, 128]: what N of its
    first is multiplied by in N of its second, which is in `cross`, times T of the first."""
    i = tl.arange(0, CHUNK)
    d = tl.arange(0, KEY)
    turn = tl.program_id(0)
    turns = tl.num_programs(0)
    start = 0
    before = 0
    pairs = 0
    for n in range(0, sequences):
        length = _length(lengths, n, start, tokens, VARLEN)
        chunks = (length + CHUNK - 1) // CHUNK
        both = (chunks + 1) // 2
        for work in range(turn, both * value_heads, turns):
            head = work % value_heads
            pair = work // value_heads
            left = length - pair * (2 * CHUNK)
            token = (start + pair * (2 * CHUNK) + i).to(tl.int64)[:, None]
            of_k = k + (head // group).to(tl.int64) * k_head + token * k_token
            k_tile = tl.load(of_k + d[None], mask=(i < left)[:, None], other=0.0)
            row = ((before + 2 * pair) * value_heads + head).to(tl.int64) * CHUNK + i[:, None]
            square = row * CHUNK + i[None]
            place = (pairs * value_heads + work).to(tl.int64)
            to = (place * (2 * CHUNK) + i[:, None]) * KEY + d[None]
            x = tl.dot(tl.load(grown + square), k_tile)
            tl.store(taken + to, x.to(taken.dtype.element_ty))
            if left > CHUNK:
                of_k += CHUNK * k_token
                k_tile = tl.load(of_k + d[None], mask=(i < left - CHUNK)[:, None], other=0.0)
                square += value_heads * (CHUNK * CHUNK)
                of_t = solved + place * (4 * CHUNK * CHUNK) + i[:, None] * (2 * CHUNK) + i[None]
                far = place * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None]
                t_tile = tl.load(of_t + (2 * CHUNK + 1) * CHUNK)
                x = tl.dot(t_tile, tl.load(lower_far + far))
                tl.store(cross + far, x.to(cross.dtype.element_ty))
                x_tile = tl.load(cross + far)
                x = tl.dot(x_tile, tl.load(of_t))
                tl.store(of_t + 2 * CHUNK * CHUNK, x.to(solved.dtype.element_ty))
                x = tl.dot(tl.load(grown + square), k_tile)
                x = tl.dot(x_tile, tl.load(taken + to), x)
                tl.store(taken + to + CHUNK * KEY, x.to(taken.dtype.element_ty))
        turn = ((turn - both * value_heads) % turns + turns) % turns
        start += length
        before += chunks
        pairs += both


@entry.jit(do_not_specialize=["sequences", "tokens", "value_heads", "v_token", "v_head"])
def walk(
    v,
    lengths,
    solved,
    taken,
    faded,
    growths,
    initial,
    states,
    new,
    final,
    sequences,
    tokens,
    value_heads,
    v_token,
    v_head,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    VARLEN: tl.constexpr,
    VALUE_TILE: tl.constexpr,
):
    """Of every pair of chunks the S before it [pairs, HV, V, K], transposed, and N [pairs, HV, 128,
    V]; the final states."""
    TILES: tl.constexpr = VALUE // VALUE_TILE
    PAIR: tl.constexpr = 2 * CHUNK
    i = tl.arange(0, PAIR)
    d = tl.arange(0, KEY)
    c = tl.arange(0, VALUE_TILE)
    turn = tl.program_id(0)
    turns = tl.num_programs(0)
    start = 0
    before = 0
    pairs = 0
    for n in range(0, sequences):
        length = _length(lengths, n, start, tokens, VARLEN)
        chunks = (length + CHUNK - 1) // CHUNK
        both = (chunks + 1) // 2
        for work in range(turn, value_heads * TILES, turns):
            head = work // TILES
            column = work % TILES * VALUE_TILE + c
            of_v = v + head.to(tl.int64) * v_head
            of_state = column[:, None] * KEY + d[None]
            whole = (n * value_heads + head).to(tl.int64) * (VALUE * KEY)
            state = tl.load(initial + whole + of_state)
            for pair in range(0, both):
                left = length - pair * PAIR
                token = (start + pair * PAIR + i).to(tl.int64)[:, None]
                # a sequence may end in a chunk without a second
                ends = tl.where(left > CHUNK, PAIR, CHUNK)
                made = (i < ends)[:, None]
                place = (before + 2 * pair).to(tl.int64) * value_heads + head
                place += tl.where(left > CHUNK, value_heads, 0)
                growth = tl.load(growths + place * CHUNK + CHUNK - 1)
                half = state.to(states.dtype.element_ty)
                place = (pairs + pair).to(tl.int64) * value_heads + head
                tl.store(states + place * (VALUE * KEY) + of_state, half)
                row = place * PAIR + i[:, None]
                there = (i < left)[:, None]
                v_tile = tl.load(of_v + token * v_token + column[None], mask=there, other=0.0)
                t_tile = tl.load(solved + row * PAIR + i[None], mask=made, other=0.0)
                w_tile = tl.load(taken + row * KEY + d[None], mask=made, other=0.0)
                e_tile = tl.load(faded + row * KEY + d[None], mask=made, other=0.0)
                x = tl.dot(w_tile, tl.trans(half), tl.dot(t_tile, v_tile))
                # stored and loaded by the cube: the vector units take no part in it
                to = new + row * VALUE + column[None]
                tl.store(to, x.to(new.dtype.element_ty))
                state = state * growth + tl.dot(tl.trans(tl.load(to)), e_tile)
            tl.store(final + whole + of_state, state)
        turn = ((turn - value_heads * TILES) % turns + turns) % turns
        start += length
        before += chunks
        pairs += both


@entry.jit(
    do_not_specialize=[
        "sequences", "tokens", "group", "value_heads", "scale", "q_token", "q_head",
    ]
)  # fmt: skip
def outputs(
    q,
    lengths,
    seen,
    seen_far,
    growths,
    states,
    new,
    out,
    sequences,
    tokens,
    group,
    value_heads,
    scale,
    q_token,
    q_head,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    VARLEN: tl.constexpr,
    VALUE_TILE: tl.constexpr,
):
    TILES: tl.constexpr = VALUE // VALUE_TILE
    i = tl.arange(0, CHUNK)
    d = tl.arange(0, KEY)
    c = tl.arange(0, VALUE_TILE)
    turn = tl.program_id(0)
    turns = tl.num_programs(0)
    start = 0
    before = 0
    pairs = 0
    for n in range(0, sequences):
        length = _length(lengths, n, start, tokens, VARLEN)
        chunks = (length + CHUNK - 1) // CHUNK
        both = (chunks + 1) // 2
        for work in range(turn, both * value_heads * TILES, turns):
            column = work % TILES * VALUE_TILE + c
            head = work // TILES % value_heads
            pair = work // TILES // value_heads
            left = length - pair * (2 * CHUNK)
            token = (start + pair * (2 * CHUNK) + i).to(tl.int64)[:, None]
            # where a sequence has no second chunk it is of zeros
            second = (i < tl.where(left > CHUNK, CHUNK, 0))[:, None]
            of_pair = (pairs * value_heads + work // TILES).to(tl.int64)
            place = ((before + 2 * pair) * value_heads + head).to(tl.int64)
            s_tile = tl.load(states + of_pair * (VALUE * KEY) + column[:, None] * KEY + d[None])
            s_tile = tl.trans(s_tile)
            of_q = q + (head // group).to(tl.int64) * q_head
            there = (i < left)[:, None]
            q_tile = tl.load(of_q + token * q_token + d[None], mask=there, other=0.0)
            square = i[:, None] * CHUNK + i[None]
            p_tile = tl.load(seen + place * (CHUNK * CHUNK) + square)
            of_n = new + (of_pair * (2 * CHUNK) + i[:, None]) * VALUE + column[None]
            n_first = tl.load(of_n)
            growth = tl.load(growths + place * CHUNK + i)[:, None]
            o = tl.dot(q_tile, s_tile) * growth + tl.dot(p_tile, n_first)
            to = out + (token * value_heads + head) * VALUE + column[None]
            tl.store(to, (o * scale).to(out.dtype.element_ty), mask=there)
            place += value_heads
            token += CHUNK
            there = (i < left - CHUNK)[:, None]
            q_tile = tl.load(of_q + token * q_token + d[None], mask=there, other=0.0)
            of_far = seen_far + of_pair * (CHUNK * CHUNK) + square
            x = tl.dot(tl.load(of_far, mask=second, other=0.0), n_first)
            of_p = seen + place * (CHUNK * CHUNK) + square
            p_tile = tl.load(of_p, mask=second, other=0.0)
            x = tl.dot(p_tile, tl.load(of_n + CHUNK * VALUE), x)
            growth = tl.load(growths + place * CHUNK + i, mask=i < left - CHUNK, other=0.0)
            o = tl.dot(q_tile, s_tile) * growth[:, None] + x
            to = out + (token * value_heads + head) * VALUE + column[None]
            tl.store(to, (o * scale).to(out.dtype.element_ty), mask=there)
        turn = ((turn - both * value_heads * TILES) % turns + turns) % turns
        start += length
        before += chunks
        pairs += both


def _tile(name: str, key_size: int, value_size: int) -> dict[str, Any]:
    """The widest that divides the value channels and fits."""
    kernel = f"chunk_gated_delta_rule.{name}"
    dividing = [
        c
        for c in tune.TABLE[kernel]
        if value_size % c.tiles["VALUE_TILE"] == 0
        and (c.tiles["VALUE_TILE"] * key_size <= _STATE or c.tiles["VALUE_TILE"] == 16)
    ]
    return tune.choose(kernel, dividing, key_size).keywords


def unsupported(query: Tensor, value: Tensor, **_: Any) -> str | None:
    if reason := tiling.not_multiplied(query=query):
        return reason
    sizes = query.shape[-1], value.shape[-1]
    if any(size % 16 or not 16 <= size <= LARGEST for size in sizes):
        return f"head sizes {sizes[0]} and {sizes[1]}, expected multiples of 16 up to {LARGEST}"
    if value.shape[1] > MOST_HEADS:
        return f"{value.shape[1]} value heads, the kernel takes {MOST_HEADS} at most"
    return None


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor | None,
    initial_state: Tensor | None,
    actual_seq_lengths: Tensor | None,
    scale: float | None,
    g: Tensor | None,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
) -> tuple[Tensor, Tensor]:
    tokens, heads, key_size = key.shape
    value_heads, value_size = value.shape[1:]
    varlen = actual_seq_lengths is not None
    sequences = actual_seq_lengths.shape[0] if actual_seq_lengths is not None else 1
    out = memory.empty(value.shape, value.dtype, value.device)
    whole = (sequences, value_heads, value_size, key_size)
    state = memory.empty(whole, torch.float32, value.device)
    if initial_state is None:
        state.zero_()
    else:
        state.copy_(initial_state)
    kind = torch.float32 if initial_state is None else initial_state.dtype
    if varlen or state.numel() == 0:
        out.zero_()  # tokens behind the last sequence belong to no chunk
    if state.numel() == 0:
        return out, state.to(kind)
    group = value_heads // heads
    scale = key_size**-0.5 if scale is None else scale
    # of a token at the most: W, E and N, a state, squares by chunk and by pair, and its growth
    each = value_heads * (4 * key_size + 2 * value_size + value_size * key_size // 64 + 708)
    each += heads * 768
    at_once = tiling.at_once(tokens, each)
    if at_once < tokens:
        at_once = max(at_once // CHUNK.value, 1) * CHUNK.value
    sizes = dict(KEY=key_size, VARLEN=varlen)
    for first in range(0, tokens, max(at_once, 1)):
        here = slice(first, first + at_once)
        q, k, v, o = query[here], key[here], value[here], out[here]
        rate, gate = (None if x is None else x[here] for x in (beta, g))
        if value_heads == 1:
            rate, gate = (None if x is None else x.contiguous() for x in (rate, gate))
        count = q.shape[0]
        # every sequence may end in a part of a chunk
        chunks = triton.cdiv(count, CHUNK.value) + (sequences if varlen else 0)
        pairs = triton.cdiv(count, 2 * CHUNK.value) + (sequences if varlen else 0)

        def space(
            *shape: int, kind: torch.dtype = value.dtype, by: int = value_heads, n: int = chunks
        ) -> Tensor:
            return memory.empty((n, by, *shape), kind, value.device)

        square = (CHUNK.value, CHUNK.value)
        qk, kk = (space(*square, kind=torch.float32, by=heads) for _ in range(2))
        qk_far, kk_far = (space(*square, kind=torch.float32, by=heads, n=pairs) for _ in range(2))
        grown, seen = (space(*square) for _ in range(2))
        seen_far, lower_far, cross = (space(*square, n=pairs) for _ in range(3))
        solved = space(2 * CHUNK.value, 2 * CHUNK.value, n=pairs)
        growths = space(CHUNK.value, kind=torch.float32)
        taken, faded = (space(2 * CHUNK.value, key_size, n=pairs) for _ in range(2))
        new = space(2 * CHUNK.value, value_size, n=pairs)
        states = space(value_size, key_size, n=pairs)
        lengths = growths
        if actual_seq_lengths is not None:
            lengths = _cut(actual_seq_lengths, tokens, first, count)
        of_q, of_k, of_v = (x.stride()[:2] for x in (q, k, v))
        products[(cores.cube(),)](
            q,
            k,
            lengths,
            qk,
            kk,
            qk_far,
            kk_far,
            sequences,
            count,
            heads,
            *of_q,
            *of_k,
            **sizes,
            FAR=True,
            **tune.only("chunk_gated_delta_rule.products").keywords,
        )
        triangles[(cores.vector(),)](
            k,
            qk,
            kk,
            qk_far,
            kk_far,
            growths if rate is None else rate,
            growths if gate is None else gate,
            lengths,
            solved,
            grown,
            faded,
            seen,
            seen_far,
            lower_far,
            growths,
            growths,
            sequences,
            count,
            group,
            0 if rate is None else rate.stride(0),
            0 if gate is None else gate.stride(0),
            *of_k,
            KEY=key_size,
            VALUE_HEADS=value_heads,
            VARLEN=varlen,
            BETA=kind_of_rate(rate, use_beta_sigmoid_in_kernel, allow_neg_eigval),
            GATE=gate is not None,
            APART=False,
            **tune.only("chunk_gated_delta_rule.triangles").keywords,
        )
        weights[(cores.cube(),)](
            k,
            lengths,
            solved,
            grown,
            lower_far,
            cross,
            taken,
            sequences,
            count,
            group,
            value_heads,
            *of_k,
            **sizes,
            **tune.only("chunk_gated_delta_rule.weights").keywords,
        )
        walk[(cores.cube(),)](
            v,
            lengths,
            solved,
            taken,
            faded,
            growths,
            state,
            states,
            new,
            state,
            sequences,
            count,
            value_heads,
            *of_v,
            VALUE=value_size,
            **sizes,
            **_tile("walk", key_size, value_size),
        )
        outputs[(cores.cube(),)](
            q,
            lengths,
            seen,
            seen_far,
            growths,
            states,
            new,
            o,
            sequences,
            count,
            group,
            value_heads,
            scale,
            *of_q,
            VALUE=value_size,
            **sizes,
            **_tile("outputs", key_size, value_size),
        )
    return out, state.to(kind)


def _cut(lengths: Tensor, tokens: int, first: int, count: int) -> Tensor:
    """Of each sequence's tokens those among the `count` from `first` on."""
    if count == tokens:
        return lengths
    ends = lengths.long().clamp(0, tokens).cumsum(0).clamp(first, first + count)
    return torch.diff(ends, prepend=ends.new_full((1,), first))
