# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""lightning_indexer_grad.py on a Hopper GPU, 33 to 64 heads, for sums by atomics.

A program owns a row of queries and gathers each key once.  Rows of its scores are keys and columns
are heads, so that what a tile adds to its keys is a product of registers:

    s [keys, heads] = keys x queries^T     d_key [keys, D] += ds x queries     d_query += ds^T keys

ds passes through shared memory for d_query alone, which grows while the tile's part of d_key is on
its way to memory, whole rows at a time.  Two programs run on a multiprocessor.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...common import gpu, rows
from ...common.gluon_names import barrier, cp_async
from ...common.hopper.layouts import GATHER, LINE, S
from ...common.hopper.rows import gather_rows, locate, slots
from ...common.hopper.tma import aligned
from ...runtime import launches

ROOM = gl.constexpr(4)  # tiles: the last one, which a late warp still reads, to the next one


@gluon.constexpr_function
def _rows(D):
    """16 bytes a thread, whole rows a warp."""
    return gl.BlockedLayout([1, 4], [128 // D, D // 4], [4, 1], [1, 0])


@gluon.jit
def _add(sums, dk, places, D: gl.constexpr):
    ROWS: gl.constexpr = _rows(D)
    x = gl.convert_layout(dk, ROWS)
    place = places.load(gl.SliceLayout(1, ROWS))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, ROWS))
    at = (sums + place.to(gl.int64) * D)[:, None] + d[None, :]
    gl.atomic_add(at, x, mask=(place >= 0)[:, None], sem="relaxed")


@gluon.jit(do_not_specialize=[*rows.NUMBERS, "entries"])
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
    sums,
    tokens,
    requests,
    max_kv_len,
    table_stride,
    pages,
    entries,
    strides,
    HEADS: gl.constexpr,
    D: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    q_row, q_head, w_row, key_row, dy_row, index_row = strides
    DK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = key.dtype.element_ty
    q = gl.allocate_shared_memory(dtype, [64, D], SWIZZLED)
    keys = gl.allocate_shared_memory(dtype, [2, 64, D], SWIZZLED)
    ds_smem = gl.allocate_shared_memory(dtype, [64, 64], SWIZZLED)
    places = gl.allocate_shared_memory(gl.int32, [ROOM, 64], FLAT)

    row = gl.program_id(0).to(gl.int64)
    of = rows.Requests(
        seqlens_q, seqlens_k, table, tokens, requests, max_kv_len, table_stride, pages
    )
    h = gl.arange(0, 64, layout=gl.SliceLayout(1, GATHER))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, GATHER))
    q_at = query + row * q_row
    cp_async(q, (q_at + h.to(gl.int64) * q_head)[:, None] + d[None, :], mask=(h < HEADS)[:, None])
    head = gl.arange(0, 64, layout=gl.SliceLayout(0, S))
    weight = gl.load(weights + row * w_row + head, mask=head < HEADS, other=0.0).to(gl.float32)

    EVERY: gl.constexpr = gl.BlockedLayout([max(1, LAYOUT.REQUESTS // 32)], [32], [4], [0])
    request, start, kv_len = locate(row, of, LAYOUT, EVERY)
    entries = gl.where(kv_len > 0, entries, 0)
    indices += row * index_row
    dy += row * dy_row
    entry = gl.arange(0, 64, layout=LINE)
    index = gl.load(indices + entry, mask=entry < entries, other=-1)
    places.index(0).store(slots(index, entry, kv_len, request, start, of, 1, LAYOUT))
    entry += 64
    index = gl.load(indices + entry, mask=entry < entries, other=-1)
    slot = gl.arange(0, 64, layout=gl.SliceLayout(1, S))
    grad_ahead = gl.load(dy + slot, mask=slot < entries, other=0.0)
    barrier()
    gather_rows(key, key_row, places.index(0), keys.index(0), D, True)

    dq = gl.zeros([64, D], gl.float32, layout=DK)
    # of two rows of a tile, each thread adds up its products: they are in the same one
    dw = gl.sum(gl.reshape(gl.zeros([64, 64], gl.float32, layout=S), [4, 2, 8, 64]), 1)
    for t in range((entries + 63) // 64):
        next_places = places.index((t + 1) % ROOM)
        next_places.store(slots(index, entry, kv_len, request, start, of, 1, LAYOUT))
        entry += 64
        index = gl.load(indices + entry, mask=entry < entries, other=-1)
        tile = keys.index(t % 2)
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()  # the keys and the next places are there, and the last tile is read
        s = gl.zeros([64, 64], gl.float32, layout=S)
        s = warpgroup_mma(tile, q.permute((1, 0)), s, use_acc=False, is_async=True)
        gather_rows(key, key_row, next_places, keys.index((t + 1) % 2), D, True)
        there = places.index(t % ROOM).load(gl.SliceLayout(1, S)) >= 0
        grad = gl.where(there, grad_ahead.to(gl.float32), 0.0)
        slot += 64
        grad_ahead = gl.load(dy + slot, mask=slot < entries, other=0.0)
        s = warpgroup_mma_wait(0, deps=[s])
        # a NaN counts as above 0, as in torch
        products = gl.where(s <= 0, 0.0, s) * grad[:, None]
        dw += gl.sum(gl.reshape(products, [4, 2, 8, 64]), 1)
        ds = gl.where(s <= 0, 0.0, grad[:, None] * weight[None, :]).to(dtype)
        dk = gl.zeros([64, D], gl.float32, layout=DK)
        dk = warpgroup_mma(
            gl.convert_layout(ds, gl.DotOperandLayout(0, DK, 2)),
            q,
            dk,
            use_acc=False,
            is_async=True,
        )
        ds_smem.store(ds)
        fence_async_shared()
        barrier()
        dq = warpgroup_mma(ds_smem.permute((1, 0)), tile, dq, is_async=True)
        dk = warpgroup_mma_wait(1, deps=[dk])
        _add(sums, dk, places.index(t % ROOM), D)
        dq = warpgroup_mma_wait(0, deps=[dq])
    async_copy.wait_group(0)
    barrier()
    total = gl.convert_layout(gl.sum(gl.sum(dw, 1), 0), LINE)
    h = gl.arange(0, 64, layout=LINE)
    to = d_weights + row * HEADS + h
    gl.store(to, total.to(d_weights.dtype.element_ty), mask=h < HEADS)
    dq = gl.convert_layout(dq.to(d_query.dtype.element_ty), GATHER)
    h = gl.arange(0, 64, layout=gl.SliceLayout(1, GATHER))
    to = (d_query + (row * HEADS + h) * D)[:, None] + d[None, :]
    gl.store(to, dq, mask=(h < HEADS)[:, None])


def supports(query: Tensor, key: Tensor, plan: rows.Plan) -> bool:
    """Keys that are evenly spaced, also from one request to the next, and steps of 16 numbers, by
    which the compiler knows that rows are aligned."""
    steps = (*query.stride()[:2], key.stride(-3))
    apart = plan.layout.KEYS != rows.TND and key.shape[0] > 1
    return (
        gpu.is_hopper(query.device)
        and 32 < query.shape[1] <= 64
        and query.shape[2] in (64, 128)
        and query.element_size() == 2
        and plan.layout.REQUESTS <= 256
        and not (apart and key.stride(0) != key.shape[1] * key.stride(1))
        and not any(step % 16 for step in steps)
        and aligned(query, key)
    )


def launch(programs: int, **x: Any) -> None:
    launches.kernel(_gradients, programs)(**x, num_warps=4)
