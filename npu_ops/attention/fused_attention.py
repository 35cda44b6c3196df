# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Flash attention: a core takes a tile of query rows of a head, and goes over its keys.

    number    one vector core   the numbers of the rows of a tile, for the masks
    attend    cube + vector     a tile of rows; its keys without a mask, then those that need one

Sequences are the batch, or lie in one row behind prefix sums; what lies before the first and behind
the last one are pieces without keys.  The cores take the tiles of all pieces in turn.

A sequence that fills a tile is stored without masks: its last tile ends with it, and overlaps the
one before, in rows whose sums go over the same tiles of keys.  Packed sequences that are shorter
have a launch of their own.

The vector units of the oldest compiler share a tile only if nothing in it comes from a vector of
rows but by a reduction or from the cube: what a row carries is a tile of LANES equal columns, and
the numbers of the rows are a product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory
from ..common import cores, entry, tiling, tune, tuples
from ..common.lengths import within

WIDEST = 256  # head sizes, of which the tiles of the last configuration fit
PARTS = 2  # configurations before those of sequences that fill no tile
LANES = tl.constexpr(8)
NUMBERS = tl.constexpr(16)  # columns of the product that numbers the rows
FARTHEST = 2**30  # as far as a window reaches: positions are 32 bits wide


@triton.jit
def _after(n, end, bounds, sequences, tokens):
    """Where piece n ends, which begins at `end`."""
    bound = tl.maximum(within(bounds + tl.minimum(n, sequences), tokens), end)
    return tl.where(n > sequences, tokens, bound)


@triton.jit
def piece_of(
    n, end_q, end_k, starts_q, starts_k, sequences, tokens_q, tokens_k, VARLEN: tl.constexpr
):
    """(batch, first query row, their number, first key row, their number, whether its rows see its
    keys) of piece n.  Packed, the first piece is what lies before the first sequence, the last one
    what lies behind the last; a sequence begins where all before it have ended, at the ends of
    piece n - 1."""
    batch = n
    start_q = n * 0
    start_k = n * 0
    count_q = tokens_q
    count_k = tokens_k
    live = n >= 0
    if VARLEN:
        batch = n * 0
        start_q = end_q
        start_k = end_k
        count_q = _after(n, end_q, starts_q, sequences, tokens_q) - end_q
        count_k = _after(n, end_k, starts_k, sequences, tokens_k) - end_k
        live = (n > 0) & (n <= sequences)
    return batch.to(tl.int64), start_q, count_q, start_k, count_k, live


@triton.jit
def keys_of(
    first,
    left,
    shift,
    count_k,
    window,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    Q_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
):
    """(shared, end): of the keys before `end`, which a tile of rows sees, every row sees those
    before `shared`, whole tiles from 0.  With a window these are out of sight."""
    shared = count_k
    end = count_k
    if CAUSAL:
        shared = tl.maximum(tl.minimum(count_k, shift + first + 1), 0)
        end = tl.minimum(count_k, shift + first + tl.minimum(left, Q_TILE))
    elif WINDOW:
        end = tl.minimum(count_k, shift + first + Q_TILE - 1 + window)
    if WINDOW:
        shared = tl.maximum(shift + first - window + 1, 0)
    return shared // KEY_TILE * KEY_TILE, end


@triton.jit
def in_turn(tile, head, tiles, CAUSAL: tl.constexpr):
    """The tile that is due: the work in a tile grows or shrinks along a head, and every other head
    goes the other way, so that each core gets of all."""
    if CAUSAL:
        tile = tl.where(head % 2 == 0, tile, tiles - 1 - tile)
    return tile


@triton.jit
def near(distance):
    """A distance of positions as a float, exact where it matters: within a tile."""
    return tl.minimum(tl.maximum(distance, -4096), 4096).to(tl.float32)


@triton.jit
def visible(
    x,
    hidden,
    numbers,
    position,
    start,
    count_k,
    window,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    KEY_TILE: tl.constexpr,
):
    """`x` where a row sees the key, `hidden` elsewhere: of rows from `position`, keys from `start`.
    Floats are what every build of the compiler compares as vectors."""
    column = tl.arange(0, KEY_TILE).to(tl.float32)[None]
    if not CAUSAL:
        x = tl.where(column < near(count_k - start), x, hidden)
    if CAUSAL or WINDOW:
        row = tl.max(numbers, 1)[:, None]
        last = position - start + (0 if CAUSAL else window - 1)
        x = tl.where(column - near(last) <= row, x, hidden)
    if WINDOW:
        x = tl.where(column - near(position - start - window) > row, x, hidden)
    return x


@triton.jit
def _step(
    q_tile,
    of_k,
    of_v,
    keys,
    numbers,
    position,
    start,
    count_k,
    window,
    row_max,
    total,
    acc,
    scale,
    k_row,
    v_row,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The running maximum, sum and output, one tile of keys further."""
    at_k = of_k + keys[:, None] * k_row + tl.arange(0, DIM)[None]
    at_v = of_v + keys[:, None] * v_row + tl.arange(0, VALUE_DIM)[None]
    if MASKED:
        there = (tl.arange(0, KEY_TILE) < count_k - start)[:, None]
        k_tile = tl.load(at_k, mask=there, other=0.0)
        v_tile = tl.load(at_v, mask=there, other=0.0)
    else:
        k_tile = tl.load(at_k)
        v_tile = tl.load(at_v)
    z = tl.dot(q_tile, tl.trans(k_tile)) * scale
    if MASKED:
        z = visible(
            z, float("-inf"), numbers, position, start, count_k, window, CAUSAL, WINDOW, KEY_TILE
        )
    new_max = tl.maximum(row_max, tl.max(z, 1)[:, None])
    shrink = tl.exp(row_max - new_max)
    p = tl.exp(z - tl.max(new_max, 1)[:, None])
    total = total * shrink + tl.sum(p, 1)[:, None]
    acc = acc * tl.max(shrink, 1)[:, None] + tl.dot(p.to(v_tile.dtype), v_tile)
    return new_max, total, acc


@entry.jit()
def number(to, ROWS: tl.constexpr):
    """[NUMBERS, NUMBERS] and [ROWS, NUMBERS]: of both the product is the number of each row in
    every column.  Exact, in 16 bits as well."""
    column = tl.arange(0, NUMBERS)[None]
    one = tl.full((NUMBERS, NUMBERS), 1.0, to.dtype.element_ty)
    tl.store(to + tl.arange(0, NUMBERS)[:, None] * NUMBERS + column, one)
    row = tl.arange(0, ROWS)[:, None]
    each = (row + column * 0).to(tl.float32) / NUMBERS
    tl.store(to + (NUMBERS + row) * NUMBERS + column, each.to(to.dtype.element_ty))


@triton.jit
def product_of(numbers, ROWS: tl.constexpr):
    """What `number` left, multiplied."""
    column = tl.arange(0, NUMBERS)[None]
    one = tl.load(numbers + tl.arange(0, NUMBERS)[:, None] * NUMBERS + column)
    each = tl.load(numbers + (NUMBERS + tl.arange(0, ROWS))[:, None] * NUMBERS + column)
    return tl.dot(each, one)


class Strides(NamedTuple):
    batch: int
    head: int
    row: int


@tuples.jit(["sequences", "heads", "group", "tokens_q", "tokens_k", "below", "window", "scale"])
def attend(
    q,
    k,
    v,
    starts_q,
    starts_k,
    numbers,
    out,
    lse,
    sequences,
    heads,
    group,
    tokens_q,
    tokens_k,
    below,
    window,
    scale,
    q_stride: Strides,
    k_stride: Strides,
    v_stride: Strides,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    Q_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
):
    """The sequences of fewer than `below` rows; without it those that fill a tile."""
    VARLEN: tl.constexpr = starts_q is not None
    WINDOW: tl.constexpr = window is not None
    WHOLE: tl.constexpr = below is None
    i = tl.arange(0, Q_TILE)
    j = tl.arange(0, KEY_TILE)
    d = tl.arange(0, DIM)
    e = tl.arange(0, VALUE_DIM)
    numbered = 0
    if CAUSAL or WINDOW:
        numbered = product_of(numbers, Q_TILE)
    turn = tl.program_id(0)
    turns = tl.num_programs(0)
    end_q = 0
    end_k = 0
    for n in range(0, sequences + 2 * VARLEN):
        batch, start_q, count_q, start_k, count_k, live = piece_of(
            n, end_q, end_k, starts_q, starts_k, sequences, tokens_q, tokens_k, VARLEN
        )
        end_q = start_q + count_q
        end_k = start_k + count_k
        if VARLEN:
            count_k = tl.where(live, count_k, 0)
        shift = count_k - count_q
        tiles = (count_q + Q_TILE - 1) // Q_TILE
        if VARLEN:
            if WHOLE:
                tiles = tl.where(count_q >= Q_TILE, tiles, 0)
            else:
                tiles = tl.where(count_q < below, tiles, 0)
        for work in range(turn, tiles * heads, turns):
            head = work // tiles
            first = in_turn(work % tiles, head, tiles, CAUSAL) * Q_TILE
            if WHOLE:
                first = tl.minimum(first, count_q - Q_TILE)
            key_head = head // group
            left = count_q - first
            of_q = q + batch * q_stride.batch + head.to(tl.int64) * q_stride.head
            of_k = k + batch * k_stride.batch + key_head.to(tl.int64) * k_stride.head
            of_v = v + batch * v_stride.batch + key_head.to(tl.int64) * v_stride.head
            rows = (start_q + first + i).to(tl.int64)
            at_q = of_q + rows[:, None] * q_stride.row + d[None]
            if WHOLE:
                q_tile = tl.load(at_q)
            else:
                q_tile = tl.load(at_q, mask=(i < left)[:, None], other=0.0)
            shared, end = keys_of(
                first, left, shift, count_k, window, CAUSAL, WINDOW, Q_TILE, KEY_TILE
            )
            row_max = tl.full((Q_TILE, LANES), -1e30, tl.float32)  # finite: a tile may show no key
            total = tl.zeros((Q_TILE, LANES), tl.float32)
            # 0, as a number of this turn: a constant would be held beside what becomes of it
            acc = tl.full((Q_TILE, VALUE_DIM), (work < 0).to(tl.float32), tl.float32)
            if not WINDOW:
                for start in range(0, shared, KEY_TILE):
                    row_max, total, acc = _step(
                        q_tile,
                        of_k,
                        of_v,
                        (start_k + start + j).to(tl.int64),
                        numbered,
                        shift + first,
                        start,
                        count_k,
                        window,
                        row_max,
                        total,
                        acc,
                        scale,
                        k_stride.row,
                        v_stride.row,
                        DIM,
                        VALUE_DIM,
                        KEY_TILE,
                        CAUSAL,
                        WINDOW,
                        False,
                    )
            # from 0: the compiler of January 2026 crashes where a loop begins at a window's edge
            for step in range(0, (tl.maximum(end - shared, 0) + KEY_TILE - 1) // KEY_TILE):
                start = shared + step * KEY_TILE
                row_max, total, acc = _step(
                    q_tile,
                    of_k,
                    of_v,
                    (start_k + start + j).to(tl.int64),
                    numbered,
                    shift + first,
                    start,
                    count_k,
                    window,
                    row_max,
                    total,
                    acc,
                    scale,
                    k_stride.row,
                    v_stride.row,
                    DIM,
                    VALUE_DIM,
                    KEY_TILE,
                    CAUSAL,
                    WINDOW,
                    True,
                )
            seen = total > 0
            divisor = tl.where(seen, total, 1.0)
            result = (acc / tl.max(divisor, 1)[:, None]).to(out.dtype.element_ty)
            sums = tl.where(seen, row_max + tl.log(divisor), float("-inf"))
            if VARLEN:
                to = rows * heads + head
            else:
                to = (batch * heads + head) * tokens_q + rows
            to_out = out + to[:, None] * VALUE_DIM + e[None]
            if WHOLE:
                tl.store(lse + to, tl.max(sums, 1))
                tl.store(to_out, result)
            else:
                tl.store(lse + to, tl.max(sums, 1), mask=i < left)
                tl.store(to_out, result, mask=(i < left)[:, None])
        turn = ((turn - tiles * heads) % turns + turns) % turns


def unsupported(q: Tensor, v: Tensor, **_: Any) -> str | None:
    if reason := tiling.not_multiplied(q=q):
        return reason
    if v.dtype is not q.dtype:
        return f"`v` is {v.dtype}, the Ascend compiler knows no float8"
    sizes = q.shape[-1], v.shape[-1]
    if any(size % 16 or not 16 <= size <= WIDEST for size in sizes):
        return f"head sizes {sizes[0]} and {sizes[1]}, expected multiples of 16 up to {WIDEST}"
    return None


def strides(x: Tensor) -> Strides:
    """Of [B, H, N, D] or [T, H, D]."""
    return Strides(*x.stride()[:3]) if x.ndim == 4 else Strides(0, x.stride(1), x.stride(0))


def config(kernel: str, *sizes: int, **flags: bool) -> tune.Config:
    """The tiles for these head sizes: they are listed from the largest down."""
    return tune.choose(kernel, _fitting(tune.TABLE[kernel], *sizes), *sizes, *flags.values())


def _fitting(listed: tuple[tune.Config, ...], *sizes: int) -> tuple[tune.Config, ...]:
    least = 0 if max(sizes) <= 64 else 1 if max(sizes) <= 128 else 2
    return listed[min(least, len(listed) - 1) :]


def numbers_of(q: Tensor) -> Tensor:
    """For `numbered`, of tiles of any height."""
    rows = tune.only("fused_attention.number")
    to = memory.empty([NUMBERS.value + rows.tiles["ROWS"], NUMBERS.value], q.dtype, q.device)
    number[(1,)](to, **rows.keywords)
    return to


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    sm_scale: float | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    window: int | None,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    heads = q.shape[1]
    out = memory.empty([*q.shape[:-1], v.shape[-1]], q.dtype, q.device)
    lse = memory.empty(q.shape[:-1], torch.float32, q.device)
    if lse.numel() == 0:
        return out, lse
    varlen, masked = cu_seqlens_q is not None, causal or window is not None
    tokens_q, tokens_k = (x.shape[0 if varlen else 2] for x in (q, k))
    numbers = numbers_of(q) if masked else None
    sizes = q.shape[-1], v.shape[-1]
    listed = tune.TABLE["fused_attention.attend"]
    whole, part = (
        tune.choose("fused_attention.attend", found, *sizes, masked, varlen)
        for found in (listed[max(sizes) > 128 :], _fitting(listed[PARTS:], *sizes))
    )
    full = whole.tiles["Q_TILE"]
    launches = [(whole, None), (part, full)]
    if not varlen:
        launches = launches[:1] if tokens_q >= full else launches[1:]
    for tiles, below in launches:
        attend[(cores.cube(),)](
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            numbers,
            out,
            lse,
            cu_seqlens_q.shape[0] - 1 if cu_seqlens_q is not None else q.shape[0],
            heads,
            heads // k.shape[1],
            tokens_q,
            tokens_k,
            below,
            None if window is None else min(window, FARTHEST),
            q.shape[-1] ** -0.5 if sm_scale is None else sm_scale,
            *strides(q),
            *strides(k),
            *strides(v),
            DIM=q.shape[-1],
            VALUE_DIM=v.shape[-1],
            CAUSAL=causal,
            **tiles.keywords,
        )
    return out, lse
