# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Dense attention over paged latents, which are keys and values at once.

    z = scale ([query, query_rope] . [key, key_rope])   m = max z   l = sum exp(z - m)
    out = sum exp(z - m) key / (l + exp(sink - m))      lse = m + log l

    note         vector cores    the request of each token, and which positions it sees
    weigh        cube + vector   scores [T, K, N], and m and l of each part of the keys
    accumulate   cube + vector   exp(z - m) key in L0C, nothing rescaled; where tokens are few, so
                                 many parts of the keys, each divided by the sum of all
    merge        vector cores    the parts added up

A run is what a token sees of SPAN keys that lie in one page: one bulk copy, straight from the
cache, and bound by its length: rows behind it are not read.  A page has runs of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import memory
from ...dispatch.ops.attention.fused_infer_attention_score_v2 import (
    Arguments,
    is_packed,
    pages_of,
    shapes,
    with_heads,
)
from ..common import cores, entry, ragged, tiling, tune, tuples, two_passes
from ..common.lengths import within

MOST_SPLITS = 24  # of a token's keys, whose parts of the output are merged
_OP = "fused_infer_attention_score_v2"
# of a token: its request, and the positions that it sees
REQUEST, BEGIN, LIMIT = (tl.constexpr(i) for i in range(3))
NOTED = tl.constexpr(8)


@entry.jit(do_not_specialize=["rows", "tokens", "requests", "reach", "window"])
def note(
    noted,
    query_lengths,
    key_lengths,
    rows,
    tokens,
    requests,
    reach,
    window,
    PACKED: tl.constexpr,
    LENGTHS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    PIECE: tl.constexpr,
):
    """`tokens` are those of a request, or of all of them where they are packed."""
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        if PACKED:
            # the first request whose sum is above the row, and the largest sum before it
            request = requests
            first = 0
            for start in range(0, requests, PIECE):
                i = start + tl.arange(0, PIECE)
                end = tl.load(query_lengths + i, mask=i < requests, other=0)
                end = tl.minimum(tl.maximum(end, 0), tokens).to(tl.float32)
                number = i.to(tl.float32)
                above = tl.where(end > row.to(tl.float32), number, requests * 1.0)
                request = tl.minimum(request, tl.min(above, 0).to(tl.int32))
                before = tl.where(number < request.to(tl.float32), end, 0.0)
                first = tl.maximum(first, tl.max(before, 0).to(tl.int32))
            inside = request < requests
            request = tl.minimum(request, requests - 1)
            count = within(query_lengths + request, tokens) - first
        else:
            request = row // tokens
            first = request * tokens
            count = tokens
            inside = row >= 0
            if LENGTHS:
                count = within(query_lengths + request, tokens)
        left = tl.where(inside, count - (row - first), 0)
        limit = within(key_lengths + request, reach)
        if CAUSAL:
            limit = tl.maximum(limit - left + 1, 0)
        limit = tl.where(left > 0, limit, 0)
        begin = row * 0
        if WINDOW:
            begin = tl.maximum(limit - 1 - window, 0)
        of_row = noted + row.to(tl.int64) * NOTED
        tl.store(of_row + REQUEST, request)
        tl.store(of_row + BEGIN, begin)
        tl.store(of_row + LIMIT, limit)


class Pages(NamedTuple):
    """Of the table and the cache."""

    columns: int  # from request to request
    count: int
    page: int
    key_page: int
    key_row: int
    rope_page: int
    rope_row: int


class Heads(NamedTuple):
    """How far apart the rows of tokens and heads are."""

    query_row: int
    query_head: int
    rope_row: int
    rope_head: int


@triton.jit
def runs_of(begin, limit, page, SPAN: tl.constexpr):
    """(the first run that the positions begin .. limit - 1 touch, how many of them)."""
    a_page = (page + SPAN - 1) // SPAN
    last = tl.maximum(limit - 1, 0)
    start = begin // page * a_page + begin % page // SPAN
    stop = last // page * a_page + last % page // SPAN + 1
    return start, tl.where(limit > begin, stop - start, 0)


@triton.jit
def run_at(of_request, run, begin, limit, page, pages, SPAN: tl.constexpr):
    """(page, first row, number of rows) of a run; no rows, if its page is absent."""
    a_page = (page + SPAN - 1) // SPAN
    column = run // a_page
    passed = run % a_page * SPAN
    first = tl.maximum(begin - column * page, passed)
    end = tl.minimum(tl.minimum(limit - column * page, page), passed + SPAN)
    number = tl.load(of_request + column)
    exists = (number >= 0) & (number < pages)
    there = tl.where(exists, tl.maximum(end - first, 0), 0)
    return tl.where(exists, number, 0).to(tl.int64), first, there


@triton.jit
def logits(z, there, scale, KEY_TILE: tl.constexpr):
    """[keys, heads]; -inf from key `there` on."""
    j = tl.arange(0, KEY_TILE).to(tl.float32)
    return z * scale + tl.where(j < there.to(tl.float32), 0.0, float("-inf"))[:, None]


class Weighing(NamedTuple):
    LATENT: tl.constexpr
    ROTARY: tl.constexpr
    WHOLE: tl.constexpr  # heads fill the tiles
    SPAN: tl.constexpr


@tuples.jit(["first", "rows", "wide", "heads", "padded", "splits", "scale"])
def weigh(
    query,
    query_rope,
    key,
    key_rope,
    table,
    noted,
    scores,
    peaks,
    sums,
    first,
    rows,
    wide,
    heads,
    padded,
    splits,
    apart: Heads,
    pages: Pages,
    scale,
    C: Weighing,
    HEAD_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    set_workspace_multibuffer: tl.constexpr,
):
    """Each key tile has statistics of its own, so that nothing depends on `splits`.  The scores are
    stored as the cube has them, without scale and mask."""
    TILES: tl.constexpr = C.SPAN // KEY_TILE
    d = tl.arange(0, C.LATENT)
    j = tl.arange(0, KEY_TILE)
    head_tiles = padded // HEAD_TILE
    for work in range(tl.program_id(0), rows * head_tiles * splits, tl.num_programs(0)):
        part = work % splits
        h = work // splits % head_tiles * HEAD_TILE + tl.arange(0, HEAD_TILE)
        row = work // splits // head_tiles
        token = (first + row).to(tl.int64)
        there = h[:, None] < heads
        of_query = query + token * apart.query_row + h[:, None] * apart.query_head + d[None]
        if C.WHOLE:
            q = tl.load(of_query)
        else:
            q = tl.load(of_query, mask=there, other=0.0)
        if C.ROTARY > 0:
            e = tl.arange(0, C.ROTARY)
            of_rope = query_rope + token * apart.rope_row + h[:, None] * apart.rope_head + e[None]
            if C.WHOLE:
                qr = tl.load(of_rope)
            else:
                qr = tl.load(of_rope, mask=there, other=0.0)
        of_token = noted + token * NOTED
        of_request = table + tl.load(of_token + REQUEST).to(tl.int64) * pages.columns
        begin = tl.load(of_token + BEGIN)
        limit = tl.load(of_token + LIMIT)
        start, runs = runs_of(begin, limit, pages.page, C.SPAN)
        each = (runs * TILES + splits - 1) // splits
        for tile in range(part * each, tl.minimum(part * each + each, runs * TILES)):
            number, at, count = run_at(
                of_request, start + tile // TILES, begin, limit, pages.page, pages.count, C.SPAN
            )
            passed = tile % TILES * KEY_TILE
            count -= passed
            i = at + passed + j
            of_key = key + number * pages.key_page + i[:, None] * pages.key_row + d[None]
            k = tl.load(of_key, mask=j[:, None] < count, other=0.0)
            z = tl.dot(k, tl.trans(q))  # [KEY_TILE, HEAD_TILE]
            if C.ROTARY > 0:
                of_key = key_rope + number * pages.rope_page + i[:, None] * pages.rope_row + e[None]
                kr = tl.load(of_key, mask=j[:, None] < count, other=0.0)
                z = tl.dot(kr, tl.trans(qr), z)
            part_of = row.to(tl.int64) * (wide // KEY_TILE) + tile
            tl.store(scores + (part_of * KEY_TILE + j)[:, None] * padded + h[None], z)
            z = logits(z, count, scale, KEY_TILE)
            # finite: a tile without a single key must not make NaN
            peak = tl.maximum(tl.max(z, 0), -1e30)
            tl.store(peaks + part_of * padded + h, peak)
            tl.store(sums + part_of * padded + h, tl.sum(tl.exp(z - peak[None]), 0))


class Accumulating(NamedTuple):
    LATENT: tl.constexpr
    SINKS: tl.constexpr
    WHOLE: tl.constexpr  # heads fill the tiles
    PART: tl.constexpr  # keys of one of `peaks` and `sums`


@tuples.jit(
    [
        *("first", "rows", "wide", "heads", "padded", "splits"),
        *("out_row", "out_head", "out_split", "scale"),
    ]
)
def accumulate(
    scores,
    peaks,
    sums,
    key,
    table,
    noted,
    sinks,
    out,
    lse,
    first,
    rows,
    wide,
    heads,
    padded,
    splits,
    out_row,
    out_head,
    out_split,
    pages: Pages,
    scale,
    C: Accumulating,
    PARTS: tl.constexpr,
    PIECES: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    set_workspace_multibuffer: tl.constexpr,
):
    """A run is a tile of keys.  Keys by heads: else both vector units do the work of the whole
    tile.  Every piece and split of a token stores the statistics, the same ones."""
    COLUMNS: tl.constexpr = C.LATENT // PIECES
    j = tl.arange(0, KEY_TILE)
    head_tiles = padded // HEAD_TILE
    for work in range(tl.program_id(0), rows * head_tiles * PIECES * splits, tl.num_programs(0)):
        split = work % splits
        d = work // splits % PIECES * COLUMNS + tl.arange(0, COLUMNS)
        h = work // splits // PIECES % head_tiles * HEAD_TILE + tl.arange(0, HEAD_TILE)
        row = work // splits // PIECES // head_tiles
        of_token = noted + (first + row).to(tl.int64) * NOTED
        of_request = table + tl.load(of_token + REQUEST).to(tl.int64) * pages.columns
        begin = tl.load(of_token + BEGIN)
        limit = tl.load(of_token + LIMIT)
        start, runs = runs_of(begin, limit, pages.page, KEY_TILE)
        of_row = row.to(tl.int64) * wide
        peak = tl.full((HEAD_TILE,), -1e30, tl.float32)
        total = tl.zeros((HEAD_TILE,), tl.float32)
        parts = runs * (KEY_TILE // C.PART)
        for part in range(0, parts, PARTS):
            i = part + tl.arange(0, PARTS)
            at = (of_row // C.PART + i)[:, None] * padded + h[None]
            m = tl.load(peaks + at, mask=(i < parts)[:, None], other=-1e30)
            s = tl.load(sums + at, mask=(i < parts)[:, None], other=0.0)
            new = tl.maximum(peak, tl.max(m, 0))
            total = total * tl.exp(peak - new) + tl.sum(s * tl.exp(m - new[None]), 0)
            peak = new
        acc = tl.zeros((HEAD_TILE, COLUMNS), tl.float32)
        each = (runs + splits - 1) // splits
        # from 0: build 1.0.0 dies of another first run
        for done in range(0, tl.minimum(each, runs - split * each)):
            run = split * each + done
            number, at, count = run_at(
                of_request, start + run, begin, limit, pages.page, pages.count, KEY_TILE
            )
            of_score = scores + (of_row + run * KEY_TILE + j)[:, None] * padded + h[None]
            z = logits(tl.load(of_score), count, scale, KEY_TILE)
            of_key = key + number * pages.key_page + (at + j)[:, None] * pages.key_row + d[None]
            v = tl.load(of_key, mask=j[:, None] < count, other=0.0)
            p = tl.exp(z - peak[None]).to(v.dtype)  # [KEY_TILE, HEAD_TILE]
            acc = tl.dot(tl.trans(p), v, acc)
        denominator = total
        if C.SINKS:
            if C.WHOLE:
                sink = tl.load(sinks + h)
            else:
                sink = tl.load(sinks + h, mask=h < heads, other=0.0)
            denominator += tl.exp(sink.to(tl.float32) - peak)
        # without a key the sums are 0, and so is the result
        denominator = tl.where(denominator > 0, denominator, 1.0)[:, None]
        x = (acc / denominator).to(out.dtype.element_ty)
        log = peak + tl.log(tl.where(total > 0, total, 1.0))
        log = tl.where(total > 0, log, float("-inf"))
        to = row.to(tl.int64) * out_row + split * out_split
        of_out = out + to + h[:, None] * out_head + d[None]
        of_lse = lse + row.to(tl.int64) * heads + h
        if C.WHOLE:
            tl.store(of_out, x)
            tl.store(of_lse, log)
        else:
            tl.store(of_out, x, mask=h[:, None] < heads)
            tl.store(of_lse, log, mask=h < heads)


@entry.jit(do_not_specialize=["rows", "heads", "splits", "part", "out_row", "out_head"])
def merge(
    parts,
    out,
    rows,
    heads,
    splits,
    part,
    out_row,
    out_head,
    LATENT: tl.constexpr,
):
    """The sum of so many [rows, heads, LATENT], `part` numbers apart."""
    d = tl.arange(0, LATENT)
    for work in range(tl.program_id(0), rows * heads, tl.num_programs(0)):
        acc = tl.zeros((LATENT,), tl.float32)
        for split in range(0, splits):
            at = split.to(tl.int64) * part + work.to(tl.int64) * LATENT
            acc += tl.load(parts + at + d)
        to = (work // heads).to(tl.int64) * out_row + work % heads * out_head
        tl.store(out + to + d, acc.to(out.dtype.element_ty))


def _sizes(x: Arguments) -> tuple[int, int, int, int, int]:
    """(requests, tokens of one or packed, heads, rank, rope)."""
    query = with_heads(x["query"], x["input_layout"], x["num_query_heads"])
    *_, tokens, heads, rank = query.shape
    kv = x["actual_seq_kvlen"]
    assert kv is not None  # the check said so
    rope = 0 if x["key_rope"] is None else x["key_rope"].shape[-1]
    return kv.shape[0], tokens, heads, rank, rope


def unsupported(**x: Unpack[Arguments]) -> str | None:
    query, key, table = x["query"], pages_of(x["key"]), x["block_table"]
    assert table is not None
    if reason := tiling.not_multiplied(query=query):
        return reason
    _, _, _, rank, rope = _sizes(x)
    if rank == 0 or rank % 32 or rope % 16:
        return f"head sizes {rank} and {rope}: half of the one and the other come in 16s"
    if overflow := tiling.weigh_overflow(16, 64, rank, rope):
        return overflow
    reach = table.shape[1] * key.shape[1]
    if reach > ragged.LONGEST:
        return f"contexts of up to {reach} positions, the kernel reaches {ragged.LONGEST}"
    return None


def _span(page: int) -> int:
    """The most keys of a run."""
    return 64 if page <= 64 else 128


def _weighing(span: int, heads: int, size: int, rotary: int) -> tune.Config:
    """The least tile that covers the heads, or the largest that fits, and divides a run."""
    kernel = f"{_OP}.weigh"
    fitting = [
        config
        for config in tune.TABLE[kernel]
        if span % config.tiles["KEY_TILE"] == 0
        and not tiling.weigh_overflow(
            config.tiles["HEAD_TILE"], config.tiles["KEY_TILE"], size, rotary
        )
    ]
    return tune.choose(kernel, tune.ranked(fitting, "HEAD_TILE", heads), size, rotary)


def _accumulating(
    rows: int, padded: int, size: int, runs: int, span: int
) -> tuple[tune.Config, int]:
    """The tiles, and over how many programs the keys of a token are spread, that load the least on
    the core with the most to do: of a key, a core loads a piece of the row, and its vector units
    the scores of a tile of heads; of a part of the output, twice a number of 32 bits.  For the
    same number of cores on every machine, and so with the same result."""
    kernel = f"{_OP}.accumulate"

    def loaded(config: tune.Config, splits: int) -> int:
        heads, pieces = config.tiles["HEAD_TILE"], config.tiles["PIECES"]
        turns = -(-rows * (padded // heads) * pieces * splits // tiling.A3.cube_cores)
        keys = -(-runs // splits) * span * max(2 * size // pieces, 4 * heads)
        merged = 8 * rows * padded * size * splits // tiling.A3.cube_cores if splits > 1 else 0
        return turns * (keys + 16 * runs * heads) + merged

    def shares(config: tune.Config) -> int:
        return min(range(1, min(runs, MOST_SPLITS) + 1), key=lambda n: loaded(config, n))

    fitting = [
        config
        for config in tune.TABLE[kernel]
        if config.tiles["KEY_TILE"] == span
        and padded % config.tiles["HEAD_TILE"] == 0
        and size % (16 * config.tiles["PIECES"]) == 0
        and not tiling.accumulate_overflow(
            config.tiles["HEAD_TILE"], size // config.tiles["PIECES"]
        )
    ]
    ranked = sorted(fitting, key=lambda config: loaded(config, shares(config)))
    chosen = tune.choose(kernel, ranked, size)
    return chosen, shares(chosen)


def _most_runs(x: Arguments, page: int, columns: int, span: int) -> int:
    """That a token sees."""
    a_page = -(-page // span)
    if x["sparse_mode"] == 4:
        seen = min(x["pre_tokens"] + 1, page * columns)
        touched = min((seen + page - 2) // page + 1, columns)
        return min(touched * a_page, seen // span + 2 * touched)
    return columns * a_page


def forward(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor]:
    layout, device, dtype = x["input_layout"], x["query"].device, x["query"].dtype
    requests, tokens, heads, rank, rope = _sizes(x)
    packed, table, sinks = is_packed(layout), x["block_table"], x["learnable_sink"]
    assert table is not None and x["actual_seq_kvlen"] is not None
    shape, lse_shape = shapes(x["query"], layout, heads)
    rows = tokens * (1 if packed else requests)
    out = memory.empty(shape, dtype, device)
    lse = memory.empty((rows, heads), torch.float32, device)
    key = kr = pages_of(x["key"])
    columns = table.shape[1]
    reach = columns * key.shape[1]
    if out.numel() * requests * reach * key.numel() == 0:
        return out.zero_(), _returned(lse.fill_(-torch.inf), x, lse_shape)
    q = qr = with_heads(x["query"], layout, heads).reshape(rows, heads, rank)
    if x["query_rope"] is not None and x["key_rope"] is not None and rope:
        qr = with_heads(x["query_rope"], layout, heads).reshape(rows, heads, rope)
        kr = pages_of(x["key_rope"])

    noted = memory.empty((rows, NOTED.value), torch.int32, device)
    lengths, key_lengths = x["actual_seq_qlen"], ragged.int32(x["actual_seq_kvlen"])
    note[(min(rows, cores.vector()),)](
        noted,
        key_lengths if lengths is None else ragged.int32(lengths),
        key_lengths,
        rows,
        tokens,
        requests,
        reach,
        min(x["pre_tokens"], ragged.LONGEST),
        PACKED=packed,
        LENGTHS=lengths is not None,
        CAUSAL=x["sparse_mode"] != 0,
        WINDOW=x["sparse_mode"] == 4,
        **tune.only(f"{_OP}.note").keywords,
    )
    span = _span(key.shape[1])
    weighing = _weighing(span, heads, rank, rope)
    head_tile, part = weighing.tiles["HEAD_TILE"], weighing.tiles["KEY_TILE"]
    padded = tiling.up(heads, head_tile)
    runs = _most_runs(x, key.shape[1], columns, span)
    wide = runs * span
    at_once = tiling.at_once(rows, wide * padded * 4)
    splits = two_passes.splits(at_once, padded // head_tile, head_tile, wide, part)
    accumulating, shares = _accumulating(at_once, padded, rank, runs, span)
    pieces = padded // accumulating.tiles["HEAD_TILE"] * accumulating.tiles["PIECES"] * shares
    scores = memory.empty((at_once, wide, padded), torch.float32, device)
    peaks, sums = (
        memory.empty((at_once, wide // part, padded), torch.float32, device) for _ in range(2)
    )
    turned = layout in ("TND_NTD", "BSND_NBSD")
    flat = out.view(heads, rows, rank).transpose(0, 1) if turned else out.view(rows, heads, rank)
    parts = flat[None]
    if shares > 1:
        parts = memory.empty((shares, at_once, heads, rank), torch.float32, device)
    pages = (table.stride(0), *key.shape[:2], *key.stride()[:2], *kr.stride()[:2])
    table = ragged.int32(table)
    for first in range(0, rows, at_once):
        count = min(at_once, rows - first)
        weigh[(min(count * padded // head_tile * splits, cores.cube()),)](
            q,
            qr,
            key,
            kr,
            table,
            noted,
            scores,
            peaks,
            sums,
            first,
            count,
            wide,
            heads,
            padded,
            splits,
            *q.stride()[:2],
            *qr.stride()[:2],
            *pages,
            x["softmax_scale"],
            LATENT=rank,
            ROTARY=rope,
            WHOLE=heads == padded,
            SPAN=span,
            **weighing.keywords,
        )
        accumulate[(min(count * pieces, cores.cube()),)](
            scores,
            peaks,
            sums,
            key,
            table,
            noted,
            lse if sinks is None else sinks,
            parts if shares > 1 else flat[first:],
            lse[first:],
            first,
            count,
            wide,
            heads,
            padded,
            shares,
            *parts.stride()[1:3],
            parts.stride(0),
            *pages,
            x["softmax_scale"],
            LATENT=rank,
            SINKS=sinks is not None,
            WHOLE=heads == padded,
            PART=part,
            **accumulating.keywords,
        )
        if shares > 1:
            merge[(min(count * heads, cores.vector()),)](
                parts,
                flat[first:],
                count,
                heads,
                shares,
                parts.stride(0),
                *flat.stride()[:2],
                LATENT=rank,
                **tune.only(f"{_OP}.merge").keywords,
            )
    return out, _returned(lse, x, lse_shape)


def _returned(lse: Tensor, x: Arguments, shape: list[int]) -> Tensor:
    """Of [tokens, heads]."""
    if not x["return_softmax_lse"]:
        return lse.new_empty([0])
    if is_packed(x["input_layout"]):
        return lse.view(shape)
    batch, heads, tokens, _ = shape
    return lse.view(batch, tokens, heads).transpose(1, 2).contiguous().view(shape)
