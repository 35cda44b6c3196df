# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Gradients of attention from its log-sum-exp, in three kernels; every sum has one fixed order.

    P = exp(S - lse)   dS = P (grad_o v^T - delta)   delta = sum_d grad_o o - grad_lse

    row_sums     vector cores    delta and lse, a head's rows side by side
    grad_keys    cube + vector   a tile of keys, over the rows of all heads that share it
    grad_query   cube + vector   a tile of query rows, over its keys

Both gradients of a tile of keys accumulate in L0C, next to S and the product with v.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory
from ..common import cores, tune, tuples
from ..common.cores import tiled
from . import fused_attention
from .fused_attention import FARTHEST, Strides, config, in_turn, keys_of, piece_of, strides

unsupported = fused_attention.unsupported


@triton.jit
def within_tile(bound, start, KEY_TILE: tl.constexpr):
    """Which column of the tile that begins at `start` a row's bound is; as floats, which every
    build of the compiler compares as vectors."""
    return tl.minimum(tl.maximum(bound - start, 0), KEY_TILE).to(tl.float32)[:, None]


@tuples.jit(["batches", "heads", "tokens"])
def row_sums(
    grad_o,
    o,
    lse,
    grad_lse,
    delta,
    sums,
    batches,
    heads,
    tokens,
    g_stride: Strides,
    o_stride: Strides,
    VALUE_DIM: tl.constexpr,
    VARLEN: tl.constexpr,
    GRAD_LSE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A row that sees nothing gets the sum inf, so that its P is 0."""
    i, tiles = tiled(tokens, ROWS)
    e = tl.arange(0, VALUE_DIM)
    for work in range(tl.program_id(0), batches * heads * tiles, tl.num_programs(0)):
        of_head = work // tiles
        batch = (of_head // heads).to(tl.int64)
        head = (of_head % heads).to(tl.int64)
        first = work % tiles * ROWS
        there = i < tokens - first
        rows = (first + i).to(tl.int64)
        g = tl.load(
            grad_o
            + batch * g_stride.batch
            + head * g_stride.head
            + rows[:, None] * g_stride.row
            + e[None],
            mask=there[:, None],
            other=0.0,
        )
        x = tl.load(
            o
            + batch * o_stride.batch
            + head * o_stride.head
            + rows[:, None] * o_stride.row
            + e[None],
            mask=there[:, None],
            other=0.0,
        )
        total = tl.sum(g.to(tl.float32) * x.to(tl.float32), 1)
        to = of_head.to(tl.int64) * tokens + rows
        if VARLEN:
            at = rows * heads + head
        else:
            at = to
        if GRAD_LSE:
            total = total - tl.load(grad_lse + at, mask=there, other=0.0)
        known = tl.load(lse + at, mask=there, other=0.0)
        tl.store(delta + to, total, mask=there)
        tl.store(sums + to, tl.where(known > float("-inf"), known, float("inf")), mask=there)


@tuples.jit(["sequences", "heads", "key_heads", "tokens_q", "tokens_k", "window", "scale"])
def grad_keys(
    grad_o,
    q,
    k,
    v,
    delta,
    sums,
    starts_q,
    starts_k,
    grad_k,
    grad_v,
    sequences,
    heads,
    key_heads,
    tokens_q,
    tokens_k,
    window,
    scale,
    q_stride: Strides,
    k_stride: Strides,
    v_stride: Strides,
    g_stride: Strides,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    Q_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    set_workspace_multibuffer: tl.constexpr,
):
    VARLEN: tl.constexpr = starts_q is not None
    WINDOW: tl.constexpr = window is not None
    i = tl.arange(0, Q_TILE)
    j = tl.arange(0, KEY_TILE)
    column = j.to(tl.float32)[None]
    d = tl.arange(0, DIM)
    e = tl.arange(0, VALUE_DIM)
    group = heads // key_heads
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
            count_q = tl.where(live, count_q, 0)
        shift = count_k - count_q
        tiles = (count_k + KEY_TILE - 1) // KEY_TILE
        for work in range(turn, tiles * key_heads, turns):
            key_head = work // tiles
            first = in_turn(work % tiles, key_head, tiles, CAUSAL) * KEY_TILE
            there = (j < count_k - first)[:, None]
            keys = (start_k + first + j).to(tl.int64)
            of_k = k + batch * k_stride.batch + key_head.to(tl.int64) * k_stride.head
            of_v = v + batch * v_stride.batch + key_head.to(tl.int64) * v_stride.head
            k_tile = tl.load(of_k + keys[:, None] * k_stride.row + d[None], mask=there, other=0.0)
            v_tile = tl.load(of_v + keys[:, None] * v_stride.row + e[None], mask=there, other=0.0)
            acc_k = tl.zeros((KEY_TILE, DIM), tl.float32)
            acc_v = tl.zeros((KEY_TILE, VALUE_DIM), tl.float32)
            begin = 0
            end = count_q
            if CAUSAL:
                begin = tl.maximum(first - shift, 0)
            elif WINDOW:
                begin = tl.maximum(first - shift - window + 1, 0)
            if WINDOW:
                end = tl.minimum(count_q, first + KEY_TILE - 1 + window - shift)
            steps = (tl.maximum(end - begin, 0) + Q_TILE - 1) // Q_TILE
            for step in range(0, group * steps):
                head = key_head * group + step // steps
                start = begin + step % steps * Q_TILE
                known = i < count_q - start
                rows = (start_q + start + i).to(tl.int64)
                of_q = q + batch * q_stride.batch + head.to(tl.int64) * q_stride.head
                of_g = grad_o + batch * g_stride.batch + head.to(tl.int64) * g_stride.head
                of_row = (batch * heads + head) * tokens_q + rows
                q_tile = tl.load(
                    of_q + rows[:, None] * q_stride.row + d[None], mask=known[:, None], other=0.0
                )
                g_tile = tl.load(
                    of_g + rows[:, None] * g_stride.row + e[None], mask=known[:, None], other=0.0
                )
                lse = tl.load(sums + of_row, mask=known, other=float("inf"))
                of_delta = tl.load(delta + of_row, mask=known, other=0.0)
                p = tl.exp(tl.dot(q_tile, tl.trans(k_tile)) * scale - lse[:, None])
                if CAUSAL or WINDOW:
                    after = shift + start + i + (1 if CAUSAL else window)
                    p = tl.where(column < within_tile(after, first, KEY_TILE), p, 0.0)
                    if WINDOW:
                        low = shift + start + i - window + 1
                        p = tl.where(column >= within_tile(low, first, KEY_TILE), p, 0.0)
                acc_v = tl.dot(tl.trans(p.to(q_tile.dtype)), g_tile, acc_v)
                ds = p * (tl.dot(g_tile, tl.trans(v_tile)) - of_delta[:, None]) * scale
                acc_k = tl.dot(tl.trans(ds.to(q_tile.dtype)), q_tile, acc_k)
            if VARLEN:
                to = (keys * key_heads + key_head)[:, None]
            else:
                to = ((batch * key_heads + key_head) * tokens_k + keys)[:, None]
            tl.store(grad_k + to * DIM + d[None], acc_k.to(grad_k.dtype.element_ty), mask=there)
            tl.store(
                grad_v + to * VALUE_DIM + e[None], acc_v.to(grad_v.dtype.element_ty), mask=there
            )
        turn = ((turn - tiles * key_heads) % turns + turns) % turns


@triton.jit
def _along_keys(
    q_tile,
    g_tile,
    of_k,
    of_v,
    keys,
    start,
    count_k,
    low,
    high,
    lse,
    of_delta,
    acc,
    scale,
    k_row,
    v_row,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The gradient of a tile of rows, one tile of keys further."""
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
    p = tl.exp(tl.dot(q_tile, tl.trans(k_tile)) * scale - lse[:, None])
    if MASKED:
        # behind the tail as well: the exponential of -lse may be inf, and inf * 0 is NaN
        column = j.to(tl.float32)[None]
        p = tl.where(column < within_tile(high, start, KEY_TILE), p, 0.0)
        if WINDOW:
            p = tl.where(column >= within_tile(low, start, KEY_TILE), p, 0.0)
    ds = p * (tl.dot(g_tile, tl.trans(v_tile)) - of_delta[:, None]) * scale
    return tl.dot(ds.to(k_tile.dtype), k_tile, acc)


@tuples.jit(["sequences", "heads", "key_heads", "tokens_q", "tokens_k", "window", "scale"])
def grad_query(
    grad_o,
    q,
    k,
    v,
    delta,
    sums,
    starts_q,
    starts_k,
    grad_q,
    sequences,
    heads,
    key_heads,
    tokens_q,
    tokens_k,
    window,
    scale,
    q_stride: Strides,
    k_stride: Strides,
    v_stride: Strides,
    g_stride: Strides,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    Q_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
):
    VARLEN: tl.constexpr = starts_q is not None
    WINDOW: tl.constexpr = window is not None
    i = tl.arange(0, Q_TILE)
    j = tl.arange(0, KEY_TILE)
    d = tl.arange(0, DIM)
    e = tl.arange(0, VALUE_DIM)
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
        for work in range(turn, tiles * heads, turns):
            head = work // tiles
            first = in_turn(work % tiles, head, tiles, CAUSAL) * Q_TILE
            key_head = head // (heads // key_heads)
            left = count_q - first
            known = i < left
            rows = (start_q + first + i).to(tl.int64)
            of_q = q + batch * q_stride.batch + head.to(tl.int64) * q_stride.head
            of_g = grad_o + batch * g_stride.batch + head.to(tl.int64) * g_stride.head
            of_k = k + batch * k_stride.batch + key_head.to(tl.int64) * k_stride.head
            of_v = v + batch * v_stride.batch + key_head.to(tl.int64) * v_stride.head
            of_row = (batch * heads + head) * tokens_q + rows
            q_tile = tl.load(
                of_q + rows[:, None] * q_stride.row + d[None], mask=known[:, None], other=0.0
            )
            g_tile = tl.load(
                of_g + rows[:, None] * g_stride.row + e[None], mask=known[:, None], other=0.0
            )
            lse = tl.load(sums + of_row, mask=known, other=float("inf"))
            of_delta = tl.load(delta + of_row, mask=known, other=0.0)
            shared, end = keys_of(
                first, left, shift, count_k, window, CAUSAL, WINDOW, Q_TILE, KEY_TILE
            )
            position = shift + first + i
            low = position
            if WINDOW:
                low = position - window + 1
            # count_k, as a vector: a mask of keys alone keeps the vector units from sharing
            high = tl.minimum(position + count_q + count_k, count_k)
            if CAUSAL:
                high = tl.minimum(position + 1, count_k)
            elif WINDOW:
                high = tl.minimum(position + window, count_k)
            acc = tl.zeros((Q_TILE, DIM), tl.float32)
            if not WINDOW:
                for start in range(0, shared, KEY_TILE):
                    acc = _along_keys(
                        q_tile,
                        g_tile,
                        of_k,
                        of_v,
                        (start_k + start + j).to(tl.int64),
                        start,
                        count_k,
                        low,
                        high,
                        lse,
                        of_delta,
                        acc,
                        scale,
                        k_stride.row,
                        v_stride.row,
                        DIM,
                        VALUE_DIM,
                        KEY_TILE,
                        WINDOW,
                        False,
                    )
            # from 0: the compiler of January 2026 crashes where a loop begins at a window's edge
            for step in range(0, (tl.maximum(end - shared, 0) + KEY_TILE - 1) // KEY_TILE):
                start = shared + step * KEY_TILE
                acc = _along_keys(
                    q_tile,
                    g_tile,
                    of_k,
                    of_v,
                    (start_k + start + j).to(tl.int64),
                    start,
                    count_k,
                    low,
                    high,
                    lse,
                    of_delta,
                    acc,
                    scale,
                    k_stride.row,
                    v_stride.row,
                    DIM,
                    VALUE_DIM,
                    KEY_TILE,
                    WINDOW,
                    True,
                )
            if VARLEN:
                to = (rows * heads + head)[:, None]
            else:
                to = of_row[:, None]
            to = grad_q + to * DIM + d[None]
            tl.store(to, acc.to(grad_q.dtype.element_ty), mask=known[:, None])
        turn = ((turn - tiles * heads) % turns + turns) % turns


def backward(
    grad_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    causal: bool,
    sm_scale: float | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    window: int | None,
    deterministic: bool,
    grad_lse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_q, grad_k, grad_v = (memory.empty(x.shape, x.dtype, x.device) for x in (q, k, v))
    heads, key_heads = q.shape[1], k.shape[1]
    varlen = cu_seqlens_q is not None
    batches = 1 if varlen else q.shape[0]
    tokens_q, tokens_k = (x.shape[0 if varlen else 2] for x in (q, k))
    if q.numel() == 0 or k.numel() == 0:
        return grad_q.zero_(), grad_k.zero_(), grad_v.zero_()
    delta, sums = (
        memory.empty([batches, heads, tokens_q], torch.float32, q.device) for _ in range(2)
    )
    sizes = q.shape[-1], v.shape[-1]
    masked = causal or window is not None
    row_sums[(cores.vector(),)](
        grad_o,
        o,
        lse,
        lse if grad_lse is None else grad_lse,
        delta,
        sums,
        batches,
        heads,
        tokens_q,
        *strides(grad_o),
        *strides(o),
        VALUE_DIM=v.shape[-1],
        VARLEN=varlen,
        GRAD_LSE=grad_lse is not None,
        **tune.only("fused_attention_backward.row_sums").keywords,
    )
    inputs = (grad_o, q, k, v, delta, sums, cu_seqlens_q, cu_seqlens_k)
    scalars = (
        batches if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1,
        heads,
        key_heads,
        tokens_q,
        tokens_k,
        None if window is None else min(window, FARTHEST),
        q.shape[-1] ** -0.5 if sm_scale is None else sm_scale,
        *strides(q),
        *strides(k),
        *strides(v),
        *strides(grad_o),
    )
    flags = {"DIM": q.shape[-1], "VALUE_DIM": v.shape[-1], "CAUSAL": causal}
    grad_keys[(cores.cube(),)](
        *inputs,
        grad_k,
        grad_v,
        *scalars,
        **flags,
        **config("fused_attention_backward.grad_keys", *sizes, masked=masked).keywords,
    )
    grad_query[(cores.cube(),)](
        *inputs,
        grad_q,
        *scalars,
        **flags,
        **config("fused_attention_backward.grad_query", *sizes, masked=masked).keywords,
    )
    return grad_q, grad_k, grad_v
