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
    sizes,
)
from ..common import cores, entry, ragged, tiling, tune, tuples, two_passes
from ..common.lengths import within

MOST_ROWS = 128  # of a tile: tokens times heads
MASKED = 64 * 64  # scores of a tile whose tokens have masks of their own
MOST_SPLITS = 24  # of a group's keys, whose parts of the output are merged
PARTS_BYTES = 128 * 2**20  # of those parts at the most
_OP = "fused_infer_attention_score_v2"
# what is noted of a group, tokens of one request one behind the other: the request; its first token
# and how many there are; how many of them the request has; the positions that any of them sees; how
# many its first token sees, below 0 if a later one sees the first key
REQUEST, FIRST, TOKENS, USED, BEGIN, LIMIT, BASE = (tl.constexpr(i) for i in range(7))
NOTED = tl.constexpr(8)
NONE, CAUSAL, BAND = (tl.constexpr(i) for i in range(3))
AFAR = tl.constexpr(2.0**25)  # no position is


@entry.jit(do_not_specialize=["groups", "tokens", "requests", "reach", "window"])
def note(
    noted,
    query_lengths,
    key_lengths,
    groups,
    tokens,
    requests,
    reach,
    window,
    PACKED: tl.constexpr,
    LENGTHS: tl.constexpr,
    MASK: tl.constexpr,
    EACH: tl.constexpr,
    PIECE: tl.constexpr,
):
    """`tokens` are those of a request, or of all of them where they are packed; EACH of a group,
    fewer of the last one of a request.  Behind the last request those of none have groups."""
    for group in range(tl.program_id(0), groups, tl.num_programs(0)):
        if PACKED:
            request = requests * 0
            token = tokens * 0
            end = tokens * 0
            passed = 0.0  # groups of the requests before
            latest = 0.0  # where all of them have ended
            at = group.to(tl.float32)
            for start in range(0, requests, PIECE):
                i = start + tl.arange(0, PIECE)
                ends = tl.load(query_lengths + i, mask=i < requests, other=0)
                ends = tl.minimum(tl.maximum(ends, 0), tokens).to(tl.float32)
                number = i.to(tl.float32)
                before = number[None, :] < number[:, None]
                begins = tl.max(tl.where(before, ends[None, :], 0.0), 1)
                begins = tl.maximum(begins, latest)
                count = tl.maximum(ends - begins, 0.0).to(tl.int32)
                count = ((count + EACH - 1) // EACH).to(tl.float32)
                firsts = tl.sum(tl.where(before, count[None, :], 0.0), 1) + passed
                here = tl.where((firsts <= at) & (at < firsts + count), 1.0, 0.0)
                request += tl.sum(here * number, 0).to(tl.int32)
                token += tl.sum(here * (begins + (at - firsts) * EACH), 0).to(tl.int32)
                end += tl.sum(here * ends, 0).to(tl.int32)
                passed += tl.sum(count, 0)
                latest = tl.maximum(latest, tl.max(ends, 0))
            inside = at < passed
            rest = (latest + (at - passed) * EACH).to(tl.int32)
            token = tl.where(inside, token, tl.minimum(rest, tokens))
            left = tl.where(inside, end - token, 0)
            count = tl.minimum(tl.where(inside, left, tokens - token), EACH)
        else:
            a_request = (tokens + EACH - 1) // EACH
            request = group // a_request
            first = group % a_request * EACH
            token = request * tokens + first
            count = tl.minimum(tokens - first, EACH)
            left = tokens - first
            if LENGTHS:
                left = within(query_lengths + request, tokens) - first
        used = tl.minimum(tl.maximum(left, 0), count)
        base = within(key_lengths + request, reach)
        limit = base
        begin = base * 0
        if MASK != NONE:
            base = base - left + 1
            limit = base + used - 1
        if MASK == BAND:
            begin = tl.maximum(base - 1 - window, 0)
        limit = tl.where(used > 0, tl.maximum(limit, 0), 0)
        of_group = noted + group.to(tl.int64) * NOTED
        tl.store(of_group + REQUEST, request)
        tl.store(of_group + FIRST, token)
        tl.store(of_group + TOKENS, count)
        tl.store(of_group + USED, used)
        tl.store(of_group + BEGIN, begin)
        tl.store(of_group + LIMIT, limit)
        tl.store(of_group + BASE, base)


class Pages(NamedTuple):
    """Of the table and the cache."""

    columns: int  # from request to request
    count: int  # type: ignore[assignment]
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
    """(page, first row, its position, number of rows) of a run; no rows, if its page is absent."""
    a_page = (page + SPAN - 1) // SPAN
    column = run // a_page
    passed = run % a_page * SPAN
    first = tl.maximum(begin - column * page, passed)
    end = tl.minimum(tl.minimum(limit - column * page, page), passed + SPAN)
    number = tl.load(of_request + column)
    exists = (number >= 0) & (number < pages)
    there = tl.where(exists, tl.maximum(end - first, 0), 0)
    return tl.where(exists, number, 0).to(tl.int64), first, column * page + first, there


@triton.jit
def logits(z, there, last, rows, heads, window, scale, MASK: tl.constexpr, KEY_TILE: tl.constexpr):
    """[keys, rows]; -inf from key `there` on, and where a token does not see a key: the first one
    of the group sees those up to `last`."""
    j = tl.arange(0, KEY_TILE).to(tl.float32)
    if MASK == NONE:
        z = z * scale + tl.where(j < there.to(tl.float32), 0.0, float("-inf"))[:, None]
    else:
        j = tl.where(j < there.to(tl.float32), j, AFAR)
        ahead = j[:, None] - ((rows // heads).to(tl.float32) + last.to(tl.float32))[None]
        z = z * scale + tl.where(ahead <= 0, 0.0, float("-inf"))
        if MASK == BAND:
            z += tl.where(ahead >= -window.to(tl.float32), 0.0, float("-inf"))
    return z


class Weighing(NamedTuple):
    LATENT: tl.constexpr
    ROTARY: tl.constexpr
    MASK: tl.constexpr  # of the tokens of a group: NONE, if they see the same keys
    WHOLE: tl.constexpr  # heads fill the tiles
    SPAN: tl.constexpr


@tuples.jit(["first", "groups", "wide", "heads", "padded", "splits", "window", "scale"])
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
    groups,
    wide,
    heads,
    padded,
    splits,
    window,
    apart: Heads,
    pages: Pages,
    scale,
    C: Weighing,
    ROW_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    set_workspace_multibuffer: tl.constexpr,
):
    """Each key tile has statistics of its own, so that nothing depends on `splits`.  The scores are
    stored as the cube has them, without scale and mask."""
    TILES: tl.constexpr = C.SPAN // KEY_TILE
    d = tl.arange(0, C.LATENT)
    j = tl.arange(0, KEY_TILE)
    tiles = padded // ROW_TILE
    for work in range(tl.program_id(0), groups * tiles * splits, tl.num_programs(0)):
        part = work % splits
        row = work // splits % tiles * ROW_TILE + tl.arange(0, ROW_TILE)
        group = work // splits // tiles
        of_group = noted + (first + group).to(tl.int64) * NOTED
        token = tl.load(of_group + FIRST).to(tl.int64)
        there = tl.load(of_group + USED) * heads
        of_query = query + token * apart.query_row + row[:, None] * apart.query_head + d[None]
        if C.WHOLE:
            q = tl.load(of_query)
        else:
            q = tl.load(of_query, mask=row[:, None] < there, other=0.0)
        if C.ROTARY > 0:
            e = tl.arange(0, C.ROTARY)
            of_rope = query_rope + token * apart.rope_row + row[:, None] * apart.rope_head + e[None]
            if C.WHOLE:
                qr = tl.load(of_rope)
            else:
                qr = tl.load(of_rope, mask=row[:, None] < there, other=0.0)
        of_request = table + tl.load(of_group + REQUEST).to(tl.int64) * pages.columns
        begin = tl.load(of_group + BEGIN)
        limit = tl.load(of_group + LIMIT)
        base = tl.load(of_group + BASE)
        start, runs = runs_of(begin, limit, pages.page, C.SPAN)
        each = (runs * TILES + splits - 1) // splits
        for tile in range(part * each, tl.minimum(part * each + each, runs * TILES)):
            number, at, position, count = run_at(
                of_request, start + tile // TILES, begin, limit, pages.page, pages.count, C.SPAN
            )
            passed = tile % TILES * KEY_TILE
            count -= passed
            i = at + passed + j
            of_key = key + number * pages.key_page + i[:, None] * pages.key_row + d[None]
            k = tl.load(of_key, mask=j[:, None] < count, other=0.0)
            z = tl.dot(k, tl.trans(q))  # [KEY_TILE, ROW_TILE]
            if C.ROTARY > 0:
                of_key = key_rope + number * pages.rope_page + i[:, None] * pages.rope_row + e[None]
                kr = tl.load(of_key, mask=j[:, None] < count, other=0.0)
                z = tl.dot(kr, tl.trans(qr), z)
            part_of = group.to(tl.int64) * (wide // KEY_TILE) + tile
            tl.store(scores + (part_of * KEY_TILE + j)[:, None] * padded + row[None], z)
            last = base - 1 - position - passed
            z = logits(z, count, last, row, heads, window, scale, C.MASK, KEY_TILE)
            # finite: a tile without a single key must not make NaN
            peak = tl.maximum(tl.max(z, 0), -1e30)
            tl.store(peaks + part_of * padded + row, peak)
            tl.store(sums + part_of * padded + row, tl.sum(tl.exp(z - peak[None]), 0))


class Accumulating(NamedTuple):
    LATENT: tl.constexpr
    MASK: tl.constexpr
    SINKS: tl.constexpr
    WHOLE: tl.constexpr
    PART: tl.constexpr  # keys of one of `peaks` and `sums`


@tuples.jit(
    [
        *("first", "groups", "wide", "heads", "padded", "splits", "window"),
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
    groups,
    wide,
    heads,
    padded,
    splits,
    window,
    out_row,
    out_head,
    out_split,
    pages: Pages,
    scale,
    C: Accumulating,
    PARTS: tl.constexpr,
    PIECES: tl.constexpr,
    ROW_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    set_workspace_multibuffer: tl.constexpr,
):
    """A run is a tile of keys.  Keys by rows: else both vector units do the work of the whole tile.
    Every piece and split of a group stores the statistics, the same ones."""
    COLUMNS: tl.constexpr = C.LATENT // PIECES
    j = tl.arange(0, KEY_TILE)
    tiles = padded // ROW_TILE
    for work in range(tl.program_id(0), groups * tiles * PIECES * splits, tl.num_programs(0)):
        split = work % splits
        d = work // splits % PIECES * COLUMNS + tl.arange(0, COLUMNS)
        row = work // splits // PIECES % tiles * ROW_TILE + tl.arange(0, ROW_TILE)
        group = work // splits // PIECES // tiles
        of_group = noted + (first + group).to(tl.int64) * NOTED
        of_request = table + tl.load(of_group + REQUEST).to(tl.int64) * pages.columns
        begin = tl.load(of_group + BEGIN)
        limit = tl.load(of_group + LIMIT)
        base = tl.load(of_group + BASE)
        start, runs = runs_of(begin, limit, pages.page, KEY_TILE)
        before = group.to(tl.int64) * wide
        peak = tl.full((ROW_TILE,), -1e30, tl.float32)
        total = tl.zeros((ROW_TILE,), tl.float32)
        parts = runs * (KEY_TILE // C.PART)
        for part in range(0, parts, PARTS):
            i = part + tl.arange(0, PARTS)
            at = (before // C.PART + i)[:, None] * padded + row[None]
            m = tl.load(peaks + at, mask=(i < parts)[:, None], other=-1e30)
            s = tl.load(sums + at, mask=(i < parts)[:, None], other=0.0)
            new = tl.maximum(peak, tl.max(m, 0))
            total = total * tl.exp(peak - new) + tl.sum(s * tl.exp(m - new[None]), 0)
            peak = new
        acc = tl.zeros((ROW_TILE, COLUMNS), tl.float32)
        each = (runs + splits - 1) // splits
        # from 0: build 1.0.0 dies of another first run
        for done in range(0, tl.minimum(each, runs - split * each)):
            run = split * each + done
            number, at, position, count = run_at(
                of_request, start + run, begin, limit, pages.page, pages.count, KEY_TILE
            )
            z = tl.load(scores + (before + run * KEY_TILE + j)[:, None] * padded + row[None])
            last = base - 1 - position
            z = logits(z, count, last, row, heads, window, scale, C.MASK, KEY_TILE)
            of_key = key + number * pages.key_page + (at + j)[:, None] * pages.key_row + d[None]
            v = tl.load(of_key, mask=j[:, None] < count, other=0.0)
            p = tl.exp(z - peak[None]).to(v.dtype)  # [KEY_TILE, ROW_TILE]
            acc = tl.dot(tl.trans(p), v, acc)
        denominator = total
        there = tl.load(of_group + TOKENS) * heads
        if C.SINKS:
            if C.WHOLE:
                sink = tl.load(sinks + row)
            else:
                sink = tl.load(sinks + row, mask=row < there, other=0.0)
            denominator += tl.exp(sink.to(tl.float32) - peak)
        # without a key the sums are 0, and so is the result
        denominator = tl.where(denominator > 0, denominator, 1.0)
        log = peak + tl.log(tl.where(total > 0, total, 1.0))
        log = tl.where(total > 0, log, float("-inf"))
        if not C.WHOLE:
            # a token that its request does not have
            seeing = row < tl.load(of_group + USED) * heads
            denominator = tl.where(seeing, denominator, float("inf"))
            log = tl.where(seeing, log, float("-inf"))
        x = (acc / denominator[:, None]).to(out.dtype.element_ty)
        token = tl.load(of_group + FIRST).to(tl.int64)
        of_out = out + token * out_row + split.to(tl.int64) * out_split
        of_out += row[:, None] * out_head + d[None]
        of_lse = lse + token * heads + row
        if C.WHOLE:
            tl.store(of_out, x)
            tl.store(of_lse, log)
        else:
            tl.store(of_out, x, mask=row[:, None] < there)
            tl.store(of_lse, log, mask=row < there)


@entry.jit(do_not_specialize=["rows", "heads", "splits", "out_row", "out_head"])
def merge(
    parts,
    out,
    rows,
    heads,
    splits,
    out_row,
    out_head,
    LATENT: tl.constexpr,
):
    """The sum of so many [rows, heads, LATENT]."""
    d = tl.arange(0, LATENT)
    for work in range(tl.program_id(0), rows * heads, tl.num_programs(0)):
        acc = tl.zeros((LATENT,), tl.float32)
        for split in range(0, splits):
            acc += tl.load(parts + (split.to(tl.int64) * rows * heads + work) * LATENT + d)
        to = (work // heads).to(tl.int64) * out_row + work % heads * out_head
        tl.store(out + to + d, acc.to(out.dtype.element_ty))


def unsupported(**x: Unpack[Arguments]) -> str | None:
    query, key, table = x["query"], pages_of(x["key"]), x["block_table"]
    assert table is not None
    if reason := tiling.not_multiplied(query=query):
        return reason
    _, _, _, rank, rope = sizes(x)
    if rank == 0 or rank % 32 or rope % 16:
        return f"head sizes {rank} and {rope}: half of the one and the other come in 16s"
    if overflow := tiling.weigh_overflow(16, 64, rank, rope):
        return overflow
    reach = table.shape[1] * key.shape[1]
    if reach > ragged.LONGEST:
        return f"contexts of up to {reach} positions, the kernel reaches {ragged.LONGEST}"
    return None


def _span(page: int, each: int) -> int:
    """The most keys of a run."""
    return 64 if page <= 64 or each > 1 else 128


def _has_room(config: tune.Config, each: int) -> bool:
    """Whether UB holds the masks of so many tokens beside a tile."""
    return each == 1 or config.tiles["ROW_TILE"] * config.tiles["KEY_TILE"] <= MASKED


def _each(x: Arguments) -> int:
    """How many tokens of a request share the keys that a core loads: a tile has 128 rows at most.
    Of packed ones, as many as the requests have on average."""
    requests, tokens, heads, _, _ = sizes(x)
    mean = -(-tokens // max(requests, 1)) if is_packed(x["input_layout"]) else tokens
    return max(min(mean, MOST_ROWS // max(heads, 1)), 1)


def _weighing(span: int, each: int, rows: int, size: int, rotary: int) -> tune.Config:
    """The least tile that covers the rows, or the largest that fits, and divides a run."""
    kernel = f"{_OP}.weigh"
    fitting = [
        config
        for config in tune.TABLE[kernel]
        if span % config.tiles["KEY_TILE"] == 0
        and _has_room(config, each)
        and not tiling.weigh_overflow(
            config.tiles["ROW_TILE"], config.tiles["KEY_TILE"], size, rotary
        )
    ]
    return tune.choose(kernel, tune.ranked(fitting, "ROW_TILE", rows), size, rotary)


def _accumulating(
    groups: int, each: int, padded: int, size: int, runs: int, span: int, most: int
) -> tuple[tune.Config, int]:
    """The tiles, and over how many programs (`most` of them) the keys of a group are spread, that
    load the least on the core with the most to do: of a key, a core loads a piece of the row, and
    its vector units the scores of a tile; of a part of the output, twice a number of 32 bits.  For
    the same number of cores on every machine, and so with the same result."""
    kernel = f"{_OP}.accumulate"

    def loaded(config: tune.Config, splits: int) -> int:
        rows, pieces = config.tiles["ROW_TILE"], config.tiles["PIECES"]
        turns = -(-groups * (padded // rows) * pieces * splits // tiling.A3.cube_cores)
        keys = -(-runs // splits) * span * max(2 * size // pieces, 4 * rows)
        merged = 8 * groups * padded * size * splits // tiling.A3.cube_cores if splits > 1 else 0
        return turns * (keys + 16 * runs * rows) + merged

    def shares(config: tune.Config) -> int:
        return min(range(1, max(min(runs, most), 1) + 1), key=lambda n: loaded(config, n))

    fitting = [
        config
        for config in tune.TABLE[kernel]
        if config.tiles["KEY_TILE"] == span
        and _has_room(config, each)
        and padded % config.tiles["ROW_TILE"] == 0
        and size % (16 * config.tiles["PIECES"]) == 0
        and not tiling.accumulate_overflow(config.tiles["ROW_TILE"], size // config.tiles["PIECES"])
    ]
    ranked = sorted(fitting, key=lambda config: loaded(config, shares(config)))
    chosen = tune.choose(kernel, ranked, size)
    return chosen, shares(chosen)


def _most_runs(x: Arguments, page: int, columns: int, span: int, each: int) -> int:
    """That a group sees."""
    a_page = -(-page // span)
    if x["sparse_mode"] == 4:
        seen = min(x["pre_tokens"] + each, page * columns)
        touched = min((seen + page - 2) // page + 1, columns)
        return min(touched * a_page, seen // span + 2 * touched)
    return columns * a_page


def forward(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor]:
    layout, device, dtype = x["input_layout"], x["query"].device, x["query"].dtype
    requests, tokens, heads, rank, rope = sizes(x)
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
    q = qr = x["query"].reshape(rows, heads, rank)
    if x["query_rope"] is not None and x["key_rope"] is not None and rope:
        qr = x["query_rope"].reshape(rows, heads, rope)
        kr = pages_of(x["key_rope"])

    each = _each(x)
    if each > 1:  # a tile goes on from token to token
        q, qr = q.contiguous(), qr.contiguous()
        sinks = None if sinks is None else sinks.expand(each, heads).contiguous()
    groups = min(rows, rows // each + requests + 1) if packed else requests * -(-tokens // each)
    noted = memory.empty((groups, NOTED.value), torch.int32, device)
    lengths, key_lengths = x["actual_seq_qlen"], ragged.int32(x["actual_seq_kvlen"])
    window = min(x["pre_tokens"], ragged.LONGEST)
    mask = {0: NONE, 3: CAUSAL, 4: BAND}[x["sparse_mode"]].value
    note[(min(groups, cores.vector()),)](
        noted,
        key_lengths if lengths is None else ragged.int32(lengths),
        key_lengths,
        groups,
        tokens,
        requests,
        reach,
        window,
        PACKED=packed,
        LENGTHS=lengths is not None,
        MASK=mask,
        EACH=each,
        **tune.only(f"{_OP}.note").keywords,
    )
    span = _span(key.shape[1], each)
    weighing = _weighing(span, each, each * heads, rank, rope)
    row_tile, part = weighing.tiles["ROW_TILE"], weighing.tiles["KEY_TILE"]
    padded = tiling.up(each * heads, row_tile)
    runs = _most_runs(x, key.shape[1], columns, span, each)
    wide = runs * span
    at_once = tiling.at_once(groups, wide * padded * 4)
    splits = two_passes.splits(at_once, padded // row_tile, row_tile, wide, part)
    most = PARTS_BYTES // (rows * heads * rank * 4)
    accumulating, shares = _accumulating(
        at_once, each, padded, rank, runs, span, min(most, MOST_SPLITS)
    )
    pieces = padded // accumulating.tiles["ROW_TILE"] * accumulating.tiles["PIECES"] * shares
    scores = memory.empty((at_once, wide, padded), torch.float32, device)
    peaks, sums = (
        memory.empty((at_once, wide // part, padded), torch.float32, device) for _ in range(2)
    )
    turned = layout in ("TND_NTD", "BSND_NBSD")
    flat = out.view(heads, rows, rank).transpose(0, 1) if turned else out.view(rows, heads, rank)
    parts = flat[None]
    if shares > 1:
        parts = memory.empty((shares, rows, heads, rank), torch.float32, device)
    elif turned and each > 1:
        parts = memory.empty((1, rows, heads, rank), dtype, device)
    table = ragged.int32(table)
    pages = (table.stride(0), *key.shape[:2], *key.stride()[:2], *kr.stride()[:2])
    flags = dict(
        LATENT=rank, MASK=mask if each > 1 else NONE.value, WHOLE=each * heads == padded == heads
    )
    for first in range(0, groups, at_once):
        count = min(at_once, groups - first)
        weigh[(min(count * padded // row_tile * splits, cores.cube()),)](
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
            window,
            *q.stride()[:2],
            *qr.stride()[:2],
            *pages,
            x["softmax_scale"],
            ROTARY=rope,
            SPAN=span,
            **flags,
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
            parts,
            lse,
            first,
            count,
            wide,
            heads,
            padded,
            shares,
            window,
            *parts.stride()[1:3],
            parts.stride(0),
            *pages,
            x["softmax_scale"],
            SINKS=sinks is not None,
            PART=part,
            **flags,
            **accumulating.keywords,
        )
    if shares > 1:
        merge[(min(rows * heads, cores.vector()),)](
            parts,
            flat,
            rows,
            heads,
            shares,
            *flat.stride()[:2],
            LATENT=rank,
            **tune.only(f"{_OP}.merge").keywords,
        )
    elif turned and each > 1:
        flat.copy_(parts[0])
    return out, _returned(lse, x, lse_shape)


def _returned(lse: Tensor, x: Arguments, shape: list[int]) -> Tensor:
    """Of [tokens, heads]."""
    if not x["return_softmax_lse"]:
        return lse.new_empty([0])
    if is_packed(x["input_layout"]):
        return lse.view(shape)
    batch, heads, tokens, _ = shape
    return lse.view(batch, tokens, heads).transpose(1, 2).contiguous().view(shape)
