# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The scores of lightning_indexer.py on Hopper (Gluon).

The 64 rows of a wgmma are keys, which come by TMA, 64 at a time; its columns are the heads of up to
four tokens, which stay in shared memory.  The sum over heads is one in registers.  Up to 128
columns one warpgroup does everything, and others on its multiprocessor hide what it waits for; with
256 there is room for one block, in which two warpgroups multiply and a warp asks for keys.
Queries and keys of e4m3 are multiplied as they are (sums of 32 products are cut to some 14 bits);
their keys' scales are loaded a tile ahead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...common import gpu, rows
from ...common.gluon_names import barrier, reinterpret, tma_load
from ...common.hopper.rows import request_of
from ...common.hopper.tma import DTYPES, describable, describe_box, forget, load_box
from ...common.rows import BSND, PAGED, TND
from ...common.tiling import cdiv, power_of_two
from ...common.topk import EVERY
from ...runtime import launches

KEYS_AT_ONCE = gl.constexpr(64)
LEAST_SCORE = gl.constexpr(-3.4028234663852886e38)
EVERY_NAN = gl.constexpr(tl.PropagateNan.ALL)


class Scores(NamedTuple):
    """Where the scores of rows from `first_row` on go, and every EVERY-th of them once more."""

    scores: Any
    sample: Any
    first_row: Any
    score_row: Any
    sample_row: Any


class Factors(NamedTuple):
    """What products count: weights of heads, and of e4m3 the scales of queries and keys."""

    weights: Any
    query_scale: Any
    key_scale: Any
    w_row: Any
    qs_row: Any
    qs_head: Any
    ks_o: Any
    ks_i: Any


class Constants(NamedTuple):
    HEADS: int
    ROWS: int
    STAGES: int
    EVERY: int
    E4M3: bool
    QUERY_SCALE: bool
    RATIO: int


@gluon.jit
def _sees(j, asked, tokens, LAYOUT: gl.constexpr, C: gl.constexpr):
    """How many keys a request's j-th row sees, of `asked`, each of RATIO of its tokens."""
    seen = rows.sees(j, asked, tokens, LAYOUT.CAUSAL)
    if C.RATIO != 1:
        seen = seen // C.RATIO
    return seen


@gluon.jit
def _part(row, stop, request, first, of, lo, per_chunk, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Of rows row .. stop of a request: (how many rows and tokens of keys the request has, its
    first key, where this program's keys end that any of them sees)."""
    asked = rows.rows_of(request, first, of, LAYOUT)
    source = of
    if C.RATIO != 1:
        source = rows.Requests(
            of.seqlens_q,
            of.seqlens_k,
            of.table,
            of.tokens,
            of.requests,
            of.max_kv_len * C.RATIO + (C.RATIO - 1),
            of.table_stride,
            of.pages,
        )
    start, keys = rows.keys_of(request, source, LAYOUT)
    last = gl.minimum(stop, first + asked) - 1
    most = gl.where(last >= row, _sees(last - first, asked, keys, LAYOUT, C), 0)
    return asked, keys, start, gl.minimum(lo + per_chunk, most)


@gluon.jit
def _outer_of(base, request, of, LAYOUT: gl.constexpr):
    """Of the next 32 tiles the key tensor's first index; negative where the page is absent.  The
    number of keys is not yet known: this load and that of the number need not wait in turn."""
    tile: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    pos = base + gl.arange(0, 32, layout=tile) * KEYS_AT_ONCE
    if LAYOUT.KEYS == PAGED:
        entry = of.table + request.to(gl.int64) * of.table_stride + pos // LAYOUT.PAGE
        outer = gl.load(entry, mask=(pos < of.max_kv_len) & (request < of.requests), other=-1)
        return gl.where((outer >= 0) & (outer < of.pages), outer, -1).to(gl.int32)
    elif LAYOUT.KEYS == BSND:
        return pos * 0 + request
    return pos * 0


@gluon.jit
def _pick(outer, i):
    tile: gl.constexpr = outer.type.layout
    return gl.sum(gl.where(gl.arange(0, 32, layout=tile) == i, outer, 0), 0)


@gluon.jit
def _inner_of(n, start, LAYOUT: gl.constexpr):
    """The key tensor's second index of a request's key n."""
    if LAYOUT.KEYS == PAGED:
        return n % LAYOUT.PAGE
    elif LAYOUT.KEYS == TND:
        return n + start
    return n


@gluon.jit
def _weights_of(by, owner, h, end, C: gl.constexpr):
    """Of rows `owner` and heads h, their queries' scales included."""
    mask = (owner < end) & (h < C.HEADS)
    weight = gl.load(by.weights + owner * by.w_row + h, mask=mask, other=0.0).to(gl.float32)
    if C.QUERY_SCALE:
        at = by.query_scale + owner * by.qs_row + h * by.qs_head
        weight *= gl.load(at, mask=mask, other=0.0).to(gl.float32)
    return weight


@gluon.jit
def _scales_of(by, outer, n, hi, start, LAYOUT: gl.constexpr, E4M3: gl.constexpr, L: gl.constexpr):
    """Of the keys n .. n + 63 that are below hi."""
    line = gl.arange(0, KEYS_AT_ONCE, layout=L)
    if E4M3:
        inner = (_inner_of(n, start, LAYOUT) + line).to(gl.int64)
        at = by.key_scale + outer.to(gl.int64) * by.ks_o + inner * by.ks_i
        scale = gl.load(at, mask=(n + line < hi) & (outer >= 0), other=0.0).to(gl.float32)
    else:
        scale = gl.zeros([KEYS_AT_ONCE], gl.float32, layout=L)
    return scale


@gluon.jit
def _head_of(s, R: gl.constexpr):
    """Of each column of products of R rows."""
    return gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout)) % (s.shape[1] // R)


@gluon.jit
def _finish(
    s,
    weight,
    scale,
    to,
    member,
    row,
    stop,
    first,
    asked,
    keys,
    n,
    valid,
    R: gl.constexpr,
    LAYOUT: gl.constexpr,
    C: gl.constexpr,
):
    """Sum products [64, columns] over the heads, store the scores of rows member, member + 1 .."""
    s = gl.maximum(s, 0.0, propagate_nan=EVERY_NAN) * weight[None, :]
    if s.shape[1] // R != C.HEADS:
        # the zeros of heads that are not there, times an infinite key, are NaN
        s = gl.where((_head_of(s, R) < C.HEADS)[None, :], s, 0.0)
    score = gl.sum(gl.reshape(s, [KEYS_AT_ONCE, R, s.shape[1] // R]), 2)
    L: gl.constexpr = score.type.layout
    if C.E4M3:
        score *= gl.convert_layout(scale, gl.SliceLayout(1, L))[:, None]
    pos = n + gl.arange(0, KEYS_AT_ONCE, layout=gl.SliceLayout(1, L))
    member += gl.arange(0, R, layout=gl.SliceLayout(0, L))
    kv_len = _sees(member - first, asked, keys, LAYOUT, C)
    kv_len = gl.where((member >= row) & (member < stop), kv_len, 0)
    # a NaN comes last, and only what is absent is -inf
    score = gl.where(score > LEAST_SCORE, score, LEAST_SCORE)
    score = gl.where(valid, score, float("-inf"))
    mask = pos[:, None] < kv_len[None, :]
    at = (member - to.first_row).to(gl.int64)
    gl.store(to.scores + (at * to.score_row)[None, :] + pos[:, None], score, mask=mask)
    at = to.sample + (at * to.sample_row)[None, :] + (pos // C.EVERY)[:, None]
    gl.store(at, score, mask=mask & (pos % C.EVERY == 0)[:, None])


@gluon.jit
def _ask(
    key,
    k_tiles,
    full,
    outers,
    i,
    stage,
    wanted,
    lo,
    start,
    LAYOUT: gl.constexpr,
    E4M3: gl.constexpr,
):
    """Tile i of a program's keys, into its place in the ring."""
    SIZE: gl.constexpr = 1 if E4M3 else 2
    outer = _pick(outers, i)
    outer = gl.where(outer < 0, 2147483647, outer)  # out of bounds: zeros
    inner = _inner_of(lo + i * KEYS_AT_ONCE, start, LAYOUT)
    bar = full.index(stage)
    mbarrier.expect(bar, KEYS_AT_ONCE * k_tiles.shape[2] * SIZE, pred=wanted)
    tma_load(
        key,
        [outer, inner, 0],
        bar,
        reinterpret(k_tiles.index(stage), key.dtype, key.block_shape, key.layout),
        pred=wanted,
    )


@gluon.jit(do_not_specialize=[*rows.NUMBERS, "count", "chunks", "per_chunk"])
def _scores(
    q,
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
    LAYOUT: gl.constexpr,
    C: gl.constexpr,
):
    """ROWS rows against `per_chunk` keys, 32 tiles at most, which pass by: once for each request
    among the rows."""
    of = rows.Requests(
        seqlens_q, seqlens_k, table, tokens, requests, max_kv_len, table_stride, pages
    )
    D: gl.constexpr = key.block_shape[2]
    BLOCK_N: gl.constexpr = q.block_shape[0] * q.block_shape[1]
    BLOCK_H: gl.constexpr = BLOCK_N // C.ROWS
    STAGES: gl.constexpr = C.STAGES
    SIZE: gl.constexpr = 1 if C.E4M3 else 2
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32 // SIZE])
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS_AT_ONCE, D], key.dtype)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    k_tiles = gl.allocate_shared_memory(key.dtype, [STAGES, KEYS_AT_ONCE, D], tile)
    q_tile = gl.allocate_shared_memory(key.dtype, [BLOCK_N, D], tile)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], bars)
    for each in gl.static_range(STAGES):
        mbarrier.init(full.index(each), count=1)
    mbarrier.init(q_full.index(0), count=1)
    fence_async_shared()
    barrier()
    program = gl.program_id(0)
    lo = program % chunks * per_chunk
    row = first_row + program // chunks * C.ROWS
    end = gl.minimum(row + C.ROWS, first_row + count)
    gdc_launch_dependents()
    gdc_wait()
    mbarrier.expect(q_full.index(0), BLOCK_N * D * SIZE)
    load_box(q, [row, 0, 0], q_full.index(0), q_tile)
    column = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, M))
    h = column % BLOCK_H
    owner = (row + column // BLOCK_H).to(gl.int64)
    score_row, sample_row, w_row, qs_row, qs_head, ks_o, ks_i = strides
    to = Scores(scores, sample, first_row, score_row, sample_row)
    by = Factors(weights, query_scale, key_scale, w_row, qs_row, qs_head, ks_o, ks_i)
    weight = _weights_of(by, owner, h, end, C)
    zero = gl.zeros([KEYS_AT_ONCE, BLOCK_N], gl.float32, layout=M)
    own = row
    done = 0
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    while row < end:
        request, first, stop = request_of(row, of, LAYOUT, LINE)
        stop = gl.minimum(stop, end)
        outers = _outer_of(lo, request, of, LAYOUT)
        asked, keys, start, hi = _part(row, stop, request, first, of, lo, per_chunk, LAYOUT, C)
        tiles = gl.maximum(hi - lo + KEYS_AT_ONCE - 1, 0) // KEYS_AT_ONCE
        for each in gl.static_range(STAGES):
            _ask(
                key,
                k_tiles,
                full,
                outers,
                each,
                (done + each) % STAGES,
                each < tiles,
                lo,
                start,
                LAYOUT,
                C.E4M3,
            )
        if lo == 0:
            lane: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
            member = row + gl.arange(0, 32, layout=lane)
            mask = member < stop
            at = lengths + member - first_row
            gl.store(at, _sees(member - first, asked, keys, LAYOUT, C), mask=mask)
        scale = _scales_of(
            by, _pick(outers, 0), lo, hi, start, LAYOUT, C.E4M3, gl.SliceLayout(1, M)
        )
        mbarrier.wait(q_full.index(0), 0)
        for i in range(tiles):
            stage = (done + i) % STAGES
            mbarrier.wait(full.index(stage), ((done + i) // STAGES) & 1)
            s = warpgroup_mma(
                k_tiles.index(stage), q_tile.permute([1, 0]), zero, use_acc=False, is_async=True
            )
            valid = _pick(outers, i) >= 0
            ahead = _scales_of(
                by,
                _pick(outers, i + 1),
                lo + (i + 1) * KEYS_AT_ONCE,
                hi,
                start,
                LAYOUT,
                C.E4M3,
                gl.SliceLayout(1, M),
            )
            s = warpgroup_mma_wait(0, deps=[s])
            barrier()  # done in every warp: the tile is free
            _ask(
                key,
                k_tiles,
                full,
                outers,
                i + STAGES,
                stage,
                i + STAGES < tiles,
                lo,
                start,
                LAYOUT,
                C.E4M3,
            )
            _finish(
                s,
                weight,
                scale,
                to,
                own,
                row,
                stop,
                first,
                asked,
                keys,
                lo + i * KEYS_AT_ONCE,
                valid,
                C.ROWS,
                LAYOUT,
                C,
            )
            scale = ahead
        done += tiles
        row = stop
    forget(full)
    forget(q_full)


@gluon.jit
def _load(
    key,
    q,
    k_tiles,
    q_tiles,
    full,
    empty,
    q_full,
    lengths,
    of,
    row,
    end,
    lo,
    per_chunk,
    first_row,
    LAYOUT: gl.constexpr,
    C: gl.constexpr,
):
    SIZE: gl.constexpr = 1 if C.E4M3 else 2
    STAGES: gl.constexpr = k_tiles.shape[0]
    D: gl.constexpr = k_tiles.shape[2]
    gdc_launch_dependents()
    gdc_wait()
    mbarrier.expect(q_full.index(0), 2 * q_tiles.shape[1] * D * SIZE)
    for part in gl.static_range(2):
        tma_load(
            q,
            [row + part * q.block_shape[0], 0, 0],
            q_full.index(0),
            reinterpret(q_tiles.index(part), q.dtype, q.block_shape, q.layout),
        )
    count = 0
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    while row < end:
        request, first, stop = request_of(row, of, LAYOUT, LINE)
        stop = gl.minimum(stop, end)
        asked, keys, start, hi = _part(row, stop, request, first, of, lo, per_chunk, LAYOUT, C)
        if lo == 0:
            member = row + gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
            mask = member < stop
            at = lengths + member - first_row
            gl.store(at, _sees(member - first, asked, keys, LAYOUT, C), mask=mask)
        for base in range(lo, hi, 32 * KEYS_AT_ONCE):
            outers = _outer_of(base, request, of, LAYOUT)
            for i in range(0, gl.minimum((hi - base + KEYS_AT_ONCE - 1) // KEYS_AT_ONCE, 32)):
                stage = count % STAGES
                bar = full.index(stage)
                outer = _pick(outers, i)
                outer = gl.where(outer < 0, 2147483647, outer)  # out of bounds: zeros
                inner = _inner_of(base + i * KEYS_AT_ONCE, start, LAYOUT)
                mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
                mbarrier.expect(bar, KEYS_AT_ONCE * D * SIZE)
                load_box(key, [outer, inner, 0], bar, k_tiles.index(stage))
                count += 1
        row = stop


@gluon.jit
def _multiply(
    k_tiles,
    q_tiles,
    full,
    empty,
    q_full,
    by,
    to,
    of,
    row,
    end,
    lo,
    per_chunk,
    GROUP: gl.constexpr,
    LAYOUT: gl.constexpr,
    C: gl.constexpr,
):
    """Warpgroup GROUP of two takes every other tile."""
    STAGES: gl.constexpr = k_tiles.shape[0]
    BLOCK_N: gl.constexpr = q_tiles.shape[1]
    R: gl.constexpr = C.ROWS // 2
    BLOCK_H: gl.constexpr = BLOCK_N // R
    SIZE: gl.constexpr = 1 if C.E4M3 else 2
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32 // SIZE])
    gdc_wait()
    column = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, M))
    h = column % BLOCK_H
    owner = (row + column // BLOCK_H).to(gl.int64)
    weight0 = _weights_of(by, owner, h, end, C)
    weight1 = _weights_of(by, owner + R, h, end, C)
    zero = gl.zeros([KEYS_AT_ONCE, BLOCK_N], gl.float32, layout=M)
    own = row
    q0 = q_tiles.index(0).permute([1, 0])
    q1 = q_tiles.index(1).permute([1, 0])
    mbarrier.wait(q_full.index(0), 0)
    count = 0
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    while row < end:
        request, first, stop = request_of(row, of, LAYOUT, LINE)
        stop = gl.minimum(stop, end)
        asked, keys, start, hi = _part(row, stop, request, first, of, lo, per_chunk, LAYOUT, C)
        for base in range(lo, hi, 32 * KEYS_AT_ONCE):
            outers = _outer_of(base, request, of, LAYOUT)
            tiles = gl.minimum((hi - base + KEYS_AT_ONCE - 1) // KEYS_AT_ONCE, 32)
            mine = (GROUP - count) & 1
            scale = _scales_of(
                by,
                _pick(outers, mine),
                base + mine * KEYS_AT_ONCE,
                hi,
                start,
                LAYOUT,
                C.E4M3,
                gl.SliceLayout(1, M),
            )
            for i in range(mine, tiles, 2):
                stage = (count + i) % STAGES
                n = base + i * KEYS_AT_ONCE
                valid = _pick(outers, i) >= 0
                ahead = _scales_of(
                    by,
                    _pick(outers, i + 2),
                    n + 2 * KEYS_AT_ONCE,
                    hi,
                    start,
                    LAYOUT,
                    C.E4M3,
                    gl.SliceLayout(1, M),
                )
                mbarrier.wait(full.index(stage), ((count + i) // STAGES) & 1)
                k_tile = k_tiles.index(stage)
                s0 = warpgroup_mma(k_tile, q0, zero, use_acc=False, is_async=True)
                s1 = warpgroup_mma(k_tile, q1, zero, use_acc=False, is_async=True)
                s0 = warpgroup_mma_wait(1, deps=[s0])
                _finish(
                    s0,
                    weight0,
                    scale,
                    to,
                    own,
                    row,
                    stop,
                    first,
                    asked,
                    keys,
                    n,
                    valid,
                    R,
                    LAYOUT,
                    C,
                )
                s1 = warpgroup_mma_wait(0, deps=[s1])
                barrier()
                mbarrier.arrive(empty.index(stage))
                _finish(
                    s1,
                    weight1,
                    scale,
                    to,
                    own + R,
                    row,
                    stop,
                    first,
                    asked,
                    keys,
                    n,
                    valid,
                    R,
                    LAYOUT,
                    C,
                )
                scale = ahead
            count += tiles
        row = stop


@gluon.jit(do_not_specialize=[*rows.NUMBERS, "count", "chunks", "per_chunk"])
def _scores_shared(
    q,
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
    LAYOUT: gl.constexpr,
    C: gl.constexpr,
):
    """_scores of more rows, twice as many as q has in a block, and of any number of keys."""
    STAGES: gl.constexpr = C.STAGES
    of = rows.Requests(
        seqlens_q, seqlens_k, table, tokens, requests, max_kv_len, table_stride, pages
    )
    D: gl.constexpr = key.block_shape[2]
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS_AT_ONCE, D], key.dtype)
    k_tiles = gl.allocate_shared_memory(key.dtype, [STAGES, KEYS_AT_ONCE, D], tile)
    BLOCK_N: gl.constexpr = q.block_shape[0] * q.block_shape[1]
    q_tiles = gl.allocate_shared_memory(key.dtype, [2, BLOCK_N, D], tile)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], bars)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    mbarrier.init(q_full.index(0), count=1)
    fence_async_shared()
    barrier()
    program = gl.program_id(0)
    lo = program % chunks * per_chunk
    row = first_row + program // chunks * C.ROWS
    end = gl.minimum(row + C.ROWS, first_row + count)
    score_row, sample_row, w_row, qs_row, qs_head, ks_o, ks_i = strides
    to = Scores(scores, sample, first_row, score_row, sample_row)
    by = Factors(weights, query_scale, key_scale, w_row, qs_row, qs_head, ks_o, ks_i)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    k_tiles,
                    q_tiles,
                    full,
                    empty,
                    q_full,
                    by,
                    to,
                    of,
                    row,
                    end,
                    lo,
                    per_chunk,
                    gl.constexpr(0),
                    LAYOUT,
                    C,
                ),
            ),
            (
                _multiply,
                (
                    k_tiles,
                    q_tiles,
                    full,
                    empty,
                    q_full,
                    by,
                    to,
                    of,
                    row,
                    end,
                    lo,
                    per_chunk,
                    gl.constexpr(1),
                    LAYOUT,
                    C,
                ),
            ),
            (
                _load,
                (
                    key,
                    q,
                    k_tiles,
                    q_tiles,
                    full,
                    empty,
                    q_full,
                    lengths,
                    of,
                    row,
                    end,
                    lo,
                    per_chunk,
                    first_row,
                    LAYOUT,
                    C,
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )


def supports(q: Tensor, key: Tensor, layout_key: str) -> bool:
    """q [rows, N, D]; the heads fit in a wgmma, and a tile of keys lies on one page."""
    heads, dim = q.shape[1:]
    paged = layout_key == "PA_BSND"
    return (
        gpu.is_hopper(q.device)
        and (q.dtype in DTYPES or q.dtype is torch.float8_e4m3fn)
        and heads <= 128
        and dim in (64, 128)
        and key.numel() > 0
        and not (paged and key.shape[1] % 64)
        and describable(q)
        and describable(key)
    )


def _config(groups: int, max_kv_len: int, columns: int, num_sms: int) -> tuple[int, int]:
    """(tiles in the ring, keys a program).  Few keys a program as long as all programs run at once,
    four on a multiprocessor with 64 columns, two with 128.  One H200, 2026-11, 64 heads x 128, 64K
    keys, microseconds of the scores alone: of 4 rows 19.4 with 512 keys, 20.1 with 1024; of 32 and
    128 131.2 and 506.7 with 1024, 131.3 and 510.4 with 2048; of 128 requests' two rows each 539
    with 1024 and 2 tiles, 556 with 2048, 640 with 2048 and 3 tiles."""
    if columns > 128:
        return 8, 4096
    if columns > 64:
        return (4, 256) if groups * cdiv(max_kv_len, 256) <= 2 * num_sms else (2, 1024)
    for keys in (128, 256, 512):
        if groups * cdiv(max_kv_len, keys) <= 4 * num_sms:
            return 2, keys
    return 2, 1024


def launch(
    q: Tensor,
    key: Tensor,
    weights: Tensor,
    scores: Tensor,
    sample: Tensor,
    lengths: Tensor,
    plan: rows.Plan,
    layout_key: str,
    shared: int,
    first: int,
    count: int,
    query_scale: Tensor | None,
    key_scale: Tensor | None,
    cmp_ratio: int,
) -> None:
    """Scores of `count` rows from row `first` on, `shared` to a program, and every EVERY-th of
    them once more as a sample.  query_scale [rows, N]; key_scale as key, without its last axis."""
    heads, dim = q.shape[1:]
    h_tile = max(16, power_of_two(heads))
    columns = shared * h_tile
    outer, inner = rows.strides(layout_key, key)
    tall, wide = (1, key.shape[0]) if layout_key == "TND" else key.shape[:2]
    groups = cdiv(count, shared)
    parts = 2 if columns > 128 else 1
    max_kv_len = max(plan.max_kv_len, 1)
    stages, per_chunk = _config(groups, max_kv_len, columns, gpu.num_sms(q.device))
    chunks = cdiv(max_kv_len, per_chunk)
    qs = weights if query_scale is None else query_scale
    ks = key if key_scale is None else key_scale.unsqueeze(-1)
    launches.kernel(_scores_shared if parts == 2 else _scores, groups * chunks)(
        describe_box(q, [*q.shape], [*q.stride()], [shared // parts, h_tile, dim]),
        describe_box(key, [tall, wide, dim], [outer, inner, 1], [1, 64, dim]),
        weights,
        qs,
        ks,
        scores=scores,
        sample=sample,
        lengths=lengths,
        first_row=first,
        count=count,
        chunks=chunks,
        per_chunk=per_chunk,
        strides=(
            scores.stride(0),
            sample.stride(0),
            weights.stride(0),
            *qs.stride(),
            *rows.strides(layout_key, ks),
        ),
        **plan.arguments,
        LAYOUT=plan.layout,
        C=Constants(
            HEADS=heads,
            ROWS=shared,
            STAGES=stages,
            EVERY=EVERY,
            E4M3=key_scale is not None,
            QUERY_SCALE=query_scale is not None,
            RATIO=cmp_ratio,
        ),
        num_warps=4,
        launch_pdl=True,
    )
