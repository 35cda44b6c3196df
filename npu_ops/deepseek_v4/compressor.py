# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Entries of windows of m tokens, the state of those tokens, and the pages of both; see
dispatch/reference/deepseek_v4/compressor.py.

    project   cube     kv and z of every token, in parts of the depth
    normalise vector   the LayerNorm of kv, if there is one
    pool      vector   C of the windows that close, by blocks of channels: history and own tokens
    finish    vector   norm, rotation, the output and the entries' pages
    keep      vector   the states of this call's tokens

Two compressors of the same tokens, of entries and of index keys, are one launch each but for
`finish`: their products lie one beside the other, and so does what is pooled.

`pool` alone reads states and `keep` alone writes them, behind it: however often a launch is begun
anew, history is what it was before the call.  Positions are scalars of 64 bits.  A page or a window
that is not there makes empty copies: the mask is a bound on their length.  Without a gate, `ape`
None, every z is 0, and no product and no state has one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import compressed, memory
from ...dispatch.ops.deepseek_v4.compressor import Arguments
from ..common import cores, entry, quantize, ragged, tiling, tune
from ..common.cores import tiled, turn
from ..common.front_end import insert_slice
from ..common.lengths import within

HALVES = tl.constexpr(compressed.HALVES)  # how channels turn
FULL_PAIRS = tl.constexpr(3)  # pairs, of whose angles every second one counts
_PARTS = 8  # of the depth, at most
_CHANNELS = 2048  # of an entry, which UB holds at once


@triton.jit
def _products(
    x,
    w,
    out,
    width,
    first,
    rows,
    depth,
    parts,
    x_row,
    w_row,
    out_row,
    out_part,
    WHOLE_M: tl.constexpr,
    WHOLE_N: tl.constexpr,
    WHOLE_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """x [rows, depth] by the rows of w, of which core `first` takes the first tile; the core where
    they end."""
    d = tl.arange(0, DEPTH)
    across = (width + COLUMNS - 1) // COLUMNS
    tiles = (rows + ROWS - 1) // ROWS * across
    span = (depth + parts - 1) // parts
    for work in range(turn(first), tiles * parts, tl.num_programs(0)):
        part = work // tiles
        tile = work % tiles
        row = tile // across * ROWS + tl.arange(0, ROWS)
        column = tile % across * COLUMNS + tl.arange(0, COLUMNS)
        m = (row < rows)[:, None]
        n = column < width
        row = row.to(tl.int64)[:, None]
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in range(0, span, DEPTH):
            k = part * span + step
            of_x = x + row * x_row + (k + d)[None]
            of_w = w + column.to(tl.int64)[:, None] * w_row + (k + d)[None]
            if WHOLE_M and WHOLE_K:
                x_tile = tl.load(of_x)
            elif WHOLE_K:
                x_tile = tl.load(of_x, mask=m, other=0.0)
            else:
                x_tile = tl.load(of_x, mask=m & (d < depth - k)[None], other=0.0)
            if WHOLE_N and WHOLE_K:
                w_tile = tl.load(of_w)
            else:
                w_tile = tl.load(of_w, mask=n[:, None] & (d < depth - k)[None], other=0.0)
            acc = tl.dot(x_tile, tl.trans(w_tile), acc)
        to = out + part.to(tl.int64) * out_part + row * out_row + column[None]
        tl.store(to, acc, mask=m & n[None])
    return (first + tiles * parts) % tl.num_programs(0)


@entry.jit(
    do_not_specialize=[
        "width", "next_width", "first", "rows", "depth", "parts", "x_row", "kv_row", "gate_row",
        "next_kv_row", "next_gate_row", "out_part",
    ]
)  # fmt: skip
def project(
    x,
    wkv,
    wgate,
    next_kv,
    next_gate,
    out,
    width,
    next_width,
    first,
    rows,
    depth,
    parts,
    x_row,
    kv_row,
    gate_row,
    next_kv_row,
    next_gate_row,
    out_part,
    WHOLE_M: tl.constexpr,
    WHOLE_N: tl.constexpr,
    WHOLE_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """out [parts, rows, kv and z of `width` each, those of `next_width`], whose sum over the parts
    is the product."""
    out_row = width + next_width
    if wgate is not None:
        out_row = 2 * out_row
    first = _products(
        x,
        wkv,
        out,
        width,
        first,
        rows,
        depth,
        parts,
        x_row,
        kv_row,
        out_row,
        out_part,
        WHOLE_M,
        WHOLE_N,
        WHOLE_K,
        ROWS,
        COLUMNS,
        DEPTH,
    )
    if wgate is not None:
        first = _products(
            x,
            wgate,
            out + width,
            width,
            first,
            rows,
            depth,
            parts,
            x_row,
            gate_row,
            out_row,
            out_part,
            WHOLE_M,
            WHOLE_N,
            WHOLE_K,
            ROWS,
            COLUMNS,
            DEPTH,
        )
    if next_kv is not None:
        of_next = out + 2 * width
        first = _products(
            x,
            next_kv,
            of_next,
            next_width,
            first,
            rows,
            depth,
            parts,
            x_row,
            next_kv_row,
            out_row,
            out_part,
            WHOLE_M,
            WHOLE_N,
            WHOLE_K,
            ROWS,
            COLUMNS,
            DEPTH,
        )
        _products(
            x,
            next_gate,
            of_next + next_width,
            next_width,
            first,
            rows,
            depth,
            parts,
            x_row,
            next_gate_row,
            out_row,
            out_part,
            WHOLE_M,
            WHOLE_N,
            WHOLE_K,
            ROWS,
            COLUMNS,
            DEPTH,
        )


@triton.jit
def _floor(a, m):
    """a // m of numbers of either sign, in 64 bits."""
    q = a // m
    return tl.where(a - q * m < 0, q - 1, q)


@triton.jit
def _span(r, bounds, used, starts, tokens, PACKED: tl.constexpr):
    """(row of x, position, number) of the tokens of a request; x has `tokens` for each of them, or
    for all."""
    if PACKED:
        first = within(bounds + r, tokens)
        count = tl.maximum(within(bounds + r + 1, tokens) - first, 0)
    else:
        first = r * tokens
        count = tokens + 0 * r
    if used is not None:
        count = within(used + r, count)
    start = r.to(tl.int64) * 0
    if starts is not None:
        start += tl.load(starts + r)
    return first, start, count


@triton.jit
def _closing(r, bounds, used, starts, tokens, ratio, PACKED: tl.constexpr):
    """(the first window of a request that may close, how many do)"""
    _, start, count = _span(r, bounds, used, starts, tokens, PACKED)
    low = tl.maximum(_floor(start, ratio), 0)
    return low, tl.maximum(_floor(start + count, ratio) - low, 0)


@triton.jit
def _window(
    row, request, before, each, bounds, used, starts, tokens, requests, ratio, PACKED: tl.constexpr
):
    """(request, the rows of all before it, window) of an output row, `each` rows a request if not
    packed, else behind a row of `request`; window -1: none closes."""
    if PACKED:
        low, closed = _closing(request, bounds, used, starts, tokens, ratio, PACKED)
        while (before + closed <= row) & (request < requests - 1):
            before += closed
            request += 1
            low, closed = _closing(request, bounds, used, starts, tokens, ratio, PACKED)
        number = tl.where(row < before + closed, low + row - before, -1)
    else:
        request = row // each
        _, start, count = _span(request, bounds, used, starts, tokens, PACKED)
        number = _floor(start, ratio) + row % each
        number = tl.where(number < _floor(start + count, ratio), number, -1)
    return request, before, number


@triton.jit
def _pooled(kv, z, there, top, total, acc):
    """The running maximum, sum and value of channels, with the tokens of a tile that are there."""
    z = tl.where(there, z, float("-inf"))
    peak = tl.maximum(top, tl.max(z, 0))
    base = tl.where(peak == float("-inf"), 0.0, peak)
    share = tl.exp(z - base[None])
    kept = tl.exp(top - base)
    return peak, total * kept + tl.sum(share, 0), acc * kept + tl.sum(share * kv, 0)


@triton.jit
def _added(product, at, mask, parts, out_part):
    total = tl.load(product + at, mask=mask, other=0.0)
    for i in range(1, parts):
        total += tl.load(product + i.to(tl.int64) * out_part + at, mask=mask, other=0.0)
    return total


@triton.jit
def _within(x, most):
    """x from 0 to `most`, as int32."""
    return tl.minimum(tl.maximum(x, 0), most).to(tl.int32)


@triton.jit
def _own(x, next_x, of_next):
    """`x`, or from it on to `next_x`: a selected pointer does not lower, its distance does."""
    return x + tl.where(of_next, (next_x.to(tl.int64) - x.to(tl.int64)) // 4, 0)


@entry.jit(
    do_not_specialize=[
        "tokens", "requests", "each", "rows", "size", "next_size", "ratio", "parts", "out_part",
        "state_page", "next_state_page", "table_row", "columns", "pages", "page",
    ]
)  # fmt: skip
def pool(
    product,
    ape,
    next_ape,
    state,
    next_state,
    table,
    bounds,
    used,
    starts,
    out,
    tokens,
    requests,
    each,
    rows,
    size,
    next_size,
    ratio,
    parts,
    out_part,
    state_page,
    next_state_page,
    table_row,
    columns,
    pages,
    page,
    PACKED: tl.constexpr,
    COFF: tl.constexpr,
    RING: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """out [rows, size + next_size]; rows of windows that do not close are left as they are."""
    r = tl.arange(0, ROWS)
    d, tiles = tiled(size, CHANNELS)
    all_tiles = tiles + (next_size + CHANNELS - 1) // CHANNELS
    of_token = COFF * (size + next_size)
    if ape is not None:
        of_token = 2 * of_token
    own_size = size
    of_product = product
    of_ape = ape
    of_state = state
    own_page = state_page
    to_row = out
    request = 0
    before = tl.program_id(0).to(tl.int64) * 0
    for work in range(tl.program_id(0), rows * all_tiles, tl.num_programs(0)):
        row = work // all_tiles
        tile = work % all_tiles
        if next_ape is not None:
            of_next = tile >= tiles
            tile -= tl.where(of_next, tiles, 0)
            own_size = tl.where(of_next, next_size, size)
            of_product = product + tl.where(of_next, 2 * COFF * size, 0)
            of_ape = _own(ape, next_ape, of_next)
            if state is not None:
                of_state = _own(state, next_state, of_next)
                own_page = tl.where(of_next, next_state_page, state_page)
            to_row = out + tl.where(of_next, size, 0)
        first_d = tile * CHANNELS
        width = COFF * own_size
        of_state_row = width
        if ape is not None:
            of_state_row = 2 * width
        request, before, number = _window(
            row, request, before, each, bounds, used, starts, tokens, requests, ratio, PACKED
        )
        first, start, count = _span(request, bounds, used, starts, tokens, PACKED)
        on_d = (d < tl.where(number >= 0, own_size - first_d, 0))[None]
        last = tl.where(number >= 0, ratio, 0)
        top = tl.full((CHANNELS,), float("-inf"), tl.float32)
        total = tl.zeros((CHANNELS,), tl.float32)
        acc = tl.zeros((CHANNELS,), tl.float32)
        for half in tl.static_range(COFF):
            base = (number - (COFF - 1) + half) * ratio
            channel = half * own_size + first_d + d[None]
            begin = _within(-base, last)
            own = tl.maximum(_within(start - base, last), begin)
            end = _within(start + count - base, last)
            if state is not None:
                # page by page
                column = (base + begin) // page
                pieces = tl.where(own > begin, (base + own - 1) // page - column + 1, 0)
                for piece in range(0, pieces.to(tl.int32)):
                    at_page = (column + piece) * page - base
                    if RING:
                        slot = (column + piece) % columns
                    else:
                        slot = column + piece
                    there = slot < columns
                    number_of = tl.load(
                        table + request.to(tl.int64) * table_row + tl.where(there, slot, 0)
                    )
                    there = there & (number_of >= 0) & (number_of < pages)
                    of_page = of_state + tl.where(there, number_of, 0).to(tl.int64) * own_page
                    low = tl.maximum(at_page, begin).to(tl.int32)
                    high = tl.where(there, tl.minimum(at_page + page, own), 0).to(tl.int32)
                    for i in range(low, high, ROWS):
                        at = (i - at_page + r)[:, None] * of_state_row + channel
                        on = (r < high - i)[:, None]
                        kv = tl.load(of_page + at, mask=on & on_d, other=0.0)
                        if ape is not None:
                            z = tl.load(of_page + at + width, mask=on & on_d, other=0.0)
                        else:
                            z = tl.zeros((ROWS, CHANNELS), tl.float32)
                        top, total, acc = _pooled(kv, z, on, top, total, acc)
            for i in range(own, end, ROWS):
                at = (first + base - start + i + r)[:, None] * of_token + channel
                on = (r < end - i)[:, None]
                kv = _added(of_product, at, on & on_d, parts, out_part)
                if ape is not None:
                    z = _added(of_product, at + width, on & on_d, parts, out_part)
                    of_row = of_ape + (i + r)[:, None] * width + channel
                    z += tl.load(of_row, mask=on & on_d, other=0.0)
                else:
                    z = tl.zeros((ROWS, CHANNELS), tl.float32)
                top, total, acc = _pooled(kv, z, on, top, total, acc)
        to = to_row + row.to(tl.int64) * (size + next_size) + first_d + d
        tl.store(to, acc / total, mask=d < tl.where(number >= 0, own_size - first_d, 0))


@triton.jit
def _both(x, there, SIZE: tl.constexpr, PAIRS: tl.constexpr):
    """The two channels that each angle turns, [SIZE / 2] each."""
    if PAIRS:
        of_pair = tl.load(x + tl.arange(0, SIZE), mask=tl.arange(0, SIZE) < there, other=0.0)
        left, right = tl.split(of_pair.reshape(SIZE // 2, 2))
    else:
        h = tl.arange(0, SIZE // 2)
        left = tl.load(x + h, mask=h < there, other=0.0)
        right = tl.load(x + SIZE // 2 + h, mask=h < there, other=0.0)
    return left, right


@triton.jit
def _angle(x, SIZE: tl.constexpr, FULL: tl.constexpr):
    """One for each pair; FULL: the even ones of SIZE numbers."""
    if FULL:
        angle, _ = tl.split(tl.load(x + tl.arange(0, SIZE)).reshape(SIZE // 2, 2))
    else:
        angle = tl.load(x + tl.arange(0, SIZE // 2))
    return angle.to(tl.float32)


@entry.jit(
    do_not_specialize=[
        "tokens", "requests", "each", "rows", "ratio", "pooled_row", "angle_row", "epsilon",
        "values_page", "scales_page", "table_row", "columns", "pages", "page",
    ]
)  # fmt: skip
def finish(
    pooled,
    gamma,
    sin,
    cos,
    bounds,
    used,
    starts,
    out,
    values,
    scales,
    table,
    tokens,
    requests,
    each,
    rows,
    ratio,
    pooled_row,
    angle_row,
    epsilon,
    values_page,
    scales_page,
    table_row,
    columns,
    pages,
    page,
    PACKED: tl.constexpr,
    SIZE: tl.constexpr,
    ROTARY: tl.constexpr,
    TURN: tl.constexpr,
    FIRST: tl.constexpr,
):
    """TURN: HALVES, PAIRS or FULL_PAIRS; FIRST: the first channels turn."""
    PLAIN: tl.constexpr = SIZE - ROTARY
    AT: tl.constexpr = 0 if FIRST else PLAIN
    BESIDE: tl.constexpr = ROTARY if FIRST else 0
    PAIRS: tl.constexpr = TURN != HALVES
    FULL: tl.constexpr = TURN == FULL_PAIRS
    e = tl.arange(0, SIZE)
    one = tl.arange(0, 1)
    request = 0
    before = tl.program_id(0).to(tl.int64) * 0
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        request, before, number = _window(
            row, request, before, each, bounds, used, starts, tokens, requests, ratio, PACKED
        )
        closes = number >= 0
        at = row.to(tl.int64) * pooled_row
        squares = 0.0
        if PLAIN > 0:
            d = tl.arange(0, PLAIN)
            of_plain = pooled + at + BESIDE + d
            plain = tl.load(of_plain, mask=d < tl.where(closes, PLAIN, 0), other=0.0)
            squares += tl.sum(plain * plain, 0)
        if ROTARY > 0:
            there = tl.where(closes, ROTARY if PAIRS else ROTARY // 2, 0)
            left, right = _both(pooled + at + AT, there, ROTARY, PAIRS)
            squares += tl.sum(left * left, 0) + tl.sum(right * right, 0)
        if gamma is not None:
            scale = 1.0 / tl.sqrt(squares / SIZE + epsilon)
            if PLAIN > 0:
                plain = plain * scale * tl.load(gamma + BESIDE + d)
            if ROTARY > 0:
                g0, g1 = _both(gamma + AT, ROTARY, ROTARY, PAIRS)
                left = left * scale * g0
                right = right * scale * g1
        if ROTARY > 0:
            s = _angle(sin + row.to(tl.int64) * angle_row, ROTARY, FULL)
            c = _angle(cos + row.to(tl.int64) * angle_row, ROTARY, FULL)
            turned = left * c - right * s
            right = right * c + left * s
            u = tl.zeros((SIZE,), tl.float32)
            if PLAIN > 0:
                u = insert_slice(u, plain, (BESIDE,), (PLAIN,), (1,))
            if PAIRS:
                both = tl.join(turned, right).reshape(ROTARY)
                u = insert_slice(u, both, (AT,), (ROTARY,), (1,))
            else:
                u = insert_slice(u, turned, (AT,), (ROTARY // 2,), (1,))
                u = insert_slice(u, right, (AT + ROTARY // 2,), (ROTARY // 2,), (1,))
        else:
            u = plain
        if out is not None:
            tl.store(out + row.to(tl.int64) * SIZE + e, u.to(out.dtype.element_ty))
        if values is not None:
            slot = tl.maximum(number, 0) // page
            there = closes & (slot < columns)
            entry_of = tl.load(table + request.to(tl.int64) * table_row + tl.where(there, slot, 0))
            there = there & (entry_of >= 0) & (entry_of < pages)
            outer = tl.where(there, entry_of, 0).to(tl.int64)
            inner = tl.maximum(number, 0) % page
            if scales is not None:
                by = tl.max(tl.abs(u), 0) / 127.0
                u = quantize.rounded(u / quantize.divisor(by))
                by = quantize.stored(tl.zeros((1,), tl.float32) + by, scales.dtype.element_ty)
                of_scale = scales + outer * scales_page + inner + one
                tl.store(of_scale, by, mask=one < tl.where(there, 1, 0))
            to = values + outer * values_page + inner * SIZE + e
            tl.store(to, u.to(values.dtype.element_ty), mask=e < tl.where(there, SIZE, 0))


@entry.jit(
    do_not_specialize=[
        "tokens", "requests", "rows", "size", "next_size", "ratio", "parts", "out_part",
        "state_page", "next_state_page", "table_row", "columns", "pages", "page",
    ]
)  # fmt: skip
def keep(
    product,
    ape,
    next_ape,
    state,
    next_state,
    table,
    bounds,
    used,
    starts,
    tokens,
    requests,
    rows,
    size,
    next_size,
    ratio,
    parts,
    out_part,
    state_page,
    next_state_page,
    table_row,
    columns,
    pages,
    page,
    PACKED: tl.constexpr,
    COFF: tl.constexpr,
    RING: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The states of all tokens, or of those that a ring has room for."""
    w = tl.arange(0, WIDTH)
    tiles = (COFF * size + WIDTH - 1) // WIDTH
    all_tiles = tiles + (COFF * next_size + WIDTH - 1) // WIDTH
    of_token = COFF * (size + next_size)
    if ape is not None:
        of_token = 2 * of_token
    width = COFF * size
    of_product = product
    of_ape = ape
    of_state = state
    own_page = state_page
    for work in range(tl.program_id(0), rows * all_tiles, tl.num_programs(0)):
        token = work // all_tiles
        tile = work % all_tiles
        if next_ape is not None:
            of_next = tile >= tiles
            tile -= tl.where(of_next, tiles, 0)
            width = COFF * tl.where(of_next, next_size, size)
            of_product = product + tl.where(of_next, 2 * COFF * size, 0)
            of_ape = _own(ape, next_ape, of_next)
            of_state = _own(state, next_state, of_next)
            own_page = tl.where(of_next, next_state_page, state_page)
        at = tile * WIDTH
        if PACKED:
            request = ragged.request_of(token, bounds + 1, requests, tokens, True)
            inside = request < requests
            request = tl.minimum(request, requests - 1)
        else:
            request = token // tokens
            inside = request < requests
        first, start, count = _span(request, bounds, used, starts, tokens, PACKED)
        j = token - first
        position = start + j
        there = inside & (j >= 0) & (j < count) & (position >= 0)
        column = tl.maximum(position, 0) // page
        if RING:
            there = there & (position >= start + count - columns.to(tl.int64) * page)
            column = column % columns
        there = there & (column < columns)
        number = tl.load(table + request.to(tl.int64) * table_row + tl.where(there, column, 0))
        there = there & (number >= 0) & (number < pages)
        on = w < tl.where(there, width - at, 0)
        of_page = of_state + tl.where(there, number, 0).to(tl.int64) * own_page
        from_ = token.to(tl.int64) * of_token + at + w
        inner = tl.maximum(position, 0) % page
        if ape is not None:
            to = of_page + inner * (2 * width) + at + w
            z = _added(of_product, from_ + width, on, parts, out_part)
            of_row = of_ape + tl.maximum(position, 0) % ratio * width + at + w
            z += tl.load(of_row, mask=on, other=0.0)
            tl.store(to + width, z, mask=on)
        else:
            to = of_page + inner * width + at + w
        tl.store(to, _added(of_product, from_, on, parts, out_part), mask=on)


@entry.jit(do_not_specialize=["rows", "parts", "row_length", "out_part", "epsilon"])
def normalise(
    product,
    out,
    weight,
    bias,
    rows,
    parts,
    row_length,
    out_part,
    epsilon,
    GATED: tl.constexpr,
    SIZE: tl.constexpr,
):
    """out [rows, kv, and z if GATED]: the LayerNorm of kv, and z, of what the parts add up to."""
    d = tl.arange(0, SIZE)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = row.to(tl.int64) * row_length + d
        kv = _added(product, at, d < SIZE, parts, out_part)
        kv = kv - tl.sum(kv, 0) / SIZE
        kv = kv * (1.0 / tl.sqrt(tl.sum(kv * kv, 0) / SIZE + epsilon))
        tl.store(out + at, kv * tl.load(weight + d) + tl.load(bias + d))
        if GATED:
            tl.store(out + at + SIZE, _added(product, at + SIZE, d < SIZE, parts, out_part))


def _cut(rows: int, widths: list[int], depth: int, sides: int) -> tuple[tune.Config, int]:
    """Tiles, and the parts of the depth with which a core of 24 reads the least: from the shapes
    alone, like all that decides about a sum."""
    table = tune.TABLE["compressor.project"]
    tallest = max(config.tiles["ROWS"] for config in table)
    found = tune.ranked(table, "ROWS", min(rows, tallest))
    config = tune.choose("compressor.project", found)
    step = config.tiles["DEPTH"]
    tiles = tile_count(rows, widths, config, sides)

    def cost(n: int) -> int:
        return triton.cdiv(n * tiles, tiling.A3.cube_cores) * triton.cdiv(depth, n)

    return config, min([1, *(n for n in range(2, _PARTS + 1) if depth % (n * step) == 0)], key=cost)


def tile_count(rows: int, widths: list[int], config: tune.Config, sides: int = 2) -> int:
    """`sides`: 2, kv and z; 1 without a gate."""
    across = sum(triton.cdiv(width, config.tiles["COLUMNS"]) for width in widths)
    return sides * triton.cdiv(rows, config.tiles["ROWS"]) * across


class Own(NamedTuple):
    """What each of two compressors of the same tokens has for itself."""

    wkv: Tensor
    wgate: Tensor | None
    state_cache: Tensor
    ape: Tensor | None
    norm_weight: Tensor | None
    cmp_cache: Tensor | None
    cmp_scale_cache: Tensor | None


def unsupported(
    x: Tensor, wkv: Tensor, coff: int, kind: str, hadamard: bool, **_: Any
) -> str | None:
    size = compressed.channels(wkv, coff)
    if size % 16 or size > _CHANNELS:
        return f"entries have {size} channels, the kernels take multiples of 16 up to {_CHANNELS}"
    if hadamard:
        return "hadamard=True: the transform has no kernel for the NPU yet"
    return (None if kind == "none" else quantize.only_int8(kind)) or tiling.not_multiplied(x=x)


class Call:
    """Of a compressor, or of two of the same tokens: what each launch takes besides its tiles.

    `second`: its states lie in the same pages; of what it makes only the pages.
    """

    def __init__(self, second: Own | None = None, **a: Unpack[Arguments]) -> None:
        x, wkv, wgate, coff, ratio = a["x"], a["wkv"], a["wgate"], a["coff"], a["cmp_ratio"]
        cu_seqlens, state_cache = a["cu_seqlens"], a["state_cache"]
        state_table, table = a["state_block_table"], a["cmp_block_table"]
        assert state_table is not None  # the check said so
        size, shape = compressed.channels(wkv, coff), compressed.rows(x, cu_seqlens, ratio)
        self.returned = a["return_cmp_kv"]
        self.out = memory.empty((*shape, size) if self.returned else (0,), x.dtype, x.device)
        self.flat = x.reshape(-1, x.shape[-1])
        self.rows, self.depth = self.flat.shape
        packed = cu_seqlens is not None
        requests = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        self.nothing = self.rows * requests * size == 0
        caches = a["cmp_cache"], a["cmp_scale_cache"]
        first = Own(wkv, wgate, state_cache, a["ape"], a["norm_weight"], *caches)
        self.owns = [first] if second is None else [first, second]
        self.sizes = [compressed.channels(own.wkv, coff) for own in self.owns]
        self.widths = [coff * each for each in self.sizes]
        self.sides = 1 if wgate is None else 2
        self.norm = None if a["ln_weight"] is None else (a["ln_weight"], a["ln_bias"], a["ln_eps"])
        self.first = a["rope_slice"] == compressed.FIRST
        self.ratio, self.entries = ratio, torch.Size(shape).numel()
        self.pooled = memory.empty((self.entries, sum(self.sizes)), torch.float32, x.device)
        self.stateful = state_cache.numel() * state_table.numel() > 0
        self.storing = [_stores(own, table) for own in self.owns]
        self._each = max(shape[-1], 1)
        self._tokens = dict(
            bounds=None if cu_seqlens is None else ragged.int32(cu_seqlens),
            used=a["seqused"],
            starts=a["start_pos"],
            tokens=self.rows if packed else x.shape[1],
            requests=requests,
            ratio=ratio,
            PACKED=packed,
        )
        self._states = dict(
            ape=a["ape"],
            next_ape=None if second is None else second.ape,
            size=size,
            next_size=sum(self.sizes[1:]),
            COFF=coff,
            state=state_cache if self.stateful else None,
            next_state=second.state_cache if self.stateful and second is not None else None,
            table=state_table,
            state_page=state_cache.stride(0),
            next_state_page=0 if second is None else second.state_cache.stride(0),
            table_row=state_table.stride(0),
            columns=state_table.shape[1],
            pages=state_cache.shape[0],
            page=state_cache.shape[1],
            RING=a["cache_mode"] == compressed.RING,
        )
        sin = cos = None
        turn = a["rotary_mode"]
        if a["rope_sin"] is not None and a["rope_cos"] is not None:
            sin, cos = (angles.flatten(0, -2) for angles in (a["rope_sin"], a["rope_cos"]))
            if sin.stride(0) != cos.stride(0):
                sin, cos = sin.contiguous(), cos.contiguous()
            if turn == compressed.PAIRS and sin.shape[-1] == a["rope_head_dim"]:
                turn = FULL_PAIRS.value
        self._turning = dict(
            sin=sin,
            cos=cos,
            angle_row=0 if sin is None else sin.stride(0),
            epsilon=a["norm_eps"],
            ROTARY=a["rope_head_dim"],
            TURN=turn,
            table=table,
            table_row=0 if table is None else table.stride(0),
            columns=0 if table is None else table.shape[1],
        )

    def cut(self) -> tuple[tune.Config, int]:
        return _cut(self.rows, self.widths, self.depth, self.sides)

    def sums(self, parts: int) -> Tensor:
        shape = (parts, self.rows, self.sides * sum(self.widths))
        return memory.empty(shape, torch.float32, self.flat.device)

    def projecting(self, product: Tensor, first: int = 0) -> dict[str, Any]:
        """`first`: the core that takes the first tile."""
        own, *others = self.owns
        second = others[0] if others else None
        return dict(
            x=self.flat,
            wkv=own.wkv,
            wgate=own.wgate,
            next_kv=None if second is None else second.wkv,
            next_gate=None if second is None else second.wgate,
            out=product,
            width=self.widths[0],
            next_width=sum(self.widths[1:]),
            first=first,
            rows=self.rows,
            depth=self.depth,
            parts=product.shape[0],
            x_row=self.flat.stride(0),
            kv_row=own.wkv.stride(0),
            gate_row=0 if own.wgate is None else own.wgate.stride(0),
            next_kv_row=0 if second is None else second.wkv.stride(0),
            next_gate_row=0 if second is None or second.wgate is None else second.wgate.stride(0),
            out_part=product.stride(0),
        )

    def normalised(self, product: Tensor) -> Tensor:
        """What stands for the product behind the LayerNorm, if there is one."""
        if self.norm is None:
            return product
        out = self.sums(1)
        weight, bias, eps = self.norm
        normalise[(min(self.rows, cores.vector()),)](
            product,
            out,
            weight,
            bias,
            rows=self.rows,
            parts=product.shape[0],
            row_length=product.stride(1),
            out_part=product.stride(0),
            epsilon=eps,
            GATED=self.sides == 2,
            SIZE=self.sizes[0],
            **tune.only("compressor.normalise").keywords,
        )
        return out

    def pooling(self, product: Tensor) -> dict[str, Any]:
        own = dict(out=self.pooled, each=self._each, rows=self.entries)
        return self._of_sums(product) | own

    def pooled_tiles(self, config: tune.Config) -> int:
        return self.entries * sum(triton.cdiv(n, config.tiles["CHANNELS"]) for n in self.sizes)

    def finishing(self) -> list[dict[str, Any]]:
        """Of each that returns or stores anything."""
        found = []
        pooled = self.pooled.split(self.sizes, 1)
        for own, stores, of_own in zip(self.owns, self.storing, pooled, strict=True):
            returned = self.out if self.returned and own is self.owns[0] else None
            if returned is None and not stores:
                continue
            values = own.cmp_cache if stores else None
            scales = own.cmp_scale_cache if stores else None
            cached = dict(
                values_page=0 if values is None else values.stride(0),
                scales_page=0 if scales is None else scales.stride(0),
                pages=0 if values is None else values.shape[0],
                page=1 if values is None else values.shape[1],
            )
            found.append(
                self._tokens
                | self._turning
                | cached
                | dict(
                    pooled=of_own,
                    gamma=own.norm_weight,
                    out=returned,
                    values=values,
                    scales=scales,
                    each=self._each,
                    rows=self.entries,
                    pooled_row=self.pooled.stride(0),
                    SIZE=of_own.shape[1],
                )
            )
        return found

    def keeping(self, product: Tensor) -> dict[str, Any]:
        return self._of_sums(product) | dict(rows=self.rows)

    def kept_tiles(self, config: tune.Config) -> int:
        return self.rows * sum(triton.cdiv(n, config.tiles["WIDTH"]) for n in self.widths)

    def _of_sums(self, product: Tensor) -> dict[str, Any]:
        sums = dict(product=product, parts=product.shape[0], out_part=product.stride(0))
        return self._tokens | self._states | sums


def projected(call: Call, config: tune.Config) -> dict[str, bool]:
    """Which tiles of `project` are whole."""
    height, across, step = (config.tiles[name] for name in ("ROWS", "COLUMNS", "DEPTH"))
    return dict(
        WHOLE_M=call.rows % height == 0,
        WHOLE_N=all(width % across == 0 for width in call.widths),
        WHOLE_K=call.depth % step == 0,
    )


def forward(second: Own | None = None, **arguments: Unpack[Arguments]) -> Tensor:
    call = Call(second, **arguments)
    if call.nothing:
        return call.out.zero_()
    config, parts = call.cut()
    product = call.sums(parts)
    tiles = parts * tile_count(call.rows, call.widths, config, call.sides)
    project[(min(tiles, cores.cube()),)](
        **call.projecting(product), **projected(call, config), **config.keywords
    )
    product = call.normalised(product)
    if call.entries and (call.returned or any(call.storing)):
        config = tune.at_least("compressor.pool", "ROWS", call.ratio)
        pool[(min(call.pooled_tiles(config), cores.vector()),)](
            **call.pooling(product), **config.keywords
        )
        for given in call.finishing():
            finish[(min(call.entries, cores.vector()),)](
                **given, FIRST=call.first, **tune.only("compressor.finish").keywords
            )
    if call.stateful:
        config = tune.only("compressor.keep")
        keep[(min(call.kept_tiles(config), cores.vector()),)](
            **call.keeping(product), **config.keywords
        )
    return call.out


def _stores(own: Own, table: Tensor | None) -> bool:
    cache = own.cmp_cache
    return cache is not None and table is not None and cache.numel() * table.numel() > 0
