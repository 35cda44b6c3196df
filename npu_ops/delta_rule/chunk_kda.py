# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Kimi delta attention over whole sequences, 64 tokens at a time on the cube.

    G_i [K] = sum of the decay's logarithm up to i, within a chunk
    A_ij = sum over channels of k_i k_j exp(G_i - G_j) for j < i     T = (I + beta A)^-1 beta
    P_ij = scale q_i k_j exp(G_i - G_j) for j <= i
    by chunk:  N = T (v - (exp(G) k) S);  out = (scale exp(G) q) S + P N;
    S = exp(G_last) S + (exp(G_last - G) k)^T N

exp(G_i - G_j) is no product of a number of i and one of j that stay in range: the vector cores make
A and P, one token j at a time, and no exponent is above 0.

    sums       vector cores    by chunk: G, and k as the norm leaves it
    pairs      vector cores    by ROWS tokens of a chunk: A, P, and what the walk multiplies
    triangles  vector cores    by chunk: T, by elimination
    walk       cube + vector   over a sequence, VALUE_TILE columns of a head: outputs, states

A, P and T lie transposed, as they are made.  What lies between the kernels is laid out by chunk, in
rounds of chunks that fit the workspace; the state of the sequence that a round ends within is
carried to the next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory
from ...dispatch.common.gated_delta import kind_of_rate
from ..common import cores, entry, tiling, tune
from ..common.front_end import extract_slice
from ..common.lengths import within
from ..common.rates import rate_of
from .fused_sigmoid_gating_delta_rule_update import _softplus

CHUNK = tl.constexpr(64)
LARGEST = 128  # key size; of values twice as much
_TILE = 1024  # elements of a tile of which UB holds twenty
# exp() of it is 0 in float32; minus infinity times 0 would be none
_LEAST = tl.constexpr(-100.0)
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
def _touched(before, chunks, count, since, most):
    """Whether a walk has anything to do: `count` chunks, or the state of an empty sequence, which
    two rounds may move.  Behind the last chunk there is no other round."""
    empty = (chunks == 0) & (before >= since) & (before <= since + most)
    return (count > 0) | empty


@triton.jit
def _logarithm(x, rate, lower_bound, GATE: tl.constexpr):
    """The decay's, not below that of what is 0 in float32."""
    if GATE == 1:
        x = -rate * _softplus(x, 1.0, 20.0)
    elif GATE == 2:
        x = lower_bound / (1.0 + tl.exp(-rate * x))
    return tl.where(x < _LEAST, _LEAST, x)


@triton.jit
def _unit(x, NORM: tl.constexpr):
    if NORM:
        x = x / tl.sqrt(tl.sum(x * x, 1) + 1e-6)[:, None]
    return x


@entry.jit(
    do_not_specialize=[
        "sequences", "length", "tokens", "since", "most", "group", "value_heads", "lower_bound",
        "k_token", "k_head", "g_token", "g_head",
    ]
)  # fmt: skip
def sums(
    k,
    g,
    A_log,
    dt_bias,
    bounds,
    total,
    units,
    sequences,
    length,
    tokens,
    since,
    most,
    group,
    value_heads,
    lower_bound,
    k_token,
    k_head,
    g_token,
    g_head,
    KEY: tl.constexpr,
    VARLEN: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    A: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """G and k [chunks, HV, 64, K] in float32."""
    row = tl.arange(0, ROWS)
    d = tl.arange(0, KEY)
    one = tl.zeros((1,), tl.int32)  # a scalar of the vector unit
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
            rows = ((before + low - since) * value_heads + work).to(tl.int64) * (CHUNK * KEY)
            of_k = k + (head // group).to(tl.int64) * k_head
            of_g = g + head.to(tl.int64) * g_head
            rate = tl.zeros((1,), tl.float32)
            if A:
                rate += tl.load(A_log + head + one).to(tl.float32)
            rate = tl.exp(rate)[:, None]
            running = tl.zeros((1, KEY), tl.float32)
            for part in range(0, CHUNK, ROWS):
                i = part + row
                there = (i < size - first)[:, None]
                token = (start + first + i).to(tl.int64)[:, None]
                k_tile = tl.load(of_k + token * k_token + d[None], mask=there, other=0.0)
                k_tile = _unit(k_tile.to(tl.float32), NORM)
                tl.store(units + rows + i[:, None] * KEY + d[None], k_tile)
                x = tl.load(of_g + token * g_token + d[None], mask=there, other=0.0)
                x = x.to(tl.float32)
                if BIAS:
                    x += tl.load(dt_bias + head * KEY + d).to(tl.float32)[None]
                decay = tl.where(there, _logarithm(x, rate, lower_bound, GATE), 0.0)
                for r in range(0, ROWS):
                    running += extract_slice(decay, (r, 0), (1, KEY), (1, 1))
                    tl.store(total + rows + (part + r) * KEY + d[None], running)
        turn = ((turn - count * value_heads) % turns + turns) % turns
        end = start + size
        before += chunks


@entry.jit(
    do_not_specialize=[
        "sequences", "length", "tokens", "since", "most", "group", "value_heads", "scale",
        "q_token", "q_head",
    ]
)  # fmt: skip
def pairs(
    q,
    bounds,
    total,
    units,
    alike,
    seen,
    queries,
    keys,
    left,
    fades,
    scaled,
    sequences,
    length,
    tokens,
    since,
    most,
    group,
    value_heads,
    scale,
    q_token,
    q_head,
    KEY: tl.constexpr,
    VARLEN: tl.constexpr,
    NORM: tl.constexpr,
    GRAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A and P [chunks, HV, 64, 64]; scale exp(G) q, exp(G) k and exp(G_last - G) k
    [chunks, HV, 64, K]; exp(G_last) [chunks, HV, K]; for a gradient also scale q in float32."""
    PARTS: tl.constexpr = CHUNK // ROWS
    row = tl.arange(0, ROWS)
    d = tl.arange(0, KEY)
    turn = tl.program_id(0)
    turns = tl.num_programs(0)
    end = 0
    before = 0
    for n in range(0, sequences):
        start, size = _sequence(bounds, n, end, length, tokens, VARLEN)
        chunks = (size + CHUNK - 1) // CHUNK
        low, count = _here(before, chunks, since, most)
        for work in range(turn, count * value_heads * PARTS, turns):
            tile_of = work // PARTS
            # a later part has more pairs: a core takes each of them in turn
            part = (work + tile_of * PARTS // turns) % PARTS * ROWS
            head = tile_of % value_heads
            first = (low + tile_of // value_heads) * CHUNK
            place = ((before + low - since) * value_heads + tile_of).to(tl.int64)
            i = part + row
            there = (i < size - first)[:, None]
            token = (start + first + i).to(tl.int64)[:, None]
            of_q = q + (head // group).to(tl.int64) * q_head + token * q_token + d[None]
            q_tile = _unit(tl.load(of_q, mask=there, other=0.0).to(tl.float32), NORM) * scale
            base = place * (CHUNK * KEY)
            rows = base + i[:, None] * KEY + d[None]
            k_tile = tl.load(units + rows)
            g_tile = tl.load(total + rows)
            last = tl.load(total + base + (CHUNK - 1) * KEY + d)
            growth = tl.exp(g_tile)
            if GRAD:
                tl.store(scaled + rows, q_tile)
            tl.store(queries + rows, (q_tile * growth).to(queries.dtype.element_ty))
            tl.store(keys + rows, (k_tile * growth).to(keys.dtype.element_ty))
            rest = k_tile * tl.exp(last[None] - g_tile)
            tl.store(left + rows, rest.to(left.dtype.element_ty))
            tl.store(fades + place * KEY + d, tl.exp(last))
            tile = place * (CHUNK * CHUNK) + i
            # of earlier tokens: exp(G_i - G_part) exp(G_part - G_j), and neither is above 1
            at_part = tl.load(total + base + part * KEY + d)[None]
            since_part = tl.exp(g_tile - at_part)
            q_far = q_tile * since_part
            k_far = k_tile * since_part
            for earlier in range(0, part, ROWS):
                rows = base + (earlier + row)[:, None] * KEY + d[None]
                faded = tl.exp(at_part - tl.load(total + rows)) * tl.load(units + rows)
                for r in range(0, ROWS):
                    of_row = extract_slice(faded, (r, 0), (1, KEY), (1, 1))
                    to = tile + (earlier + r) * CHUNK
                    tl.store(seen + to, tl.sum(q_far * of_row, 1).to(seen.dtype.element_ty))
                    tl.store(alike + to, tl.sum(k_far * of_row, 1))
            for r in range(0, ROWS):
                g_row = extract_slice(g_tile, (r, 0), (1, KEY), (1, 1))
                k_row = extract_slice(k_tile, (r, 0), (1, KEY), (1, 1))
                faded = tl.exp(tl.minimum(g_tile - g_row, 0.0)) * k_row
                on_q = tl.where(row >= r, tl.sum(q_tile * faded, 1), 0.0)
                on_k = tl.where(row > r, tl.sum(k_tile * faded, 1), 0.0)
                to = tile + (part + r) * CHUNK
                tl.store(seen + to, on_q.to(seen.dtype.element_ty))
                tl.store(alike + to, on_k)
            later = tl.arange(0, CHUNK)[:, None]
            of_none = later < CHUNK - ROWS - part
            to = tile[None] + (part + ROWS + later) * CHUNK
            tl.store(seen + to, tl.zeros((CHUNK, ROWS), seen.dtype.element_ty), mask=of_none)
            tl.store(alike + to, tl.zeros((CHUNK, ROWS), tl.float32), mask=of_none)
        turn = ((turn - count * value_heads * PARTS) % turns + turns) % turns
        end = start + size
        before += chunks


@entry.jit(
    do_not_specialize=[
        "sequences", "length", "tokens", "since", "most", "value_heads", "beta_head",
    ]
)  # fmt: skip
def triangles(
    alike,
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
    """T [chunks, HV, 64, 64]; beta [HV, tokens].  For a gradient (I + beta A)^-1, and what its
    rounding leaves."""
    i = tl.arange(0, CHUNK)
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
            place = ((before + low - since) * value_heads + work).to(tl.int64)
            tile = place * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None]
            upper = tl.load(alike + tile) * rate[None]
            x = tl.where(i[:, None] == i[None], 1.0, 0.0)
            # column r is done: take it out of the columns behind
            for r in range(0, CHUNK - 1):
                factor = extract_slice(upper, (r, 0), (1, CHUNK), (1, 1))
                done = extract_slice(x, (0, r), (CHUNK, 1), (1, 1))
                x = x - factor * done
            if GRAD:
                whole = x.to(solved.dtype.element_ty)
                tl.store(solved + tile, whole)
                tl.store(finer + tile, (x - whole.to(tl.float32)).to(finer.dtype.element_ty))
            else:
                tl.store(solved + tile, (x * rate[:, None]).to(solved.dtype.element_ty))
        turn = ((turn - count * value_heads) % turns + turns) % turns
        end = start + size
        before += chunks


@entry.jit(
    do_not_specialize=[
        "sequences", "length", "tokens", "since", "most", "came", "goes", "value_heads", "v_token",
        "v_head",
    ]
)  # fmt: skip
def walk(
    queries,
    keys,
    left,
    fades,
    v,
    bounds,
    solved,
    seen,
    initial,
    final,
    out,
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
    INITIAL: tl.constexpr,
    VALUE_FIRST: tl.constexpr,
    VALUE_TILE: tl.constexpr,
):
    """Outputs and final states.  The sequence that the round begins within has its state at `came`
    in `initial`, that which it ends within leaves it at `goes` in `final`."""
    TILES: tl.constexpr = VALUE // VALUE_TILE
    i = tl.arange(0, CHUNK)
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
        works = tl.where(_touched(before, chunks, count, since, most), value_heads * TILES, 0)
        for work in range(turn, works, turns):
            head = work // TILES
            column = work % TILES * VALUE_TILE + c
            of_v = v + head.to(tl.int64) * v_head
            if VALUE_FIRST:
                of_state = column[:, None] * KEY + d[None]
            else:
                of_state = d[:, None] * VALUE + column[None]
            if INITIAL:
                whole = (of_first * value_heads + head).to(tl.int64) * (VALUE * KEY)
                state = tl.load(initial + whole + of_state).to(tl.float32)
                if not VALUE_FIRST:
                    state = tl.trans(state)
            else:
                state = tl.zeros((VALUE_TILE, KEY), tl.float32)
            for chunk in range(low, low + count):
                first = chunk * CHUNK
                there = (i < size - first)[:, None]
                token = (start + first + i).to(tl.int64)[:, None]
                place = ((before + chunk - since) * value_heads + head).to(tl.int64)
                rows = place * (CHUNK * KEY) + i[:, None] * KEY + d[None]
                tile = place * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None]
                v_tile = tl.load(of_v + token * v_token + column[None], mask=there, other=0.0)
                half = tl.trans(state.to(v_tile.dtype))
                r = v_tile.to(tl.float32) - tl.dot(tl.load(keys + rows), half)
                t_tile, p_tile = tl.load(solved + tile), tl.load(seen + tile)
                new = tl.dot(tl.trans(t_tile), r.to(v_tile.dtype)).to(v_tile.dtype)
                o = tl.dot(tl.load(queries + rows), half) + tl.dot(tl.trans(p_tile), new)
                to = (token * value_heads + head) * VALUE + column[None]
                tl.store(out + to, o.to(out.dtype.element_ty), mask=there)
                fade = tl.load(fades + place * KEY + d)
                state = state * fade[None] + tl.dot(tl.trans(new), tl.load(left + rows))
            whole = (of_last * value_heads + head).to(tl.int64) * (VALUE * KEY)
            if not VALUE_FIRST:
                tl.store(final + whole + of_state, tl.trans(state).to(final.dtype.element_ty))
            else:
                tl.store(final + whole + of_state, state.to(final.dtype.element_ty))
        turn = ((turn - works) % turns + turns) % turns
        end = start + size
        before += chunks


def _rows(kernel: str, key_size: int) -> dict[str, Any]:
    """The most rows that UB holds, with what is made of them."""
    kernel = f"chunk_kda.{kernel}"
    fitting = [c for c in tune.TABLE[kernel] if c.tiles["ROWS"] * key_size <= _TILE]
    return tune.choose(kernel, fitting, key_size).keywords


def _tile(value_size: int) -> tune.Config:
    """The widest that divides the value channels."""
    kernel = "chunk_kda.walk"
    dividing = [c for c in tune.TABLE[kernel] if value_size % c.tiles["VALUE_TILE"] == 0]
    return tune.choose(kernel, dividing)


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
    total: Tensor
    units: Tensor
    alike: Tensor
    seen: Tensor
    solved: Tensor
    finer: Tensor
    queries: Tensor
    keys: Tensor
    left: Tensor
    fades: Tensor
    scaled: Tensor
    betas: Tensor  # [HV, tokens]
    kind: int  # of rates that they make


def laid_out(
    most: int, q: Tensor, beta: Tensor, kind: int, cu_seqlens: Tensor | None, grad: bool
) -> Chunks:
    value_heads, key_size = beta.shape[-1], q.shape[-1]
    square = (CHUNK.value, CHUNK.value)

    def space(*shape: int, dtype: torch.dtype = q.dtype) -> Tensor:
        return memory.empty((most, value_heads, *shape), dtype, q.device)

    alike = space(*square, dtype=torch.float32)
    seen, solved = (space(*square) for _ in range(2))
    total, units = (space(CHUNK.value, key_size, dtype=torch.float32) for _ in range(2))
    queries, keys, left = (space(CHUNK.value, key_size) for _ in range(3))
    fades = space(key_size, dtype=torch.float32)
    # a tensor stands for one that is not there, and is not touched
    scaled = space(CHUNK.value, key_size, dtype=torch.float32) if grad else units
    finer = space(*square) if grad else solved
    return Chunks(
        most,
        fades if cu_seqlens is None else cu_seqlens,
        total,
        units,
        alike,
        seen,
        solved,
        finer,
        queries,
        keys,
        left,
        fades,
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
    sums[(cores.vector(),)](
        k,
        g,
        x.fades if A_log is None else A_log,
        x.fades if dt_bias is None else dt_bias,
        x.bounds,
        x.total,
        x.units,
        *here,
        group,
        value_heads,
        0.0 if lower_bound is None else lower_bound,
        *k.stride()[:2],
        *g.stride()[:2],
        KEY=key_size,
        VARLEN=varlen,
        NORM=norm,
        GATE=gate,
        A=A_log is not None,
        BIAS=dt_bias is not None,
        **_rows("sums", key_size),
    )
    pairs[(cores.vector(),)](
        q,
        x.bounds,
        x.total,
        x.units,
        x.alike,
        x.seen,
        x.queries,
        x.keys,
        x.left,
        x.fades,
        x.scaled,
        *here,
        group,
        value_heads,
        key_size**-0.5 if scale is None else scale,
        *q.stride()[:2],
        KEY=key_size,
        VARLEN=varlen,
        NORM=norm,
        GRAD=grad,
        **_rows("pairs", key_size),
    )
    triangles[(cores.vector(),)](
        x.alike,
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
    # G and k in float32, five tiles by channel or pair in halves, A in float32
    side = CHUNK.value
    most = at_once(count, value_heads * (side * (14 * key_size + 8 * side) + 4 * key_size))
    rate = kind_of_rate(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    x = laid_out(most, q, beta, rate, cu_seqlens, grad=False)
    initial, state = initial_state, final
    if most < count:  # the last two are of sequences that rounds end within
        initial = state = memory.empty((sequences + 2, *final.shape[1:]), torch.float32, v.device)
        if initial_state is None:
            state.zero_()
        else:
            state[:sequences].copy_(initial_state)
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
        walk[(cores.cube(),)](
            x.queries,
            x.keys,
            x.left,
            x.fades,
            v,
            x.bounds,
            x.solved,
            x.seen,
            state if initial is None else initial,
            state,
            out,
            sequences,
            length,
            batch * length,
            since,
            most,
            came,
            goes,
            value_heads,
            *v.stride()[:2],
            KEY=key_size,
            VALUE=value_size,
            VARLEN=varlen,
            INITIAL=initial is not None,
            VALUE_FIRST=state_layout == "vk",
            **_tile(value_size).keywords,
        )
        came, goes = goes, came
    if most < count:
        final.copy_(state[:sequences])
    return out, final
