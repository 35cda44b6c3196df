# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The gated delta rule over whole sequences, 64 tokens at a time on the cube.

    G_i = sum of g up to i, within a chunk     D_ij = exp(G_i - G_j) for j <= i
    L_ij = beta_i D_ij (k_i . k_j) for j < i     T = (I + L)^-1 beta     P_ij = D_ij (q_i . k_j)
    by chunk:  R = v - exp(G) (k S);  N = T R;  out = scale (exp(G) (q S) + P N);
    S = exp(G_last) S + k^T (exp(G_last - G) N)

The first kernel leaves T, P and G of every chunk in memory, the second walks over the chunks of a
sequence with VALUE_TILE columns of one head's state, transposed, in UB.  The triangle is inverted
by elimination on the vector cores: in powers of L, which the cube could multiply, what cancels is
1e17 times as large as the result where keys are alike.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch.common import memory
from . import cores, entry, tiling, tune
from .front_end import extract_slice
from .lengths import within

CHUNK = tl.constexpr(64)
LARGEST = 256  # key and value size
MOST_HEADS = 128  # rows of gates are loaded whole


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
    q, k, lengths, qk, kk, sequences, tokens, heads, q_token, q_head, k_token, k_head,
    KEY: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
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
    qk, kk, beta, g, lengths, solved, finer, seen, sums, rates, sequences, tokens, group,
    beta_token, g_token, VALUE_HEADS: tl.constexpr, VARLEN: tl.constexpr, BETA: tl.constexpr,
    GATE: tl.constexpr, APART: tl.constexpr, multibuffer: tl.constexpr,
):  # fmt: skip
    """T and P [chunks, HV, 64, 64] and G [chunks, HV, 64] of every chunk; APART: instead of T
    (I + L)^-1, what rounding leaves of it in `finer`, and beta in `rates`."""
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
                rate = _column(beta, token if VALUE_HEADS == 1 else token * beta_token, head,
                               there, VALUE_HEADS)  # fmt: skip
            else:
                rate = tl.where(there, 1.0, 0.0)
            sees = f[:, None] >= f[None]
            if GATE:
                gate = _column(g, token if VALUE_HEADS == 1 else token * g_token, head, there,
                               VALUE_HEADS)  # fmt: skip
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
            tl.store(sums + place * CHUNK + i, total)
            lower = tl.load(kk + of_pair) * fading * rate[:, None]
            lower = tl.where(f[:, None] > f[None], lower, 0.0)
            x = tl.where(f[:, None] == f[None], 1.0, 0.0)
            # row r is done: take it out of the rows below
            for r in range(0, CHUNK - 1):
                factor = extract_slice(lower, (0, r), (CHUNK, 1), (1, 1))
                done = extract_slice(x, (r, 0), (1, CHUNK), (1, 1))
                x = x - factor * done
            if APART:
                half = x.to(solved.dtype.element_ty)
                tl.store(solved + tile, half)
                tl.store(finer + tile, (x - half.to(tl.float32)).to(half.dtype))
                tl.store(rates + place * CHUNK + i, rate)
            else:
                tl.store(solved + tile, (x * rate[None]).to(solved.dtype.element_ty))
        turn = ((turn - chunks * VALUE_HEADS) % turns + turns) % turns
        start += length
        before += chunks


@entry.jit(
    do_not_specialize=[
        "sequences", "tokens", "group", "value_heads", "scale", "q_token", "q_head", "k_token",
        "k_head", "v_token", "v_head",
    ]
)  # fmt: skip
def walk(
    q, k, v, lengths, solved, seen, sums, initial, final, out,
    sequences, tokens, group, value_heads, scale, q_token, q_head, k_token, k_head, v_token, v_head,
    KEY: tl.constexpr, VALUE: tl.constexpr, VARLEN: tl.constexpr, INITIAL: tl.constexpr,
    VALUE_TILE: tl.constexpr,
):  # fmt: skip
    """Outputs and final states; initial, final [sequences, HV, V, K]."""
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
            of_v = v + head.to(tl.int64) * v_head
            of_state = (n * value_heads + head).to(tl.int64) * (VALUE * KEY)
            of_state += column[:, None] * KEY + d[None]
            if INITIAL:
                state = tl.load(initial + of_state).to(tl.float32)
            else:
                state = tl.zeros((VALUE_TILE, KEY), tl.float32)
            for chunk in range(0, chunks):
                first = chunk * CHUNK
                there = (i < length - first)[:, None]
                token = (start + first + i).to(tl.int64)[:, None]
                q_tile = tl.load(of_q + token * q_token + d[None], mask=there, other=0.0)
                k_tile = tl.load(of_k + token * k_token + d[None], mask=there, other=0.0)
                v_tile = tl.load(of_v + token * v_token + column[None], mask=there, other=0.0)
                place = ((before + chunk) * value_heads + head).to(tl.int64)
                tile = place * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None]
                t_tile = tl.load(solved + tile)
                p_tile = tl.load(seen + tile)
                total = tl.load(sums + place * CHUNK + i)
                last = tl.load(sums + place * CHUNK + CHUNK - 1)
                growth = tl.exp(total)[:, None]
                half = tl.trans(state.to(k_tile.dtype))
                r = v_tile.to(tl.float32) - tl.dot(k_tile, half) * growth
                new = tl.dot(t_tile, r.to(k_tile.dtype))
                o = tl.dot(q_tile, half) * growth + tl.dot(p_tile, new.to(k_tile.dtype))
                to = (token * value_heads + head) * VALUE + column[None]
                tl.store(out + to, (o * scale).to(out.dtype.element_ty), mask=there)
                kept = (new * tl.exp(last - total)[:, None]).to(k_tile.dtype)
                state = state * tl.exp(last) + tl.dot(tl.trans(kept), k_tile)
            tl.store(final + of_state, state.to(final.dtype.element_ty))
        turn = ((turn - value_heads * TILES) % turns + turns) % turns
        start += length
        before += chunks
    # tokens behind the last sequence
    for token in range(start + tl.program_id(0), tokens, turns):
        e = tl.arange(0, VALUE)
        for head in range(0, value_heads):
            nothing = tl.zeros((VALUE,), out.dtype.element_ty)
            tl.store(out + (token.to(tl.int64) * value_heads + head) * VALUE + e, nothing)


def _tile(key_size: int, value_size: int) -> tune.Config:
    """The widest that divides the value channels."""
    kernel = "chunk_gated_delta_rule.walk"
    dividing = [c for c in tune.TABLE[kernel] if value_size % c.tiles["VALUE_TILE"] == 0]
    return tune.choose(kernel, dividing, key_size)


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
) -> tuple[Tensor, Tensor]:
    tokens, heads, key_size = key.shape
    value_heads, value_size = value.shape[1:]
    varlen = actual_seq_lengths is not None
    sequences = actual_seq_lengths.shape[0] if actual_seq_lengths is not None else 1
    out = memory.empty(value.shape, value.dtype, value.device)
    kind = torch.float32 if initial_state is None else initial_state.dtype
    final = memory.empty((sequences, value_heads, value_size, key_size), kind, value.device)
    if final.numel() == 0:
        return out.zero_(), final
    # every sequence may end in a part of a chunk
    chunks = triton.cdiv(tokens, CHUNK.value) + (sequences if varlen else 0)
    tile = (CHUNK.value, CHUNK.value)
    whole = (chunks, value_heads, *tile)
    qk, kk = (memory.empty((chunks, heads, *tile), torch.float32, value.device) for _ in range(2))
    solved, seen = (memory.empty(whole, value.dtype, value.device) for _ in range(2))
    sums = memory.empty(whole[:3], torch.float32, value.device)
    lengths = sums if actual_seq_lengths is None else actual_seq_lengths
    group = value_heads // heads
    if value_heads == 1:
        beta, g = (None if gates is None else gates.contiguous() for gates in (beta, g))
    products[(cores.cube(),)](
        query, key, lengths, qk, kk, sequences, tokens, heads, *query.stride()[:2],
        *key.stride()[:2], KEY=key_size, VARLEN=varlen,
        **tune.only("chunk_gated_delta_rule.products").keywords,
    )  # fmt: skip
    triangles[(cores.vector(),)](
        qk, kk, sums if beta is None else beta, sums if g is None else g, lengths, solved, solved,
        seen, sums, sums, sequences, tokens, group, 0 if beta is None else beta.stride(0),
        0 if g is None else g.stride(0), VALUE_HEADS=value_heads, VARLEN=varlen,
        BETA=beta is not None, GATE=g is not None, APART=False,
        **tune.only("chunk_gated_delta_rule.triangles").keywords,
    )  # fmt: skip
    walk[(cores.cube(),)](
        query, key, value, lengths, solved, seen, sums,
        final if initial_state is None else initial_state, final, out, sequences, tokens, group,
        value_heads, key_size**-0.5 if scale is None else scale, *query.stride()[:2],
        *key.stride()[:2], *value.stride()[:2], KEY=key_size, VALUE=value_size, VARLEN=varlen,
        INITIAL=initial_state is not None, **_tile(key_size, value_size).keywords,
    )  # fmt: skip
    return out, final
