# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The `sparse_count` keys of each query token that score highest.

    score[p] = sum_n weights[n] * relu(query[n] . key[p])        p = 0 .. keys seen - 1

query [B, S, N, D], key [B, S2, 1, D] (or TND, or pages), weights [B, S, N].  The scores are fp32
and lie in a [rows, keys] buffer of bounded size, a chunk of rows at a time; topk.py selects.
Keys are the rows of the product, heads its columns: the sum over heads stays within a thread.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch.common import memory
from . import rows, topk

LEAST_SCORE = tl.constexpr(-3.4028234663852886e38)
CHUNK_BYTES = 2**28  # of scores at a time: 1024 rows of 64K keys


@triton.jit
def _key_tile(
    key, pos, ok, request, start, table, table_stride, pages, key_o, key_i, d,
    D: tl.constexpr, D_TILE: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    ONE_PAGE: tl.constexpr,
):  # fmt: skip
    """([keys, D_TILE], ok): the keys at pos.  ONE_PAGE: they lie on one page, asked for once."""
    if ONE_PAGE:
        first = tl.min(pos, 0)
        entry = table + request.to(tl.int64) * table_stride + first // PAGE
        outer = tl.load(entry).to(tl.int64)
        there = (outer >= 0) & (outer < pages)
        ok = ok & there
        base = key + outer * key_o + (first % PAGE).to(tl.int64) * key_i
        at = base + (pos - first)[:, None] * key_i + d[None, :]
    else:
        outer, inner, ok = rows.place(
            pos, ok, request, start, table, table_stride, pages, PAGE, KEYS
        )
        at = key + (outer * key_o + inner * key_i)[:, None] + d[None, :]
    if D == D_TILE:
        tile = tl.load(at, mask=ok[:, None], other=0.0)
    else:
        tile = tl.load(at, mask=ok[:, None] & (d < D)[None, :], other=0.0)
    return tile, ok


@triton.jit
def _query_tile(query, weights, row, q_row, q_head, w_row, HEADS: tl.constexpr, D: tl.constexpr,
                H_TILE: tl.constexpr, D_TILE: tl.constexpr):  # fmt: skip
    """[H_TILE, D_TILE] and the weights [H_TILE] of one row."""
    h = tl.arange(0, H_TILE)
    d = tl.arange(0, D_TILE)
    at = query + row * q_row + h[:, None] * q_head + d[None, :]
    if H_TILE == HEADS and D_TILE == D:
        q_tile = tl.load(at)
    else:
        q_tile = tl.load(at, mask=(h < HEADS)[:, None] & (d < D)[None, :], other=0.0)
    weight = tl.load(weights + row * w_row + h, mask=h < HEADS, other=0.0).to(tl.float32)
    return q_tile, weight


@triton.jit
def _score(k_tile, q_tile, weight, ok):
    s = tl.dot(k_tile, q_tile.T, input_precision="ieee")
    score = tl.sum(tl.maximum(s, 0.0) * weight[None, :], 1)
    # a NaN comes last, and only what is absent is -inf
    score = tl.where(score > LEAST_SCORE, score, LEAST_SCORE)
    return tl.where(ok, score, float("-inf"))


@triton.jit(do_not_specialize=["tokens", "requests", "reach", "count", "chunks", "per_chunk"])
def _scores_few(
    query, key, weights, act_q, act_k, table, scores, lengths,
    tokens, requests, reach, table_stride, pages, first_row, count, chunks, per_chunk, together,
    q_row, q_head, w_row, key_o, key_i, score_row,
    HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, Q_TND: tl.constexpr,
    KEYS: tl.constexpr, CAUSAL: tl.constexpr, HAS_Q: tl.constexpr, HAS_K: tl.constexpr,
    REQUESTS: tl.constexpr, H_TILE: tl.constexpr, D_TILE: tl.constexpr, KEY_TILE: tl.constexpr,
    ONE_PAGE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One row against `per_chunk` keys; `together` rows in turn, which may share their keys."""
    program = tl.program_id(0)
    member = program % together
    chunk = program // together % chunks
    place = program // (together * chunks) * together + member
    if place < count:
        row = first_row + place.to(tl.int64)
        request, start, seen = rows.locate(
            row, act_q, act_k, tokens, requests, reach, Q_TND, KEYS, CAUSAL, HAS_Q, HAS_K, REQUESTS
        )
        if chunk == 0:
            tl.store(lengths + place, seen)
        lo = chunk * per_chunk
        hi = tl.minimum(lo + per_chunk, seen)
        d = tl.arange(0, D_TILE)
        scores += place.to(tl.int64) * score_row
        q_tile, weight = _query_tile(
            query, weights, row, q_row, q_head, w_row, HEADS, D, H_TILE, D_TILE
        )
        for n in tl.range(lo, hi, KEY_TILE, num_stages=STAGES):
            pos = n + tl.arange(0, KEY_TILE)
            k_tile, ok = _key_tile(
                key, pos, pos < hi, request, start, table, table_stride, pages, key_o, key_i, d,
                D, D_TILE, PAGE, KEYS, ONE_PAGE,
            )  # fmt: skip
            tl.store(scores + pos, _score(k_tile, q_tile, weight, ok), mask=pos < hi)


@triton.jit(do_not_specialize=["tokens", "requests", "reach", "count", "chunks"])
def _scores_many(
    query, key, weights, act_q, act_k, table, scores, lengths,
    tokens, requests, reach, table_stride, pages, first_row, count, chunks, group,
    q_row, q_head, w_row, key_o, key_i, score_row,
    HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, Q_TND: tl.constexpr,
    KEYS: tl.constexpr, CAUSAL: tl.constexpr, HAS_Q: tl.constexpr, HAS_K: tl.constexpr,
    REQUESTS: tl.constexpr, H_TILE: tl.constexpr, D_TILE: tl.constexpr, KEY_TILE: tl.constexpr,
    ONE_PAGE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """KEY_TILE keys against `group` rows: the keys stay, the rows pass by."""
    program = tl.program_id(0)
    lo = program % chunks * KEY_TILE
    row = first_row + program // chunks * group
    end = tl.minimum(row + group, first_row + count)
    pos = lo + tl.arange(0, KEY_TILE)
    d = tl.arange(0, D_TILE)
    while row < end:
        request, first = rows.request_of(row, act_q, tokens, requests, Q_TND, REQUESTS)
        asked = rows.rows_of(request, first, act_q, tokens, requests, Q_TND, HAS_Q)
        start, keys = rows.keys_of(request, act_k, reach, requests, KEYS, HAS_K)
        stop = first + tokens
        if Q_TND:
            stop = tl.where(request < requests, first + asked, end)
        stop = tl.minimum(stop, end)
        if lo == 0:
            for r in tl.range(row, stop):
                tl.store(lengths + r - first_row, rows.sees(r - first, asked, keys, CAUSAL))
        from_row = row
        if CAUSAL:  # earlier rows do not see this far
            from_row = tl.maximum(row, first + asked - keys + lo)
        if lo >= keys:
            from_row = stop
        to_row = tl.minimum(stop, first + asked)
        if from_row < to_row:
            k_tile, ok = _key_tile(
                key, pos, pos < keys, request, start, table, table_stride, pages, key_o, key_i, d,
                D, D_TILE, PAGE, KEYS, ONE_PAGE,
            )  # fmt: skip
            for r in tl.range(from_row, to_row, num_stages=STAGES):
                wide = (row * 0 + r).to(tl.int64)  # the interpreter counts in Python's ints
                q_tile, weight = _query_tile(
                    query, weights, wide, q_row, q_head, w_row, HEADS, D, H_TILE, D_TILE
                )
                score = _score(k_tile, q_tile, weight, ok)
                seen = rows.sees(r - first, asked, keys, CAUSAL)
                tl.store(scores + (wide - first_row) * score_row + pos, score, mask=pos < seen)
        row = stop


def unsupported(**arguments: Any) -> str | None:
    query, k = arguments["query"], arguments["sparse_count"]
    if query.is_cuda and query.dtype not in (torch.float16, torch.bfloat16):
        return f"query is {query.dtype}, supported float16 and bfloat16"
    if k > topk.MOST:
        return f"sparse_count={k}, supported up to {topk.MOST}"
    if query.shape[-1] > 256 or query.shape[-2] > 256:
        return f"heads and head_dim are {tuple(query.shape[-2:])}, supported up to 256"
    return None


def forward(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    block_table: Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    pre_tokens: int = 2**63 - 1,
    next_tokens: int = 2**63 - 1,
    return_value: bool = False,
) -> tuple[Tensor, Tensor]:
    device = query.device
    shape = (*query.shape[:-2], 1, sparse_count)
    indices = memory.empty(shape, torch.int32, device)
    values = memory.empty(shape if return_value else (0,), query.dtype, device)
    if indices.numel() == 0:
        return indices, values
    plan = rows.plan(
        query, key, actual_seq_lengths_query, actual_seq_lengths_key, block_table, layout_query,
        layout_key, sparse_mode,
    )  # fmt: skip
    heads, dim = query.shape[-2:]
    q = query.reshape(plan.rows, heads, dim)
    w = weights.reshape(plan.rows, heads)
    key_o, key_i = rows.strides(key, layout_key)
    reach = max(plan.reach, 1)
    # rows of a request share its keys: many of them pass by a tile of keys that stays
    few = plan.rows <= 4 * plan.arguments["requests"]
    chunk_rows = max(1, min(plan.rows, CHUNK_BYTES // (4 * reach)))
    score_row = triton.cdiv(reach, 128) * 128
    scores = memory.empty((chunk_rows, score_row), torch.float32, device)
    lengths = memory.empty((chunk_rows,), torch.int32, device)
    # measured on one H200, 2026-11, 64 heads x 128, bf16, 64K keys: 128 keys a program for one
    # row; 2048 in tiles of 64 for 32 and 128 rows
    alone = few and plan.rows * triton.cdiv(reach, 128) <= 2048
    key_tile = 128 if alone or not few else 64
    flat_indices = indices.view(plan.rows, sparse_count)
    flat_values = values.view(plan.rows, sparse_count) if return_value else values
    page = plan.constants["PAGE"]
    common: dict[str, Any] = {
        **plan.arguments, **plan.constants, "score_row": score_row, "q_row": q.stride(0),
        "q_head": q.stride(1), "w_row": w.stride(0), "key_o": key_o, "key_i": key_i,
        "HEADS": heads, "D": dim, "H_TILE": max(16, triton.next_power_of_2(heads)),
        "D_TILE": max(16, triton.next_power_of_2(dim)), "KEY_TILE": key_tile,
        "ONE_PAGE": layout_key == "PA_BSND" and page % key_tile == 0, "num_warps": 4,
    }  # fmt: skip
    for first in range(0, plan.rows, chunk_rows):
        count = min(chunk_rows, plan.rows - first)
        here = {"first_row": first, "count": count, **common}
        if few:
            per_chunk = key_tile if alone else 2048
            chunks = triton.cdiv(reach, per_chunk)
            together = min(count, 4 if layout_query == "TND" else query.shape[1])
            _scores_few[(triton.cdiv(count, together) * together * chunks,)](
                q, key, w, scores=scores, lengths=lengths, chunks=chunks, per_chunk=per_chunk,
                together=together, STAGES=1 if alone else 2, **here,
            )  # fmt: skip
        else:
            chunks = triton.cdiv(reach, key_tile)
            group = 64
            _scores_many[(triton.cdiv(count, group) * chunks,)](
                q, key, w, scores=scores, lengths=lengths, chunks=chunks, group=group, STAGES=2,
                **here,
            )  # fmt: skip
        topk.topk(
            scores[:count], lengths, flat_indices[first : first + count],
            flat_values[first : first + count] if return_value else values, sparse_count,
        )  # fmt: skip
    return indices, values
