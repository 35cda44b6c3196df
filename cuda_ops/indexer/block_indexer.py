# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The blocks of keys that each head of a packed token chooses.

    score[n, w] = max over the positions p of block w that the token sees of query[n] . key[p]

The scores are fp32 and lie in a [heads, rows, blocks] buffer of bounded size, a chunk of rows at a
time; topk.py selects.  Keys are the rows of the product; its columns are the heads of some tokens,
so that a key is read once for all of them.  Blocks of few positions share a tile of keys; one of
more than a tile takes several.

    condition    kernels
    any          _scores then topk.py
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import memory
from ...dispatch.common.packed import block_within
from ...dispatch.ops.indexer.block_indexer import Arguments
from ..common import gpu, packed, rows
from ..common.tiling import cdiv, power_of_two
from ..runtime import launches
from . import topk
from .lightning_indexer import CHUNK_BYTES, LEAST_SCORE

FORCED = tl.constexpr(3.4028234663852886e38)  # of a block that is always chosen
MOST_SCORE = tl.constexpr(3.402823263561193e38)  # the number below, of others


class Constants(NamedTuple):
    """SPAN positions of each of GROUP blocks make a tile of keys."""

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
    VALUES: bool


@triton.jit
def _best(
    w,
    part,
    most,
    limit,
    q_tile,
    key,
    table,
    pages,
    key_page,
    key_slot,
    C: tl.constexpr,
):
    """[GROUP, columns]: of the positions from `part` on, SPAN of each of GROUP blocks; -inf where a
    column sees none."""
    lane = tl.arange(0, C.GROUP * C.SPAN)
    d = tl.arange(0, C.BLOCK_D)
    inside = part + lane % C.SPAN
    position = (w + lane // C.SPAN) * C.BLOCK + inside
    valid = (inside < C.BLOCK) & (position < most)
    page = tl.load(table + position // C.PAGE, mask=valid, other=-1).to(tl.int64)
    valid = valid & (page >= 0) & (page < pages)
    row = page * key_page + (position % C.PAGE).to(tl.int64) * key_slot
    there = valid[:, None] & (d < C.D)[None, :]
    k_tile = tl.load(key + row[:, None] + d[None, :], mask=there, other=0.0)
    s = tl.dot(k_tile, q_tile.T, input_precision="ieee")
    s = tl.where(s > LEAST_SCORE, s, LEAST_SCORE)  # a NaN comes last
    seen = valid[:, None] & (position[:, None] < limit[None, :])
    s = tl.where(seen, s, float("-inf"))
    return tl.max(tl.reshape(s, [C.GROUP, C.SPAN, C.ROWS * C.BLOCK_H]), 1)


@triton.jit(
    do_not_specialize=[
        "tokens",
        "requests",
        "reach",
        "table_stride",
        "pages",
        "first_row",
        "count",
        "chunks",
        "per_chunk",
    ]
)
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
    of = packed.Requests(lengths, key_lengths, table, tokens, requests, reach, table_stride, pages)
    program = tl.program_id(0)
    lo = program % chunks * per_chunk
    row = first_row + program // chunks * C.ROWS
    stop = tl.minimum(row + C.ROWS, first_row + count)
    column = tl.arange(0, C.ROWS * C.BLOCK_H)
    owner = row + column // C.BLOCK_H
    h = (column % C.BLOCK_H).to(tl.int64)
    d = tl.arange(0, C.BLOCK_D)
    there = (owner < stop) & (h < C.HEADS)
    at = query + (owner.to(tl.int64) * q_row + h * q_head)[:, None] + d[None, :]
    q_tile = tl.load(at, mask=there[:, None] & (d < C.D)[None, :], other=0.0)
    to = h * score_head + (owner - first_row).to(tl.int64) * score_row
    ends = packed.ends_of(of, C.REQUESTS)
    member = tl.arange(0, C.GROUP)
    while row < stop:
        request, first, end = packed.request_of(row, ends, of)
        keys = packed.keys_of(request, of)
        of_request = table + request.to(tl.int64) * table_stride
        mine = there & (owner >= row) & (owner < end)
        limit = tl.where(mine, rows.sees(owner - first, end - first, keys, True), 0)
        blocks = (limit + C.BLOCK - 1) // C.BLOCK
        if lo == 0:
            tl.store(found + h * found_head + owner - first_row, blocks, mask=mine)
        most = tl.max(limit, 0)
        hi = tl.minimum(lo + per_chunk, tl.max(blocks, 0))
        for w in tl.range(lo, hi, C.GROUP, num_stages=2):
            if C.BLOCK <= C.SPAN:
                best = _best(
                    w, 0, most, limit, q_tile, key, of_request, pages, key_page, key_slot, C
                )
            else:
                best = tl.full([C.GROUP, C.ROWS * C.BLOCK_H], float("-inf"), tl.float32)
                for part in tl.range(0, C.BLOCK, C.SPAN):
                    more = _best(
                        w, part, most, limit, q_tile, key, of_request, pages, key_page, key_slot, C
                    )
                    best = tl.maximum(best, more)
            block = (w + member)[:, None]
            kept = mine[None, :] & (block < hi) & (block < blocks[None, :])
            where = to[None, :] + block
            if C.VALUES:
                tl.store(raw + where, best, mask=kept)
            forced = (block < C.INIT) | (block >= (blocks - C.LOCAL)[None, :])
            score = tl.where(forced, FORCED, tl.minimum(best, MOST_SCORE))
            score = tl.where(best > float("-inf"), score, float("-inf"))
            tl.store(scores + where, score, mask=kept)
        row = end


def _keys(columns: int) -> int:
    """Of a tile: where few columns meet a key, one holds a block of MiniMax-M3."""
    return 128 if columns <= 32 else 64


def shape(together: int, heads: int, dim: int, device: torch.device) -> tuple[int, int, int] | None:
    """(ROWS, BLOCK_H, BLOCK_D) for up to `together` tokens of a request, the first that fits into
    this GPU; the product has 16 to 128 columns where heads allow."""
    h_tile, d_tile = power_of_two(heads), max(16, power_of_two(dim))
    shared = max(1, min(128 // h_tile, power_of_two(together)))
    while True:
        columns = max(16, shared * h_tile)
        keys = _keys(columns)
        needed = 2 * d_tile * (columns + 2 * keys) + 4 * keys * columns + 1024
        if needed <= gpu.shared_memory(device):
            return shared, columns // shared, d_tile
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
    if shape(1, heads, dim, query.device) is None:
        return gpu.too_small(query.device, N=heads, D=dim)
    reach = block_table.shape[1] * key.shape[1]
    return rows.too_many(max(reach, key.shape[0] * key.shape[1], query.shape[0]), "positions")


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
    found = shape(cdiv(tokens, max(lengths.shape[0], 1)), heads, dim, device)
    assert found is not None
    shared, h_tile, d_tile = found
    most = _keys(shared * h_tile)
    span = min(most, power_of_two(block))
    group = most // span
    wide = 16 if blocks <= 2 * topk.BLOCK else topk.BLOCK
    width = cdiv(blocks, wide) * wide
    chunk_rows = max(1, min(tokens, CHUNK_BYTES // (4 * width * heads)))
    score = memory.empty((heads, chunk_rows, width), torch.float32, device)
    raw = memory.empty((heads, chunk_rows, width), torch.float32, device) if wanted else score
    number = memory.empty((heads, chunk_rows), torch.int32, device)
    no_values = memory.empty((0,), torch.float32, device)
    # as many programs as keep all processors busy twice over, where there are blocks enough
    items = cdiv(tokens, shared) * cdiv(blocks, group)
    share = power_of_two(cdiv(items, 2 * gpu.num_sms(device)))
    per_chunk = group * max(1, min(share, max(1, 2048 // (group * block))))
    chunks = cdiv(blocks, per_chunk)
    for first in range(0, tokens, chunk_rows):
        rows_here = min(chunk_rows, tokens - first)
        launches.kernel(_scores, cdiv(rows_here, shared) * chunks)(
            query,
            key,
            scores=score,
            raw=raw,
            found=number,
            first_row=first,
            count=rows_here,
            chunks=chunks,
            per_chunk=per_chunk,
            strides=(
                *query.stride()[:2],
                *key.stride()[:2],
                score.stride(0),
                width,
                number.stride(0),
            ),
            **requests,
            C=Constants(
                HEADS=heads,
                D=dim,
                BLOCK=block,
                PAGE=key.shape[1],
                REQUESTS=packed.room(lengths),
                ROWS=shared,
                BLOCK_H=h_tile,
                BLOCK_D=d_tile,
                SPAN=span,
                GROUP=group,
                INIT=x["init_blocks"],
                LOCAL=x["local_blocks"],
                VALUES=wanted,
            ),
            num_warps=4,
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
            to = index[:, first : first + rows_here]
            value = raw[:, :rows_here].gather(2, to.clamp(0, width - 1).long())
            values[:, first : first + rows_here] = value.masked_fill(to < 0, 0.0)
    return index, values
