# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Latent attention over each query's own selection, in three launches.

    z = scale ([query, query_rope] . [key, key_rope])   m = max z   l = sum exp(z - m)
    out = sum exp(z - m) key / (l + exp(sink - m))

    collect      vector cores    sparse_indices -> slots [T, K], -1 where absent, last slot of a
                                 token, and the selected rows, dense [T, K, 512] and [T, K, 64], two
                                 in one copy; an absent row is a copy of one that the token selected
    weigh        cube + vector   scores [T, K, N], and m and l of each part of the keys; few tokens
                                 are spread over the cores by their keys
    accumulate   cube + vector   exp(z - m) key over all keys in L0C, where half of a latent of 512
                                 holds 128 heads: nothing is rescaled, and no output goes through
                                 memory but the last

Few tokens of many keys, a tile of which is all that a core has, take two others instead of both:

    attend       cube + vector   sums of exp(z - m) key over a tile of keys, and its m and l
    merge        vector cores    the tiles of a head together

`resolve` and `gather` are the two halves of `collect` for the gradients, which keep the order of
the rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import memory, rope
from ...dispatch.ops.sparse_attention.sparse_flash_attention import Arguments, Selected
from ..common import cores, entry, ragged, tiling, tune, tuples, two_passes
from ..common.front_end import extract_slice, get_element
from ..common.ragged import PAGED, TND, Layout, Pages, Requests, pages_of, visible

SPAN = 128  # every key tile divides it


@triton.jit
def _pages(row, column, limit, page, PIECE: tl.constexpr):
    """The table's entries at `column`, looked up in UB: from global memory they come one by one.
    As floats, since the gather takes no integers; exact up to 2**24, and no cache has more."""
    p = tl.arange(0, PIECE)
    number = tl.full((PIECE,), -1.0, tl.float32)
    used = (limit + page - 1) // page
    for first in range(0, used, PIECE):
        entry = tl.load(row + first + p, mask=p < used - first, other=-1).to(tl.float32)
        at = column - first
        here = (at >= 0) & (at < PIECE)
        found = tl.gather(entry, tl.where(here, at, 0), 0)
        number = tl.where(here, found, number)
    return number.to(tl.int32)


@triton.jit
def positions(selected, j, first, count, limit, block, BLOCKS: tl.constexpr, PIECE: tl.constexpr):
    """(position, whether the token sees it) of the j-th selected ones, PIECE from `first` on."""
    if BLOCKS:
        number = j // block
        # looked up in UB, as pages are
        begin = first // block
        i = begin + tl.arange(0, PIECE)
        entry = tl.load(selected + i, mask=i < count, other=-1)
        # an absent block stays near, so that its positions fit in 32 bits
        entry = tl.minimum(tl.maximum(entry, -1), limit // block + 1)
        at = tl.gather(entry.to(tl.float32), number - begin, 0).to(tl.int32)
        position = (at - number) * block + j
        exists = (j < count * block) & (position >= 0) & (position < limit)
    else:
        position = tl.load(selected + j, mask=j < count, other=-1)
        exists = (position >= 0) & (position < limit)
    return position, exists


@triton.jit
def placed(
    position,
    exists,
    table,
    request,
    start,
    limit,
    table_stride,
    pages,
    page,
    page_rows,
    KEYS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """The slots of positions; -1 where there is none."""
    if KEYS == PAGED:
        # not `position % page`: a remainder is a scalar loop
        of_request = table + request.to(tl.int64) * table_stride
        column = tl.where(exists, position // page, 0)
        number = _pages(of_request, column, limit, page, PIECE)
        exists = exists & (number >= 0) & (number < pages)
        slot = number * page_rows + position - column * page
    elif KEYS == TND:
        slot = start + position
    else:
        slot = request * page_rows + position
    return tl.where(exists, slot, -1)


@triton.jit
def reached(exists, j):
    """One past the last that exists."""
    return tl.max(tl.where(exists, (j + 1).to(tl.float32), 0.0), 0).to(tl.int32)


@tuples.jit(["rows", "count", "wide", "indices_stride", "block"])
def resolve(
    indices,
    table,
    slots,
    last,
    rows,
    count,
    wide,
    indices_stride,
    block,
    of: Requests,
    pages: Pages,
    layout: Layout,
    BLOCKS: tl.constexpr,
    PIECE: tl.constexpr,
):
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        request, start, limit = visible(row, *of, *layout)
        selected = indices + row.to(tl.int64) * indices_stride
        end = 0
        for first in range(0, wide, PIECE):
            j = first + tl.arange(0, PIECE)
            position, exists = positions(selected, j, first, count, limit, block, BLOCKS, PIECE)
            slot = placed(
                position, exists, table, request, start, limit, *pages, layout.KEYS, PIECE
            )
            tl.store(slots + row.to(tl.int64) * wide + j, slot, mask=j < wide)
            end = tl.maximum(end, reached(slot >= 0, j))
        tl.store(last + row, end)


@triton.jit
def pair(rows_of, stride, one, other, SIZE: tl.constexpr):
    """Two rows in one copy with a stride; in two, where the second lies before the first."""
    at = one * stride + tl.arange(0, 2)[:, None] * ((other - one) * stride)
    return tl.load(rows_of + at + tl.arange(0, SIZE)[None])


@triton.jit
def put(dense, to, tile, SIZE: tl.constexpr):
    at = (to + tl.arange(0, 2))[:, None] * SIZE + tl.arange(0, SIZE)[None]
    tl.store(dense + at, tile.to(dense.dtype.element_ty))


@triton.jit
def lay_out(
    latent,
    rotary,
    scales,
    slot,
    top,
    dense,
    dense_rope,
    to,
    latent_stride,
    rotary_stride,
    scale_stride,
    LATENT: tl.constexpr,
    ROTARY: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    ORDERED: tl.constexpr,
):
    """The rows of ROWS slots, from the dense row `to` on; zeros where `top`, the highest slot that
    is near, is absent as well."""
    if top >= 0:
        for r in range(0, ROWS, 2):
            # an absent row is a copy of another, since 0 * NaN is NaN; a mask would not stop its
            # read
            one = get_element(slot, (r,))
            other = get_element(slot, (r + 1,))
            one = tl.where(one >= 0, one, tl.where(other >= 0, other, top)).to(tl.int64)
            other = tl.where(other >= 0, other.to(tl.int64), one)
            if ORDERED:
                near = one
                far = other
            else:
                near = tl.minimum(one, other)
                far = tl.maximum(one, other)
            x = pair(latent, latent_stride, near, far, LATENT)
            if TILES > 0:
                by = pair(scales, scale_stride, near, far, TILES)
                x = x.to(tl.float32).reshape(2, TILES, LATENT // TILES)
                x = (x * by[:, :, None]).reshape(2, LATENT)
            put(dense, to + r, x, LATENT)
            if ROTARY > 0:
                put(dense_rope, to + r, pair(rotary, rotary_stride, near, far, ROTARY), ROTARY)
    else:
        for r in range(0, ROWS, 2):
            put(dense, to + r, tl.zeros((2, LATENT), tl.float32), LATENT)
            if ROTARY > 0:
                put(dense_rope, to + r, tl.zeros((2, ROTARY), tl.float32), ROTARY)


class RowStrides(NamedTuple):
    latent: int
    rotary: int
    scale: int


class Constants(NamedTuple):
    BLOCKS: tl.constexpr  # indices are those of blocks
    LATENT: tl.constexpr
    ROTARY: tl.constexpr
    TILES: tl.constexpr  # of an int8 latent, each with a scale; 0: it has none
    SPAN: tl.constexpr  # the slots of a token come in whole ones


@tuples.jit(
    [
        *("first", "rows", "count", "wide", "indices_stride", "block"),
    ]
)
def collect(
    latent,
    rotary,
    scales,
    indices,
    table,
    slots,
    last,
    dense,
    dense_rope,
    first,
    rows,
    count,
    wide,
    indices_stride,
    block,
    of: Requests,
    pages: Pages,
    stride: RowStrides,
    layout: Layout,
    C: Constants,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Programs share the dense rows evenly, in pieces of ROWS; each resolves the tokens that it
    has a part of.  `last` comes in whole SPANs: key tiles are read as a whole."""
    # blocks are looked up beside pages, half as many at a time
    PART: tl.constexpr = PIECE // 2 if C.BLOCKS else PIECE
    pieces = wide // ROWS
    each = (rows * pieces + tl.num_programs(0) - 1) // tl.num_programs(0)
    begin = tl.program_id(0) * each
    stop = tl.minimum(begin + each, rows * pieces)
    for row in range(begin // pieces, (stop + pieces - 1) // pieces):
        request, start, limit = visible(first + row, *of, *layout)
        selected = indices + (first + row).to(tl.int64) * indices_stride
        of_row = row.to(tl.int64) * wide
        end = 0
        for at in range(0, wide, PART):
            j = at + tl.arange(0, PART)
            position, exists = positions(selected, j, at, count, limit, block, C.BLOCKS, PART)
            end = tl.maximum(end, reached(exists, j))
        tl.store(last + row, (end + C.SPAN - 1) // C.SPAN * C.SPAN)
        low = tl.maximum(begin - row * pieces, 0) * ROWS
        high = tl.minimum(stop - row * pieces, pieces) * ROWS
        for at in range(0, wide, PART):
            j = at + tl.arange(0, PART)
            position, exists = positions(selected, j, at, count, limit, block, C.BLOCKS, PART)
            slot = placed(position, exists, table, request, start, limit, *pages, layout.KEYS, PART)
            tl.store(slots + of_row + j, slot, mask=j < wide)
            top = tl.max(slot, 0)
            for i in range(tl.maximum(low, at), tl.minimum(high, at + PART), ROWS):
                if i < (end + C.SPAN - 1) // C.SPAN * C.SPAN:
                    part = extract_slice(slot, (i - at,), (ROWS,), (1,))
                    lay_out(
                        latent,
                        rotary,
                        scales,
                        part,
                        top,
                        dense,
                        dense_rope,
                        of_row + i,
                        *stride,
                        C.LATENT,
                        C.ROTARY,
                        C.TILES,
                        ROWS,
                        False,
                    )


@entry.jit(do_not_specialize=["first", "rows", "wide", "latent_stride", "rotary_stride"])
def gather(
    latent,
    rotary,
    slots,
    last,
    dense,
    dense_rope,
    first,
    rows,
    wide,
    latent_stride,
    rotary_stride,
    LATENT: tl.constexpr,
    ROTARY: tl.constexpr,
    ROWS: tl.constexpr,
    KEY_TILE: tl.constexpr,
):
    pieces = wide // ROWS
    for work in range(tl.program_id(0), rows * pieces, tl.num_programs(0)):
        row = work // pieces
        piece = work % pieces * ROWS
        end = tl.load(last + first + row)
        # a key tile is read as a whole
        if piece < (end + KEY_TILE - 1) // KEY_TILE * KEY_TILE:
            of_piece = (first + row).to(tl.int64) * wide + piece
            slot = tl.load(slots + of_piece + tl.arange(0, ROWS))
            top = tl.max(slot, 0)
            lay_out(
                latent,
                rotary,
                latent,
                slot,
                top,
                dense,
                dense_rope,
                row.to(tl.int64) * wide + piece,
                latent_stride,
                rotary_stride,
                0,
                LATENT,
                ROTARY,
                0,
                ROWS,
                True,
            )


@triton.jit
def logits(z, slots, scale):
    """[keys, heads]; -inf where a slot is absent."""
    slot = tl.load(slots).to(tl.float32)
    return z * scale + tl.where(slot >= 0, 0.0, float("-inf"))[:, None]


@triton.jit
def finite_peak(z):
    """A tile without a single key must not make NaN."""
    return tl.maximum(tl.max(z, 0), -1e30)


@triton.jit
def of_heads(query, h, heads, stride, SIZE: tl.constexpr, WHOLE: tl.constexpr):
    """Those heads of a token; zeros behind the last, of which WHOLE tiles have none."""
    at = query + h[:, None] * stride + tl.arange(0, SIZE)[None]
    if WHOLE:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=h[:, None] < heads, other=0.0)
    return x


@entry.jit(
    do_not_specialize=[
        "first", "rows", "wide", "heads", "padded", "splits", "query_row", "query_head",
        "rope_row", "rope_head", "scale",
    ]
)  # fmt: skip
def weigh(
    query,
    query_rope,
    dense,
    dense_rope,
    slots,
    last,
    scores,
    peaks,
    sums,
    first,
    rows,
    wide,
    heads,
    padded,
    splits,
    query_row,
    query_head,
    rope_row,
    rope_head,
    scale,
    LATENT: tl.constexpr,
    ROTARY: tl.constexpr,
    WHOLE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    set_workspace_multibuffer: tl.constexpr,
):
    """Each key tile has statistics of its own, so that nothing depends on `splits`.  The scores are
    stored as the cube has them, without scale and mask: in this orientation build 1.2.0 stores
    nothing else."""
    d = tl.arange(0, LATENT)
    j = tl.arange(0, KEY_TILE)
    tiles = padded // HEAD_TILE
    for work in range(tl.program_id(0), rows * tiles * splits, tl.num_programs(0)):
        part = work % splits
        h = work // splits % tiles * HEAD_TILE + tl.arange(0, HEAD_TILE)
        row = work // splits // tiles
        token = (first + row).to(tl.int64)
        q = of_heads(query + token * query_row, h, heads, query_head, LATENT, WHOLE)
        if ROTARY > 0:
            e = tl.arange(0, ROTARY)
            qr = of_heads(query_rope + token * rope_row, h, heads, rope_head, ROTARY, WHOLE)
        count = tl.load(last + row) // KEY_TILE
        each = (count + splits - 1) // splits
        for tile in range(part * each, tl.minimum(part * each + each, count)):
            key = row.to(tl.int64) * wide + tile * KEY_TILE + j
            k = tl.load(dense + key[:, None] * LATENT + d[None])
            z = tl.dot(k, tl.trans(q))  # [KEY_TILE, HEAD_TILE]
            if ROTARY > 0:
                kr = tl.load(dense_rope + key[:, None] * ROTARY + e[None])
                z = tl.dot(kr, tl.trans(qr), z)
            tl.store(scores + key[:, None] * padded + h[None], z)
            z = logits(z, slots + key, scale)
            peak = finite_peak(z)
            to = (row * (wide // KEY_TILE) + tile).to(tl.int64) * padded + h
            tl.store(peaks + to, peak)
            tl.store(sums + to, tl.sum(tl.exp(z - peak[None]), 0))


@entry.jit(do_not_specialize=["first", "rows", "wide", "heads", "padded", "scale"])
def accumulate(
    scores,
    peaks,
    sums,
    dense,
    slots,
    last,
    sinks,
    out,
    out_max,
    out_sum,
    first,
    rows,
    wide,
    heads,
    padded,
    scale,
    LATENT: tl.constexpr,
    SINKS: tl.constexpr,
    WHOLE: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    PIECES: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    set_workspace_multibuffer: tl.constexpr,
):
    """`peaks` and `sums` are those of PART keys each.  Keys by heads: else both vector units do the
    work of the whole tile.  Every piece of the latent stores the statistics, the same ones."""
    COLUMNS: tl.constexpr = LATENT // PIECES
    j = tl.arange(0, KEY_TILE)
    tiles = padded // HEAD_TILE
    for work in range(tl.program_id(0), rows * tiles * PIECES, tl.num_programs(0)):
        d = work % PIECES * COLUMNS + tl.arange(0, COLUMNS)
        h = work // PIECES % tiles * HEAD_TILE + tl.arange(0, HEAD_TILE)
        row = work // PIECES // tiles
        end = tl.load(last + row)
        peak = tl.full((HEAD_TILE,), -1e30, tl.float32)
        total = tl.zeros((HEAD_TILE,), tl.float32)
        parts = end // PART
        for part in range(0, parts, PARTS):
            i = part + tl.arange(0, PARTS)
            at = (row.to(tl.int64) * (wide // PART) + i)[:, None] * padded + h[None]
            m = tl.load(peaks + at, mask=(i < parts)[:, None], other=-1e30)
            s = tl.load(sums + at, mask=(i < parts)[:, None], other=0.0)
            new = tl.maximum(peak, tl.max(m, 0))
            total = total * tl.exp(peak - new) + tl.sum(s * tl.exp(m - new[None]), 0)
            peak = new
        acc = tl.zeros((HEAD_TILE, COLUMNS), tl.float32)
        for start in range(0, end, KEY_TILE):
            key = row.to(tl.int64) * wide + start + j
            z = tl.load(scores + key[:, None] * padded + h[None])
            z = logits(z, slots + key, scale)
            v = tl.load(dense + key[:, None] * LATENT + d[None])
            p = tl.exp(z - peak[None]).to(v.dtype)  # [KEY_TILE, HEAD_TILE]
            acc = tl.dot(tl.trans(p), v, acc)
        denominator = total
        if SINKS:
            if WHOLE:
                sink = tl.load(sinks + h)
            else:
                sink = tl.load(sinks + h, mask=h < heads, other=0.0)
            denominator += tl.exp(sink - peak)
        # without a key the sums are 0, and so is the result
        denominator = tl.where(denominator > 0, denominator, 1.0)[:, None]
        x = (acc / denominator).to(out.dtype.element_ty)
        peak = tl.where(total > 0, peak, float("-inf"))
        to = (first + row).to(tl.int64) * heads + h
        if WHOLE:
            tl.store(out + to[:, None] * LATENT + d[None], x)
            tl.store(out_max + to, peak)
            tl.store(out_sum + to, total)
        else:
            there = h < heads
            tl.store(out + to[:, None] * LATENT + d[None], x, mask=there[:, None])
            tl.store(out_max + to, peak, mask=there)
            tl.store(out_sum + to, total, mask=there)


@entry.jit(
    do_not_specialize=[
        "rows", "wide", "heads", "padded", "query_row", "query_head", "rope_row", "rope_head",
        "scale",
    ]
)  # fmt: skip
def attend(
    query,
    query_rope,
    dense,
    dense_rope,
    slots,
    last,
    partial,
    peaks,
    sums,
    rows,
    wide,
    heads,
    padded,
    query_row,
    query_head,
    rope_row,
    rope_head,
    scale,
    LATENT: tl.constexpr,
    ROTARY: tl.constexpr,
    WHOLE: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
):
    """The part of a token that a tile of keys is: sums over it, and their statistics."""
    d = tl.arange(0, LATENT)
    c = tl.arange(0, COLUMNS)
    j = tl.arange(0, KEY_TILE)
    tiles = padded // HEAD_TILE
    parts = wide // KEY_TILE
    for work in range(tl.program_id(0), rows * tiles * parts, tl.num_programs(0)):
        h = work % tiles * HEAD_TILE + tl.arange(0, HEAD_TILE)
        part = work // tiles % parts
        row = work // tiles // parts
        if part * KEY_TILE < tl.load(last + row):
            token = row.to(tl.int64)
            q = of_heads(query + token * query_row, h, heads, query_head, LATENT, WHOLE)
            key = token * wide + part * KEY_TILE + j
            k = tl.load(dense + key[:, None] * LATENT + d[None])
            z = tl.dot(k, tl.trans(q))  # [KEY_TILE, HEAD_TILE]
            if ROTARY > 0:
                e = tl.arange(0, ROTARY)
                qr = of_heads(query_rope + token * rope_row, h, heads, rope_head, ROTARY, WHOLE)
                kr = tl.load(dense_rope + key[:, None] * ROTARY + e[None])
                z = tl.dot(kr, tl.trans(qr), z)
            z = logits(z, slots + key, scale)
            peak = finite_peak(z)
            p = tl.exp(z - peak[None])
            to = (token * parts + part) * padded + h
            tl.store(peaks + to, peak)
            tl.store(sums + to, tl.sum(p, 0))
            p = tl.trans(p.to(k.dtype))
            for first in range(0, LATENT, COLUMNS):
                v = tl.load(dense + key[:, None] * LATENT + first + c[None])
                tl.store(partial + to[:, None] * LATENT + first + c[None], tl.dot(p, v))


@entry.jit(do_not_specialize=["rows", "wide", "heads", "padded"])
def merge(
    partial,
    peaks,
    sums,
    last,
    sinks,
    out,
    out_max,
    out_sum,
    rows,
    wide,
    heads,
    padded,
    LATENT: tl.constexpr,
    SINKS: tl.constexpr,
    PARTS: tl.constexpr,
    KEY_TILE: tl.constexpr,
):
    """The parts of a head of a token, each by its peak."""
    d = tl.arange(0, LATENT)
    i = tl.arange(0, PARTS)
    parts = wide // KEY_TILE
    for work in range(tl.program_id(0), rows * heads, tl.num_programs(0)):
        row = work // heads
        h = work % heads
        count = tl.load(last + row) // KEY_TILE
        peak = -1e30
        total = 0.0
        acc = tl.zeros((LATENT,), tl.float32)
        for first in range(0, count, PARTS):
            here = i < count - first
            at = (row.to(tl.int64) * parts + first + i) * padded + h
            m = tl.load(peaks + at, mask=here, other=-1e30)
            s = tl.load(sums + at, mask=here, other=0.0)
            x = tl.load(partial + at[:, None] * LATENT + d[None], mask=here[:, None], other=0.0)
            new = tl.maximum(peak, tl.max(m, 0))
            share = tl.exp(m - new)
            again = tl.exp(peak - new)
            total = total * again + tl.sum(s * share, 0)
            acc = acc * again + tl.sum(x * share[:, None], 0)
            peak = new
        denominator = total
        if SINKS:
            denominator += tl.exp(tl.load(sinks + h) - peak)
        # without a key the sums are 0, and so is the result
        denominator = tl.where(denominator > 0, denominator, 1.0)
        tl.store(out + work.to(tl.int64) * LATENT + d, (acc / denominator).to(out.dtype.element_ty))
        tl.store(out_max + work, tl.where(total > 0, peak, float("-inf")))
        tl.store(out_sum + work, total)


def few_tokens(rows: int, heads: int, wide: int, size: int, rotary: int) -> tune.Config | None:
    """The tiles of `attend`, where it has one for a core at most; whatever the machine, since the
    result depends on it."""
    kernel = "sparse_flash_attention.attend"
    config = tune.at_least(kernel, "HEAD_TILE", heads, size, rotary)
    head_tile, key_tile, columns = (
        config.tiles[name] for name in ("HEAD_TILE", "KEY_TILE", "COLUMNS")
    )
    works = rows * tiling.up(heads, head_tile) // head_tile * (wide // key_tile)
    fits = size <= 512 and size % columns == 0 and rotary <= 64
    return config if fits and wide >= 4 * key_tile and works <= tiling.A3.cube_cores else None


def in_parts(
    query: Tensor,
    query_rope: Tensor,
    dense: Tensor,
    dense_rope: Tensor,
    slots: Tensor,
    last: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    out_max: Tensor,
    out_sum: Tensor,
    scale: float,
    config: tune.Config,
) -> None:
    """The attention of few tokens over their dense rows."""
    rows, heads, size = query.shape
    wide, device = dense.shape[1], dense.device
    head_tile, key_tile = config.tiles["HEAD_TILE"], config.tiles["KEY_TILE"]
    padded, parts = tiling.up(heads, head_tile), wide // key_tile
    partial = memory.empty((rows, parts, padded, size), torch.float32, device)
    peaks, sums = (memory.empty((rows, parts, padded), torch.float32, device) for _ in range(2))
    attend[(min(rows * (padded // head_tile) * parts, cores.cube()),)](
        query,
        query_rope,
        dense,
        dense_rope,
        slots,
        last,
        partial,
        peaks,
        sums,
        rows,
        wide,
        heads,
        padded,
        *query.stride()[:2],
        *query_rope.stride()[:2],
        scale,
        LATENT=size,
        ROTARY=dense_rope.shape[-1],
        WHOLE=heads == padded,
        **config.keywords,
    )
    merge[(min(rows * heads, cores.vector()),)](
        partial,
        peaks,
        sums,
        last,
        out if sinks is None else sinks,
        out,
        out_max,
        out_sum,
        rows,
        wide,
        heads,
        padded,
        LATENT=size,
        SINKS=sinks is not None,
        KEY_TILE=key_tile,
        **tune.only("sparse_flash_attention.merge").keywords,
    )


def resolved(
    indices: Tensor, key: Tensor, plan: ragged.Plan, wide: int, block: int = 1
) -> tuple[Tensor, Tensor]:
    """(slots [T, wide], last [T]) of int32 `indices` [T, .., K]: see `resolve`."""
    slots = memory.empty((plan.rows, wide), torch.int32, key.device)
    last = memory.empty((plan.rows,), torch.int32, key.device)
    resolve[(min(plan.rows, cores.vector()),)](
        indices,
        plan.table,
        slots=slots,
        last=last,
        **plan.requests,
        **plan.flags,
        rows=plan.rows,
        count=indices.shape[-1],
        wide=wide,
        indices_stride=indices.stride(0),
        block=block,
        **pages_of(key, plan.table),
        BLOCKS=block > 1,
        **tune.only("sparse_flash_attention.resolve").keywords,
    )
    return slots, last


def gathered(
    keys: tuple[Tensor, Tensor | None],
    slots: Tensor,
    last: Tensor,
    dense: tuple[Tensor, Tensor | None],
    span: tuple[int, int, int],
    tile: int,
) -> None:
    """The selected keys, and the rotary ones if there are any, of the rows `first` and on: `span`
    is (first, rows, wide), and rows are written in whole tiles of keys."""
    (latent, rotary), (to_latent, to_rotary) = keys, dense
    gather[(cores.vector(),)](
        latent,
        latent if rotary is None else rotary,
        slots,
        last,
        to_latent,
        to_latent if to_rotary is None else to_rotary,
        *span,
        ragged.row_stride(latent),
        0 if rotary is None else ragged.row_stride(rotary),
        LATENT=to_latent.shape[-1],
        ROTARY=0 if to_rotary is None else to_rotary.shape[-1],
        KEY_TILE=tile,
        **tune.only("sparse_flash_attention.gather").keywords,
    )


def unsupported(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    block_table: Tensor | None,
    sparse_indices: Tensor,
    sparse_block_size: int,
    **_: Any,
) -> str | None:
    if reason := tiling.not_multiplied(query=query):
        return reason
    latent = query.shape[-1]
    rotary = 0 if query_rope is None else query_rope.shape[-1]
    if latent % 32 or rotary % 16:
        return f"head sizes {latent} and {rotary}: half of the one and the other come in 16s"
    overflow = tiling.weigh_overflow(16, 64, latent, rotary)
    if overflow:
        return overflow
    if value is not None and (value.data_ptr(), value.stride()) != (key.data_ptr(), key.stride()):
        return "`value` is another tensor than `key`; the kernel attends to the latent itself"
    reach = block_table.shape[1] * key.shape[1] if block_table is not None else key.shape[-3]
    if max(reach, sparse_indices.shape[-1] * sparse_block_size) > ragged.LONGEST:
        return f"contexts of up to {reach} positions, the kernel reaches {ragged.LONGEST}"
    if block_table is not None and key.shape[0] > ragged.LONGEST:
        return f"a cache of {key.shape[0]} pages, the kernel knows {ragged.LONGEST} apart"
    return ragged.uneven(key=key, key_rope=rope.given(query_rope, key_rope)[1])


def selecting(query: Tensor, key: Tensor, x: Selected) -> ragged.Plan:
    """What follows from the shapes of an attention over selected keys."""
    lengths = x["actual_seq_lengths_query"], x["actual_seq_lengths_kv"]
    layouts = x["layout_query"], x["layout_kv"]
    return ragged.plan(query, key, *lengths, x["block_table"], *layouts, x["sparse_mode"])


def forward(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor]:
    query, key = x["query"], x["key"]
    of_query, of_key = rope.given(x["query_rope"], x["key_rope"])
    plan = selecting(query, key, x)
    out, *statistics = attended(
        query,
        query if of_query is None else of_query,
        key,
        key if of_key is None else of_key,
        key,
        x["sparse_indices"],
        x["scale_value"],
        x["sparse_block_size"],
        x["sinks"],
        plan,
        ROTARY=0 if of_query is None else of_query.shape[-1],
        TILES=0,
    )
    if not x["return_softmax_lse"]:
        statistics = [each.new_empty([0]) for each in statistics]
    return out, statistics[0], statistics[1]


def attended(
    query: Tensor,
    query_rope: Tensor,
    latent: Tensor,
    rotary: Tensor,
    scales: Tensor,
    sparse_indices: Tensor,
    scale: float,
    block: int,
    sinks: Tensor | None,
    plan: ragged.Plan,
    ROTARY: int,
    TILES: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, softmax_max, softmax_sum).  The rows are [latent, rotary]; with TILES, each of so many
    parts of an int8 latent has a scale."""
    *batch, length, heads, size = query.shape
    device, dtype = query.device, query.dtype
    shape = [*batch, 1, length, heads]
    out = memory.empty(query.shape, dtype, device)
    out_max = memory.empty(shape, torch.float32, device)
    out_sum = memory.empty(shape, torch.float32, device)
    count = sparse_indices.shape[-1]
    if plan.rows * heads == 0 or count * plan.reach == 0 or latent.numel() == 0:
        return out.zero_(), out_max.fill_(-torch.inf), out_sum.zero_()

    in_passes(
        query.flatten(0, -3),
        query_rope.flatten(0, -3),
        (latent, rotary, scales),
        ragged.int32(sparse_indices).flatten(0, -3),
        scale,
        block,
        sinks,
        (out, out_max, out_sum),
        plan,
        (size, ROTARY),
        TILES,
    )
    return out, out_max, out_sum


def in_passes(
    q: Tensor,
    rope: Tensor,
    keys: tuple[Tensor, Tensor, Tensor],
    indices: Tensor,
    scale: float,
    block: int,
    sinks: Tensor | None,
    outputs: tuple[Tensor, Tensor, Tensor],
    plan: ragged.Plan,
    sizes: tuple[int, int],
    TILES: int = 0,
    VALUES: bool = False,
) -> None:
    """Into (out, softmax_max, softmax_sum) from queries [T, N, D].  `keys` are rows of a latent, of
    what stands beside it, and of the latent's scales; `sizes` those of the first two.  VALUES: what
    stands beside a latent, which then is a key, is its value, and not its rotary part."""
    (out, out_max, out_sum), (latent, rotary, scales), (size, beside) = outputs, keys, sizes
    (heads, count), device, dtype = (q.shape[1], indices.shape[-1]), q.device, q.dtype
    ROTARY = 0 if VALUES else beside
    weighing = two_passes.weighing("sparse_flash_attention", heads, size, ROTARY)
    head_tile, key_tile = weighing.tiles["HEAD_TILE"], weighing.tiles["KEY_TILE"]
    copies = tune.only("sparse_flash_attention.collect")
    wide, padded = tiling.up(count * block, SPAN), tiling.up(heads, head_tile)
    at_once = tiling.at_once(plan.rows, wide * ((size + beside) * dtype.itemsize + padded * 4))
    splits = two_passes.splits(at_once, padded // head_tile, head_tile, wide, key_tile)
    accumulating = two_passes.accumulating("sparse_flash_attention", at_once, padded, size)
    few = None
    if at_once == plan.rows and not VALUES:
        few = few_tokens(plan.rows, heads, wide, size, ROTARY)
    slots = memory.empty((at_once, wide), torch.int32, device)
    last = memory.empty((at_once,), torch.int32, device)
    dense = memory.empty((at_once, wide, size), dtype, device)
    dense_rope = memory.empty((at_once, wide, beside), dtype, device)
    scores = memory.empty((at_once, wide, padded), torch.float32, device)
    parts = wide // key_tile
    peaks, sums = (memory.empty((at_once, parts, padded), torch.float32, device) for _ in range(2))
    for first in range(0, plan.rows, at_once):
        rows = min(at_once, plan.rows - first)
        collect[(min(rows * wide // copies.tiles["ROWS"], cores.vector()),)](
            latent,
            rotary,
            scales,
            indices,
            plan.table,
            slots=slots,
            last=last,
            dense=dense,
            dense_rope=dense_rope,
            **plan.requests,
            **plan.flags,
            first=first,
            rows=rows,
            count=count,
            wide=wide,
            indices_stride=indices.stride(0),
            block=block,
            **pages_of(latent, plan.table),
            stride_latent=ragged.row_stride(latent),
            stride_rotary=ragged.row_stride(rotary),
            stride_scale=ragged.row_stride(scales),
            BLOCKS=block > 1,
            LATENT=size,
            ROTARY=beside,
            TILES=TILES,
            SPAN=SPAN,
            **copies.keywords,
        )
        if few is not None:
            in_parts(
                q, rope, dense, dense_rope, slots, last, sinks, out, out_max, out_sum, scale, few
            )
            break
        weigh[(min(rows * padded // head_tile * splits, cores.cube()),)](
            q,
            rope,
            dense,
            dense_rope,
            slots,
            last,
            scores,
            peaks,
            sums,
            first,
            rows,
            wide,
            heads,
            padded,
            splits,
            *q.stride()[:2],
            *rope.stride()[:2],
            scale,
            LATENT=size,
            ROTARY=ROTARY,
            WHOLE=heads == padded,
            **weighing.keywords,
        )
        tiles = padded // accumulating.tiles["HEAD_TILE"] * accumulating.tiles["PIECES"]
        accumulate[(min(rows * tiles, cores.cube()),)](
            scores,
            peaks,
            sums,
            dense_rope if VALUES else dense,
            slots,
            last,
            out if sinks is None else sinks,
            out,
            out_max,
            out_sum,
            first,
            rows,
            wide,
            heads,
            padded,
            scale,
            LATENT=size,
            SINKS=sinks is not None,
            WHOLE=heads == padded,
            PART=key_tile,
            **accumulating.keywords,
        )
