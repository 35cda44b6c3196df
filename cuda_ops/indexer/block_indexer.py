# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The blocks of keys that each head of a packed token chooses.

    score[n, w] = max over the positions p of block w that the token sees of query[n] . key[p]

The scores are fp32 and lie in a [heads, rows, blocks] buffer of bounded size, a chunk of rows at a
time; topk.py selects.  Rows of the product are the heads of some tokens, so that a key is read once
for all of them; the greatest of a block is then within few threads.  Blocks of few positions share
a tile of keys; one of more than a tile takes several.

    condition                          kernels
    Hopper, blocks of 128 on a page,   hopper/block_indexer.py then topk.py, _values
      128 heads of some tokens
    else                               _scores then topk.py, _values
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents
from typing_extensions import Unpack

from ...dispatch.common import memory
from ...dispatch.common.packed import block_within
from ...dispatch.ops.indexer.block_indexer import Arguments
from ..common import gpu, packed, rows
from ..common.tiling import cdiv, power_of_two
from ..runtime import launches
from . import topk
from .hopper import block_indexer as hopper
from .lightning_indexer import CHUNK_BYTES, LEAST_SCORE

FORCED = tl.constexpr(3.4028234663852886e38)  # of a block that is always chosen
MOST_SCORE = tl.constexpr(3.402823263561193e38)  # the number below, of others


class Constants(NamedTuple):
    """SPAN positions of each of GROUP blocks make a tile of keys; WHOLE: it lies on one page."""

    HEADS: int
    D: int
    BLOCK: int
    PAGE: int
    REQUESTS: int
    ROWS: int
    BLOCK_H: int
    BLOCK_D: int
    SPAN: int
    GROUP: int
    INIT: int
    LOCAL: int
    WHOLE: bool
    VALUES: bool
    STAGES: int
    CHAINED: bool


@triton.jit
def _place(tile, lo, most, C: tl.constexpr):
    """(first block, first position, positions of all keys, which are below `most`) of a tile."""
    PARTS: tl.constexpr = (C.BLOCK + C.SPAN - 1) // C.SPAN
    lane = tl.arange(0, C.GROUP * C.SPAN)
    w = lo + tile // PARTS * C.GROUP
    begin = w * C.BLOCK + tile % PARTS * C.SPAN
    inside = tile % PARTS * C.SPAN + lane % C.SPAN
    position = (w + lane // C.SPAN) * C.BLOCK + inside
    return w, begin, position, (inside < C.BLOCK) & (position < most)


@triton.jit
def _pages(tile, lo, most, table, C: tl.constexpr):
    """Of the keys of a tile, or of all of them; -1 where there are none."""
    _, begin, position, valid = _place(tile, lo, most, C)
    if C.WHOLE:
        page = tl.load(table + begin // C.PAGE, mask=begin < most, other=-1)
    else:
        page = tl.load(table + position // C.PAGE, mask=valid, other=-1)
    return page


@triton.jit(do_not_specialize=[*packed.NUMBERS, "first_row", "count", "chunks", "per_chunk"])
def _scores(
    query,
    key,
    lengths,
    key_lengths,
    table,
    scores,
    raw,
    found,
    tokens,
    requests,
    reach,
    table_stride,
    pages,
    first_row,
    count,
    chunks,
    per_chunk,
    strides,
    C: tl.constexpr,
):
    """ROWS tokens against `per_chunk` blocks, once for each request among the tokens.  `raw` has
    the scores as they are, `found` how many blocks each row has."""
    q_row, q_head, key_page, key_slot, score_head, score_row, found_head = strides
    if C.CHAINED:
        gdc_launch_dependents()  # the selection is set up meanwhile
    of = packed.Requests(lengths, key_lengths, table, tokens, requests, reach, table_stride, pages)
    program = tl.program_id(0)
    lo = program % chunks * per_chunk
    row = first_row + program // chunks * C.ROWS
    stop = tl.minimum(row + C.ROWS, first_row + count)
    lane = tl.arange(0, C.ROWS * C.BLOCK_H)
    owner = row + lane // C.BLOCK_H
    h = (lane % C.BLOCK_H).to(tl.int64)
    d = tl.arange(0, C.BLOCK_D)
    there = (owner < stop) & (h < C.HEADS)
    at = query + (owner.to(tl.int64) * q_row + h * q_head)[:, None] + d[None, :]
    q_tile = tl.load(at, mask=there[:, None] & (d < C.D)[None, :], other=0.0)
    to = h * score_head + (owner - first_row).to(tl.int64) * score_row
    ends = packed.ends_of(of, C.REQUESTS)
    member = tl.arange(0, C.GROUP)
    PARTS: tl.constexpr = (C.BLOCK + C.SPAN - 1) // C.SPAN
    while row < stop:
        request, first, end = packed.request_of(row, ends, of)
        keys = packed.keys_of(request, of)
        of_request = table + request.to(tl.int64) * table_stride
        mine = there & (owner >= row) & (owner < end)
        limit = tl.where(mine, rows.sees(owner - first, end - first, keys, True), 0)
        blocks = (limit + C.BLOCK - 1) // C.BLOCK
        if lo == 0:
            tl.store(found + h * found_head + owner - first_row, blocks, mask=mine)
        least = tl.min(tl.where(mine, limit, 2147483647), 0)
        most = tl.max(limit, 0)
        hi = tl.minimum(lo + per_chunk, tl.max(blocks, 0))
        # the pages of the next tile are asked for below this one: its keys come below it as well
        ahead = _pages(0, lo, most, of_request, C)
        best = tl.full([C.ROWS * C.BLOCK_H, C.GROUP], float("-inf"), tl.float32)
        for tile in tl.range(0, (hi - lo + C.GROUP - 1) // C.GROUP * PARTS, num_stages=C.STAGES):
            w, begin, position, valid = _place(tile, lo, most, C)
            page = ahead.to(tl.int64)
            ahead = _pages(tile + 1, lo, most, of_request, C)
            known = (page >= 0) & (page < pages)
            at_key = page * key_page + (position % C.PAGE).to(tl.int64) * key_slot
            inside = (valid & known)[:, None] & (d < C.D)[None, :]
            k_tile = tl.load(key + at_key[:, None] + d[None, :], mask=inside, other=0.0)
            s = tl.dot(q_tile, k_tile.T, input_precision="ieee")
            # a NaN comes last, and where no key of a tile is hidden a row's greatest alone is asked
            hidden = True
            if C.WHOLE:
                hidden = (begin + C.GROUP * C.SPAN > least) | (known == 0)
            if hidden:
                s = tl.where(s > LEAST_SCORE, s, LEAST_SCORE)
                seen = (valid & known)[None, :] & (position[None, :] < limit[:, None])
                s = tl.where(seen, s, float("-inf"))
            part = tl.max(tl.reshape(s, [C.ROWS * C.BLOCK_H, C.GROUP, C.SPAN]), 2)
            part = tl.where((part > LEAST_SCORE) | hidden, part, LEAST_SCORE)
            best = part if PARTS == 1 else tl.where(tile % PARTS == 0, part, tl.maximum(best, part))
            block = (w + member)[None, :]
            kept = mine[:, None] & (block < hi) & (block < blocks[:, None])
            if PARTS > 1:
                kept = kept & (tile % PARTS == PARTS - 1)
            where = to[:, None] + block
            if C.VALUES:
                tl.store(raw + where, best, mask=kept)
            forced = (block < C.INIT) | (block >= (blocks - C.LOCAL)[:, None])
            score = tl.where(forced, FORCED, tl.minimum(best, MOST_SCORE))
            score = tl.where(best > float("-inf"), score, float("-inf"))
            tl.store(scores + where, score, mask=kept)
        row = end


@triton.jit(do_not_specialize=["first_row", "count", "rows_here", "tokens", "score_row"])
def _values(
    index,
    raw,
    values,
    first_row,
    rows_here,
    count,
    tokens,
    score_head,
    score_row,
    BLOCK: tl.constexpr,
):
    """The scores of the chosen blocks of one head, as they are; 0 where none is."""
    h = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < rows_here * count
    at = (h * tokens + first_row) * count + lane
    block = tl.load(index + at, mask=inside, other=-1)
    of_row = raw + h * score_head + (lane // count).to(tl.int64) * score_row
    value = tl.load(of_row + block, mask=inside & (block >= 0), other=0.0)
    tl.store(values + at, value, mask=inside)


class Tile(NamedTuple):
    """`keys` positions by the `heads` of `rows` tokens, in `stages` of them on their way."""

    rows: int
    heads: int
    dim: int
    keys: int
    stages: int


def tile_of(together: int, heads: int, dim: int, block: int, device: torch.device) -> Tile | None:
    """For up to `together` tokens of a request, the first that fits into this GPU; the product has
    16 to 128 rows where heads allow.  A whole block is one tile where it can be: the loads of
    the next one go on below it."""
    h_tile, d_tile = power_of_two(heads), max(16, power_of_two(dim))
    shared = max(1, min(128 // h_tile, power_of_two(together)))
    while True:
        wide = max(16, shared * h_tile)
        for keys, stages in ((128, 3), (128, 2), (64, 2)):
            few, whole = wide == 16, wide <= 32 or block >= 128
            needed = 2 * d_tile * (wide + stages * keys) + 4 * keys * wide + 1024
            fits = needed <= gpu.shared_memory(device)
            if fits and (few or stages == 2) and (whole or keys == 64):
                return Tile(shared, wide // shared, d_tile, keys, stages)
        if shared == 1:
            return None
        shared //= 2


def unsupported(
    query: Tensor, key: Tensor, block_table: Tensor, block_size: int, top_k: int, **_: object
) -> str | None:
    if query.is_cuda and query.dtype not in (torch.float16, torch.bfloat16):
        return f"query is {query.dtype}, supported float16 and bfloat16"
    if top_k > topk.MOST:
        return f"top_k={top_k}, supported up to {topk.MOST}"
    heads, dim = query.shape[1:]
    if dim > 256 or heads > 256:
        return f"heads and head_dim are {(heads, dim)}, supported up to 256"
    reach = block_table.shape[1] * key.shape[1]
    if tile_of(1, heads, dim, block_within(block_size, reach), query.device) is None:
        return gpu.too_small(query.device, N=heads, D=dim)
    return rows.too_many(max(reach, key.shape[0] * key.shape[1], query.shape[0]), "positions")


def _plain(
    query: Tensor, key: Tensor, programs: int, C: Constants, strides: tuple[int, ...], **x: Any
) -> None:
    # two programs a processor: one multiplies while the other looks for the greatest
    large = C.GROUP * C.SPAN * C.ROWS * C.BLOCK_H > 64 * 128
    launches.kernel(_scores, programs)(
        query,
        key,
        **x,
        strides=(*query.stride()[:2], *key.stride()[:2], *strides),
        C=C,
        num_warps=8 if large else 4,
        maxnreg=128 if large else None,
    )


def forward(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor]:
    query, key, table = x["query"], x["key"], x["block_table"]
    lengths, key_lengths = x["actual_seq_lengths"], x["actual_seq_lengths_key"]
    device, (tokens, heads, dim), count = query.device, query.shape, x["top_k"]
    selected = (heads, tokens, count)
    index = memory.empty(selected, torch.int32, device)
    wanted = x["return_value"]
    values = memory.empty(selected if wanted else (0,), torch.float32, device)
    if index.numel() == 0:
        return index, values
    requests = packed.arguments(query, key, lengths, key_lengths, table)
    block = block_within(x["block_size"], requests["reach"])
    blocks = max(1, cdiv(requests["reach"], block))
    tile = tile_of(cdiv(tokens, max(lengths.shape[0], 1)), heads, dim, block, device)
    assert tile is not None
    span = min(tile.keys, power_of_two(block))
    group = tile.keys // span
    wide = 16 if blocks <= 2 * topk.BLOCK else topk.BLOCK
    width = cdiv(blocks, wide) * wide
    chunk_rows = max(1, min(tokens, CHUNK_BYTES // (4 * width * heads)))
    score = memory.empty((heads, chunk_rows, width), torch.float32, device)
    raw = memory.empty((heads, chunk_rows, width), torch.float32, device) if wanted else score
    number = memory.empty((heads, chunk_rows), torch.int32, device)
    no_values = memory.empty((0,), torch.float32, device)
    # as many programs as keep all processors busy twice over, where there are blocks enough
    items = cdiv(tokens, tile.rows) * cdiv(blocks, group)
    share = power_of_two(cdiv(items, 2 * gpu.num_sms(device)))
    per_chunk = group * max(1, min(share, max(1, 2048 // (group * block))))
    chunks = cdiv(blocks, per_chunk)
    on_hopper = tile.rows * tile.heads == 128 and hopper.supports(query, key, heads, block)
    launch = hopper.launch if on_hopper else _plain
    C = Constants(
        HEADS=heads,
        D=dim,
        BLOCK=block,
        PAGE=key.shape[1],
        REQUESTS=packed.room(lengths),
        ROWS=tile.rows,
        BLOCK_H=tile.heads,
        BLOCK_D=tile.dim,
        SPAN=span,
        GROUP=group,
        INIT=x["init_blocks"],
        LOCAL=x["local_blocks"],
        WHOLE=block % span == 0 and key.shape[1] % tile.keys == 0,
        VALUES=wanted,
        STAGES=tile.stages,
        CHAINED=gpu.has_chained_launch(device),
    )
    for first in range(0, tokens, chunk_rows):
        rows_here = min(chunk_rows, tokens - first)
        launch(
            query,
            key,
            cdiv(rows_here, tile.rows) * chunks,
            C,
            scores=score,
            raw=raw,
            found=number,
            first_row=first,
            count=rows_here,
            chunks=chunks,
            per_chunk=per_chunk,
            strides=(score.stride(0), width, number.stride(0)),
            **requests,
        )
        if rows_here == tokens:  # all rows of all heads are one list
            flat = heads * tokens
            topk.topk(
                score.view(flat, width),
                number.view(flat),
                index.view(flat, count),
                no_values,
                count,
            )
        else:
            for h in range(heads):
                to = index[h, first : first + rows_here]
                topk.topk(score[h, :rows_here], number[h], to, no_values, count)
        if wanted:
            launches.kernel(_values, cdiv(rows_here * count, 1024), heads)(
                index,
                raw,
                values,
                first_row=first,
                rows_here=rows_here,
                count=count,
                tokens=tokens,
                score_head=raw.stride(0),
                score_row=width,
                BLOCK=1024,
                num_warps=4,
            )
    return index, values
