# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The gated delta rule over whole sequences, 64 tokens at a time on the cube.

    G_i = sum of g up to i, within a chunk     D_ij = exp(G_i - G_j) for j <= i
    L_ij = beta_i D_ij (k_i . k_j) for j < i     T = (I + L)^-1 beta     P_ij = D_ij (q_i . k_j)
    W = T exp(G) k;  E = exp(G_last - G) k;  N = T v - W S;  S = exp(G_last) S + E^T N
    out = scale (exp(G) (q S) + P N), with the S before the chunk

    products   cube            by chunk: q k^T and k k^T
    triangles  vector cores    by chunk: T, P, exp(G) and what k is multiplied by in W and E
    weights    cube            by chunk: -W and E
    walk       cube + vector   over a sequence, VALUE_TILE columns of a head's state: S and N
    outputs    cube + vector   by chunk

Only the walk is serial.  N stays with the cube; the vector units add to the state in float32, which
goes from them to the cube and back once a chunk.  The triangle is inverted
by elimination on the vector cores: in powers of L, which the cube could multiply, what cancels is
1e17 times as large as the result where keys are alike.  What lies between the kernels is laid out
by chunk, in rounds of tokens that fit the workspace.
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
    sequences,
    tokens,
    heads,
    q_token,
    q_head,
    k_token,
    k_head,
    KEY: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """q k^T and k k^T [chunks, H, 64, 64] of every chunk."""
    i = tl.arange(0, CHUNK)
    d = tl.arange(0, KEY)
    turn = tl.program_id(0)
    turns = tl.num_programs(0)
    start = 0
    before = 0
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
        turn = ((turn - chunks * heads) % turns + turns) % turns
        start += length
        before += chunks


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


@entry.jit(do_not_specialize=["sequences", "tokens", "group", "beta_token", "g_token"])
def triangles(
    qk,
    kk,
    beta,
    g,
    lengths,
    solved,
    finer,
    fades,
    seen,
    sums,
    rates,
    sequences,
    tokens,
    group,
    beta_token,
    g_token,
    VALUE_HEADS: tl.constexpr,
    VARLEN: tl.constexpr,
    BETA: tl.constexpr,
    GATE: tl.constexpr,
    APART: tl.constexpr,
    multibuffer: tl.constexpr,
):
    """Of every chunk T, -T exp(G) in `finer`, exp(G_last - G) on the diagonal of `fades`, and P
    [chunks, HV, 64, 64], and exp(G) [chunks, HV, 64].  APART: (I + L)^-1 instead of T, what
    rounding leaves of it in `finer`, G, and beta in `rates`."""
    HALF: tl.constexpr = CHUNK // 2
    i = tl.arange(0, CHUNK)
    f = i.to(tl.float32)  # which the vector unit compares as they are
    turn = tl.program_id(0)
    turns = tl.num_programs(0)
    start = 0
    before = 0
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
            if GATE:
                gate = _column(
                    g, token if VALUE_HEADS == 1 else token * g_token, head, there, VALUE_HEADS
                )
            else:
                gate = rate * 0.0  # a constant, and what follows, would stay in UB
            total = tl.sum(tl.where(sees, gate[None], 0.0), 1)
            across = tl.sum(tl.where(f[:, None] <= f[None], gate[:, None], 0.0), 0)
            fading = tl.exp(tl.where(sees, total[:, None] - across[None], 0.0))
            at = i[:, None] * CHUNK + i[None]
            pair = (before + work // VALUE_HEADS) * (VALUE_HEADS // group) + head // group
            of_pair = pair.to(tl.int64) * (CHUNK * CHUNK) + at
            place = (before * VALUE_HEADS + work).to(tl.int64)
            tile = place * (CHUNK * CHUNK) + at
            p = tl.where(sees, tl.load(qk + of_pair) * fading, 0.0)
            tl.store(seen + tile, p.to(seen.dtype.element_ty))
            tl.store(sums + place * CHUNK + i, total if APART else tl.exp(total))
            lower = tl.load(kk + of_pair) * fading * rate[:, None]
            lower = tl.where(f[:, None] > f[None], lower, 0.0)
            x = tl.where(f[:, None] == f[None], 1.0, 0.0)
            if not APART:
                fade = extract_slice(fading, (CHUNK - 1, 0), (1, CHUNK), (1, 1))
                # in parts, for the sake of UB
                for r in range(0, CHUNK, 16):
                    part = extract_slice(x, (r, 0), (16, CHUNK), (1, 1)) * fade
                    row = place * CHUNK + r + tl.arange(0, 16)[:, None]
                    tl.store(fades + row * CHUNK + i[None], part.to(fades.dtype.element_ty))
            # row r is done: take it out of the rows below; the right half joins with its own rows
            left = extract_slice(x, (0, 0), (CHUNK, HALF), (1, 1))
            for r in range(0, HALF):
                factor = extract_slice(lower, (0, r), (CHUNK, 1), (1, 1))
                done = extract_slice(left, (r, 0), (1, HALF), (1, 1))
                left = left - factor * done
            x = insert_slice(x, left, (0, 0), (CHUNK, HALF), (1, 1))
            for r in range(HALF, CHUNK - 1):
                factor = extract_slice(lower, (0, r), (CHUNK, 1), (1, 1))
                done = extract_slice(x, (r, 0), (1, CHUNK), (1, 1))
                x = x - factor * done
            if APART:
                half = x.to(solved.dtype.element_ty)
                tl.store(solved + tile, half)
                tl.store(finer + tile, (x - half.to(tl.float32)).to(half.dtype))
                tl.store(rates + place * CHUNK + i, rate)
            else:
                x = x * rate[None]
                tl.store(solved + tile, x.to(solved.dtype.element_ty))
                x = x * -tl.exp(across)[None]
                tl.store(finer + tile, x.to(finer.dtype.element_ty))
        turn = ((turn - chunks * VALUE_HEADS) % turns + turns) % turns
        start += length
        before += chunks


@entry.jit(do_not_specialize=["sequences", "tokens", "group", "value_heads", "k_token", "k_head"])
def weights(
    k,
    lengths,
    grown,
    fades,
    taken,
    faded,
    sequences,
    tokens,
    group,
    value_heads,
    k_token,
    k_head,
    KEY: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """-W and E [chunks, HV, 64, K]."""
    i = tl.arange(0, CHUNK)
    d = tl.arange(0, KEY)
    turn = tl.program_id(0)
    turns = tl.num_programs(0)
    start = 0
    before = 0
    for n in range(0, sequences):
        length = _length(lengths, n, start, tokens, VARLEN)
        chunks = (length + CHUNK - 1) // CHUNK
        for work in range(turn, chunks * value_heads, turns):
            head = work % value_heads
            first = work // value_heads * CHUNK
            there = (i < length - first)[:, None]
            token = (start + first + i).to(tl.int64)[:, None]
            of_k = k + (head // group).to(tl.int64) * k_head + token * k_token
            k_tile = tl.load(of_k + d[None], mask=there, other=0.0)
            row = (before * value_heads + work).to(tl.int64) * CHUNK + i[:, None]
            w = tl.dot(tl.load(grown + row * CHUNK + i[None]), k_tile)
            tl.store(taken + row * KEY + d[None], w.to(taken.dtype.element_ty))
            e = tl.dot(tl.load(fades + row * CHUNK + i[None]), k_tile)
            tl.store(faded + row * KEY + d[None], e.to(faded.dtype.element_ty))
        turn = ((turn - chunks * value_heads) % turns + turns) % turns
        start += length
        before += chunks


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
    """S [chunks, HV, V, K], transposed, N [chunks, HV, 64, V], and the final states."""
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
            of_v = v + head.to(tl.int64) * v_head
            of_state = column[:, None] * KEY + d[None]
            whole = (n * value_heads + head).to(tl.int64) * (VALUE * KEY)
            state = tl.load(initial + whole + of_state)
            for chunk in range(0, chunks):
                first = chunk * CHUNK
                there = (i < length - first)[:, None]
                token = (start + first + i).to(tl.int64)[:, None]
                place = (before + chunk).to(tl.int64) * value_heads + head
                growth = tl.load(growths + place * CHUNK + CHUNK - 1)
                half = state.to(states.dtype.element_ty)
                tl.store(states + place * (VALUE * KEY) + of_state, half)
                row = place * CHUNK + i[:, None]
                t_tile = tl.load(solved + row * CHUNK + i[None])
                v_tile = tl.load(of_v + token * v_token + column[None], mask=there, other=0.0)
                w_tile = tl.load(taken + row * KEY + d[None])
                e_tile = tl.load(faded + row * KEY + d[None])
                x = tl.dot(w_tile, tl.trans(half), tl.dot(t_tile, v_tile))
                # stored and loaded by the cube: the vector units take no part in it
                to = new + row * VALUE + column[None]
                tl.store(to, x.to(new.dtype.element_ty))
                state = state * growth + tl.dot(tl.trans(tl.load(to)), e_tile)
            tl.store(final + whole + of_state, state)
        turn = ((turn - value_heads * TILES) % turns + turns) % turns
        start += length
        before += chunks


@entry.jit(
    do_not_specialize=[
        "sequences", "tokens", "group", "value_heads", "scale", "q_token", "q_head",
    ]
)  # fmt: skip
def outputs(
    q,
    lengths,
    seen,
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
    for n in range(0, sequences):
        length = _length(lengths, n, start, tokens, VARLEN)
        chunks = (length + CHUNK - 1) // CHUNK
        for work in range(turn, chunks * value_heads * TILES, turns):
            column = work % TILES * VALUE_TILE + c
            head = work // TILES % value_heads
            first = work // TILES // value_heads * CHUNK
            there = (i < length - first)[:, None]
            token = (start + first + i).to(tl.int64)[:, None]
            place = (before * value_heads + work // TILES).to(tl.int64)
            of_q = q + (head // group).to(tl.int64) * q_head
            q_tile = tl.load(of_q + token * q_token + d[None], mask=there, other=0.0)
            p_tile = tl.load(seen + place * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None])
            s_tile = tl.load(states + place * (VALUE * KEY) + column[:, None] * KEY + d[None])
            n_tile = tl.load(new + (place * CHUNK + i[:, None]) * VALUE + column[None])
            growth = tl.load(growths + place * CHUNK + i)[:, None]
            o = tl.dot(q_tile, tl.trans(s_tile)) * growth + tl.dot(p_tile, n_tile)
            to = out + (token * value_heads + head) * VALUE + column[None]
            tl.store(to, (o * scale).to(out.dtype.element_ty), mask=there)
        turn = ((turn - chunks * value_heads * TILES) % turns + turns) % turns
        start += length
        before += chunks


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
    # of a token: W, E and N, a state and squares of pairs by chunk
    each = value_heads * (4 * key_size + 2 * value_size + value_size * key_size // 32 + 512)
    each += heads * 512
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

        def space(
            *shape: int, kind: torch.dtype = value.dtype, by: int = value_heads, n: int = chunks
        ) -> Tensor:
            return memory.empty((n, by, *shape), kind, value.device)

        square = (CHUNK.value, CHUNK.value)
        qk, kk = (space(*square, kind=torch.float32, by=heads) for _ in range(2))
        solved, grown, fades, seen = (space(*square) for _ in range(4))
        growths = space(CHUNK.value, kind=torch.float32)
        taken, faded = (space(CHUNK.value, key_size) for _ in range(2))
        new = space(CHUNK.value, value_size)
        states = space(value_size, key_size)
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
            sequences,
            count,
            heads,
            *of_q,
            *of_k,
            **sizes,
            **tune.only("chunk_gated_delta_rule.products").keywords,
        )
        triangles[(cores.vector(),)](
            qk,
            kk,
            growths if rate is None else rate,
            growths if gate is None else gate,
            lengths,
            solved,
            grown,
            fades,
            seen,
            growths,
            growths,
            sequences,
            count,
            group,
            0 if rate is None else rate.stride(0),
            0 if gate is None else gate.stride(0),
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
            grown,
            fades,
            taken,
            faded,
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
