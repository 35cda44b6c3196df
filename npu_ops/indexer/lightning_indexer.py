# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Exact top-k of the indexer's scores, in three kernels (and a fourth for their values).

    score[t, p] = key_scale[p] sum_n weights[t, n] query_scale[t, n] relu(query[t, n] . key[p])

    scores   cube + vector   a group of tokens of one request stays in L1 while tiles of keys pass;
                             paged keys come as one bulk copy a tile -> fp32 [groups, reach]
    collect  vector cores    of long rows: all scores above one that few more than k exceed, by
                             a sample, beside their positions; a piece of a row a core
    topk     vector cores    the k-th score of a row by counting, then compaction in order; where
                             rows are few, each of several cores packs a piece
    values   vector cores    the chosen scores, where they are asked for

The scales belong to int8, whose products are exact integers.  An absent position scores -inf and is
never chosen; a score that is NaN or -inf counts as the lowest finite one, so that it comes last.
On ties the lower position wins.

With RATIO a key stands for so many tokens, which lengths and limits count; the key that closes at a
token is seen by it.  Pages may then be smaller than a tile, whose last rows stay empty.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import memory
from ...dispatch.ops.indexer.lightning_indexer import Arguments, Selection
from ..common import cores, entry, ragged, tiling, tune, tuples
from ..common.front_end import extract_slice, get_element, sort
from ..common.ragged import (
    PAGED,
    TND,
    Layout,
    Strides,
    keys_of,
    request_of,
    seen,
    tokens_of,
    visible,
)

_LEAST = 16  # keys of a tile
_PIECE = 2048  # keys for which a core loads the queries of a group, if there is work for all cores
_LOWEST = tl.constexpr(-3.4028234663852886e38)
_ABSENT, _INF = tl.constexpr(-2139095041), tl.constexpr(2139095040)  # the keys of -inf and inf
_GUESSES = tl.constexpr(6)
_TOLD = tl.constexpr(4)  # the same where a sample tells the first one
_DEVIATIONS = 6  # from the fewest candidates to the most, of what a sample says of their number


@triton.jit
def heads_of(
    query,
    weights,
    query_scale,
    h,
    query_head,
    scale_head,
    Q_SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """(query, weight) of the heads `h`; if they are not the whole ones, zero from HEADS on."""
    of_query = query + h[:, None] * query_head + tl.arange(0, DIM)[None]
    of_scale = query_scale + h * scale_head
    if WHOLE:
        q = tl.load(of_query)
        w = tl.load(weights + h).to(tl.float32)
        if Q_SCALE:
            w *= tl.load(of_scale).to(tl.float32)
    else:
        q = tl.load(of_query, mask=(h < HEADS)[:, None], other=0)
        w = tl.load(weights + h, mask=h < HEADS, other=0.0).to(tl.float32)
        if Q_SCALE:
            w *= tl.load(of_scale, mask=h < HEADS, other=0.0).to(tl.float32)
    return q, w


@triton.jit
def groups_of(tokens, rows, TOKENS: tl.constexpr):
    """How many groups the tokens of a request make at most, of those of this launch."""
    return (tl.minimum(tokens, rows) + TOKENS - 1) // TOKENS


@triton.jit
def first_group(request, token, first, rows, tokens, Q_TND: tl.constexpr, TOKENS: tl.constexpr):
    """The group that a request begins, among those of the tokens `first` to `first + rows`; its own
    first token is `token`.  Packed requests have room for one group more than their share."""
    if Q_TND:
        before = tl.minimum(tl.maximum(token - first, 0), rows)
        group = (before + (TOKENS - 1) * request) // TOKENS
    else:
        group = (request - first // tokens) * groups_of(tokens, rows, TOKENS)
    return group


@triton.jit
def last_tile(requests, tokens, Q_TND: tl.constexpr, TOKENS: tl.constexpr):
    """Where the last TOKENS tokens of all begin: no tile of a group begins behind it."""
    if Q_TND:
        last = tokens - TOKENS
    else:
        last = requests * tokens - TOKENS
    return last


@triton.jit
def request_at(
    group,
    query_lengths,
    first,
    rows,
    requests,
    steps,
    tokens,
    Q_TND: tl.constexpr,
    Q_LENGTHS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """The request of a group; the last one of those that begin with it."""
    if Q_TND:
        request = requests * 0
        last = requests - 1
        for _ in range(0, steps):
            middle = (request + last + 1) // 2
            token, _count = tokens_of(middle, query_lengths, requests, tokens, Q_TND, Q_LENGTHS)
            begun = first_group(middle, token, first, rows, tokens, Q_TND, TOKENS) <= group
            request = tl.where(begun, middle, request)
            last = tl.where(begun, last, middle - 1)
    else:
        request = first // tokens + group // groups_of(tokens, rows, TOKENS)
    return request


@triton.jit
def score_row(
    token,
    request,
    query_lengths,
    first,
    rows,
    groups,
    requests,
    tokens,
    Q_TND: tl.constexpr,
    Q_LENGTHS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Where `scores` puts the row of a token of this request."""
    begun, _count = tokens_of(request, query_lengths, requests, tokens, Q_TND, Q_LENGTHS)
    group = first_group(request, begun, first, rows, tokens, Q_TND, TOKENS)
    begun = tl.maximum(begun, first)
    of_group = (token - begun) // TOKENS
    begun = tl.minimum(begun + of_group * TOKENS, last_tile(requests, tokens, Q_TND, TOKENS))
    row = (group + of_group) * TOKENS + token - begun
    # sums that do not ascend name groups that are not there
    return tl.minimum(tl.maximum(row, 0), groups * TOKENS - 1).to(tl.int64)


class Cache(NamedTuple):
    table_stride: int
    pages: int
    page: int  # keys of a page
    page_rows: int  # how far pages are apart, in rows
    scale_page: int  # and those of their scales


class Constants(NamedTuple):
    RATIO: tl.constexpr  # tokens that a key stands for
    Q_SCALE: tl.constexpr  # queries have scales
    K_SCALE: tl.constexpr  # keys have scales
    HEADS: tl.constexpr
    DIM: tl.constexpr
    KEY_STEP: tl.constexpr  # keys at a time: a tile, or a page that is smaller


@tuples.jit(
    [
        *("first", "rows", "wide", "groups", "pieces", "steps", "weights_row", "key_row"),
        *("requests", "tokens", "reach"),
    ]
)
def scores(
    query,
    key,
    weights,
    query_scale,
    key_scale,
    table,
    query_lengths,
    key_lengths,
    out,
    first,
    rows,
    wide,
    groups,
    pieces,
    steps,
    q_stride: Strides,
    weights_row,
    s_stride: Strides,
    key_row,
    requests,
    tokens,
    reach,
    cache: Cache,
    layout: Layout,
    C: Constants,
    HEAD_TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    KEY_TILE: tl.constexpr,
    set_workspace_multibuffer: tl.constexpr,
    limit_auto_multi_buffer_of_local_buffer: tl.constexpr,
):
    """out [groups * TOKENS, wide]: a core takes a piece of the keys that a group of tokens sees, a
    tile of KEY_STEP at a time."""
    r = tl.arange(0, KEY_TILE)
    d = tl.arange(0, C.DIM)
    h = tl.arange(0, TOKENS * HEAD_TILE)  # of several tokens: the heads of one after the other's
    t = tl.arange(0, TOKENS)
    for unit in range(tl.program_id(0), groups * pieces, tl.num_programs(0)):
        piece = unit // groups
        group = unit - piece * groups
        request = request_at(
            group,
            query_lengths,
            first,
            rows,
            requests,
            steps,
            tokens,
            layout.Q_TND,
            layout.Q_LENGTHS,
            TOKENS,
        )
        token, count = tokens_of(
            request, query_lengths, requests, tokens, layout.Q_TND, layout.Q_LENGTHS
        )
        start, keys = keys_of(request, key_lengths, reach, layout.KEYS, layout.K_LENGTHS)
        begun = first_group(request, token, first, rows, tokens, layout.Q_TND, TOKENS)
        j = tl.maximum(first - token, 0) + (group - begun) * TOKENS
        left = tl.maximum(tl.minimum(tl.minimum(count, first + rows - token) - j, TOKENS), 0)
        n = tl.where(left > 0, seen(j + left - 1, count, keys, layout.CAUSAL), 0)
        if C.RATIO > 1:
            n = n // C.RATIO
        tiles = ((n + C.KEY_STEP - 1) // C.KEY_STEP).to(tl.int64)
        at = tl.minimum(token + j, last_tile(requests, tokens, layout.Q_TND, TOKENS)).to(tl.int64)
        of_query = query + at * q_stride.row
        of_weights = weights + at * weights_row
        of_scale = query_scale + at * s_stride.row
        to = out + (group * TOKENS).to(tl.int64) * wide
        if C.HEADS <= HEAD_TILE:
            q, w = heads_of(
                of_query,
                of_weights,
                of_scale,
                h,
                q_stride.head,
                s_stride.head,
                C.Q_SCALE,
                C.HEADS,
                C.DIM,
                C.HEADS == HEAD_TILE,
            )
        begin = (tiles * piece // pieces).to(tl.int32)
        end = (tiles * (piece + 1) // pieces).to(tl.int32)
        for tile in range(begin, end):
            position = tile * C.KEY_STEP
            inside = n - position
            if C.KEY_STEP < KEY_TILE:
                inside = tl.minimum(inside, C.KEY_STEP)
            if layout.KEYS == PAGED:
                column = position // cache.page
                number = tl.load(table + request.to(tl.int64) * cache.table_stride + column)
                there = (number >= 0) & (number < cache.pages)
                row = number.to(tl.int64) * cache.page_rows + position - column * cache.page
                by_row = number.to(tl.int64) * cache.scale_page + position - column * cache.page
            elif layout.KEYS == TND:
                there = tile >= 0
                row = (start + position).to(tl.int64)
                by_row = row
            else:
                there = tile >= 0
                row = request.to(tl.int64) * cache.page_rows + position
                by_row = request.to(tl.int64) * cache.scale_page + position
            loaded = r < tl.where(there, inside, 0)
            k = tl.load(key + (row + r)[:, None] * key_row + d[None], mask=loaded[:, None], other=0)
            for head in tl.static_range(0, C.HEADS, HEAD_TILE):
                if C.HEADS > HEAD_TILE:
                    q, w = heads_of(
                        of_query,
                        of_weights,
                        of_scale,
                        head + h,
                        q_stride.head,
                        s_stride.head,
                        C.Q_SCALE,
                        C.HEADS,
                        C.DIM,
                        C.HEADS % HEAD_TILE == 0,
                    )
                z = tl.dot(q, tl.trans(k)).to(tl.float32)  # [TOKENS * HEAD_TILE, KEY_TILE]
                z = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL) * w[:, None]
                if C.HEADS % HEAD_TILE != 0:
                    # the zeros of heads that are not there, times an infinite key, are NaN
                    z = tl.where((head + h < C.HEADS)[:, None], z, 0.0)
                if TOKENS > 1:
                    score = tl.sum(z.reshape(TOKENS, HEAD_TILE, KEY_TILE), 1)
                elif head == 0:
                    score = tl.sum(z, 0)
                else:
                    score += tl.sum(z, 0)
            if C.K_SCALE:
                by = tl.load(key_scale + by_row + r, mask=loaded, other=0.0)
                if TOKENS > 1:
                    score *= by.to(tl.float32)[None]
                else:
                    score *= by.to(tl.float32)
            # false for NaN as well
            score = tl.where(score > _LOWEST, score, _LOWEST)
            most = tl.where(there, float("inf"), float("-inf"))
            score = tl.minimum(score, most, propagate_nan=tl.PropagateNan.ALL)
            if TOKENS > 1:
                rows_of = to + t[:, None] * wide + position + r[None]
                tl.store(rows_of, score, mask=(r < inside)[None])
            else:
                tl.store(to + position + r, score, mask=r < inside)


@triton.jit
def scores_of(
    row,
    query_lengths,
    key_lengths,
    first,
    rows,
    groups,
    requests,
    tokens,
    reach,
    Q_TND: tl.constexpr,
    Q_LENGTHS: tl.constexpr,
    KEYS: tl.constexpr,
    K_LENGTHS: tl.constexpr,
    CAUSAL: tl.constexpr,
    RATIO: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """(how many scores a token of this launch has, where `scores` puts its row)"""
    request, _, n = visible(
        first + row,
        query_lengths,
        key_lengths,
        requests,
        tokens,
        reach,
        Q_TND,
        Q_LENGTHS,
        KEYS,
        K_LENGTHS,
        CAUSAL,
    )
    if RATIO > 1:
        n = n // RATIO
    at = score_row(
        first + row,
        request,
        query_lengths,
        first,
        rows,
        groups,
        requests,
        tokens,
        Q_TND,
        Q_LENGTHS,
        TOKENS,
    )
    return n, at


@triton.jit
def as_float(key):
    """The float behind an ordered int32 key: floats compare as their keys do."""
    key = key.to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def as_key(number):
    """The ordered key of a float, as int64."""
    bits = number.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def narrower(low, high, most, least, key, count, wanted):
    """The bracket, and what is not below its ends, by one more count."""
    enough = count >= wanted
    closer = (key < high) & (count < wanted)
    most = tl.where(enough, count, most)
    least = tl.where(closer, count, least)
    return tl.where(enough, key, low), tl.where(closer, key, high), most, least


@triton.jit
def search(of_row, n, low, high, most, least, key1, key2, key3, wanted, TILE: tl.constexpr):
    """The bracket from `low`, which `most` scores reach, to `high`, which `least` do, narrowed by
    three ascending keys; one that is not inside it changes nothing."""
    c = tl.arange(0, TILE)
    at1, at2, at3 = as_float(key1), as_float(key2), as_float(key3)
    above1 = tl.zeros((TILE,), tl.float32)
    above2 = tl.zeros((TILE,), tl.float32)
    above3 = tl.zeros((TILE,), tl.float32)
    for s in range(0, n, TILE):
        v = tl.load(of_row + s + c, mask=c < n - s, other=float("-inf"))
        above1 += tl.where(v >= at1, 1.0, 0.0)
        above2 += tl.where(v >= at2, 1.0, 0.0)
        above3 += tl.where(v >= at3, 1.0, 0.0)
    low, high, most, least = narrower(low, high, most, least, key1, tl.sum(above1, 0), wanted)
    low, high, most, least = narrower(low, high, most, least, key2, tl.sum(above2, 0), wanted)
    return narrower(low, high, most, least, key3, tl.sum(above3, 0), wanted)


@triton.jit
def places(packed):
    """Where in their tile the first entries lie; 0 behind the last one."""
    return -tl.where(packed > float("-inf"), packed, 0.0).to(tl.int32)


@triton.jit
def put(to, to_positions, v, packed, start, count, WIDTH: tl.constexpr):
    """The first `count` packed entries of a tile, and their positions, which begin at `start`."""
    p = tl.arange(0, WIDTH)
    at = places(packed)
    tl.store(to + p, tl.gather(v, at, 0), mask=p < count)
    tl.store(to_positions + p, (start + at).to(tl.float32), mask=p < count)


@triton.jit
def sampled(of_row, n, QUARTER: tl.constexpr, EACH: tl.constexpr):
    """A sample of a row of `n` scores, in order: of blocks that lie evenly apart, the highest of
    each four, one from each quarter of the row."""
    apart = n // (4 * QUARTER // EACH)
    at = tl.arange(0, QUARTER // EACH)[:, None] * apart + tl.arange(0, EACH)[None]
    highest = tl.full((QUARTER // EACH, EACH), float("-inf"), tl.float32)
    for quarter in range(0, 4):
        v = tl.load(of_row + quarter * (QUARTER // EACH) * apart + at)
        highest = tl.where(v > highest, v, highest)
    return sort(tl.reshape(highest, (QUARTER,)), 0, True)


@triton.jit
def reached_by(ranked, n, aim, QUARTER: tl.constexpr):
    """A score that about `aim` of the `n` ones reach."""
    below = 1.0 - aim * 1.0 / n
    rank = (QUARTER * (1.0 - below * below * below * below)).to(tl.int32)
    return tl.maximum(get_element(ranked, (tl.minimum(rank, QUARTER - 1),)), _LOWEST)


@tuples.jit(
    [
        *("first", "rows", "wide", "groups", "chosen", "room", "aim", "more", "fewer", "pieces"),
        *("requests", "tokens", "reach"),
    ]
)
def collect(
    score,
    query_lengths,
    key_lengths,
    positions,
    missed,
    bounds,
    first,
    rows,
    wide,
    groups,
    chosen,
    room,
    aim,
    more,
    fewer,
    pieces,
    requests,
    tokens,
    reach,
    layout: Layout,
    RATIO: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    FEW: tl.constexpr,
    QUARTER: tl.constexpr,
    EACH: tl.constexpr,
    COUNT_TILE: tl.constexpr,
):
    """The candidates of a row, in order: their scores in its last `room` columns, and -inf behind
    them; positions [rows, room], as floats, which the vector unit gathers.  missed [rows]: 0 where
    the `chosen` best are among them.  bounds [rows, 4]: the score that all of them reach, and three
    between which the `chosen`-th is likely to lie, by the sample as well.

    A core takes a piece of a row, whose candidates follow those of the pieces before, which it
    counts.
    """
    p = tl.arange(0, TILE)
    c = tl.arange(0, COUNT_TILE)
    negative = -p.to(tl.float32)
    for unit in range(tl.program_id(0), rows * pieces, tl.num_programs(0)):
        row = unit // pieces
        piece = unit - row * pieces
        n, at = scores_of(
            row,
            query_lengths,
            key_lengths,
            first,
            rows,
            groups,
            requests,
            tokens,
            reach,
            *layout,
            RATIO,
            TOKENS,
        )
        of_row = score + wide * at
        to = of_row + wide - room
        to_positions = positions + row.to(tl.int64) * room
        if n > tl.maximum(room, 4 * QUARTER):
            ranked = sampled(of_row, n, QUARTER, EACH)
            least = reached_by(ranked, n, aim, QUARTER)
            tiles = (n + TILE - 1) // TILE
            begin = tiles * piece // pieces
            before = begin * TILE
            above = tl.zeros((COUNT_TILE,), tl.float32)
            for s in range(0, before, COUNT_TILE):
                v = tl.load(of_row + s + c, mask=c < before - s, other=float("-inf"))
                above += tl.where(v >= least, 1.0, 0.0)
            written = tl.sum(above, 0).to(tl.int32)
            for tile in range(begin, tiles * (piece + 1) // pieces):
                s = tile * TILE
                v = tl.load(of_row + s + p, mask=p < n - s, other=float("-inf"))
                taken = tl.sum(tl.where(v >= least, 1.0, 0.0), 0).to(tl.int32)
                if taken > 0:
                    packed = sort(tl.where(v >= least, negative, float("-inf")), 0, True)
                    fits = tl.minimum(taken, room - written)
                    if taken <= FEW:
                        few = extract_slice(packed, (0,), (FEW,), (1,))
                        put(to + written, to_positions + written, v, few, s, fits, FEW)
                    else:
                        put(to + written, to_positions + written, v, packed, s, fits, TILE)
                    written += taken
            if piece == pieces - 1:
                for s in range(written, room, TILE):
                    nothing = tl.full((TILE,), float("-inf"), tl.float32)
                    tl.store(to + s + p, nothing, mask=p < room - s)
                beyond = (written < chosen) | (written > room)
                tl.store(missed + row, beyond.to(tl.int32))
                of_bounds = bounds + row * 4
                tl.store(of_bounds, least)
                tl.store(of_bounds + 1, reached_by(ranked, n, more, QUARTER))
                tl.store(of_bounds + 2, reached_by(ranked, n, chosen, QUARTER))
                tl.store(of_bounds + 3, reached_by(ranked, n, fewer, QUARTER))
        elif piece == 0:
            tl.store(missed + row, 1)


@tuples.jit(
    [
        *("first", "rows", "wide", "groups", "chosen", "room", "pieces"),
        *("requests", "tokens", "reach"),
    ]
)
def topk(
    score,
    query_lengths,
    key_lengths,
    positions,
    missed,
    bounds,
    out,
    first,
    rows,
    wide,
    groups,
    chosen,
    room,
    pieces,
    requests,
    tokens,
    reach,
    layout: Layout,
    RATIO: tl.constexpr,
    TOKENS: tl.constexpr,
    COLLECTED: tl.constexpr,
    COUNT_TILE: tl.constexpr,
    SORT_TILE: tl.constexpr,
):
    """The `chosen`-th score lies in a bracket of keys, whose ends are counted: _GUESSES passes over
    the row narrow it down by values, which is fast where they are spread; where a score or a tie is
    not singled out then, up to 16 passes do by keys, which is sure.  Rows that are taken as a whole
    need none.  Then the positions above it, and the first ones equal to it, are packed in order.
    If COLLECTED, the candidates stand for the row, unless they missed one, and the first three
    guesses are those that were told.

    A core packs a piece of a row, behind what the pieces before take, which it counts.

    A tile is packed by sorting: -position where chosen, -inf elsewhere.  Positions and counts are
    small enough to be exact as floats, which the vector unit compares and sorts best.
    """
    c = tl.arange(0, COUNT_TILE)
    p = tl.arange(0, SORT_TILE)
    negative = -p.to(tl.float32)
    wanted = chosen.to(tl.float32)
    for unit in range(tl.program_id(0), rows * pieces, tl.num_programs(0)):
        row = unit // pieces
        piece = unit - row * pieces
        n, at = scores_of(
            row,
            query_lengths,
            key_lengths,
            first,
            rows,
            groups,
            requests,
            tokens,
            reach,
            *layout,
            RATIO,
            TOKENS,
        )
        of_row = score + wide * at
        to = out + (first + row).to(tl.int64) * chosen
        searched = tl.where(n > chosen, n, 0)
        if COLLECTED:
            of_positions = positions + row.to(tl.int64) * room
            known = tl.where(tl.load(missed + row) == 0, room, 0)
            n = tl.where(known > 0, known, n)
            searched = tl.where(known > 0, 0, searched)
            of_row += tl.where(known > 0, wide - room, 0)
        there = tl.zeros((COUNT_TILE,), tl.float32)
        lowest = tl.full((COUNT_TILE,), float("inf"), tl.float32)
        highest = tl.full((COUNT_TILE,), _LOWEST, tl.float32)
        for s in range(0, searched, COUNT_TILE):
            v = tl.load(of_row + s + c, mask=c < n - s, other=float("-inf"))
            there += tl.where(v >= _LOWEST, 1.0, 0.0)
            lowest = tl.minimum(lowest, tl.where(v >= _LOWEST, v, float("inf")))
            highest = tl.maximum(highest, v)
        most = tl.sum(there, 0)
        least = most * 0.0
        # -inf is absent: where no more are there than are wanted, all above it are taken
        low = tl.where(most > wanted, as_key(tl.min(lowest, 0)), _ABSENT)
        high = tl.where(most > wanted, as_key(tl.max(highest, 0)), _ABSENT) + 1
        halved = 2
        guesses = _GUESSES
        if COLLECTED:
            of_bounds = bounds + row * 4
            if known > 0:
                low, high, most, least = search(
                    of_row,
                    n,
                    as_key(tl.load(of_bounds)),
                    high * 0 + _INF + 1,
                    most * 0.0 + room,  # at most
                    least,
                    as_key(tl.load(of_bounds + 1)),
                    as_key(tl.load(of_bounds + 2)),
                    as_key(tl.load(of_bounds + 3)),
                    wanted,
                    COUNT_TILE,
                )
                halved = 0
                guesses = _TOLD - 1
        for guess in range(0, guesses):
            if (high - low > 1) & (most != wanted):
                share = tl.where(guess < halved, 0.5, (most - wanted) / (most - least))
                apart = tl.where(guess < halved, 0.25, 0.125)
                bottom = as_float(low)
                width = as_float(tl.minimum(high, _INF)) - bottom
                key1 = as_key(bottom + width * tl.maximum(share - apart, 0.01))
                key2 = as_key(bottom + width * tl.minimum(tl.maximum(share, 0.01), 0.99))
                key3 = as_key(bottom + width * tl.minimum(share + apart, 0.99))
                low, high, most, least = search(
                    of_row, n, low, high, most, least, key1, key2, key3, wanted, COUNT_TILE
                )
        for _ in range(0, ((high - low > 1) & (most != wanted)).to(tl.int32) * 16):
            if (high - low > 1) & (most != wanted):
                step = (high - low + 3) >> 2
                low, high, most, least = search(
                    of_row,
                    n,
                    low,
                    high,
                    most,
                    least,
                    low + step,
                    low + 2 * step,
                    low + 3 * step,
                    wanted,
                    COUNT_TILE,
                )
        at_least = as_float(low)
        # how many of those equal to it are wanted: all that there are, or those that are missing
        ties = tl.where(most == wanted, chosen, chosen - least.to(tl.int32))
        ties = tl.where(low > _ABSENT, ties, 0)
        tiles = (n + SORT_TILE - 1) // SORT_TILE
        begin = tiles * piece // pieces
        before = begin * SORT_TILE
        higher = tl.zeros((COUNT_TILE,), tl.float32)
        alike = tl.zeros((COUNT_TILE,), tl.float32)
        for s in range(0, before, COUNT_TILE):
            v = tl.load(of_row + s + c, mask=c < before - s, other=float("-inf"))
            higher += tl.where(v > at_least, 1.0, 0.0)
            alike += tl.where(v == at_least, 1.0, 0.0)
        written = tl.minimum(tl.sum(alike, 0).to(tl.int32), ties)
        ties -= written
        written += tl.sum(higher, 0).to(tl.int32)
        for tile in range(begin, tiles * (piece + 1) // pieces):
            s = tile * SORT_TILE
            v = tl.load(of_row + s + p, mask=p < n - s, other=float("-inf"))
            equal = tl.where(v == at_least, 1.0, 0.0)
            here = tl.sum(equal, 0).to(tl.int32)
            # the last equal position that is taken, negative
            last = tl.where(ties > 0, -1.0 * SORT_TILE, 1.0)
            if (here > ties) & (ties > 0):
                # rare: the wanted ones end inside this tile
                packed = sort(tl.where(equal > 0, negative, float("-inf")), 0, True)
                last = tl.sum(tl.where(p == ties - 1, packed, 0.0), 0)
            ties -= tl.minimum(here, ties)
            equal = tl.where(negative >= last, equal, 0.0)
            key = tl.where(v > at_least, negative, tl.where(equal > 0, negative, float("-inf")))
            taken = tl.sum(tl.where(key > float("-inf"), 1.0, 0.0), 0).to(tl.int32)
            if taken > 0:
                packed = sort(key, 0, True)
                place = places(packed)
                position = s + place
                if COLLECTED:
                    candidate = tl.load(of_positions + s + p, mask=p < known - s, other=0.0)
                    candidate = tl.gather(candidate, place, 0).to(tl.int32)
                    position = tl.where(known > 0, candidate, position)
                tl.store(to + written + p, position, mask=p < taken)
                written += taken
        for s in range(tl.where(piece == pieces - 1, written, chosen), chosen, SORT_TILE):
            tl.store(to + s + p, tl.full((SORT_TILE,), -1, tl.int32), mask=p < chosen - s)


@entry.jit(do_not_specialize=["first", "rows", "wide", "groups", "chosen", "requests", "tokens"])
def values(
    score,
    indices,
    query_lengths,
    out,
    first,
    rows,
    wide,
    groups,
    chosen,
    requests,
    tokens,
    Q_TND: tl.constexpr,
    Q_LENGTHS: tl.constexpr,
    TOKENS: tl.constexpr,
    PIECE: tl.constexpr,
):
    p = tl.arange(0, PIECE)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        request = request_of(first + row, query_lengths, requests, tokens, Q_TND)
        of_row = score + wide * score_row(
            first + row,
            tl.minimum(request, requests - 1),
            query_lengths,
            first,
            rows,
            groups,
            requests,
            tokens,
            Q_TND,
            Q_LENGTHS,
            TOKENS,
        )
        at = (first + row).to(tl.int64) * chosen
        for s in range(0, chosen, PIECE):
            position = tl.load(indices + at + s + p, mask=p < chosen - s, other=-1)
            value = tl.load(of_row + tl.where(position >= 0, position, 0))
            value = tl.where(position >= 0, value, 0.0)
            tl.store(out + at + s + p, value.to(out.dtype.element_ty), mask=p < chosen - s)


@tuples.jit(["rows", "chosen", "requests", "tokens", "reach"])
def tail(
    indices,
    values,
    query_lengths,
    key_lengths,
    out,
    out_values,
    rows,
    chosen,
    requests,
    tokens,
    reach,
    layout: Layout,
    RATIO: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Of a row's `chosen` entries, -1 behind them, one more: the open one ends them, of value 0."""
    p = tl.arange(0, PIECE)
    one = tl.arange(0, 1)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        _, _, seen = visible(row, query_lengths, key_lengths, requests, tokens, reach, *layout)
        at = row.to(tl.int64) * chosen
        to = at + row
        written = 0
        for s in range(0, chosen, PIECE):
            entry = tl.load(indices + at + s + p, mask=p < chosen - s, other=-1)
            there = tl.sum(tl.where(entry >= 0, 1.0, 0.0), 0).to(tl.int32)
            tl.store(out + to + s + p, entry, mask=p < there)
            if out_values is not None:
                value = tl.load(values + at + s + p, mask=p < there)
                tl.store(out_values + to + s + p, value, mask=p < there)
            written += there
        last = seen // RATIO
        more = tl.where(seen > last * RATIO, 1, 0)
        tl.store(out + to + written + one, tl.zeros((1,), tl.int32) + last, mask=one < more)
        for s in range(written + more, chosen + 1, PIECE):
            nothing = tl.full((PIECE,), -1, tl.int32)
            tl.store(out + to + s + p, nothing, mask=p < chosen + 1 - s)
        if out_values is not None:
            for s in range(written, chosen + 1, PIECE):
                nothing = tl.zeros((PIECE,), out_values.dtype.element_ty)
                tl.store(out_values + to + s + p, nothing, mask=p < chosen + 1 - s)


def unsupported(
    query: Tensor, key: Tensor, block_table: Tensor | None, cmp_ratio: int, **_: Any
) -> str | None:
    if reason := tiling.not_multiplied(query=query):
        return reason
    size = query.shape[-1]
    overflow = tiling.matmul_overflow(64, 128, size)
    if size % 16 or overflow:
        return overflow or f"head size {size}, the cube unit takes multiples of 16"
    return out_of_reach(key, block_table, cmp_ratio)


def out_of_reach(key: Tensor, block_table: Tensor | None, cmp_ratio: int) -> str | None:
    """Why the kernels do not count the positions of these keys, or None."""
    reach = block_table.shape[1] * key.shape[1] if block_table is not None else key.shape[-3]
    if reach > ragged.LONGEST:
        return f"contexts of up to {reach} positions, the kernel reaches {ragged.LONGEST}"
    if cmp_ratio > 1 and _tokens(reach, cmp_ratio) >= 2**31:
        return (
            f"{reach} keys of cmp_ratio={cmp_ratio} tokens each, the kernel counts tokens below "
            "2**31"
        )
    return ragged.uneven(key=key)


def _tokens(reach: int, cmp_ratio: int) -> int:
    """The most that a length counts: those of all keys, and of a window that is open."""
    return (reach + 1) * cmp_ratio - 1


def forward(
    value_dtype: torch.dtype | None = None, **x: Unpack[Arguments]
) -> tuple[Tensor, Tensor]:
    """Values in the dtype of `query`, unless another is asked for."""
    wanted = (value_dtype or x["query"].dtype) if x["return_value"] else None
    return select(x, None, None, wanted)


def select(
    x: Selection,
    query_scale: Tensor | None,
    key_scale: Tensor | None,
    value_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """(indices, values of `value_dtype`, or none)"""
    query, key, count, cmp_ratio = x["query"], x["key"], x["sparse_count"], x["cmp_ratio"]
    lengths = x["actual_seq_lengths_query"], x["actual_seq_lengths_key"]
    layouts = x["layout_query"], x["layout_key"]
    plan = ragged.plan(query, key, *lengths, x["block_table"], *layouts, x["sparse_mode"])
    shape = [*query.shape[:-2], 1, count]
    indices = memory.empty(shape, torch.int32, query.device)
    wanted = value_dtype is not None
    chosen = memory.empty(shape if wanted else [0], value_dtype or query.dtype, query.device)
    reach = _tokens(plan.reach, cmp_ratio)  # of lengths
    ending = None
    if x["select_tail"]:
        ending = partial(_with_tail, indices, chosen, plan, reach, cmp_ratio)
    if plan.rows == 0 or plan.reach == 0 or key.numel() == 0:
        indices.fill_(-1)
        chosen.zero_()
        return ending() if ending else (indices, chosen)

    q, w = query.flatten(0, -3), x["weights"].flatten(0, -2)
    of_query = w if query_scale is None else query_scale.flatten(0, -2)
    of_key = w if key_scale is None else key_scale
    page = key.shape[-3] if x["layout_key"] == "PA_BSND" else 0
    product = _tiles(plan, page, q, w, of_query)
    each = product.tiles["TOKENS"]
    step = min(product.tiles["KEY_TILE"], page or product.tiles["KEY_TILE"])
    plan.arguments["reach"] = reach
    of_tokens = {name: plan.arguments[name] for name in ("query_lengths", "requests", "tokens")}
    packed = {name: plan.flags[name] for name in ("Q_TND", "Q_LENGTHS")} | {"TOKENS": each}
    room, aims = _candidates(count, plan.reach)
    packing = tune.only("lightning_indexer.topk")
    wide = tiling.up(plan.reach, product.tiles["KEY_TILE"]) + room
    at_once = tiling.at_once(plan.rows, wide * 4)
    rounds = [
        (first, rows, _groups(plan, first, rows, each))
        for first in range(0, plan.rows, at_once)
        for rows in [min(at_once, plan.rows - first)]
    ]
    most = max(groups for _, _, groups in rounds)
    found = memory.empty((most * each, wide), torch.float32, query.device)
    positions = memory.empty((min(plan.rows, at_once), room), torch.float32, query.device)
    missed = memory.empty((min(plan.rows, at_once),), torch.int32, query.device)
    bounds = memory.empty((min(plan.rows, at_once), 4), torch.float32, query.device)
    for first, rows, groups in rounds:
        scores[(cores.cube(),)](
            q,
            key,
            w,
            of_query,
            of_key,
            plan.table,
            out=found,
            first=first,
            rows=rows,
            wide=wide,
            groups=groups,
            pieces=_pieces(groups, plan.reach),
            steps=plan.arguments["requests"].bit_length(),
            q_stride_row=q.stride(0),
            q_stride_head=q.stride(1),
            weights_row=w.stride(0),
            s_stride_row=of_query.stride(0),
            s_stride_head=of_query.stride(1),
            key_row=ragged.row_stride(key),
            cache_table_stride=plan.table.stride(0),
            cache_pages=key.shape[0],
            cache_page=key.shape[-3],
            cache_page_rows=ragged.page_rows(key),
            cache_scale_page=of_key.stride(0),
            Q_SCALE=query_scale is not None,
            K_SCALE=key_scale is not None,
            HEADS=q.shape[1],
            DIM=q.shape[2],
            RATIO=cmp_ratio,
            KEY_STEP=step,
            **plan.arguments,
            **plan.flags,
            **product.keywords,
        )
        of_rows = dict(
            positions=positions,
            missed=missed,
            bounds=bounds,
            first=first,
            rows=rows,
            wide=wide,
            groups=groups,
            chosen=count,
            room=room,
            RATIO=cmp_ratio,
            TOKENS=each,
            **plan.arguments,
            **plan.flags,
        )
        if room:
            pieces = max(1, cores.vector() // rows)
            collect[(min(rows * pieces, cores.vector()),)](
                found,
                **aims,
                pieces=pieces,
                **of_rows,
                **tune.only("lightning_indexer.collect").keywords,
            )
        tiles = -(-(room or plan.reach) // packing.tiles["SORT_TILE"])
        pieces = max(1, min(cores.vector() // rows, tiles))
        topk[(min(rows * pieces, cores.vector()),)](
            found,
            out=indices,
            pieces=pieces,
            COLLECTED=room > 0,
            **of_rows,
            **packing.keywords,
        )
        if wanted:
            values[(min(rows, cores.vector()),)](
                found,
                indices,
                out=chosen,
                first=first,
                rows=rows,
                wide=wide,
                groups=groups,
                chosen=count,
                **of_tokens,
                **packed,
                **tune.only("lightning_indexer.values").keywords,
            )
    return ending() if ending else (indices, chosen)


def _with_tail(
    indices: Tensor, values: Tensor, plan: ragged.Plan, reach: int, cmp_ratio: int
) -> tuple[Tensor, Tensor]:
    """The same with one more place, in which or before which the open entry stands."""
    *outer, count = indices.shape
    shape, wanted = [*outer, count + 1], values.ndim > 1
    out = memory.empty(shape, torch.int32, indices.device)
    of_values = memory.empty(shape if wanted else [0], values.dtype, values.device)
    if plan.rows:
        tail[(min(plan.rows, cores.vector()),)](
            indices,
            values,
            out=out,
            out_values=of_values if wanted else None,
            rows=plan.rows,
            chosen=count,
            RATIO=cmp_ratio,
            **plan.arguments | dict(reach=reach),
            **plan.flags,
            **tune.only("lightning_indexer.tail").keywords,
        )
    return out, of_values


def _tiles(plan: ragged.Plan, page: int, query: Tensor, *by_head: Tensor) -> tune.Config:
    """A tile of keys lies within a page, the least one also beyond a smaller one.  The heads of
    several tokens are one tile only where they lie back to back and fill it."""
    tokens, heads, size = query.shape
    dense = all(x.stride(0) == heads * x.stride(1) for x in (query, *by_head))
    within = [
        config
        for config in tune.TABLE["lightning_indexer.scores"]
        if (page % config.tiles["KEY_TILE"] == 0 or page < config.tiles["KEY_TILE"] == _LEAST)
        and (
            config.tiles["TOKENS"] == 1
            or (dense and config.tiles["HEAD_TILE"] == heads and config.tiles["TOKENS"] <= tokens)
        )
    ]
    ranked = tune.ranked(within, "HEAD_TILE", min(heads, 64))
    each = -(-plan.rows // plan.arguments["requests"])
    return tune.choose(
        "lightning_indexer.scores", tune.ranked(ranked, "TOKENS", each), size, query.dtype
    )


def _candidates(chosen: int, reach: int) -> tuple[int, dict[str, int]]:
    """(room for the candidates of a row, how many scores the bounds aim at: all candidates, and a
    few more and fewer than are chosen), or no room where a row is too short for it.  The root of a
    number that a sample counts deviates by a half, whatever it is."""
    sample = 4 * tune.only("lightning_indexer.collect").tiles["QUARTER"]
    root = math.sqrt(chosen * sample / reach)

    def at(deviations: float) -> int:
        return math.ceil(max(root + deviations, 0) ** 2 * reach / sample)

    aims = dict(aim=at(_DEVIATIONS / 2), more=at(1.5), fewer=at(-1.5))
    room = tiling.up(at(_DEVIATIONS), tune.only("lightning_indexer.topk").tiles["COUNT_TILE"])
    return (room, aims) if 2 * room <= reach else (0, aims)


def _groups(plan: ragged.Plan, first: int, rows: int, each: int) -> int:
    """How many groups of tokens `scores` numbers in a round: see `first_group`."""
    requests, tokens = plan.arguments["requests"], plan.arguments["tokens"]
    if plan.flags["Q_TND"]:
        return (rows + (each - 1) * requests) // each
    requests = (first + rows - 1) // tokens - first // tokens + 1
    return requests * -(-min(tokens, rows) // each)


def _pieces(groups: int, reach: int) -> int:
    """Into how many pieces the keys of each group go: so that all cores have as many of them, and
    long ones spread over many cores."""
    least = cores.cube() // math.gcd(groups, cores.cube())
    return least * max(1, reach // (_PIECE * least))


def scored(**arguments: Any) -> tuple[Tensor, Tensor]:
    """npu_lightning_indexer_scores"""
    return forward(**arguments, return_value=True, value_dtype=torch.float32)
