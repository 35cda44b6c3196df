# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Exact top-k of the indexer's scores, in two kernels (and a third for their values).

    score[t, p] = sum_n weights[t, n] relu(query[t, n] . key[p])

    scores   cube + vector   a tile of keys of one request stays in L1 while the request's tokens
                             pass; paged keys come as one bulk copy a page -> fp32 [T, reach]
    topk     vector cores    a row a core: the k-th score by counting, then compaction in order
    values   vector cores    the chosen scores, where they are asked for

An absent position scores -inf and is never chosen; a score that is NaN or -inf counts as the lowest
finite one, so that it comes last.  On ties the lower position wins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch.common import memory
from . import cores, entry, ragged, tiling, tune
from .front_end import sort
from .ragged import PAGED, TND, keys_of, tokens_of, visible

_LOGITS = 64 * 128  # of a token and a tile of keys, that UB has room for
_LOWEST = tl.constexpr(-3.4028234663852886e38)


@entry.jit(
    do_not_specialize=[
        "first", "rows", "wide", "query_row", "query_head", "weights_row", "key_row", "requests",
        "tokens", "reach", "table_stride", "pages", "page", "page_rows",
    ]
)  # fmt: skip
def scores(
    query, key, weights, table, query_lengths, key_lengths, out,
    first, rows, wide, query_row, query_head, weights_row, key_row, requests, tokens, reach,
    table_stride, pages, page, page_rows,
    Q_TND: tl.constexpr, Q_LENGTHS: tl.constexpr, KEYS: tl.constexpr, K_LENGTHS: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, HEAD_TILE: tl.constexpr, KEY_TILE: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, KEY_TILE)
    d = tl.arange(0, DIM)
    h = tl.arange(0, HEAD_TILE)
    core = tl.program_id(0)
    for request in range(0, requests):
        token, count = tokens_of(request, query_lengths, requests, tokens, Q_TND, Q_LENGTHS)
        start, keys = keys_of(request, key_lengths, reach, KEYS, K_LENGTHS)
        # the tokens of this request among those of this launch
        low = tl.maximum(first - token, 0)
        high = tl.minimum(count, first + rows - token)
        tiles = tl.where(high > low, (keys + KEY_TILE - 1) // KEY_TILE, 0)
        for tile in range(core, tiles, tl.num_programs(0)):
            position = tile * KEY_TILE
            if KEYS == PAGED:
                column = position // page
                number = tl.load(table + request.to(tl.int64) * table_stride + column)
                there = (number >= 0) & (number < pages)
                row = number.to(tl.int64) * page_rows + position - column * page
            elif KEYS == TND:
                there = tile >= 0
                row = (start + position).to(tl.int64)
            else:
                there = tile >= 0
                row = request.to(tl.int64) * page_rows + position
            to = out + (token - first).to(tl.int64) * wide + position
            if there:
                of_key = key + (row + r)[:, None] * key_row + d[None]
                if KEYS == PAGED:
                    k = tl.load(of_key)  # a page is there as a whole
                else:
                    k = tl.load(of_key, mask=(r < keys - position)[:, None], other=0.0)
                for s in range(low, high):
                    q_row = query + (token + s).to(tl.int64) * query_row
                    w_row = weights + (token + s).to(tl.int64) * weights_row
                    score = tl.zeros((KEY_TILE,), tl.float32)
                    for head in tl.static_range(0, HEADS, HEAD_TILE):
                        at = q_row + (head + h)[:, None] * query_head + d[None]
                        if HEADS % HEAD_TILE == 0:
                            q = tl.load(at)
                            w = tl.load(w_row + head + h)
                        else:
                            q = tl.load(at, mask=(h < HEADS - head)[:, None], other=0.0)
                            w = tl.load(w_row + head + h, mask=h < HEADS - head, other=0.0)
                        z = tl.dot(q, tl.trans(k))  # [HEAD_TILE, KEY_TILE]
                        score += tl.sum(tl.maximum(z, 0.0) * w.to(tl.float32)[:, None], 0)
                    # false for NaN as well
                    score = tl.where(score > _LOWEST, score, _LOWEST)
                    tl.store(to + s.to(tl.int64) * wide + r, score)
            else:
                for s in range(low, high):
                    absent = tl.full((KEY_TILE,), float("-inf"), tl.float32)
                    tl.store(to + s.to(tl.int64) * wide + r, absent)


@triton.jit
def as_float(key):
    """The float behind an ordered int32 key: floats compare as their keys do."""
    key = key.to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@entry.jit(do_not_specialize=["first", "rows", "wide", "chosen", "requests", "tokens", "reach"])
def topk(
    score, query_lengths, key_lengths, out,
    first, rows, wide, chosen, requests, tokens, reach,
    Q_TND: tl.constexpr, Q_LENGTHS: tl.constexpr, KEYS: tl.constexpr, K_LENGTHS: tl.constexpr,
    CAUSAL: tl.constexpr, COUNT_TILE: tl.constexpr, SORT_TILE: tl.constexpr,
):  # fmt: skip
    """16 passes narrow down the key of the `chosen`-th score, each by three counts; then the
    positions above it, and the first ones equal to it, are packed in order.

    A tile is packed by sorting: -position where chosen, -inf elsewhere.  Positions and counts are
    small enough to be exact as floats, which the vector unit compares and sorts best.
    """
    c = tl.arange(0, COUNT_TILE)
    p = tl.arange(0, SORT_TILE)
    negative = -p.to(tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        _, _, n = visible(
            first + row, query_lengths, key_lengths, requests, tokens, reach,
            Q_TND, Q_LENGTHS, KEYS, K_LENGTHS, CAUSAL,
        )  # fmt: skip
        of_row = score + row.to(tl.int64) * wide
        to = out + (first + row).to(tl.int64) * chosen
        low = tl.full((), -2139095041, tl.int64)  # the key of -inf
        high = tl.full((), 2139095041, tl.int64)  # that of inf, plus one
        for _ in range(16):
            step = (high - low + 3) >> 2
            key1 = low + step
            key2 = key1 + step
            key3 = key2 + step
            least1 = as_float(tl.minimum(key1, 2139095040))
            least2 = as_float(tl.minimum(key2, 2139095040))
            least3 = as_float(tl.minimum(key3, 2139095040))
            above1 = tl.zeros((COUNT_TILE,), tl.float32)
            above2 = tl.zeros((COUNT_TILE,), tl.float32)
            above3 = tl.zeros((COUNT_TILE,), tl.float32)
            for s in range(0, n, COUNT_TILE):
                v = tl.load(of_row + s + c, mask=c < n - s, other=float("-inf"))
                above1 += tl.where(v >= least1, 1.0, 0.0)
                above2 += tl.where(v >= least2, 1.0, 0.0)
                above3 += tl.where(v >= least3, 1.0, 0.0)
            n1 = tl.sum(above1, 0)
            n2 = tl.sum(above2, 0)
            n3 = tl.sum(above3, 0)
            wanted = chosen.to(tl.float32)
            at_most = tl.where(n3 < wanted, key3, high)
            at_most = tl.where(n2 < wanted, key2, at_most)
            at_most = tl.where(n1 < wanted, key1, at_most)
            at_least = tl.where(n1 >= wanted, key1, low)
            at_least = tl.where(n2 >= wanted, key2, at_least)
            low = tl.where(n3 >= wanted, key3, at_least)
            high = tl.minimum(high, at_most)
        least = as_float(low)
        above = tl.zeros((COUNT_TILE,), tl.float32)
        for s in range(0, n, COUNT_TILE):
            v = tl.load(of_row + s + c, mask=c < n - s, other=float("-inf"))
            above += tl.where(v > least, 1.0, 0.0)
        # how many of those equal to `least` are wanted; -inf is absent, never wanted
        ties = tl.where(low > -2139095041, chosen - tl.sum(above, 0).to(tl.int32), 0)
        written = 0
        for s in range(0, n, SORT_TILE):
            v = tl.load(of_row + s + p, mask=p < n - s, other=float("-inf"))
            equal = tl.where(v == least, 1.0, 0.0)
            here = tl.sum(equal, 0).to(tl.int32)
            last = -1.0 * SORT_TILE  # the last equal position that is taken, negative
            if here > ties:
                # rare: the wanted ones end inside this tile
                packed = sort(tl.where(equal > 0, negative, float("-inf")), 0, True)
                last = tl.sum(tl.where(p == ties - 1, packed, 0.0), 0)
                if ties == 0:
                    last = 1.0
            ties -= tl.minimum(here, ties)
            equal = tl.where(negative >= last, equal, 0.0)
            key = tl.where(v > least, negative, tl.where(equal > 0, negative, float("-inf")))
            taken = tl.sum(tl.where(key > float("-inf"), 1.0, 0.0), 0).to(tl.int32)
            if taken > 0:
                packed = sort(key, 0, True)
                position = s - tl.maximum(packed, -1.0 * SORT_TILE).to(tl.int32)
                tl.store(to + written + p, position, mask=p < taken)
                written += taken
        for s in range(written, chosen, SORT_TILE):
            tl.store(to + s + p, tl.full((SORT_TILE,), -1, tl.int32), mask=p < chosen - s)


@entry.jit(do_not_specialize=["first", "rows", "wide", "chosen"])
def values(score, indices, out, first, rows, wide, chosen, PIECE: tl.constexpr):
    p = tl.arange(0, PIECE)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        of_row = score + row.to(tl.int64) * wide
        at = (first + row).to(tl.int64) * chosen
        for s in range(0, chosen, PIECE):
            position = tl.load(indices + at + s + p, mask=p < chosen - s, other=-1)
            value = tl.load(of_row + tl.where(position >= 0, position, 0))
            value = tl.where(position >= 0, value, 0.0)
            tl.store(out + at + s + p, value.to(out.dtype.element_ty), mask=p < chosen - s)


def unsupported(query: Tensor, key: Tensor, block_table: Tensor | None, **_: Any) -> str | None:
    if reason := tiling.not_multiplied(query=query):
        return reason
    size = query.shape[-1]
    overflow = tiling.matmul_overflow(64, 128, size)
    if size % 16 or overflow:
        return overflow or f"head size {size}, the cube unit takes multiples of 16"
    reach = block_table.shape[1] * key.shape[1] if block_table is not None else key.shape[-3]
    if reach > ragged.LONGEST:
        return f"contexts of up to {reach} positions, the kernel reaches {ragged.LONGEST}"
    return ragged.uneven(key=key)


def forward(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_key: Tensor | None,
    block_table: Tensor | None,
    layout_query: str,
    layout_key: str,
    sparse_count: int,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    return_value: bool,
    value_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Values in the dtype of `query`, unless another is asked for."""
    q, w = query.flatten(0, -3), weights.flatten(0, -2)

    def score(plan: ragged.Plan, out: Tensor, first: int, rows: int, config: tune.Config) -> None:
        scores[(cores.cube(),)](
            q, key, w, plan.table, out=out, first=first, rows=rows, wide=out.shape[1],
            query_row=q.stride(0), query_head=q.stride(1), weights_row=w.stride(0),
            key_row=ragged.row_stride(key), table_stride=plan.table.stride(0),
            pages=key.shape[0], page=key.shape[-3], page_rows=ragged.page_rows(key),
            HEADS=query.shape[-2], DIM=query.shape[-1], **plan.arguments, **flags_of(plan),
            **config.keywords,
        )  # fmt: skip

    return select(
        "lightning_indexer.scores", query, key, actual_seq_lengths_query, actual_seq_lengths_key,
        block_table, layout_query, layout_key, sparse_count, sparse_mode,
        (value_dtype or query.dtype) if return_value else None, score,
    )  # fmt: skip


def flags_of(plan: ragged.Plan) -> dict[str, Any]:
    """Of the scores, which no token sees or not."""
    return {name: flag for name, flag in plan.flags.items() if name != "CAUSAL"}


def select(
    kernel: str,
    query: Tensor,
    key: Tensor,
    lengths_query: Tensor | None,
    lengths_key: Tensor | None,
    block_table: Tensor | None,
    layout_query: str,
    layout_key: str,
    count: int,
    sparse_mode: int,
    value_dtype: torch.dtype | None,
    score: Callable[..., None],
) -> tuple[Tensor, Tensor]:
    """(indices, values of `value_dtype`, or none) of what `score(plan, out, first, rows, config)`
    writes; `kernel` is the one that it launches."""
    plan = ragged.plan(
        query, key, lengths_query, lengths_key, block_table, layout_query, layout_key, sparse_mode
    )
    shape = [*query.shape[:-2], 1, count]
    heads = query.shape[-2]
    indices = memory.empty(shape, torch.int32, query.device)
    wanted = value_dtype is not None
    chosen = memory.empty(shape if wanted else [0], value_dtype or query.dtype, query.device)
    if plan.rows == 0 or plan.reach == 0 or key.numel() == 0:
        return indices.fill_(-1), chosen.zero_()

    # a tile lies within a page
    page = key.shape[-3] if layout_key == "PA_BSND" else 0
    within = [
        config
        for config in tune.TABLE[kernel]
        if page % config.tiles["KEY_TILE"] == 0
        and min(heads, 128) * config.tiles["KEY_TILE"] <= _LOGITS
    ]
    product = tune.choose(kernel, tune.ranked(within, "HEAD_TILE", min(heads, 64)), query.shape[-1])
    wide = tiling.up(plan.reach, product.tiles["KEY_TILE"])
    at_once = tiling.at_once(plan.rows, wide * 4)
    found = memory.empty((at_once, wide), torch.float32, query.device)
    for first in range(0, plan.rows, at_once):
        rows = min(at_once, plan.rows - first)
        score(plan, found, first, rows, product)
        topk[(min(rows, cores.vector()),)](
            found, out=indices, first=first, rows=rows, wide=wide, chosen=count,
            **plan.arguments, **plan.flags, **tune.only("lightning_indexer.topk").keywords,
        )  # fmt: skip
        if wanted:
            values[(min(rows, cores.vector()),)](
                found, indices, chosen, first, rows, wide, count,
                **tune.only("lightning_indexer.values").keywords,
            )  # fmt: skip
    return indices, chosen
