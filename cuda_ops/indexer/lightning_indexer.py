# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The `sparse_count` keys of each query token that score highest.

    score[p] = sum_n weights[n] * relu(query[n] . key[p])        p = 0 .. keys seen - 1

query [B, S, N, D], key [B, S2, 1, D] (or TND, or pages), weights [B, S, N].  The scores are fp32
and lie in a [rows, keys] buffer of bounded size, a chunk of rows at a time; topk.py selects.
Keys are the rows of the product, heads its columns: the sum over heads stays within a thread.
With select_tail `_tail` copies what was chosen, and puts the open entry behind it.

    condition                                         kernels
    Hopper, up to 128 heads of 64 or 128, pages of    hopper/lightning_indexer.py then topk.py
      whole 64, aligned
    the same, select_tail                             hopper/lightning_indexer.py, topk.py,
                                                      _tail
    select_tail                                       _scores, topk.py then _tail
    else                                              _scores then topk.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import memory
from ...dispatch.ops.indexer.lightning_indexer import Arguments, Selection
from ..common import gpu, quantize, rows
from ..common.tiling import cdiv, power_of_two
from ..runtime import launches
from . import topk
from .hopper import lightning_indexer as hopper

LEAST_SCORE = tl.constexpr(-3.4028234663852886e38)
CHUNK_BYTES = 2**28  # of scores at a time: 1024 rows of 64K keys
BLOCK_N = 64


class Constants(NamedTuple):
    HEADS: int
    D: int
    ROWS: int
    BLOCK_H: int
    BLOCK_D: int
    BLOCK_N: int
    ONE_PAGE: bool
    STAGES: int
    EVERY: int
    KIND: int
    QUERY_SCALE: bool
    RATIO: int


@triton.jit
def _key_tile(
    key,
    pos,
    valid,
    request,
    start,
    of,
    key_o,
    key_i,
    d,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LAYOUT: tl.constexpr,
    ONE_PAGE: tl.constexpr,
):
    """([keys, BLOCK_D], valid): the keys at pos.  ONE_PAGE: they lie on one page, read once."""
    if ONE_PAGE:
        first = tl.min(pos, 0)
        entry = of.table + request.to(tl.int64) * of.table_stride + first // LAYOUT.PAGE
        outer = tl.load(entry).to(tl.int64)
        named = (outer >= 0) & (outer < of.pages)
        valid = valid & named
        base = key + outer * key_o + (first % LAYOUT.PAGE).to(tl.int64) * key_i
        at = base + (pos - first).to(tl.int64)[:, None] * key_i + d[None, :]
    else:
        outer, inner, valid = rows.physical_slot(pos, valid, request, start, of, LAYOUT)
        at = key + (outer * key_o + inner * key_i)[:, None] + d[None, :]
    if D == BLOCK_D:
        tile = tl.load(at, mask=valid[:, None], other=0.0)
    else:
        tile = tl.load(at, mask=valid[:, None] & (d < D)[None, :], other=0.0)
    return tile, valid


@triton.jit(do_not_specialize=[*rows.NUMBERS, "count", "chunks", "per_chunk"])
def _scores(
    query,
    key,
    weights,
    query_scale,
    key_scale,
    seqlens_q,
    seqlens_k,
    table,
    scores,
    sample,
    lengths,
    tokens,
    requests,
    max_kv_len,
    table_stride,
    pages,
    first_row,
    count,
    chunks,
    per_chunk,
    strides,
    LAYOUT: tl.constexpr,
    C: tl.constexpr,
):
    """ROWS rows against `per_chunk` keys, which pass by: once for each request among the rows."""
    q_row, q_head, w_row, key_o, key_i, qs_row, qs_head, ks_o, ks_i, score_row, sample_row = strides
    of = rows.Requests(
        seqlens_q, seqlens_k, table, tokens, requests, max_kv_len, table_stride, pages
    )
    if C.RATIO == 1:
        source = of
    else:  # lengths count tokens, of which a key stands for RATIO
        source = rows.Requests(
            seqlens_q,
            seqlens_k,
            table,
            tokens,
            requests,
            max_kv_len * C.RATIO + (C.RATIO - 1),
            table_stride,
            pages,
        )
    program = tl.program_id(0)
    lo = program % chunks * per_chunk
    row = first_row + program // chunks * C.ROWS
    end = tl.minimum(row + C.ROWS, first_row + count)
    member = row.to(tl.int64) + tl.arange(0, C.ROWS)
    column = tl.arange(0, C.ROWS * C.BLOCK_H)
    owner = row.to(tl.int64) + column // C.BLOCK_H
    h = (column % C.BLOCK_H).to(tl.int64)
    d = tl.arange(0, C.BLOCK_D)
    mask = (owner < end) & (h < C.HEADS)
    q_tile = tl.load(
        query + (owner * q_row + h * q_head)[:, None] + d[None, :],
        mask=mask[:, None] & (d < C.D)[None, :],
        other=0.0,
    )
    q_tile = quantize.multiplied(q_tile, C.KIND)
    weight = tl.load(weights + owner * w_row + h, mask=mask, other=0.0).to(tl.float32)
    if C.QUERY_SCALE:
        weight *= tl.load(query_scale + owner * qs_row + h * qs_head, mask=mask, other=0.0).to(
            tl.float32
        )
    while row < end:
        request, first, stop = rows.request_of(row, of, LAYOUT)
        stop = tl.minimum(stop, end)
        asked = rows.rows_of(request, first, of, LAYOUT)
        start, keys = rows.keys_of(request, source, LAYOUT)
        in_program = (member >= row) & (member < stop)
        kv_len = rows.sees((member - first).to(tl.int32), asked, keys, LAYOUT.CAUSAL)
        if C.RATIO != 1:
            kv_len = kv_len // C.RATIO
        kv_len = tl.where(in_program, kv_len, 0)
        if lo == 0:
            tl.store(lengths + member - first_row, kv_len, mask=in_program)
        hi = tl.minimum(lo + per_chunk, tl.max(kv_len, 0))
        for n in tl.range(lo, hi, C.BLOCK_N, num_stages=C.STAGES):
            pos = n + tl.arange(0, C.BLOCK_N)
            k_tile, valid = _key_tile(
                key,
                pos,
                pos < hi,
                request,
                start,
                of,
                key_o,
                key_i,
                d,
                C.D,
                C.BLOCK_D,
                LAYOUT,
                C.ONE_PAGE,
            )
            k_tile = quantize.multiplied(k_tile, C.KIND)
            s = tl.dot(k_tile, q_tile.T, input_precision="ieee").to(tl.float32)
            s = tl.maximum(s, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
            if C.HEADS != C.BLOCK_H:
                # the zeros of heads that are not there, times an infinite key, are NaN
                s = tl.where((h < C.HEADS)[None, :], s, 0.0)
            score = tl.sum(tl.reshape(s, [C.BLOCK_N, C.ROWS, C.BLOCK_H]), 2)
            if C.KIND != quantize.PLAIN:
                scale, _ = _key_tile(
                    key_scale,
                    pos,
                    pos < hi,
                    request,
                    start,
                    of,
                    ks_o,
                    ks_i,
                    tl.arange(0, 1),
                    1,
                    1,
                    LAYOUT,
                    C.ONE_PAGE,
                )
                score *= scale.to(tl.float32)
            # a NaN comes last, and only what is absent is -inf
            score = tl.where(score > LEAST_SCORE, score, LEAST_SCORE)
            score = tl.where(valid[:, None], score, float("-inf"))
            at = scores + ((member - first_row) * score_row)[None, :] + pos[:, None]
            tl.store(at, score, mask=pos[:, None] < kv_len[None, :])
            at = sample + ((member - first_row) * sample_row)[None, :] + (pos // C.EVERY)[:, None]
            drawn = (pos % C.EVERY == 0)[:, None] & (pos[:, None] < kv_len[None, :])
            tl.store(at, score, mask=drawn)
        row = stop


@triton.jit(
    do_not_specialize=[*rows.NUMBERS, "k"]
)  # fmt: skip
def _tail(
    indices,
    values,
    out_indices,
    out_values,
    seqlens_q,
    seqlens_k,
    table,
    tokens,
    requests,
    max_kv_len,
    table_stride,
    pages,
    k,
    LAYOUT: tl.constexpr,
    RATIO: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of a row's k entries, -1 behind them, k + 1: the open one ends them."""
    of = rows.Requests(
        seqlens_q,
        seqlens_k,
        table,
        tokens,
        requests,
        max_kv_len * RATIO + (RATIO - 1),
        table_stride,
        pages,
    )
    row = tl.program_id(0)
    _, _, seen = rows.locate(row, of, LAYOUT)
    last = tl.where(seen % RATIO > 0, seen // RATIO, -1)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row.to(tl.int64) * k + j
    entry = tl.load(indices + at, mask=j < k, other=-1)
    before = tl.load(indices + at - 1, mask=(j > 0) & (j <= k), other=0)
    to = at + row
    ends = (entry < 0) & (before >= 0)
    tl.store(out_indices + to, tl.where(ends, last, entry), mask=j <= k)
    if VALUES:
        tl.store(out_values + to, tl.load(values + at, mask=j < k, other=0.0), mask=j <= k)


def shape(
    together: int, heads: int, dim: int, device: torch.device
) -> tuple[int, int, int, int] | None:
    """(ROWS, BLOCK_H, BLOCK_D, STAGES) for up to `together` rows that share the keys that pass by,
    the first that fits into this GPU; the product has 256 columns at most."""
    h_tile, d_tile = (max(16, power_of_two(size)) for size in (heads, dim))
    most = min(4, 256 // h_tile, power_of_two(together))
    for shared in (4, 2, 1):
        for stages in (3, 2):
            # a tile of keys for each stage but one, unless the product reads it from there too
            held = stages if gpu.reads_shared(device) else stages - 1
            needed = 2 * d_tile * (shared * h_tile + held * BLOCK_N) + 1024 * shared
            if shared <= most and needed <= gpu.shared_memory(device):
                return shared, h_tile, d_tile, stages
    return None


def unsupported(**arguments: Any) -> str | None:
    query, k = arguments["query"], arguments["sparse_count"]
    if query.is_cuda and query.dtype not in (torch.float16, torch.bfloat16):
        return f"query is {query.dtype}, supported float16 and bfloat16"
    if k > topk.MOST:
        return f"sparse_count={k}, supported up to {topk.MOST}"
    heads, dim = query.shape[-2:]
    if dim > 256 or heads > 256:
        return f"heads and head_dim are {(heads, dim)}, supported up to 256"
    if shape(1, heads, dim, query.device) is None:
        return gpu.too_small(query.device, N=heads, D=dim)
    return too_many(arguments["key"], arguments.get("block_table"), arguments["cmp_ratio"])


def too_many(key: Tensor, block_table: Tensor | None, cmp_ratio: int) -> str | None:
    """Positions of keys, or of the tokens that they stand for; why not, or None."""
    reach = key.shape[-3] * (1 if block_table is None else block_table.shape[1])
    return rows.too_many_positions(key, block_table, (reach + 1) * cmp_ratio - 1)


class Scored(NamedTuple):
    """What comes out, once `select_last()` has launched the top-k of the last rows."""

    indices: Tensor
    values: Tensor
    select_last: Callable[[], None]


def _nothing() -> None:
    pass


def scores(**x: Unpack[Arguments]) -> Scored:
    """Compute the scores, and launch the top-k of all chunks of rows but the last, beside which a
    caller can run something."""
    value_dtype = x["query"].dtype if x["return_value"] else None
    return scores_of(x, x["query"], x["key"], None, None, value_dtype)


def scores_of(
    x: Selection,
    query: Tensor,
    key: Tensor,
    query_scale: Tensor | None,
    key_scale: Tensor | None,
    value_dtype: torch.dtype | None,
) -> Scored:
    """The same, of queries and keys that are floats, or of 8 bits with `key_scale`; values of
    `value_dtype`, or none."""
    weights, sparse_count, cmp_ratio = x["weights"], x["sparse_count"], x["cmp_ratio"]
    layout_key = x["layout_key"]
    device = query.device
    selected = (*query.shape[:-2], 1, sparse_count)
    indices = memory.empty(selected, torch.int32, device)
    wanted = value_dtype is not None
    values = memory.empty(selected if wanted else (0,), value_dtype or torch.float32, device)
    if indices.numel() == 0:
        empty = indices.new_empty((*query.shape[:-2], 1, sparse_count + int(x["select_tail"])))
        return Scored(empty, empty.to(values.dtype) if wanted else values, _nothing)
    kind = quantize.PLAIN.value
    if key_scale is not None:
        (query, kind), (key, _) = quantize.to_read(query), quantize.to_read(key)
    plan = rows.plan(
        query,
        key,
        x["actual_seq_lengths_query"],
        x["actual_seq_lengths_key"],
        x["block_table"],
        x["layout_query"],
        layout_key,
        x["sparse_mode"],
    )
    heads, dim = query.shape[-2:]
    q = query.reshape(plan.rows, heads, dim)
    w = weights.reshape(plan.rows, heads)
    max_kv_len = max(plan.max_kv_len, 1)
    per_request = cdiv(plan.rows, max(plan.arguments["requests"], 1))
    found = shape(per_request, heads, dim, device)
    assert found is not None
    shared, h_tile, d_tile, stages = found
    if kind == quantize.INT8.value:
        d_tile = max(32, d_tile)  # the least depth of a product of bytes
    score_row = cdiv(max_kv_len, topk.BLOCK) * topk.BLOCK
    chunk_rows = max(shared, min(plan.rows, CHUNK_BYTES // (4 * score_row) // shared * shared))
    score = memory.empty((chunk_rows, score_row), torch.float32, device)
    sample = memory.empty((chunk_rows, score_row // topk.EVERY), torch.float32, device)
    qs = w if query_scale is None else query_scale.reshape(plan.rows, heads)
    ks = key if key_scale is None else key_scale.unsqueeze(-1)
    strides = (
        *q.stride()[:2],
        w.stride(0),
        *rows.strides(layout_key, key),
        *qs.stride()[:2],
        *rows.strides(layout_key, ks),
        score_row,
        sample.stride(0),
    )
    on_hopper = hopper.supports(q, key, layout_key)
    lengths = memory.empty((chunk_rows,), torch.int32, device)
    # measured on one H200, 2026-11, 64 heads x 128, bf16, 64K keys: 128 keys a program for one
    # row, 9.4 us; 2048 for 128 rows, 567 with the top-k
    alone = shared == 1 and plan.rows * cdiv(max_kv_len, 128) <= 16 * gpu.num_sms(device)
    # as many programs as keep all processors busy twice over, where there are keys enough
    items = cdiv(plan.rows, shared) * max_kv_len
    share = power_of_two(cdiv(items, 2 * gpu.num_sms(device)))
    per_chunk = 128 if alone else max(BLOCK_N, min(2048 if shared == 1 else 4096, share))
    chunks = cdiv(max_kv_len, per_chunk)
    flat_indices = indices.view(plan.rows, sparse_count)
    flat_values = values.view(plan.rows, sparse_count) if wanted else values
    one_page = layout_key == "PA_BSND" and plan.layout.PAGE % BLOCK_N == 0
    constants = Constants(
        HEADS=heads,
        D=dim,
        ROWS=shared,
        BLOCK_H=h_tile,
        BLOCK_D=d_tile,
        BLOCK_N=BLOCK_N,
        ONE_PAGE=one_page,
        STAGES=1 if alone else stages,
        EVERY=topk.EVERY,
        KIND=kind,
        QUERY_SCALE=query_scale is not None,
        RATIO=cmp_ratio,
    )
    select: Callable[[], None] = _nothing
    for first in range(0, plan.rows, chunk_rows):
        select()
        count = min(chunk_rows, plan.rows - first)
        if on_hopper:
            hopper.launch(
                q,
                key,
                w,
                score,
                sample,
                lengths,
                plan,
                layout_key,
                shared,
                first,
                count,
                None if query_scale is None else qs,
                key_scale,
                cmp_ratio,
            )
        else:
            launches.kernel(_scores, cdiv(count, shared) * chunks)(
                q,
                key,
                w,
                qs,
                key if key_scale is None else key_scale,
                scores=score,
                sample=sample,
                lengths=lengths,
                first_row=first,
                count=count,
                chunks=chunks,
                per_chunk=per_chunk,
                strides=strides,
                **plan.arguments,
                LAYOUT=plan.layout,
                C=constants,
                num_warps=4,
            )
        select = partial(
            topk.topk,
            score[:count],
            lengths,
            flat_indices[first : first + count],
            flat_values[first : first + count] if wanted else values,
            sparse_count,
            sample,
        )
    if not x["select_tail"]:
        return Scored(indices, values, select)
    return _with_tail(Scored(indices, values, select), plan, cmp_ratio)


def _with_tail(found: Scored, plan: rows.Plan, ratio: int) -> Scored:
    """The same with one more place, in which or before which the open entry stands."""
    k, wanted = found.indices.shape[-1], found.values.numel() > 0
    shape, block = (*found.indices.shape[:-1], k + 1), min(1024, power_of_two(k + 1))
    device, out_values = found.indices.device, found.values
    out_indices = memory.empty(shape, torch.int32, device)
    if wanted:
        out_values = memory.empty(shape, out_values.dtype, device)

    def select_last() -> None:
        found.select_last()
        launches.kernel(_tail, plan.rows, cdiv(k + 1, block))(
            found.indices,
            found.values,
            out_indices,
            out_values,
            **plan.arguments,
            k=k,
            LAYOUT=plan.layout,
            RATIO=ratio,
            VALUES=wanted,
            BLOCK=block,
            num_warps=4,
        )

    return Scored(out_indices, out_values, select_last)


def forward(**arguments: Any) -> tuple[Tensor, Tensor]:
    found = scores(**arguments)
    found.select_last()
    return found.indices, found.values


def scored(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor]:
    """npu_lightning_indexer_scores"""
    found = scores_of(x, x["query"], x["key"], None, None, torch.float32)
    found.select_last()
    return found.indices, found.values
