# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Entries of windows of m tokens, the state of those tokens, and the pages of both.

    kv, z = x wkv^T, x wgate^T + ape[t mod m]      C = sum_t softmax_t(z) kv_t, channel by channel
    entry = hadamard(RoPE(RMSNorm(C)))

Without a gate every z is 0 and the state kv alone; `_normalise` is the LayerNorm of every kv.

Columns are independent up to the norm, so `_pool` takes blocks of them: its programs read the
states that are history, and write none.  `_finish` ends a row, `_keep` writes the states, behind
all who read them.  What the product's runs came to is added up where it is read.

Few tokens of a request close one window at most.  `_step` has a program for each request, or for
some channels of one whose history is long, which reads it while the product still runs.

    condition                                          kernels
    up to 8 tokens a request, and no more than a       prolog/nz_matmul.py then _step
      window has, not packed; pairs or no rotation,
      up to 1024 channels, an even number
    the same with ln_weight                            prolog/nz_matmul.py, _normalise, _step
    ln_weight                                          prolog/nz_matmul.py, _normalise,
                                                       _pool, _finish, _keep
    else                                               prolog/nz_matmul.py, _pool, _finish, _keep
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from typing_extensions import Unpack

from ...dispatch.common import compressed, memory, quantized
from ...dispatch.ops.deepseek_v4.compressor import Arguments
from ..common import gpu, quantize, rows
from ..common.tiling import power_of_two
from ..prolog import nz_matmul
from ..runtime import launches

BLOCK = 128  # channels of a program that pools
WIDE = 1024  # numbers of a program that keeps states
V4 = tl.constexpr(4)  # beside the kinds of quantize.py: rows of 584 bytes
MOST_REQUESTS, MOST_CHANNELS = 2**14, 2**12
FEW, NARROW = 8, 2**10  # tokens of a request, and channels, of which a step has all
MANY = 2**14  # numbers of a request's history, each with its logit, that many programs read
NARROWEST = 32  # channels of such a program
IN_FLIGHT = 2**12  # numbers that it asks for at once


class Requests(NamedTuple):
    """The requests of a call, and the pages of their states."""

    bounds: Any
    used: Any
    starts: Any
    table: Any
    tokens: Any
    requests: Any
    table_stride: Any
    columns: Any
    pages: Any
    page: Any


class Entries(NamedTuple):
    """Where entries go: the output, or pages of values with their scales and rotary channels."""

    out: Any
    cache: Any
    scales: Any
    channels: Any
    cache_page: Any
    scales_page: Any
    channels_page: Any
    table: Any
    table_stride: Any
    columns: Any
    pages: Any
    page: Any


class Constants(NamedTuple):
    PACKED: bool
    REQUESTS: int
    USED: bool
    STARTS: int
    RATIO: int
    COFF: int
    GATED: bool
    D: int
    RUNS: int
    STATE: bool
    RING: bool


# what is known of positions: requests begin at 0, where they begin, where they end
AT_0, BEGINS, ENDS = 0, 1, 2


class Ending(NamedTuple):
    """What becomes of C."""

    BLOCK_D: int
    NORMED: bool
    DR: int
    FROM: int  # the first channel that is rotated
    PAIRS: bool
    STEP: int  # from the angle of a pair to the next
    HADAMARD: bool
    SCALE: float
    ROUNDS: int
    BF16: bool
    OUT: bool
    CACHE: bool
    KIND: int


class Step(NamedTuple):
    """A step's constants, how it is cut (PARTS programs a request, BLOCK_L states read at once) and
    how it begins, as handover.follow says."""

    OF: Constants
    END: Ending
    PARTS: int
    BLOCK_L: int
    CHAINED: bool
    LATE: bool
    SECOND: bool


@triton.jit
def _floor(a, M: tl.constexpr):
    """a // M of numbers of either sign."""
    q = a // M
    return q - (a - q * M < 0).to(tl.int64)


@triton.jit
def spans(r, of, C: tl.constexpr):
    """(row of x, position, number) of the tokens of requests r."""
    inside = r < of.requests
    if C.PACKED:
        first = rows.within(tl.load(of.bounds + r, mask=inside, other=0), of.tokens)
        stop = rows.within(tl.load(of.bounds + r + 1, mask=inside, other=0), of.tokens)
        count = tl.maximum(stop - first, 0).to(tl.int64)
        first = first.to(tl.int64)
    else:
        first = r.to(tl.int64) * of.tokens
        count = tl.where(inside, of.tokens, 0).to(tl.int64)
    used = count
    if C.USED:
        used = tl.load(of.used + r, mask=inside, other=0).to(tl.int64)
        count = tl.minimum(tl.maximum(used, 0), count)
    start = r.to(tl.int64) * 0
    if C.STARTS != 0:
        start += tl.load(of.starts + r, mask=inside, other=0)
    if C.STARTS == 2:
        start -= used
    return first, start, count


@triton.jit
def window_of(row, each, of, C: tl.constexpr):
    """(request, window) of an output row, `each` rows a request if not packed; -1: none closes."""
    if C.PACKED:
        r = tl.arange(0, C.REQUESTS)
        _, start, count = spans(r, of, C)
        low = tl.maximum(_floor(start, C.RATIO), 0)
        closed = tl.maximum(_floor(start + count, C.RATIO) - low, 0)
        ends = tl.cumsum(closed, 0)
        request = tl.sum((ends <= row).to(tl.int32), 0)
        before = tl.max(tl.where(ends <= row, ends, 0), 0)
        number = row - before + tl.sum(tl.where(r == request, low, 0), 0)
        number = tl.where(request < of.requests, number, -1)
        request = tl.minimum(request, of.requests - 1)
    else:
        request = row // each
        _, start, count = spans(request, of, C)
        number = _floor(start, C.RATIO) + row % each
        number = tl.where(number < _floor(start + count, C.RATIO), number, -1)
    return request, number


@triton.jit
def _state_at(position, valid, request, of, WIDTH: tl.constexpr, state_page, RING: tl.constexpr):
    """(where the state of each position begins, whether there is one)"""
    if RING:
        position = position % (of.columns.to(tl.int64) * of.page)
    column = position // of.page
    valid = valid & (column < of.columns)
    entry = tl.load(
        of.table + request.to(tl.int64) * of.table_stride + column, mask=valid, other=-1
    )
    entry = entry.to(tl.int64)
    valid = valid & (entry >= 0) & (entry < of.pages)
    return tl.where(valid, entry, 0) * state_page + position % of.page * WIDTH, valid


@triton.jit
def _history_at(
    i, column, inner, valid, request, of, WIDTH: tl.constexpr, state_page, RING: tl.constexpr
):
    """The same of the i-th positions behind number `inner` of page `column`, at most a ring of
    them.  Each thread divides for all of its rows, so in 32 bits."""
    i += inner
    turn = i // of.page
    inner = i - turn * of.page
    column += turn
    if RING:
        column = tl.where(column >= of.columns, column - of.columns, column)
    valid = valid & (column < of.columns)
    entry = tl.load(
        of.table + request.to(tl.int64) * of.table_stride + column, mask=valid, other=-1
    ).to(tl.int64)
    valid = valid & (entry >= 0) & (entry < of.pages)
    return tl.where(valid, entry, 0) * state_page + inner.to(tl.int64) * WIDTH, valid


@triton.jit
def _added(runs, at, mask, run_stride, RUNS: tl.constexpr):
    """What the runs of the product come to."""
    total = tl.load(runs + at, mask=mask, other=0.0)
    for _ in tl.static_range(1, RUNS):
        runs += run_stride
        total += tl.load(runs + at, mask=mask, other=0.0)
    return total


@triton.jit
def members(
    i, d, request, number, product, run_stride, ape, state, state_page, of, C: tl.constexpr
):
    """(kv, z, token) of the i-th tokens that window `number` is made of, in channels d; z is -inf
    and kv 0 where there is none, token -1 where it is none of this call's."""
    WIDTH: tl.constexpr = C.COFF * C.D
    EACH: tl.constexpr = WIDTH * (2 if C.GATED else 1)
    first, start, count = spans(request, of, C)
    position = (number - (C.COFF - 1)) * C.RATIO + i
    j = position - start
    valid = (i < C.COFF * C.RATIO) & (position >= 0)
    own = valid & (j >= 0) & (j < count)
    on_d = (d < C.D)[None, :]
    channel = (i // C.RATIO * C.D)[:, None] + d[None, :]
    mask = own[:, None] & on_d
    at = (first + j)[:, None] * EACH + channel
    kv = _added(product, at, mask, run_stride, C.RUNS)
    if C.GATED:
        z = _added(product, at + WIDTH, mask, run_stride, C.RUNS)
        z += tl.load(ape + (i % C.RATIO)[:, None] * WIDTH + channel, mask=mask, other=0.0)
    else:
        z = tl.zeros_like(kv)
    there = own
    if C.STATE:
        place, old = _state_at(position, valid & (j < 0), request, of, EACH, state_page, C.RING)
        mask = old[:, None] & on_d
        kv += tl.load(state + place[:, None] + channel, mask=mask, other=0.0)
        if C.GATED:
            z += tl.load(state + place[:, None] + channel + WIDTH, mask=mask, other=0.0)
        there = there | old
    return kv, tl.where(there[:, None], z, float("-inf")), tl.where(own, first + j, -1)


@triton.jit
def _grown(top, total, acc, kv, z):
    """The running softmax of each channel over more tokens [.., channels]; z -inf: none."""
    peak = tl.maximum(top, tl.max(z, 0))
    base = tl.where(peak == float("-inf"), 0.0, peak)
    share = tl.exp(z - base[None, :])
    kept = tl.exp(top - base)
    return peak, total * kept + tl.sum(share, 0), acc * kept + tl.sum(share * kv, 0)


@triton.jit
def _joined(top, total, acc, kv, z):
    """The same over one token more [channels]."""
    peak = tl.maximum(top, z)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    share = tl.exp(z - base)
    kept = tl.exp(top - base)
    return peak, total * kept + share, acc * kept + share * kv


@triton.jit(
    do_not_specialize=[
        "tokens", "requests", "each", "table_stride", "columns", "pages", "page"
    ]
)  # fmt: skip
def _pool(
    product,
    run_stride,
    ape,
    state,
    state_page,
    pooled,
    peaks,
    bounds,
    used,
    starts,
    table,
    tokens,
    requests,
    table_stride,
    columns,
    pages,
    page,
    each,
    C: tl.constexpr,
    PEAKS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """C of a row in some channels; PEAKS: and log(sum exp z), for the gradient."""
    of = Requests(bounds, used, starts, table, tokens, requests, table_stride, columns, pages, page)
    row = tl.program_id(0)
    request, number = window_of(row, each, of, C)
    if number >= 0:
        d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        top = tl.full([BLOCK_D], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_D], tl.float32)
        acc = tl.zeros([BLOCK_D], tl.float32)
        for lo in tl.range(0, C.COFF * C.RATIO, BLOCK_L):
            i = lo + tl.arange(0, BLOCK_L)
            kv, z, _ = members(
                i, d, request, number, product, run_stride, ape, state, state_page, of, C
            )
            top, total, acc = _grown(top, total, acc, kv, z)
        at = row.to(tl.int64) * C.D + d
        tl.store(pooled + at, acc / total, mask=d < C.D)
        if PEAKS:
            tl.store(peaks + at, top + tl.log(total), mask=d < C.D)


@triton.jit
def turned(y, other, sin, cos, first):
    """A channel of a pair, with the other one, rotated."""
    return tl.where(first, y * cos - other * sin, y * cos + other * sin)


@triton.jit
def partners(d, D: tl.constexpr, E: tl.constexpr):
    """(whether a channel is rotated, is the first of its pair, the other one, its angle)"""
    k = tl.maximum(d - E.FROM, 0)
    if E.PAIRS:
        first = k % 2 == 0
        other = tl.where(first, d + 1, d - 1)
        pair = k // 2
    else:
        HALF: tl.constexpr = E.DR // 2
        first = k < HALF
        other = tl.where(first, d + HALF, d - HALF)
        pair = k % HALF
    return (d >= E.FROM) & (d < E.FROM + E.DR), first, other, pair * E.STEP


@triton.jit
def _page_of(request, number, to, E: tl.constexpr):
    """(the page of entry `number`, whether there is one)"""
    entry, there = tl.full([], 0, tl.int64), number >= 0
    if E.CACHE:
        w = number // to.page
        there = there & (w < to.columns)
        entry = tl.load(
            to.table + request.to(tl.int64) * to.table_stride + w, mask=there, other=-1
        ).to(tl.int64)
        there = there & (entry >= 0) & (entry < to.pages)
        entry = tl.where(there, entry, 0)
    return entry, there


@triton.jit
def _store(y, row, number, entry, there, to, C: tl.constexpr, E: tl.constexpr):
    """An entry in float32, normed and rotated, to wherever it goes: its page is `entry`, if it is
    there."""
    d = tl.arange(0, E.BLOCK_D)
    at = row.to(tl.int64) * C.D
    y = tl.reshape(y, [1, E.BLOCK_D])
    h = y
    if E.HADAMARD:
        h = quantize.hadamard(y, E.SCALE, E.ROUNDS)
    column = d[None, :]
    if E.OUT:
        tl.store(to.out + at + column, h.to(to.out.dtype.element_ty), mask=column < C.D)
    if E.CACHE:
        inner = number % to.page
        if E.KIND == V4:
            # tiles of 64, the last of them rotary channels in bfloat16
            tile = tl.arange(0, 8)
            y = quantize.bf16_rounded(tl.reshape(h, [8, 64]))
            code, by = quantize.of_floats(y, 1.0, quantize.FP8, True)
            lane = tl.arange(0, 64)[None, :]
            place = to.cache + entry * to.cache_page + inner * 576
            tl.store(place + tile[:, None] * 64 + lane, code, mask=there & (tile < 7)[:, None])
            exponent = tl.where(tile < 7, by.to(tl.int32, bitcast=True) >> 23, 0)
            tl.store(
                to.scales + entry * to.scales_page + inner * 8 + tile,
                exponent.to(tl.uint8),
                mask=there & (tile < 8),
            )
            place = to.channels + entry * to.channels_page + inner * 288
            place += (tile[:, None] - 7) * 64 + lane
            tl.store(place, y.to(to.channels.dtype.element_ty), mask=there & (tile == 7)[:, None])
        elif E.KIND == quantize.PLAIN:
            place = to.cache + entry * to.cache_page + inner * C.D + column
            tl.store(place, h.to(to.cache.dtype.element_ty), mask=there & (column < C.D))
        else:
            y = quantize.rotated(y, E.HADAMARD, E.BF16)
            y, by = quantize.of_floats(y, 1.0, E.KIND, True)
            place = to.cache + entry * to.cache_page + inner * C.D + column
            tl.store(place, y, mask=there & (column < C.D))
            by = quantize.stored(by, to.scales.dtype.element_ty)
            lane = tl.arange(0, 1)
            place = to.scales + entry * to.scales_page + inner + lane
            tl.store(place, by, mask=there & (lane == 0))


@triton.jit(
    do_not_specialize=[
        "tokens", "requests", "each", "entry_columns", "entry_pages", "entry_page", "entry_stride"
    ]
)  # fmt: skip
def _finish(
    pooled,
    norm,
    sin,
    cos,
    angle_row,
    eps,
    out,
    values,
    scales,
    channels,
    values_page,
    scales_page,
    channels_page,
    entry_table,
    entry_stride,
    entry_columns,
    entry_pages,
    entry_page,
    bounds,
    used,
    starts,
    tokens,
    requests,
    each,
    C: tl.constexpr,
    E: tl.constexpr,
):
    of = Requests(bounds, used, starts, bounds, tokens, requests, 0, 0, 0, 0)
    row = tl.program_id(0)
    request, number = window_of(row, each, of, C)
    closed = number >= 0
    d = tl.arange(0, E.BLOCK_D)
    mask = (d < C.D) & closed
    at = row.to(tl.int64) * C.D
    y = tl.load(pooled + at + d, mask=mask, other=0.0)
    scale = 1.0
    if E.NORMED:
        scale = 1.0 / tl.sqrt(tl.sum(y * y, 0) / C.D + eps)
        y = y * scale * tl.load(norm + d, mask=mask, other=0.0)
    if E.DR > 0:
        rotated, first, other, angle = partners(d, C.D, E)
        rotated = rotated & closed
        angle += row.to(tl.int64) * angle_row
        s = tl.load(sin + angle, mask=rotated, other=0.0).to(tl.float32)
        c = tl.load(cos + angle, mask=rotated, other=0.0).to(tl.float32)
        z = tl.load(pooled + at + other, mask=rotated, other=0.0)
        if E.NORMED:
            z = z * scale * tl.load(norm + other, mask=rotated, other=0.0)
        y = tl.where(rotated, turned(y, z, s, c, first), y)
    to = Entries(
        out,
        values,
        scales,
        channels,
        values_page,
        scales_page,
        channels_page,
        entry_table,
        entry_stride,
        entry_columns,
        entry_pages,
        entry_page,
    )
    entry, there = _page_of(request, number, to, E)
    _store(y, row, number, entry, there, to, C, E)


@triton.jit
def _ending_of(row, number, norm, sin, cos, angle_row, C: tl.constexpr, E: tl.constexpr):
    """(gain, sine, cosine) of the channels of an entry, where they have any."""
    d = tl.arange(0, E.BLOCK_D)
    gain = tl.full([E.BLOCK_D], 1.0, tl.float32)
    s, c = gain, gain
    if E.NORMED:
        gain = tl.load(norm + d, mask=d < C.D, other=0.0)
    if E.DR > 0:
        rotated, _, _, angle = partners(d, C.D, E)
        rotated = rotated & (number >= 0)
        angle += row.to(tl.int64) * angle_row
        s = tl.load(sin + angle, mask=rotated, other=0.0).to(tl.float32)
        c = tl.load(cos + angle, mask=rotated, other=0.0).to(tl.float32)
    return gain, s, c


@triton.jit
def _ended(y, eps, gain, s, c, C: tl.constexpr, E: tl.constexpr):
    """C of a row, normed and rotated by pairs."""
    if E.NORMED:
        y *= gain / tl.sqrt(tl.sum(y * y, 0) / C.D + eps)
    if E.DR > 0:
        rotated, is_first, _, _ = partners(tl.arange(0, E.BLOCK_D), C.D, E)
        left, right = tl.split(tl.reshape(y, [E.BLOCK_D // 2, 2]))
        other = tl.reshape(tl.join(right, left), [E.BLOCK_D])
        y = tl.where(rotated, turned(y, other, s, c, is_first), y)
    return y


@triton.jit
def _kept_at(position, end, request, of, state_page, C: tl.constexpr):
    """(where the state of a token of this call goes, whether it is kept) of tokens before `end`"""
    EACH: tl.constexpr = C.COFF * C.D * (2 if C.GATED else 1)
    kept = (position >= 0) & (position < end)
    if C.RING:
        kept = kept & (position >= end - of.columns.to(tl.int64) * of.page)
    return _state_at(position, kept, request, of, EACH, state_page, C.RING)


@triton.jit
def _own(product, run_stride, ape, at, place, mask, C: tl.constexpr):
    """(kv, z) of channels of a token of this call."""
    kv = _added(product, at, mask, run_stride, C.RUNS)
    z = tl.zeros_like(kv)
    if C.GATED:
        z = _added(product, at + C.COFF * C.D, mask, run_stride, C.RUNS)
        z += tl.load(ape + place, mask=mask, other=0.0)
    return kv, z


@triton.jit(
    do_not_specialize=[
        "tokens", "requests", "table_stride", "columns", "pages", "page", "entry_stride",
        "entry_columns", "entry_pages", "entry_page",
    ]
)  # fmt: skip
def _step(
    product,
    ape,
    state,
    norm,
    sin,
    cos,
    pooled,
    arrived,
    out,
    values,
    scales,
    channels,
    entry_table,
    entry_stride,
    entry_columns,
    entry_pages,
    entry_page,
    bounds,
    used,
    starts,
    table,
    tokens,
    requests,
    table_stride,
    columns,
    pages,
    page,
    eps,
    strides,
    S: tl.constexpr,
):
    """A request, or one of S.PARTS blocks of its channels: the entry that its tokens close, and
    their states, which take the places of history that is read before.  Whoever is the last of a
    request ends its entry."""
    C: tl.constexpr = S.OF
    E: tl.constexpr = S.END
    run_stride, row_stride, state_page, angle_row, values_page, scales_page, channels_page = strides
    of = Requests(bounds, used, starts, table, tokens, requests, table_stride, columns, pages, page)
    to = Entries(
        out,
        values,
        scales,
        channels,
        values_page,
        scales_page,
        channels_page,
        entry_table,
        entry_stride,
        entry_columns,
        entry_pages,
        entry_page,
    )
    WIDTH: tl.constexpr = C.COFF * C.D
    EACH: tl.constexpr = WIDTH * (2 if C.GATED else 1)
    SIZE: tl.constexpr = E.BLOCK_D // S.PARTS
    if S.CHAINED and not S.SECOND:
        gdc_launch_dependents()
    row = tl.program_id(0) // S.PARTS
    part = tl.program_id(0) % S.PARTS
    request, number = window_of(row, 1, of, C)
    number = tl.maximum(number, -1)
    first, start, count = spans(row, of, C)
    d = part * SIZE + tl.arange(0, SIZE)
    on_d = d < C.D
    top = tl.full([SIZE], float("-inf"), tl.float32)
    total = tl.full([SIZE], 0.0, tl.float32)
    acc = tl.full([SIZE], 0.0, tl.float32)
    begin = (number - (C.COFF - 1)) * C.RATIO
    old = tl.where(number >= 0, tl.minimum(start - begin, C.COFF * C.RATIO), 0).to(tl.int32)
    # from position 0 on
    skipped = tl.where(begin < 0, -begin, 0).to(tl.int32)
    begin = tl.maximum(begin, 0)
    if C.RING:
        begin = begin % (of.columns.to(tl.int64) * of.page)
    column = begin // of.page
    inner = (begin - column * of.page).to(tl.int32)
    lane = tl.arange(0, S.BLOCK_L)
    for lo in tl.range(0, old - skipped, S.BLOCK_L):
        i = lo + lane
        place, there = _history_at(
            i, column, inner, i < old - skipped, request, of, EACH, state_page, C.RING
        )
        at = state + place[:, None] + ((i + skipped) // C.RATIO * C.D)[:, None] + d[None, :]
        mask = there[:, None] & on_d[None, :]
        kv = tl.load(at, mask=mask, other=0.0)
        if C.GATED:
            z = tl.load(at + WIDTH, mask=mask, other=float("-inf"))
        else:
            z = tl.where(mask, 0.0, float("-inf"))
        top, total, acc = _grown(top, total, acc, kv, z)
    if S.PARTS == 1:
        gain, s, c = _ending_of(row, number, norm, sin, cos, angle_row, C, E)
        entry, stored = _page_of(request, number, to, E)
    own_place, kept_own = _kept_at(start, start + count, request, of, state_page, C)
    tl.debug_barrier()  # every thread has read its history
    if S.CHAINED and not S.LATE:
        gdc_wait()
    if S.CHAINED and S.SECOND:
        gdc_launch_dependents()
    for j in tl.range(0, count.to(tl.int32)):
        position = start + j
        own = position >= 0
        to_d = state + own_place + d
        kept = on_d & kept_own
        at = (first + j) * row_stride + d
        bias = position % C.RATIO * WIDTH + d
        # loads in front of stores, which they would wait for
        kv, z = _own(product, run_stride, ape, at, bias, on_d & own, C)
        share = position // C.RATIO - (number - (C.COFF - 1))
        if C.COFF == 2:
            kv_2, z_2 = _own(product, run_stride, ape, at + C.D, bias + C.D, on_d & own, C)
            tl.store(to_d + C.D, kv_2, mask=kept)
            if C.GATED:
                tl.store(to_d + C.D + WIDTH, z_2, mask=kept)
        tl.store(to_d, kv, mask=kept)
        if C.GATED:
            tl.store(to_d + WIDTH, z, mask=kept)
        if C.COFF == 2:
            kv, z = tl.where(share == 1, kv_2, kv), tl.where(share == 1, z_2, z)
        own_place, kept_own = _kept_at(position + 1, start + count, request, of, state_page, C)
        counts = own & (number >= 0) & (share >= 0) & (share < C.COFF)
        top, total, acc = _joined(top, total, acc, kv, tl.where(counts, z, float("-inf")))
    y = tl.where(on_d & (number >= 0), acc / total, 0.0)
    if number >= 0:
        last = True
        if S.PARTS > 1:
            tl.store(pooled + row.to(tl.int64) * C.D + d, y, mask=on_d)
            tl.debug_barrier()
            last = tl.atomic_add(arrived + row, 1) == S.PARTS - 1
        if last:
            if S.PARTS > 1:
                gain, s, c = _ending_of(row, number, norm, sin, cos, angle_row, C, E)
                entry, stored = _page_of(request, number, to, E)
                whole = tl.arange(0, E.BLOCK_D)
                at = pooled + row.to(tl.int64) * C.D + whole
                whole = tl.load(at, mask=whole < C.D, other=0.0, cache_modifier=".cg")
            else:
                whole = y
            whole = _ended(whole, eps, gain, s, c, C, E)
            _store(whole, row, number, entry, stored, to, C, E)
    elif E.OUT:
        at = out + row.to(tl.int64) * C.D + d
        tl.store(at, y.to(out.dtype.element_ty), mask=on_d)
    if S.CHAINED and S.LATE:
        gdc_wait()


@triton.jit(do_not_specialize=["tokens", "requests", "table_stride", "columns", "pages", "page"])
def _keep(
    product,
    run_stride,
    ape,
    state,
    state_page,
    bounds,
    used,
    starts,
    table,
    tokens,
    requests,
    table_stride,
    columns,
    pages,
    page,
    C: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """The state of a token, or of those that a ring has room for."""
    of = Requests(bounds, used, starts, table, tokens, requests, table_stride, columns, pages, page)
    WIDTH: tl.constexpr = C.COFF * C.D
    EACH: tl.constexpr = WIDTH * (2 if C.GATED else 1)
    token = tl.program_id(0)
    if C.PACKED:
        r = tl.arange(0, C.REQUESTS)
        inside = r < requests
        stop = rows.within(tl.load(bounds + r + 1, mask=inside, other=0), tokens)
        request = tl.sum((inside & (stop <= token)).to(tl.int32), 0)
    else:
        request = token // tokens
    first, start, count = spans(request, of, C)
    j = token - first
    position = start + j
    place, kept = _kept_at(position, start + count, request, of, state_page, C)
    if kept & (j >= 0):
        w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
        mask = w < EACH
        x = _added(product, token.to(tl.int64) * EACH + w, mask, run_stride, C.RUNS)
        if C.GATED:
            of_z = mask & (w >= WIDTH)
            x += tl.load(ape + position % C.RATIO * WIDTH + w - WIDTH, mask=of_z, other=0.0)
        tl.store(state + place + w, x, mask=mask)


@triton.jit
def _normalise(
    product,
    run_stride,
    weight,
    bias,
    eps,
    C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The first run of a token's row becomes the LayerNorm of kv, and z, of what all runs add up
    to; a token of nobody too."""
    EACH: tl.constexpr = C.D * (2 if C.GATED else 1)
    d = tl.arange(0, BLOCK_D)
    mask = d < C.D
    at = tl.program_id(0).to(tl.int64) * EACH + d
    kv = _added(product, at, mask, run_stride, C.RUNS)
    kv = tl.where(mask, kv - tl.sum(kv, 0) / C.D, 0.0)
    kv *= 1.0 / tl.sqrt(tl.sum(kv * kv, 0) / C.D + eps)
    kv = kv * tl.load(weight + d, mask=mask, other=0.0) + tl.load(bias + d, mask=mask, other=0.0)
    tl.store(product + at, kv, mask=mask)
    if C.GATED and C.RUNS > 1:
        z = _added(product, at + C.D, mask, run_stride, C.RUNS)
        tl.store(product + at + C.D, z, mask=mask)


def unsupported(
    x: Tensor, wkv: Tensor, coff: int, cu_seqlens: Tensor | None, **arguments: Any
) -> str | None:
    if x.dtype is torch.float64 or (x.is_cuda and x.dtype is torch.float32):
        return f"x is {x.dtype}, supported float16 and bfloat16"
    if (size := compressed.channels(wkv, coff)) > MOST_CHANNELS:
        return f"{size} channels, supported up to {MOST_CHANNELS}"
    if cu_seqlens is not None and cu_seqlens.shape[0] > MOST_REQUESTS:
        return f"{cu_seqlens.shape[0] - 1} packed requests, supported up to {MOST_REQUESTS - 1}"
    return rows.too_many(x.shape[:-1].numel(), "tokens")


class Pooled(NamedTuple):
    """What `pool` made, and what it was made of."""

    product: Tensor
    rows: Tensor
    peaks: Tensor | None
    each: int
    requests: dict[str, Any]
    constants: Constants


def _asked(
    x: Tensor,
    cu_seqlens: Tensor | None,
    seqused: Tensor | None,
    start_pos: Tensor | None,
    coff: int,
    ratio: int,
    size: int,
    runs: int,
    state: Tensor | None,
    table: Tensor | None,
    ring: bool,
    gated: bool = True,
    ends: bool = False,
) -> tuple[dict[str, Any], Constants]:
    """(the requests and the pages of their states by name, what is known of them)"""
    packed = cu_seqlens is not None
    requests = cu_seqlens.shape[0] - 1 if cu_seqlens is not None else x.shape[0]
    constants = Constants(
        PACKED=packed,
        REQUESTS=power_of_two(requests) if packed else 1,
        USED=seqused is not None,
        STARTS=AT_0 if start_pos is None else ENDS if ends else BEGINS,
        RATIO=ratio,
        COFF=coff,
        GATED=gated,
        D=size,
        RUNS=runs,
        STATE=state is not None,
        RING=ring,
    )
    given = dict(
        bounds=x if cu_seqlens is None else cu_seqlens,
        used=x if seqused is None else seqused,
        starts=x if start_pos is None else start_pos,
        tokens=x.shape[:-1].numel() if packed else x.shape[1],
        requests=requests,
        table=x if table is None else table,
        table_stride=0 if table is None else table.stride(0),
        columns=0 if table is None else table.shape[1],
        pages=0 if state is None else state.shape[0],
        page=1 if state is None else state.shape[1],
    )
    return given, constants


def _factors(x: Tensor, weights: list[Tensor]) -> tuple[Tensor, list[tuple[Tensor, int]]]:
    """What `nz_matmul.product` takes: [T, K], and the weights with their widths."""
    return x.reshape(-1, x.shape[-1]).contiguous(), [(w.contiguous(), w.shape[0]) for w in weights]


def _weights(a: Mapping[str, Any]) -> list[Tensor]:
    return [a["wkv"]] if a["wgate"] is None else [a["wkv"], a["wgate"]]


def _normalised(product: Tensor, a: Mapping[str, Any]) -> Tensor:
    """What stands for the product behind the LayerNorm, if there is one."""
    weight = a.get("ln_weight")
    if weight is None:
        return product
    size, block = weight.shape[0], power_of_two(weight.shape[0])
    _, constants = _asked(
        a["x"],
        None,
        None,
        None,
        1,
        1,
        size,
        product.shape[0],
        None,
        None,
        False,
        a["wgate"] is not None,
    )
    launches.kernel(_normalise, product.shape[1])(
        product,
        product.stride(0),
        weight,
        a["ln_bias"],
        a["ln_eps"],
        C=constants,
        BLOCK_D=block,
        num_warps=min(8, max(1, block // 256)),
    )
    return product[:1]


def pool(
    a: Mapping[str, Any],
    shape: list[int],
    start_pos: Tensor | None = None,
    state: Tensor | None = None,
    table: Tensor | None = None,
    ring: bool = False,
    peaks: bool = False,
) -> Pooled:
    """C [E, D] in float32 of the windows that close, for an output of that `shape`."""
    x, ape, coff, ratio = a["x"], a["ape"], a["coff"], a["cmp_ratio"]
    size, factors = compressed.channels(a["wkv"], coff), _factors(x, _weights(a))
    product = nz_matmul.product(*factors, "linear", keep_float=True, first=True)
    product = _normalised(product, a)
    asked, constants = _asked(
        x,
        a["cu_seqlens"],
        a["seqused"],
        start_pos,
        coff,
        ratio,
        size,
        product.shape[0],
        state,
        table,
        ring,
        ape is not None,
    )
    count = torch.Size(shape).numel()
    out = memory.empty((count, size), torch.float32, x.device)
    logs = memory.empty((count, size), torch.float32, x.device) if peaks else None
    block = min(BLOCK, power_of_two(size))
    launches.kernel(_pool, count, triton.cdiv(size, block))(
        product,
        product.stride(0),
        product if ape is None else ape,
        product if state is None else state,
        0 if state is None else state.stride(0),
        out,
        out if logs is None else logs,
        **asked,
        each=max(shape[-1], 1),
        C=constants,
        PEAKS=peaks,
        BLOCK_D=block,
        BLOCK_L=min(16, power_of_two(coff * ratio)),
        num_warps=4,
    )
    return Pooled(product, out, logs, max(shape[-1], 1), asked, constants)


def ending(a: Mapping[str, Any], size: int, **more: Any) -> Ending:
    rope_sin, rotary = a["rope_sin"], a["rope_head_dim"]
    pairs = a["rotary_mode"] == compressed.PAIRS
    full = rope_sin is not None and rope_sin.shape[-1] == rotary
    first = a.get("rope_slice") == compressed.FIRST
    given = dict(OUT=True, CACHE=False, KIND=quantize.PLAIN.value, BF16=False)
    return Ending(
        BLOCK_D=power_of_two(size),
        NORMED=a["norm_weight"] is not None,
        DR=rotary,
        FROM=0 if first else size - rotary,
        PAIRS=pairs,
        STEP=2 if full and pairs else 1,
        HADAMARD=a["hadamard"],
        SCALE=size**-0.5,
        ROUNDS=power_of_two(size).bit_length() - 1,
        **given | more,
    )


def angles(
    rope_sin: Tensor | None, rope_cos: Tensor | None, absent: Tensor
) -> tuple[Tensor, Tensor, int]:
    """(sines, cosines, numbers from one row to the next); `absent` for those that are not read."""
    if rope_sin is None or rope_cos is None:
        return absent, absent, 0
    sin, cos = (each.flatten(0, -2) for each in (rope_sin, rope_cos))
    if sin.stride(0) != cos.stride(0):
        sin, cos = sin.contiguous(), cos.contiguous()
    return sin, cos, sin.stride(0)


def finish(
    made: Pooled,
    a: Mapping[str, Any],
    out: Tensor,
    end: Ending,
    values: Tensor | None = None,
    scales: Tensor | None = None,
    channels: Tensor | None = None,
    table: Tensor | None = None,
) -> None:
    absent = made.rows
    sin, cos, angle_row = angles(a["rope_sin"], a["rope_cos"], absent)
    given = {n: made.requests[n] for n in ("bounds", "used", "starts", "tokens", "requests")}
    launches.kernel(_finish, made.rows.shape[0])(
        made.rows,
        absent if a["norm_weight"] is None else a["norm_weight"],
        sin,
        cos,
        angle_row,
        a["norm_eps"],
        out,
        *(absent if part is None else part for part in (values, scales, channels)),
        *(0 if part is None else part.stride(0) for part in (values, scales, channels)),
        absent if table is None else table,
        0 if table is None else table.stride(0),
        0 if table is None else table.shape[1],
        0 if values is None else values.shape[0],
        1 if values is None else values.shape[1],
        **given,
        each=made.each,
        C=made.constants,
        E=end,
        num_warps=4,
    )


class _Stored(NamedTuple):
    """Where entries go, and how they end."""

    out: Tensor
    values: Tensor | None
    scales: Tensor | None
    channels: Tensor | None
    end: Ending


def _stored(a: Arguments) -> _Stored:
    x, cmp_cache, kind = a["x"], a["cmp_cache"], a["kind"]
    size = compressed.channels(a["wkv"], a["coff"])
    shape = compressed.rows(x, a["cu_seqlens"], a["cmp_ratio"])
    out = memory.empty((*shape, size) if a["return_cmp_kv"] else (0,), x.dtype, x.device)
    how: dict[str, Any] = dict(
        CACHE=cmp_cache is not None and cmp_cache.numel() > 0, OUT=a["return_cmp_kv"]
    )
    values, scales, channels = cmp_cache, a["cmp_scale_cache"], None
    if cmp_cache is not None and kind == "fp8" and size == quantized.V4_WIDTH:
        values, channels, scales = quantized.v4_parts(cmp_cache)
        values = quantize.as_bytes(values)
        how |= dict(KIND=V4.value)
    elif cmp_cache is not None and kind != "none":
        if scales is None:
            values, scales = quantized.index_cache_views(cmp_cache, kind)
        else:
            values = cmp_cache.view(quantized.VALUES[kind])
        values = quantize.as_bytes(values)
        how |= dict(KIND=quantize.kind_of(kind), BF16=a["hadamard_round"] == "bf16")
    return _Stored(out, values, scales, channels, ending(a, size, **how))


def is_few(**a: Unpack[Arguments]) -> bool:
    """Whether `_step` does all of a request."""
    size, rotary = compressed.channels(a["wkv"], a["coff"]), a["rope_head_dim"]
    return (
        a["cu_seqlens"] is None
        and a["x"].shape[1] <= min(FEW, a["cmp_ratio"])
        and size % 2 == 0
        and size <= NARROW
        and (rotary == 0 or a["rotary_mode"] == compressed.PAIRS)
        and a["state_cache"].numel() > 0
        and a["state_block_table"] is not None
        and a["state_block_table"].numel() > 0
    )


class Cut(NamedTuple):
    """How a step is cut: programs of a request, states that one reads at once, and its warps."""

    parts: int
    block: int
    warps: int


def cut(requests: int, size: int, history: int) -> Cut:
    """For `history` tokens before those of the call.  A long one is read by many programs, the
    wider the more requests there are: where no window closes each is one too many."""
    wide = power_of_two(size)
    if wide * history < MANY:
        block = min(32, power_of_two(history))
        return Cut(1, block, max(4, min(16, block * wide // 512)))
    width = min(wide, max(NARROWEST, min(power_of_two(2 * requests), BLOCK)))
    return Cut(wide // width, min(power_of_two(history), IN_FLIGHT // width), 4)


def steps(*calls: Arguments, ends: bool = False) -> list[Tensor]:
    """One or two calls on the same x, each of few tokens; `ends`: their `start_pos` is where
    requests end.  The second one begins when the product has ended, beside the first.  One that
    has a LayerNorm comes alone."""
    x = calls[0]["x"]
    factors = _factors(x, [w for a in calls for w in _weights(a)])
    cuts = [
        cut(x.shape[0], compressed.channels(a["wkv"], a["coff"]), a["coff"] * a["cmp_ratio"])
        for a in calls
    ]
    arrived = None
    if any(each.parts > 1 for each in cuts):
        arrived = memory.empty((len(calls), x.shape[0]), torch.int32, x.device)
    product = nz_matmul.product(*factors, "linear", keep_float=True, first=True, zeroed=arrived)
    if len(calls) == 1:
        product = _normalised(product, calls[0])
    chained = gpu.has_chained_launch(x.device)
    outs: list[Tensor] = []
    column = 0
    for number, a in enumerate(calls):
        ape, norm, coff, state = a["ape"], a["norm_weight"], a["coff"], a["state_cache"]
        size = compressed.channels(a["wkv"], coff)
        made, table = _stored(a), a["cmp_block_table"]
        asked, constants = _asked(
            x,
            None,
            a["seqused"],
            a["start_pos"],
            coff,
            a["cmp_ratio"],
            size,
            product.shape[0],
            state,
            a["state_block_table"],
            a["cache_mode"] == compressed.RING,
            ape is not None,
            ends,
        )
        sin, cos, angle_row = angles(a["rope_sin"], a["rope_cos"], product)
        stores = [made.values, made.scales, made.channels]
        parts, block, warps = cuts[number]
        pooled, ended = product, product
        if arrived is not None and parts > 1:
            pooled = memory.empty((x.shape[0], size), torch.float32, x.device)
            ended = arrived[number]
        launches.kernel(_step, x.shape[0] * parts)(
            product[..., column:],
            product if ape is None else ape,
            state,
            product if norm is None else norm,
            sin,
            cos,
            pooled,
            ended,
            made.out,
            *(product if part is None else part for part in stores),
            product if table is None else table,
            0 if table is None else table.stride(0),
            0 if table is None else table.shape[1],
            0 if made.values is None else made.values.shape[0],
            1 if made.values is None else made.values.shape[1],
            **asked,
            eps=a["norm_eps"],
            strides=(
                product.stride(0),
                product.stride(1),
                state.stride(0),
                angle_row,
                *(0 if part is None else part.stride(0) for part in stores),
            ),
            S=Step(
                constants,
                made.end,
                parts,
                block,
                chained,
                number > 0,
                number == 0 and len(calls) > 1,
            ),
            num_warps=warps,
            launch_pdl=chained,
        )
        column += sum(w.shape[0] for w in _weights(a))
        outs.append(made.out)
    return outs


def forward(**a: Unpack[Arguments]) -> Tensor:
    x, state_cache, cu_seqlens = a["x"], a["state_cache"], a["cu_seqlens"]
    size = compressed.channels(a["wkv"], a["coff"])
    if nothing(x, cu_seqlens, size):
        return _stored(a).out.zero_()
    if is_few(**a):
        return steps(a)[0]
    shape, ring = compressed.rows(x, cu_seqlens, a["cmp_ratio"]), a["cache_mode"] == compressed.RING
    table = a["state_block_table"]
    assert table is not None  # the check said so
    made = pool(a, shape, a["start_pos"], state_cache, table, ring)
    to = _stored(a)
    if a["return_cmp_kv"] or to.end.CACHE:
        finish(
            made,
            a,
            to.out,
            to.end,
            to.values,
            to.scales,
            to.channels,
            a["cmp_block_table"],
        )
    width = state_cache.shape[-1]
    tokens = made.product.shape[1]
    if state_cache.numel() and table.numel():
        launches.kernel(_keep, tokens, triton.cdiv(width, WIDE))(
            made.product,
            made.product.stride(0),
            made.product if a["ape"] is None else a["ape"],
            state_cache,
            state_cache.stride(0),
            **made.requests,
            C=made.constants,
            BLOCK_W=min(WIDE, power_of_two(width)),
            num_warps=4,
        )
    return to.out


def nothing(x: Tensor, cu_seqlens: Tensor | None, size: int) -> bool:
    """No token is of any request."""
    requests = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.shape[:-1].numel() * requests * size == 0
