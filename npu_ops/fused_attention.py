# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Flash attention, one kernel: a core takes a tile of query rows of a head, and goes over its keys.

Sequences are the batch, or lie in one row behind prefix sums; what lies behind the last one is a
sequence without keys.  The cores take the tiles of all sequences in turn.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch.common import memory
from . import cores, entry, tiling, tune
from .lengths import within

WIDEST = 256  # head sizes, of which the tiles of the last configuration fit
FARTHEST = 2**30  # as far as a window reaches: positions are 32 bits wide


@triton.jit
def sequence_of(n, starts_q, starts_k, sequences, tokens_q, tokens_k, VARLEN: tl.constexpr):
    """(batch, first query row, their number, first key row, their number) of sequence n."""
    if VARLEN:
        batch = n * 0
        start_q = within(starts_q + n, tokens_q)
        start_k = within(starts_k + n, tokens_k)
        after = tl.minimum(n + 1, sequences)
        end = within(starts_q + after, tokens_q)
        count_q = tl.where(n < sequences, end, tokens_q) - start_q
        count_k = within(starts_k + after, tokens_k) - start_k
    else:
        batch = n
        start_q = n * 0
        start_k = n * 0
        count_q = tokens_q
        count_k = tokens_k
    return batch.to(tl.int64), start_q, count_q, start_k, count_k


@triton.jit
def keys_of(
    position, first, left, shift, count_q, count_k, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, Q_TILE: tl.constexpr,
):  # fmt: skip
    """(begin, shared, end, low, high): a tile of rows sees the keys from `begin` to before `end`,
    every row of it those before `shared`; the row at `position` those from `low` to before `high`.
    With a window no key counts as shared."""
    begin = 0
    shared = count_k
    end = count_k
    low = position
    # count_k, as a vector: a mask of keys alone keeps the vector units from sharing
    high = tl.minimum(position + count_q + count_k, count_k)
    if CAUSAL:
        shared = tl.maximum(tl.minimum(count_k, shift + first + 1), 0)
        end = tl.minimum(count_k, shift + first + tl.minimum(left, Q_TILE))
        high = tl.minimum(position + 1, count_k)
    elif WINDOW:
        end = tl.minimum(count_k, shift + first + Q_TILE - 1 + window)
        high = tl.minimum(position + window, count_k)
    if WINDOW:
        begin = tl.maximum(shift + first - window + 1, 0)
        shared = begin
        low = position - window + 1
    return begin, shared, end, low, high


@triton.jit
def within_tile(bound, start, KEY_TILE: tl.constexpr):
    """Which column of the tile that begins at `start` a row's bound is; as floats, which every
    build of the compiler compares as vectors."""
    return tl.minimum(tl.maximum(bound - start, 0), KEY_TILE).to(tl.float32)[:, None]


@triton.jit
def _step(
    q_tile, of_k, of_v, keys, start, count_k, low, high, row_max, total, acc, scale, k_row, v_row,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_TILE: tl.constexpr, WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The running maximum, sum and output, one tile of keys further."""
    j = tl.arange(0, KEY_TILE)
    at_k = of_k + keys[:, None] * k_row + tl.arange(0, DIM)[None]
    at_v = of_v + keys[:, None] * v_row + tl.arange(0, VALUE_DIM)[None]
    if MASKED:
        there = (j < count_k - start)[:, None]
        k_tile = tl.load(at_k, mask=there, other=0.0)
        v_tile = tl.load(at_v, mask=there, other=0.0)
    else:
        k_tile = tl.load(at_k)
        v_tile = tl.load(at_v)
    z = tl.dot(q_tile, tl.trans(k_tile)) * scale
    if MASKED:
        column = j.to(tl.float32)[None]
        z = tl.where(column < within_tile(high, start, KEY_TILE), z, float("-inf"))
        if WINDOW:
            z = tl.where(column >= within_tile(low, start, KEY_TILE), z, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(z, 1))
    p = tl.exp(z - new_max[:, None])
    shrink = tl.exp(row_max - new_max)
    total = total * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None] + tl.dot(p.to(v_tile.dtype), v_tile)
    return new_max, total, acc


@entry.jit(
    do_not_specialize=[
        "sequences", "heads", "group", "tokens_q", "tokens_k", "window", "scale", "q_batch",
        "q_head", "q_row", "k_batch", "k_head", "k_row", "v_batch", "v_head", "v_row",
    ]
)  # fmt: skip
def attend(
    q, k, v, starts_q, starts_k, out, lse,
    sequences, heads, group, tokens_q, tokens_k, window, scale,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    VARLEN: tl.constexpr, WHOLE: tl.constexpr, Q_TILE: tl.constexpr, KEY_TILE: tl.constexpr,
):  # fmt: skip
    """WHOLE: every tile of rows is full, and nothing of it is masked."""
    i = tl.arange(0, Q_TILE)
    j = tl.arange(0, KEY_TILE)
    d = tl.arange(0, DIM)
    e = tl.arange(0, VALUE_DIM)
    turn = tl.program_id(0)
    turns = tl.num_programs(0)
    for n in range(0, sequences + VARLEN):
        batch, start_q, count_q, start_k, count_k = sequence_of(
            n, starts_q, starts_k, sequences, tokens_q, tokens_k, VARLEN
        )
        shift = count_k - count_q
        tiles = (count_q + Q_TILE - 1) // Q_TILE
        for work in range(turn, tiles * heads, turns):
            head = work // tiles
            first = work % tiles * Q_TILE
            key_head = head // group
            left = count_q - first
            of_q = q + batch * q_batch + head.to(tl.int64) * q_head
            of_k = k + batch * k_batch + key_head.to(tl.int64) * k_head
            of_v = v + batch * v_batch + key_head.to(tl.int64) * v_head
            rows = (start_q + first + i).to(tl.int64)
            at_q = of_q + rows[:, None] * q_row + d[None]
            if WHOLE:
                q_tile = tl.load(at_q)
            else:
                q_tile = tl.load(at_q, mask=(i < left)[:, None], other=0.0)
            begin, shared, end, low, high = keys_of(
                shift + first + i, first, left, shift, count_q, count_k, window,
                CAUSAL, WINDOW, Q_TILE,
            )  # fmt: skip
            row_max = tl.full((Q_TILE,), -1e30, tl.float32)  # finite: a tile may show no key
            total = tl.zeros((Q_TILE,), tl.float32)
            acc = tl.zeros((Q_TILE, VALUE_DIM), tl.float32)
            if not WINDOW:
                # the tiles that all rows see as a whole; what is masked does not overlap
                shared = shared // KEY_TILE * KEY_TILE
                for start in range(0, shared, KEY_TILE):
                    row_max, total, acc = _step(
                        q_tile, of_k, of_v, (start_k + start + j).to(tl.int64), start, count_k,
                        low, high, row_max, total, acc, scale, k_row, v_row,
                        DIM, VALUE_DIM, KEY_TILE, WINDOW, False,
                    )  # fmt: skip
                begin = shared
            for start in range(begin, end, KEY_TILE):
                row_max, total, acc = _step(
                    q_tile, of_k, of_v, (start_k + start + j).to(tl.int64), start, count_k,
                    low, high, row_max, total, acc, scale, k_row, v_row,
                    DIM, VALUE_DIM, KEY_TILE, WINDOW, True,
                )  # fmt: skip
            seen = total > 0
            divisor = tl.where(seen, total, 1.0)
            result = (acc / divisor[:, None]).to(out.dtype.element_ty)
            sums = tl.where(seen, row_max + tl.log(divisor), float("-inf"))
            if VARLEN:
                to = rows * heads + head
            else:
                to = (batch * heads + head) * tokens_q + rows
            to_out = out + to[:, None] * VALUE_DIM + e[None]
            if WHOLE:
                tl.store(lse + to, sums)
                tl.store(to_out, result)
            else:
                tl.store(lse + to, sums, mask=i < left)
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


def strides(x: Tensor) -> tuple[int, ...]:
    """(batch, head, row) of [B, H, N, D] or [T, H, D]."""
    return x.stride()[:3] if x.ndim == 4 else (0, x.stride(1), x.stride(0))


def config(kernel: str, *sizes: int, masked: bool) -> tune.Config:
    """The tiles for these head sizes: they are listed from the largest down."""
    found = tune.TABLE[kernel]
    least = 0 if max(sizes) <= 64 else 1 if max(sizes) <= 128 else 2
    return tune.choose(kernel, found[min(least, len(found) - 1) :], *sizes, masked)


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
    varlen = cu_seqlens_q is not None
    none = torch.empty(0, dtype=torch.int32, device=q.device)
    # packed rows take more of UB: the tiles of the next size
    sizes = q.shape[-1], v.shape[-1], 128 if varlen else 0
    tiles = config("fused_attention.attend", *sizes, masked=causal or window is not None)
    attend[(cores.cube(),)](
        q, k, v, none if cu_seqlens_q is None else cu_seqlens_q,
        none if cu_seqlens_k is None else cu_seqlens_k, out, lse,
        cu_seqlens_q.shape[0] - 1 if cu_seqlens_q is not None else q.shape[0],
        heads, heads // k.shape[1], q.shape[0 if varlen else 2], k.shape[0 if varlen else 2],
        min(window or 0, FARTHEST), q.shape[-1] ** -0.5 if sm_scale is None else sm_scale,
        *strides(q), *strides(k), *strides(v),
        DIM=q.shape[-1], VALUE_DIM=v.shape[-1], CAUSAL=causal, WINDOW=window is not None,
        VARLEN=varlen, WHOLE=not varlen and q.shape[2] % tiles.tiles["Q_TILE"] == 0,
        **tiles.keywords,
    )  # fmt: skip
    return out, lse
