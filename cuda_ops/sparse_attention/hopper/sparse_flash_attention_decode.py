# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The attention of sparse_flash_attention.py for a row or two, where latencies add up.

A program takes 16 heads of a row and one tile of its keys, without a loop: an index and a page a
thread, queries and keys straight into shared memory (`cp.async`), `mma.sync`, a part of the output.
The merge is set up meanwhile; a thread has all parts of its columns.

2048 of 64K keys, one row (H200, 2026-11): 128 heads 9.8 us, 16 heads 6.9; `_attend`, whose keys
pass through registers, and its merge 14.8 and 10.0; sparse_flash_attention 14.0 and 11.4.
The merge is 2.5 and 1.5 us of it.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common import rows
from ...common.gluon_names import cp_async
from ...common.hopper.rows import locate, slots
from ...common.selection import Attention
from ...common.tiling import cdiv
from ...runtime import launches
from . import sparse_flash_attention
from .mla_consumers import strides
from .mla_parts import ask, combine, part, parts_of, tiles_of


@gluon.jit(do_not_specialize=[*rows.NUMBERS, "entries"])
def _attend(
    q,
    q_rope,
    key,
    key_rope,
    indices,
    seqlens_q,
    seqlens_k,
    table,
    parts,
    scale_log2,
    entries,
    tokens,
    requests,
    max_kv_len,
    table_stride,
    pages,
    strides,
    HEADS: gl.constexpr,
    SPLITS: gl.constexpr,
    SPARSE_BLOCK: gl.constexpr,
    LAYOUT: gl.constexpr,
    BLOCK_N: gl.constexpr,
    ROPE: gl.constexpr,
    WARPS: gl.constexpr,
):
    q_row, q_head, qr_row, qr_head, key_stride, rope_stride, index_stride = strides
    of = rows.Requests(
        seqlens_q, seqlens_k, table, tokens, requests, max_kv_len, table_stride, pages
    )
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])  # one entry a thread
    QUERY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    GATHER: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    program = gl.program_id(0)
    TILES: gl.constexpr = (HEADS + 15) // 16
    head = program % TILES * 16
    split = program // TILES % SPLITS
    row = (program // (TILES * SPLITS)).to(gl.int64)
    # the longest chain first: index, page, key
    entry = split * BLOCK_N + gl.arange(0, BLOCK_N, layout=LINE)
    index = gl.load(
        indices + row * index_stride + entry // SPARSE_BLOCK, mask=entry < entries, other=-1
    )
    request, start, kv_len = locate(row, of, LAYOUT, LINE)
    tiles = tiles_of(key.dtype.element_ty, BLOCK_N, ROPE)
    h = (head + gl.arange(0, 16, layout=gl.SliceLayout(1, QUERY))).to(gl.int64)
    d = gl.arange(0, 512, layout=gl.SliceLayout(0, QUERY))
    at = (q + row * q_row + h * q_head)[:, None] + d[None, :]
    cp_async(tiles.queries, at, mask=(h < HEADS)[:, None])
    r = gl.arange(0, 64, layout=gl.SliceLayout(0, GATHER))
    if ROPE > 0:
        h = (head + gl.arange(0, 16, layout=gl.SliceLayout(1, GATHER))).to(gl.int64)
        at = (q_rope + row * qr_row + h * qr_head)[:, None] + r[None, :]
        cp_async(tiles.query_ropes, at, mask=(h < HEADS)[:, None])
    tiles.places.store(slots(index, entry, kv_len, request, start, of, SPARSE_BLOCK, LAYOUT))
    slot = tiles.places.load(gl.SliceLayout(1, GATHER))
    if ROPE > 0:
        at = (key_rope + gl.maximum(slot, 0).to(gl.int64) * rope_stride)[:, None] + r[None, :]
        cp_async(tiles.ropes, at, mask=(slot >= 0)[:, None])
    ask(key, slot, key_stride, tiles.left, tiles.right, GATHER)
    part(tiles, scale_log2, parts, row, split, head, HEADS, SPLITS, ROPE, WARPS)


def _tile(count: int, heads: int, entries: int) -> int:
    """Keys a program, 0 where the other kernels are faster.  Measured on one H200, 2026-11, 2048
    keys: 128 heads, 1 / 2 / 4 rows in tiles of 128 took 9.8 / 16.4 / 29.5 us, on
    sparse_flash_attention 14.0 / 17.1 / 18.4 (tiles of 64: 9.9 / 17.7 / 34.1); 16 heads,
    1 / 2 / 4 / 8 rows in tiles of 32 6.9 / 7.8 / 10.5 / 17.6, there 11.4 / 11.9 / 13.4 / 16.4
    (tiles of 16, 64: 7.2, 7.3 for one row)."""
    if entries > 2048:
        return 0
    if heads >= 64:
        return 128 if count * heads <= 256 else 0
    return 32 if count * cdiv(heads, 16) <= 4 else 0


def supports(call: Attention) -> bool:
    """What the kernel of many rows supports, of so few that it would be slower."""
    count, heads, _ = call.q.shape
    return sparse_flash_attention.supports(call) and _tile(count, heads, call.entries) > 0


def launch(call: Attention) -> None:
    count, heads, _ = call.q.shape
    tile = _tile(count, heads, call.entries)
    splits = triton.next_power_of_2(cdiv(call.entries, tile))
    parts = parts_of(count * heads, splits, call.q.device)
    warps = 8 if tile == 128 else 4
    launches.kernel(_attend, count * splits * cdiv(heads, 16))(
        call.q,
        call.qr,
        call.key,
        call.kr,
        call.index,
        parts=parts,
        scale_log2=call.scale_log2,
        entries=call.entries,
        strides=strides(call),
        HEADS=heads,
        SPLITS=splits,
        SPARSE_BLOCK=call.span,
        **call.plan.arguments,
        LAYOUT=call.plan.layout,
        BLOCK_N=tile,
        ROPE=call.rope,
        WARPS=warps,
        num_warps=warps,
    )
    combine(parts, splits, call.sinks, call.out, call.softmax_max, call.softmax_sum)
