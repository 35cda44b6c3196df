# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Gradients of the indexer's selected scores.

    s = query . key       d_weights[n] = sum_j dy[j] relu(s[n, j])
    ds[n, j] = dy[j] weights[n] [s > 0]       d_query = ds key       d_key = ds^T query

One program a query row and tile of heads; d_key is added up as scatter.py says.

    condition                                          kernels
    Hopper, 33 to 64 heads, D 64 or 128, evenly        hopper/lightning_indexer_grad.py
      spaced and aligned rows, sums by atomics
    else                                               _gradients
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import memory
from ...dispatch.ops.indexer.lightning_indexer_grad import Arguments
from ..common import rows, scatter
from ..common.selection import selected
from ..runtime import launches
from . import lightning_indexer
from .hopper import lightning_indexer_grad as hopper


@triton.jit(do_not_specialize=[*rows.NUMBERS, "entries"])
def _gradients(
    query,
    key,
    weights,
    dy,
    indices,
    seqlens_q,
    seqlens_k,
    table,
    d_query,
    d_weights,
    d_key,
    peak,
    tokens,
    requests,
    max_kv_len,
    table_stride,
    pages,
    entries,
    strides,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MODE: tl.constexpr,
):
    q_row, q_head, w_row, key_o, key_i, dy_row, index_row, out_o = strides
    of = rows.Requests(
        seqlens_q, seqlens_k, table, tokens, requests, max_kv_len, table_stride, pages
    )
    head_tiles: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    row = (tl.program_id(0) // head_tiles).to(tl.int64)
    request, start, kv_len = rows.locate(row, of, LAYOUT)
    h = (tl.program_id(0) % head_tiles * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    mask = (h < HEADS)[:, None] & (d < D)[None, :]
    q_tile = tl.load(query + row * q_row + h[:, None] * q_head + d[None, :], mask=mask, other=0.0)
    weight = tl.load(weights + row * w_row + h, mask=h < HEADS, other=0.0).to(tl.float32)
    dq = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    dw = tl.zeros([BLOCK_H], tl.float32)
    for n in tl.range(0, tl.where(kv_len > 0, entries, 0), BLOCK_N):
        entry = n + tl.arange(0, BLOCK_N)
        outer, inner, valid = selected(
            entry, entries, indices + row * index_row, kv_len, request, start, of, 1, LAYOUT
        )
        wide = valid[:, None] & (d < D)[None, :]
        k_tile = tl.load(
            key + (outer * key_o + inner * key_i)[:, None] + d[None, :], mask=wide, other=0.0
        )
        grad = tl.load(dy + row * dy_row + entry, mask=valid, other=0.0).to(tl.float32)
        s = tl.dot(q_tile, k_tile.T, input_precision="ieee")
        relu = tl.maximum(s, 0.0, propagate_nan=tl.PropagateNan.ALL)
        dw += tl.sum(relu * grad[None, :], 1)
        # a NaN counts as above 0, as in torch
        ds = tl.where(s <= 0, 0.0, grad[None, :] * weight[:, None]).to(k_tile.dtype)
        dq = tl.dot(ds, k_tile, dq, input_precision="ieee")
        dk = tl.dot(ds.T, q_tile, input_precision="ieee")
        at = (outer * out_o + inner)[:, None] * D + d[None, :]
        scatter.add(d_key, peak, at, dk, wide, MODE)
    tl.store(
        d_query + (row * HEADS + h[:, None]) * D + d[None, :],
        dq.to(d_query.dtype.element_ty),
        mask=mask,
    )
    to = d_weights + row * HEADS + h
    tl.store(to, dw.to(d_weights.dtype.element_ty), mask=h < HEADS)


def unsupported(**arguments: Any) -> str | None:
    return lightning_indexer.unsupported(**arguments, sparse_count=1, cmp_ratio=1)


def backward(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor]:
    query, key, weights, layout = x["query"], x["key"], x["weights"], x["layout"]
    layout = layout or "BSND"
    device, (heads, dim) = query.device, query.shape[-2:]
    d_query = memory.empty(query.shape, query.dtype, device)
    d_key = memory.empty(key.shape, key.dtype, device)
    d_weights = memory.empty(weights.shape, weights.dtype, device)
    plan = rows.plan(
        query,
        key,
        x["actual_seq_lengths_query"],
        x["actual_seq_lengths_key"],
        None,
        layout,
        layout,
        3 if x["sparse_mode"] is None else x["sparse_mode"],
    )
    q = query.reshape(plan.rows, heads, dim)
    w = weights.reshape(plan.rows, heads)
    index = x["sparse_indices"].reshape(plan.rows, x["sparse_indices"].shape[-1])
    grad = x["dy"].reshape(plan.rows, x["dy"].shape[-1])

    d_tile = max(16, triton.next_power_of_2(dim))
    # 128 heads of 128 at once: the query's tile and its gradient fill the registers
    h_tile = max(16, min(triton.next_power_of_2(heads), 128 * 128 // d_tile))

    given = dict(
        query=q,
        key=key,
        weights=w,
        dy=grad,
        indices=index,
        d_query=d_query,
        d_weights=d_weights,
        entries=index.shape[1],
        **plan.arguments,
        LAYOUT=plan.layout,
        HEADS=heads,
        D=dim,
    )
    of_rows = *q.stride()[:2], w.stride(0)

    def launch(mode: int, sums: Sequence[Tensor], peaks: Tensor) -> None:
        if not query.numel():
            return
        launches.kernel(_gradients, plan.rows * triton.cdiv(heads, h_tile))(
            **given,
            d_key=sums[0],
            peak=peaks,
            strides=(
                *of_rows,
                *rows.strides(layout, key),
                grad.stride(0),
                index.stride(0),
                0 if layout == "TND" else key.shape[1],
            ),
            BLOCK_H=h_tile,
            BLOCK_D=d_tile,
            # wider tiles of queries leave no registers for the gradients of 64 keys
            BLOCK_N=64 if h_tile * d_tile <= 64 * 128 else 32,
            MODE=mode,
            num_warps=4,
        )

    def plain(sums: Sequence[Tensor]) -> None:
        strides = *of_rows, key.stride(-3), grad.stride(0), index.stride(0)
        hopper.launch(plan.rows, **given, sums=sums[0], strides=strides)

    on_hopper = query.numel() > 0 and hopper.supports(q, key, plan)
    scatter.run(launch, [d_key], plain if on_hopper else None)
    return d_query, d_key, d_weights
