# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The blocks of keys that each head of a packed token chooses, in two kernels.

    scores   cube + vector   the heads of a token stay in L1 while tiles of keys pass, each within a
                             page and a block, as one bulk copy -> fp32 [T, blocks, heads]
    topk     vector cores    that of lightning_indexer, a head of a token a row

An absent key scores -inf, and so does a block without any other; a product that is NaN or -inf
counts as the lowest finite number.  Blocks that are always chosen score the largest one.
"""

from __future__ import annotations

import math

import torch
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import memory
from ...dispatch.common.packed import block_within, ends
from ...dispatch.ops.indexer.block_indexer import Arguments
from ..common import cores, ragged, tiling, tune, tuples
from ..common.ragged import PAGED, Pages, Requests, pages_of, visible
from .lightning_indexer import topk

_LOWEST = tl.constexpr(-3.4028234663852886e38)
_FORCED = tl.constexpr(3.4028234663852886e38)  # of a block that is always chosen
_MOST = tl.constexpr(3.402823263561193e38)  # the number below, of others


@tuples.jit(
    [
        *("first", "rows", "pieces", "block", "step", "init", "local", "query_row", "query_head"),
        *("key_row", "heads"),
    ]
)
def scores(
    query,
    key,
    table,
    out,
    counts,
    first,
    rows,
    pieces,
    block,
    step,
    init,
    local,
    query_row,
    query_head,
    key_row,
    of: Requests,
    pages: Pages,
    heads,
    DIM: tl.constexpr,
    VALUES: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    set_workspace_multibuffer: tl.constexpr,
):
    """out [rows, wide, heads], with VALUES behind it the same without what is forced; counts
    [heads, rows]: how many blocks a row has.  A core takes a piece of a token's blocks."""
    r = tl.arange(0, KEY_TILE)
    d = tl.arange(0, DIM)
    tiles = (heads + HEAD_TILE - 1) // HEAD_TILE
    wide = (of.reach + block - 1) // block
    for unit in range(tl.program_id(0), rows * tiles * pieces, tl.num_programs(0)):
        piece = unit % pieces
        h = unit // pieces % tiles * HEAD_TILE + tl.arange(0, HEAD_TILE)
        row = unit // pieces // tiles
        request, _, limit = visible(first + row, *of, True, True, PAGED, True, True)
        blocks = (limit + block - 1) // block
        if unit % (pieces * tiles) == 0:
            for head in range(0, heads):
                tl.store(counts + head * rows + row, blocks)
        of_query = query + (first + row).to(tl.int64) * query_row
        q = tl.load(
            of_query + h[:, None] * query_head + d[None], mask=(h < heads)[:, None], other=0
        )
        of_table = table + request.to(tl.int64) * pages.stride
        for w in range(blocks * piece // pieces, blocks * (piece + 1) // pieces):
            best = tl.full((HEAD_TILE,), float("-inf"), tl.float32)
            for part in range(0, tl.minimum(block, limit - w * block), step):
                position = w * block + part
                column = position // pages.size
                number = tl.load(of_table + column)
                there = (number >= 0) & (number < pages.count)
                inside = tl.where(there, tl.minimum(limit - position, step), 0)
                begin = number.to(tl.int64) * pages.rows + position - column * pages.size
                from_key = key + (begin + r)[:, None] * key_row + d[None]
                k = tl.load(from_key, mask=(r < inside)[:, None], other=0)
                z = tl.dot(k, tl.trans(q)).to(tl.float32)  # [KEY_TILE, HEAD_TILE]
                z = tl.where(z > _LOWEST, z, _LOWEST)  # false for NaN as well
                behind = tl.where(
                    r.to(tl.float32) < inside.to(tl.float32), float("inf"), float("-inf")
                )
                best = tl.maximum(best, tl.max(tl.minimum(z, behind[:, None]), 0))
            always = (w < init) | (w >= blocks - local)
            least = tl.where(always, _FORCED, float("-inf"))
            score = tl.maximum(tl.minimum(best, _MOST), least)
            score = tl.where(best >= _LOWEST, score, float("-inf"))
            to = (row.to(tl.int64) * wide + w) * heads + h
            tl.store(out + to, score, mask=h < heads)
            if VALUES:
                tl.store(out + rows.to(tl.int64) * wide * heads + to, best, mask=h < heads)


def _step(page: int, block: int) -> int:
    """The most keys, up to a tile, that lie within a page and a block wherever one begins."""
    both = math.gcd(page, block)
    return max(n for n in range(1, min(both, 128) + 1) if both % n == 0)


def unsupported(**x: Unpack[Arguments]) -> str | None:
    query, key = x["query"], x["key"]
    if reason := tiling.not_multiplied(query=query):
        return reason
    size = query.shape[2]
    if size % 16 or size > 256:
        return f"a head size of {size}, which comes in 16s up to 256"
    reach = x["block_table"].shape[1] * key.shape[1]
    if max(reach, x["top_k"]) > ragged.LONGEST:
        return f"contexts of up to {reach} positions, the kernel reaches {ragged.LONGEST}"
    return ragged.uneven(key=key)


def forward(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor]:
    query, key, table, count = x["query"], x["key"], x["block_table"], x["top_k"]
    (tokens, heads, size), device, wanted = query.shape, query.device, x["return_value"]
    index = memory.empty((heads, tokens, count), torch.int32, device)
    values = memory.empty((heads, tokens, count) if wanted else (0,), torch.float32, device)
    if index.numel() == 0 or key.numel() == 0 or table.numel() == 0:
        return index.fill_(-1), values.zero_()
    sums = ends(x["actual_seq_lengths"], tokens).to(torch.int32)
    plan = ragged.plan(query, key, sums, x["actual_seq_lengths_key"], table, "TND", "PA_BSND", 3)
    page, block = key.shape[1], block_within(x["block_size"], plan.reach)
    wide, step = -(-plan.reach // block), _step(page, block)
    at_once = tiling.at_once(tokens, wide * heads * (12 if wanted else 8))
    found = memory.empty(((1 + wanted) * at_once, wide, heads), torch.float32, device)
    none = memory.empty((0,), torch.int32, device)
    fitting = [c for c in tune.TABLE["block_indexer.scores"] if c.tiles["KEY_TILE"] >= step]
    fitting = [
        c for c in fitting if c.tiles["KEY_TILE"] == min(f.tiles["KEY_TILE"] for f in fitting)
    ]
    product = tune.choose(
        "block_indexer.scores", tune.ranked(fitting, "HEAD_TILE", min(heads, 64)), size
    )
    tiles = -(-heads // product.tiles["HEAD_TILE"])
    for first in range(0, tokens, at_once):
        rows = min(at_once, tokens - first)
        counts = memory.empty((heads, rows), torch.int32, device)
        pieces = min(wide, max(1, cores.cube() // (rows * tiles)))
        scores[(min(rows * tiles * pieces, cores.cube()),)](
            query,
            key,
            plan.table,
            out=found,
            counts=counts,
            first=first,
            rows=rows,
            pieces=pieces,
            block=block,
            step=step,
            init=x["init_blocks"],
            local=x["local_blocks"],
            query_row=query.stride(0),
            query_head=query.stride(1),
            key_row=ragged.row_stride(key),
            **pages_of(key, plan.table),
            heads=heads,
            DIM=size,
            VALUES=wanted,
            **plan.requests,
            **product.keywords,
        )
        of_heads = found[:rows].permute(2, 0, 1).contiguous()
        picked = memory.empty((heads, rows, count), torch.int32, device)
        # every head of a token is a request of one token that sees so many scores
        topk[(min(heads * rows, cores.vector()),)](
            of_heads,
            out=picked,
            COLLECTED=False,
            positions=of_heads,
            missed=counts,
            bounds=of_heads,
            query_lengths=none,
            key_lengths=counts.view(heads * rows),
            first=0,
            rows=heads * rows,
            wide=wide,
            groups=heads * rows,
            chosen=count,
            room=0,
            pieces=1,
            requests=heads * rows,
            tokens=1,
            reach=wide,
            Q_TND=False,
            Q_LENGTHS=False,
            KEYS=ragged.LAYOUTS["BSND"],
            K_LENGTHS=True,
            CAUSAL=False,
            RATIO=1,
            TOKENS=1,
            **tune.only("lightning_indexer.topk").keywords,
        )
        index[:, first : first + rows] = picked
        if wanted:
            at = picked.clamp(min=0).to(torch.int64)
            value = found[rows : 2 * rows].permute(2, 0, 1).contiguous().gather(2, at)
            values[:, first : first + rows] = value.masked_fill(picked < 0, 0.0)
    return index, values
