# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The indexer on int8 queries and keys: exact integer products, scaled; then the kernels of
lightning_indexer.py.

    score[t, p] = key_scale[p] sum_n weights[t, n] query_scale[t, n] relu(query[t, n] . key[p])

    scores   cube + vector   a tile of keys of one request stays in L1 while the request's tokens
                             pass -> fp32 [T, reach]
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ..dispatch.common import quantised
from . import cores, entry, lightning_indexer, ragged, tiling, tune
from .ragged import PAGED, TND, keys_of, tokens_of

_LOWEST = tl.constexpr(-3.4028234663852886e38)


@entry.jit(
    do_not_specialize=[
        "first", "rows", "wide", "query_row", "query_head", "weights_row", "scale_row",
        "scale_head", "key_row", "scale_page", "requests", "tokens", "reach", "table_stride",
        "pages", "page", "page_rows",
    ]
)  # fmt: skip
def scores(
    query, key, weights, query_scale, key_scale, table, query_lengths, key_lengths, out,
    first, rows, wide, query_row, query_head, weights_row, scale_row, scale_head, key_row,
    scale_page, requests, tokens, reach, table_stride, pages, page, page_rows,
    Q_TND: tl.constexpr, Q_LENGTHS: tl.constexpr, KEYS: tl.constexpr, K_LENGTHS: tl.constexpr,
    Q_SCALE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, HEAD_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
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
                of_scale = number.to(tl.int64) * scale_page + position - column * page
            elif KEYS == TND:
                there = tile >= 0
                row = (start + position).to(tl.int64)
                of_scale = row
            else:
                there = tile >= 0
                row = request.to(tl.int64) * page_rows + position
                of_scale = request.to(tl.int64) * scale_page + position
            to = out + (token - first).to(tl.int64) * wide + position
            if there:
                of_key = key + (row + r)[:, None] * key_row + d[None]
                if KEYS == PAGED:  # a page is there as a whole
                    k = tl.load(of_key)
                    by = tl.load(key_scale + of_scale + r).to(tl.float32)
                else:
                    k = tl.load(of_key, mask=(r < keys - position)[:, None], other=0)
                    by = tl.load(key_scale + of_scale + r, mask=r < keys - position, other=0.0)
                    by = by.to(tl.float32)
                for s in range(low, high):
                    q_row = query + (token + s).to(tl.int64) * query_row
                    w_row = weights + (token + s).to(tl.int64) * weights_row
                    s_row = query_scale + (token + s).to(tl.int64) * scale_row
                    score = tl.zeros((KEY_TILE,), tl.float32)
                    for head in tl.static_range(0, HEADS, HEAD_TILE):
                        at = q_row + (head + h)[:, None] * query_head + d[None]
                        if HEADS % HEAD_TILE == 0:
                            q = tl.load(at)
                            w = tl.load(w_row + head + h).to(tl.float32)
                            if Q_SCALE:
                                w *= tl.load(s_row + (head + h) * scale_head).to(tl.float32)
                        else:
                            some = h < HEADS - head
                            q = tl.load(at, mask=some[:, None], other=0)
                            w = tl.load(w_row + head + h, mask=some, other=0.0).to(tl.float32)
                            if Q_SCALE:
                                of = s_row + (head + h) * scale_head
                                w *= tl.load(of, mask=some, other=0.0).to(tl.float32)
                        z = tl.dot(q, tl.trans(k)).to(tl.float32)  # [HEAD_TILE, KEY_TILE]
                        score += tl.sum(tl.maximum(z, 0.0) * w[:, None], 0)
                    score = score * by
                    # false for NaN as well
                    score = tl.where(score > _LOWEST, score, _LOWEST)
                    tl.store(to + s.to(tl.int64) * wide + r, score)
            else:
                for s in range(low, high):
                    absent = tl.full((KEY_TILE,), float("-inf"), tl.float32)
                    tl.store(to + s.to(tl.int64) * wide + r, absent)


def unsupported(
    query: Tensor, key: Tensor, block_table: Tensor | None, query_dtype: int | None, **_: Any
) -> str | None:
    if quantised.typed(query, query_dtype).dtype is not torch.int8:
        return "fp8: the cube and vector units of A2 and A3 have int8 and no fp8"
    size = query.shape[-1]
    overflow = tiling.matmul_overflow(64, 128, size)
    if size % 32 or overflow:
        return overflow or f"head size {size}, the cube unit takes multiples of 32 in int8"
    reach = block_table.shape[1] * key.shape[1] if block_table is not None else key.shape[-3]
    if reach > ragged.LONGEST:
        return f"contexts of up to {reach} positions, the kernel reaches {ragged.LONGEST}"
    return ragged.uneven(key=key)


def forward(**arguments: Any) -> Tensor:
    return selected(False, **arguments)[0]


def selected(
    scored: bool,
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    query_dequant_scale: Tensor | None,
    key_dequant_scale: Tensor,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_key: Tensor | None,
    block_table: Tensor | None,
    layout_query: str,
    layout_key: str,
    sparse_count: int,
    sparse_mode: int,
    query_dtype: int | None,
    key_dtype: int | None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """(indices, their scores in float32, or none)"""
    query, key = quantised.typed(query, query_dtype), quantised.typed(key, key_dtype)
    q, w = query.flatten(0, -3), weights.flatten(0, -2)
    by = w if query_dequant_scale is None else query_dequant_scale.flatten(0, -2)
    heads = query.shape[-2]

    def score(plan: ragged.Plan, out: Tensor, first: int, rows: int, config: tune.Config) -> None:
        scores[(cores.cube(),)](
            q, key, w, by, key_dequant_scale, plan.table, out=out, first=first, rows=rows,
            wide=out.shape[1], query_row=q.stride(0), query_head=q.stride(1),
            weights_row=w.stride(0), scale_row=by.stride(0), scale_head=by.stride(1),
            key_row=ragged.row_stride(key), scale_page=key_dequant_scale.stride(0),
            table_stride=plan.table.stride(0), pages=key.shape[0], page=key.shape[-3],
            page_rows=ragged.page_rows(key), Q_SCALE=query_dequant_scale is not None, HEADS=heads,
            DIM=query.shape[-1], **plan.arguments, **lightning_indexer.flags_of(plan),
            **config.keywords,
        )  # fmt: skip

    return lightning_indexer.select(
        "quant_lightning_indexer.scores", query, key, actual_seq_lengths_query,
        actual_seq_lengths_key, block_table, layout_query, layout_key, sparse_count, sparse_mode,
        torch.float32 if scored else None, score,
    )  # fmt: skip
