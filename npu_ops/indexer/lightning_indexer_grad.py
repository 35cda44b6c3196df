# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Gradients of the indexer's selected scores, in three kernels; every sum has one fixed order.

    s[n, p] = query[n] . key[p]     d_weights[n] = sum_p g[p] relu(s[n, p])
    ds[n, p] = g[p] weights[n] [s > 0]     d_query = ds key     d_key = ds^T query

    spread       cube + vector   dy by slot -> g by position [T, reach], equal positions added up
    grad_keys    cube + vector   a tile of keys, over the tokens of its request that see it
    grad_query   cube + vector   a token's heads, over the keys it sees

Over positions, not over slots: keys are read as they lie, and a tile of d_key belongs to one core,
so that nothing is added to the same memory by two.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory
from ..common import cores, ragged, tiling, tune, tuples
from ..common.ragged import (
    TND,
    Layout,
    Requests,
    Strides,
    among,
    key_rows,
    keys_of,
    tokens_of,
    visible,
)
from .indexer_loss import usable

LOW = tl.constexpr(128)  # positions in a row of a tile of `spread`


@tuples.jit(["first", "rows", "count", "wide", "indices_row", "dy_row"])
def spread(
    dy,
    indices,
    g,
    first,
    rows,
    count,
    wide,
    indices_row,
    dy_row,
    of: Requests,
    layout: Layout,
    HIGH_TILE: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """g [T, wide], whole tiles.  There is no scatter, but with position = high * 128 + low the sum
    over the slots is a product: (high is the row's) times (the slot's dy where low is the
    column's).  The ones are exact, and so is the float32 cube with one term a place."""
    h = tl.arange(0, HIGH_TILE)
    p = tl.arange(0, LOW)
    j = tl.arange(0, SLOTS)
    of_high = h.to(tl.float32)[None]
    of_low = p.to(tl.float32)[None]
    tiles = wide // (HIGH_TILE * LOW)
    for work in range(tl.program_id(0), rows * tiles, tl.num_programs(0)):
        row = work // tiles
        tile = work % tiles * HIGH_TILE
        _, _, limit = visible(first + row, *of, *layout)
        selected = indices + (first + row).to(tl.int64) * indices_row
        of_row = dy + (first + row).to(tl.int64) * dy_row
        acc = tl.zeros((HIGH_TILE, LOW), tl.float32)
        for start in range(0, count, SLOTS):
            position = tl.load(selected + start + j, mask=j < count - start, other=-1)
            value = tl.load(of_row + start + j, mask=j < count - start, other=0.0)
            ok = usable(position, limit - 1)
            value = tl.where(ok > 0, value.to(tl.float32), 0.0)
            position = tl.where(ok > 0, position, 0)
            high = position // LOW
            low = (position - high * LOW).to(tl.float32)
            high = (high - tile).to(tl.float32)
            # slots by rows: of rows by slots build 1.1.0 shares none between the vector units
            ones = tl.where(of_high == high[:, None], 1.0, 0.0)
            values = tl.where(of_low == low[:, None], value[:, None], 0.0)
            acc = tl.dot(tl.trans(ones), values, acc)
        to = g + row.to(tl.int64) * wide + tile * LOW
        tl.store(to + h[:, None] * LOW + p[None], acc)


@tuples.jit(["first", "rows", "wide", "heads", "weights_row", "key_row", "page_rows"])
def grad_keys(
    query,
    key,
    weights,
    g,
    d_key,
    first,
    rows,
    wide,
    heads,
    q_stride: Strides,
    weights_row,
    key_row,
    page_rows,
    of: Requests,
    layout: Layout,
    DIM: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
):
    """d_key [keys, DIM], float32: what `rows` tokens from `first` on contribute.  Added up over
    launches outside: a load of earlier sums keeps the vector units from sharing the tile."""
    p = tl.arange(0, KEY_TILE)
    d = tl.arange(0, DIM)
    turn = tl.program_id(0)
    turns = tl.num_programs(0)
    steps_of_token = (heads + HEAD_TILE - 1) // HEAD_TILE
    for request in range(0, of.requests):
        token, count = tokens_of(
            request, of.query_lengths, of.requests, of.tokens, layout.Q_TND, layout.Q_LENGTHS
        )
        start, keys = keys_of(request, of.key_lengths, of.reach, layout.KEYS, layout.K_LENGTHS)
        low, high = among(token, count, first, rows)
        tiles = tl.where(high > low, (keys + KEY_TILE - 1) // KEY_TILE, 0)
        for tile in range(turn, tiles, turns):
            position = tile * KEY_TILE
            row, to = key_rows(request, start, position, page_rows, of.reach, layout.KEYS)
            there = (p < keys - position)[:, None]
            k = tl.load(key + (row + p)[:, None] * key_row + d[None], mask=there, other=0.0)
            begin = low
            if layout.CAUSAL:
                # earlier tokens see no key of this tile
                begin = tl.maximum(low, position - keys + count)
            acc = tl.zeros((KEY_TILE, DIM), tl.float32)
            for step in range(0, tl.maximum(high - begin, 0) * steps_of_token):
                t = token + begin + step // steps_of_token
                h = step % steps_of_token * HEAD_TILE + tl.arange(0, HEAD_TILE)
                q = tl.load(
                    query + t.to(tl.int64) * q_stride.row + h[:, None] * q_stride.head + d[None],
                    mask=(h < heads)[:, None],
                    other=0.0,
                )
                w = tl.load(weights + t.to(tl.int64) * weights_row + h, mask=h < heads, other=0.0)
                grad = tl.load(g + (t - first).to(tl.int64) * wide + position + p)
                s = tl.dot(q, tl.trans(k))  # [HEAD_TILE, KEY_TILE]
                ds = tl.where(s > 0, grad[None] * w.to(tl.float32)[:, None], 0.0)
                acc = tl.dot(tl.trans(ds.to(q.dtype)), q, acc)
            tl.store(d_key + (to + p)[:, None] * DIM + d[None], acc, mask=there)
        turn = ((turn - tiles) % turns + turns) % turns


@tuples.jit(["first", "rows", "wide", "heads", "weights_row", "key_row", "page_rows"])
def grad_query(
    query,
    key,
    weights,
    g,
    d_query,
    d_weights,
    first,
    rows,
    wide,
    heads,
    q_stride: Strides,
    weights_row,
    key_row,
    page_rows,
    of: Requests,
    layout: Layout,
    DIM: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
):
    p = tl.arange(0, KEY_TILE)
    d = tl.arange(0, DIM)
    tiles = (heads + HEAD_TILE - 1) // HEAD_TILE
    for work in range(tl.program_id(0), rows * tiles, tl.num_programs(0)):
        row = work // tiles
        token = (first + row).to(tl.int64)
        h = work % tiles * HEAD_TILE + tl.arange(0, HEAD_TILE)
        request, start, limit = visible(first + row, *of, *layout)
        if layout.KEYS == TND:
            origin = start.to(tl.int64)
        else:
            origin = request.to(tl.int64) * page_rows
        known = (h < heads)[:, None]
        q = tl.load(
            query + token * q_stride.row + h[:, None] * q_stride.head + d[None],
            mask=known,
            other=0.0,
        )
        w = tl.load(weights + token * weights_row + h, mask=h < heads, other=0.0).to(tl.float32)
        acc = tl.zeros((HEAD_TILE, DIM), tl.float32)
        total = tl.zeros((HEAD_TILE,), tl.float32)
        for position in range(0, limit, KEY_TILE):
            k = tl.load(
                key + (origin + position + p)[:, None] * key_row + d[None],
                mask=(p < limit - position)[:, None],
                other=0.0,
            )
            grad = tl.load(g + row.to(tl.int64) * wide + position + p)
            s = tl.dot(q, tl.trans(k))  # [HEAD_TILE, KEY_TILE]
            seen = tl.where(s > 0, grad[None], 0.0)
            # not s itself: where it is -inf, 0 times it is NaN
            relu = tl.maximum(s, 0.0, propagate_nan=tl.PropagateNan.ALL)
            total += tl.sum(relu * seen, 1)
            ds = seen * w[:, None]
            acc = tl.dot(ds.to(k.dtype), k, acc)
        to = d_query + (token * heads + h[:, None]) * DIM + d[None]
        tl.store(to, acc.to(d_query.dtype.element_ty), mask=known)
        tl.store(
            d_weights + token * heads + h, total.to(d_weights.dtype.element_ty), mask=h < heads
        )


def unsupported(query: Tensor, key: Tensor, dy: Tensor, **_: Any) -> str | None:
    if reason := tiling.not_multiplied(query=query):
        return reason
    size = query.shape[-1]
    if size % 16 or size > 128:
        return f"head size {size}, the kernel takes multiples of 16 up to 128"
    if key.shape[-3] > ragged.LONGEST:
        return f"contexts of up to {key.shape[-3]} positions, the kernel reaches {ragged.LONGEST}"
    return ragged.uneven(key=key)


def spread_width(plan: ragged.Plan) -> int:
    """A row of g: what a context can hold, in whole tiles."""
    (config,) = tune.TABLE["lightning_indexer_grad.spread"]
    return tiling.up(plan.reach, config.tiles["HIGH_TILE"] * LOW.value)


def spread_over(
    dy: Tensor, dy_row: int, indices: Tensor, g: Tensor, plan: ragged.Plan, first: int, rows: int
) -> None:
    """g [at least `rows`, spread_width] of `rows` tokens from `first` on; dy and indices [T, K]."""
    spread[(cores.cube(),)](
        dy,
        indices,
        g=g,
        first=first,
        rows=rows,
        count=indices.shape[-1],
        wide=g.shape[1],
        indices_row=indices.stride(0),
        dy_row=dy_row,
        **plan.requests,
        **plan.flags,
        **tune.only("lightning_indexer_grad.spread").keywords,
    )


def backward(
    query: Tensor,
    key: Tensor,
    dy: Tensor,
    sparse_indices: Tensor,
    weights: Tensor,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_key: Tensor | None,
    layout: str | None,
    sparse_mode: int | None,
    pre_tokens: int | None,
    next_tokens: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    layout = layout or "BSND"
    plan = ragged.plan(
        query,
        key,
        actual_seq_lengths_query,
        actual_seq_lengths_key,
        None,
        layout,
        layout,
        3 if sparse_mode is None else sparse_mode,
    )
    device, (heads, dim) = query.device, query.shape[-2:]
    d_query = memory.empty(query.shape, query.dtype, device)
    d_weights = memory.empty(weights.shape, weights.dtype, device)
    # keys behind the lengths belong to no tile
    sums = memory.empty(key.shape, torch.float32, device).zero_()
    if query.numel() == 0 or key.numel() == 0 or dy.numel() == 0:
        return d_query.zero_(), sums.to(key.dtype), d_weights.zero_()
    products = tune.at_least("lightning_indexer_grad.grad_keys", "HEAD_TILE", heads, dim)
    wide = spread_width(plan)
    at_once = tiling.at_once(plan.rows, wide * 4)
    g = memory.empty((at_once, wide), torch.float32, device)
    indices = ragged.int32(sparse_indices).flatten(0, -3)
    grad, q, w = dy.flatten(0, -3), query.flatten(0, -3), weights.flatten(0, -2)
    strides = dict(
        q_stride_row=q.stride(0),
        q_stride_head=q.stride(1),
        weights_row=w.stride(0),
        key_row=ragged.row_stride(key),
        page_rows=ragged.page_rows(key),
    )
    for first in range(0, plan.rows, at_once):
        rows = min(at_once, plan.rows - first)
        spread_over(grad, grad.stride(0), indices, g, plan, first, rows)
        shared = dict(first=first, rows=rows, wide=wide, heads=heads, DIM=dim) | strides
        part = sums if first == 0 else torch.zeros_like(sums)
        grad_keys[(cores.cube(),)](
            q,
            key,
            w,
            g,
            d_key=part,
            **shared,
            **plan.requests,
            **plan.flags,
            **products.keywords,
        )
        if first > 0:
            sums += part
        grad_query[(cores.cube(),)](
            q,
            key,
            w,
            g,
            d_query=d_query,
            d_weights=d_weights,
            **shared,
            **plan.requests,
            **plan.flags,
            **tune.at_least("lightning_indexer_grad.grad_query", "HEAD_TILE", heads, dim).keywords,
        )
    return d_query, sums.to(key.dtype), d_weights
