# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What the kernels for few rows share: the part of an output that 16 heads make of one tile of keys
without a loop, and the merge of all parts.

    condition    kernels
    any          _combine
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ....dispatch.common import memory
from ...common.combine import statistics
from ...common.gluon_names import cp_async, mma_v2
from ...common.log2 import LOG2E
from ...runtime import launches

LOWEST = gl.constexpr(-1e30)


class Tiles(NamedTuple):
    """Shared memory; without a rope its places are not read."""

    queries: Any
    query_ropes: Any
    left: Any
    right: Any
    ropes: Any
    places: Any


@gluon.jit
def tiles_of(dtype: gl.constexpr, BLOCK_N: gl.constexpr, ROPE: gl.constexpr):
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    queries = gl.allocate_shared_memory(dtype, [16, 512], SWIZZLED)
    left = gl.allocate_shared_memory(dtype, [BLOCK_N, 256], SWIZZLED)
    right = gl.allocate_shared_memory(dtype, [BLOCK_N, 256], SWIZZLED)
    query_ropes = queries
    ropes = left
    if ROPE > 0:
        query_ropes = gl.allocate_shared_memory(dtype, [16, 64], SWIZZLED)
        ropes = gl.allocate_shared_memory(dtype, [BLOCK_N, 64], SWIZZLED)
    places = gl.allocate_shared_memory(gl.int32, [BLOCK_N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Tiles(queries, query_ropes, left, right, ropes, places)


@gluon.jit
def _half(s, s2, queries, tile, COLUMN: gl.constexpr, S: gl.constexpr):
    """Scores of 256 columns, on top of two sums: half the latency of one chain of products."""
    Q: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    K: gl.constexpr = gl.DotOperandLayout(1, S, 2)
    for c in gl.static_range(2):
        s = mma_v2(
            queries.slice(COLUMN + 64 * c, 64, dim=1).load(Q),
            tile.slice(64 * c, 64, dim=1).permute((1, 0)).load(K),
            s,
        )
        s2 = mma_v2(
            queries.slice(COLUMN + 128 + 64 * c, 64, dim=1).load(Q),
            tile.slice(128 + 64 * c, 64, dim=1).permute((1, 0)).load(K),
            s2,
        )
    return s, s2


@gluon.jit
def ask(base, slot, stride, left, right, LAYOUT: gl.constexpr):
    """Both halves of the rows `slot`, a group each; absent rows become 0."""
    valid = (slot >= 0)[:, None]
    d = gl.arange(0, 256, layout=gl.SliceLayout(0, LAYOUT))
    at = (base + gl.maximum(slot, 0).to(gl.int64) * stride)[:, None] + d[None, :]
    cp_async(left, at, mask=valid)
    async_copy.commit_group()
    cp_async(right, at + 256, mask=valid)
    async_copy.commit_group()


@gluon.jit
def part(
    tiles,
    scale_log2,
    parts,
    row,
    split,
    head,
    HEADS: gl.constexpr,
    SPLITS: gl.constexpr,
    ROPE: gl.constexpr,
    WARPS: gl.constexpr,
):
    """What 16 heads make of one tile of keys that is on its way.  Of `parts` partial is [rows,
    HEADS, SPLITS, 512], not divided by the sum; partial_max, partial_sum likewise."""
    partial, partial_max, partial_sum = parts
    queries, query_ropes, left, right, ropes, places = tiles
    S: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    BLOCK_N: gl.constexpr = left.shape[0]
    dtype: gl.constexpr = left.dtype
    async_copy.wait_group(1)
    s = gl.zeros([16, BLOCK_N], gl.float32, layout=S)
    if ROPE > 0:
        s = mma_v2(
            query_ropes.load(gl.DotOperandLayout(0, S, 2)),
            ropes.permute((1, 0)).load(gl.DotOperandLayout(1, S, 2)),
            s,
        )
    s, s2 = _half(s, gl.zeros([16, BLOCK_N], gl.float32, layout=S), queries, left, 0, S)
    async_copy.wait_group(0)
    s, s2 = _half(s, s2, queries, right, 256, S)
    valid = (places.load(gl.SliceLayout(0, S)) >= 0)[None, :]
    s = gl.where(valid, (s + s2) * scale_log2, float("-inf"))
    row_max = gl.maximum(gl.max(s, 1), LOWEST)
    p = gl.exp2(s - row_max[:, None])
    weights = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, S, 2))
    gdc_launch_dependents()
    h = gl.arange(0, 16, layout=gl.SliceLayout(1, S))
    mask = head + h < HEADS
    piece = (row * HEADS + head) * SPLITS + split + h * SPLITS
    gl.store(partial_max + piece, row_max, mask=mask)
    at = (partial + piece * 512)[:, None] + gl.arange(0, 64, layout=gl.SliceLayout(0, S))[None, :]
    for c in gl.static_range(8):
        half = left if c < 4 else right
        o = mma_v2(
            weights,
            half.slice(64 * (c % 4), 64, dim=1).load(gl.DotOperandLayout(1, S, 2)),
            gl.zeros([16, 64], gl.float32, layout=S),
        )
        gl.store(at + 64 * c, o, mask=mask[:, None])
    gl.store(partial_sum + piece, gl.sum(p, 1), mask=mask)


class Constants(NamedTuple):
    HEADS: int
    SPLITS: int
    HAS_SINK: bool
    STATS: bool
    LSE: bool
    ROOM: int
    DOWN: int
    WARPS: int


@gluon.jit
def _combine(
    partial, partial_max, partial_sum, sinks, out, softmax_max, softmax_sum, C: gl.constexpr
):
    """out of one row and head, some columns, from its SPLITS parts, always in the same order."""
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [C.ROOM // C.DOWN, 4], [1, 32], [C.DOWN, C.WARPS // C.DOWN], [1, 0]
    )
    WIDTH: gl.constexpr = 128 * C.WARPS // C.DOWN
    program = gl.program_id(0).to(gl.int64)
    split = gl.arange(0, C.ROOM, layout=gl.SliceLayout(1, LAYOUT))
    d = gl.program_id(1) * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    piece = program * C.SPLITS + split
    gdc_wait()
    if C.ROOM == C.SPLITS:
        top = gl.load(partial_max + piece)
        weight = gl.load(partial_sum + piece)
        o = gl.load(partial + (piece * 512)[:, None] + d[None, :])
    else:
        there = split < C.SPLITS
        top = gl.load(partial_max + piece, mask=there, other=LOWEST)
        weight = gl.load(partial_sum + piece, mask=there, other=0.0)
        at = partial + (piece * 512)[:, None] + d[None, :]
        o = gl.load(at, mask=there[:, None], other=0.0)
    row_max = gl.max(top, 0)
    scale = gl.exp2(top - row_max)
    row_sum = gl.sum(weight * scale, 0)
    total = row_sum
    if C.HAS_SINK:
        sink = gl.load(sinks + program % C.HEADS).to(gl.float32)
        total += gl.exp2(sink * LOG2E - row_max)
    o = gl.sum(o * scale[:, None], 0)
    valid = row_sum != 0  # a NaN is there, and stays one
    o = gl.where(valid, o / gl.where(valid, total, 1.0), 0.0)
    gl.store(out + program * 512 + d, o.to(out.dtype.element_ty))
    if C.STATS:
        first = gl.program_id(1) == 0
        statistics(softmax_max, softmax_sum, program, row_max, row_sum, valid, first, C.LSE)


def parts_of(count: int, splits: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(partial, partial_max, partial_sum) of `count` rows times heads."""
    sizes = ((count * splits, 512), (count * splits,), (count * splits,))
    partial, top, total = (memory.empty(size, torch.float32, device) for size in sizes)
    return partial, top, total


def combine(
    parts: tuple[Tensor, Tensor, Tensor],
    splits: int,
    sinks: Tensor | None,
    out: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor | None,
) -> None:
    """out [.., heads, 512] of what `part` made; the statistics where not empty, or without
    `softmax_sum` their log-sum-exp for the maxima."""
    heads, rank = out.shape[-2:]
    room = triton.next_power_of_2(splits)
    # a thread takes up to 16 parts of 4 columns
    down = min(4, max(1, room // 16))
    C = Constants(
        HEADS=heads,
        SPLITS=splits,
        HAS_SINK=sinks is not None,
        STATS=softmax_max.numel() > 0,
        LSE=softmax_sum is None,
        ROOM=room,
        DOWN=down,
        WARPS=4,
    )
    launches.kernel(_combine, out.numel() // rank, down)(
        *parts,
        softmax_max if sinks is None else sinks,
        out,
        softmax_max,
        softmax_max if softmax_sum is None else softmax_sum,
        C=C,
        num_warps=C.WARPS,
        launch_pdl=True,
    )
