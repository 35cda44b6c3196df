# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The attention of sparse_attention_score.py on a Hopper GPU.

Few heads share a head of keys, 12 or 16, and the 64 rows of a wgmma would be mostly empty: so its
rows are keys and columns of values, and its columns are heads.  Both operands lie in shared memory:

    scores [keys, heads] = keys [keys, D] x queries^T [D, heads]
    out    [D, heads]   += values^T [D, keys] x weights [keys, heads]

One warpgroup does everything, and others on its multiprocessor hide what it waits for.  Each thread
finds out where one key lies.  Its block, its page and its place are a tile apart, so that no tile
waits for them.  Keys and values come row by row (cp.async), and zeros for what no token sees.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...common import gpu, packed, rows, softmax
from ...common.gluon_names import barrier, cp_async, reinterpret
from ...common.hopper.layouts import GATHER, LINE
from ...common.hopper.rows import locate_packed
from ...common.hopper.tma import aligned
from ...common.log2 import LN2
from ...runtime import launches

LOWEST = gl.constexpr(-1e30)  # below any score: keeps exp2(-inf - LOWEST) = 0 free of NaN
ROW = gl.constexpr(gl.SliceLayout(1, GATHER))
ROOM = gl.constexpr(4)  # tiles whose places are known: the one at hand, up to three on their way


class Cache(NamedTuple):
    """Keys or values of a head: where they begin, from page to page, from slot to slot."""

    base: Any
    page_step: Any
    slot_step: Any


class Bounds(NamedTuple):
    """What a program reads of a token's keys: entries below `end`, positions below `limit`."""

    end: Any
    limit: Any
    table: Any
    pages: Any


@gluon.constexpr_function
def _products(HEADS):
    """Of both products."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])


@gluon.constexpr_function
def _of_warps(HEADS):
    """[4, HEADS]: the columns as `_products` has them, one number of each warp in every thread."""
    columns = [[0, 1]]
    columns += [[0, 8 << i] for i in range(3) if 8 << i < HEADS]
    none = [0, 0]
    lanes = [[0, 2], [0, 4], none, none, none]
    return gl.DistributedLinearLayout(
        [[1, 0], [2, 0], *columns], lanes, [none, none], [], [4, HEADS]
    )


@gluon.constexpr_function
def _columns(D, HEADS):
    """[D, HEADS] with 8 neighbours of a head a thread."""
    wide = min(32, D // 8)
    return gl.BlockedLayout([8, 1], [wide, 32 // wide], [1, 4], [0, 1])


@gluon.constexpr_function
def _every(REQUESTS):
    """All requests in each warp, up to 256."""
    return gl.BlockedLayout([min(8, max(1, REQUESTS // 32))], [32], [4], [0])


@gluon.jit
def _page(index, entry, of, C: gl.constexpr):
    """(position of an entry, negative where the token does not see it, and its page)."""
    valid = (entry < of.end) & (index >= 0) & (index < (of.limit + C.BLOCK - 1) // C.BLOCK)
    position = gl.where(valid, index, 0).to(gl.int32) * C.BLOCK + entry % C.BLOCK
    valid = valid & (position < of.limit)
    page = gl.load(of.table + position // C.PAGE, mask=valid, other=-1)
    return gl.where(valid, position, -1), page


@gluon.jit
def _place(position, page, of, C: gl.constexpr):
    """Its number among all slots of the cache, negative where it has none."""
    valid = (position >= 0) & (page >= 0) & (page < of.pages)
    place = gl.where(valid, page, 0).to(gl.int32) * C.PAGE + position % C.PAGE
    return gl.where(valid, place, -1)


@gluon.jit
def _gather(cache, places, tile, C: gl.constexpr):
    """Ask for rows; absent ones become 0."""
    place = places.load(ROW)
    there = gl.maximum(place, 0)
    page = (there // C.PAGE).to(gl.int64) * cache.page_step
    slot = (there % C.PAGE).to(gl.int64) * cache.slot_step
    d = gl.arange(0, C.D, layout=gl.SliceLayout(0, GATHER))
    cp_async(tile, (cache.base + page + slot)[:, None] + d[None, :], mask=(place >= 0)[:, None])


@gluon.jit
def _highest(s, C: gl.constexpr):
    """Of each column, in one exchange between the warps."""
    REPEATS: gl.constexpr = C.BLOCK_N // 64
    top = gl.max(gl.max(gl.reshape(s, [REPEATS, 4, 16, C.BLOCK_H]), 2), 0)
    top = gl.max(gl.convert_layout(top, _of_warps(C.BLOCK_H)), 0)
    return gl.convert_layout(top, gl.SliceLayout(0, _products(C.BLOCK_H)))


@gluon.jit
def _finish(acc, row_max, row_sum, row, split, shared, tile, sinks, lse, results, C: gl.constexpr):
    """Store what the heads of a tile have seen."""
    GROUP: gl.constexpr = C.HEADS // C.SHARED
    COLUMNS: gl.constexpr = _columns(C.D, C.BLOCK_H)
    of_group = tile * C.BLOCK_H + gl.arange(0, C.BLOCK_H, layout=row_max.type.layout)
    head, mask = shared * GROUP + of_group, of_group < GROUP
    heads = (row, split, head, mask)
    inverse, to, seen = softmax.finish(row_max, row_sum, heads, sinks, results, C.D, C)
    if C.SPLITS == 1 and C.STATS:
        log = row_max * LN2 + gl.log(gl.where(seen, row_sum, 1.0))
        gl.store(lse + row * C.HEADS + head, gl.where(seen, log, float("-inf")), mask=mask)
    o = gl.convert_layout((acc * inverse[None, :]).to(to.dtype.element_ty), COLUMNS)
    to = gl.convert_layout(to, gl.SliceLayout(0, COLUMNS))
    of_group = tile * C.BLOCK_H + gl.arange(0, C.BLOCK_H, layout=gl.SliceLayout(0, COLUMNS))
    d = gl.arange(0, C.D, layout=gl.SliceLayout(1, COLUMNS))
    gl.store(to[None, :] + d[:, None], o, mask=(of_group < GROUP)[None, :])


@gluon.jit(do_not_specialize=[*packed.NUMBERS, "chosen", "per_split"])
def _attend(
    q,
    key,
    value,
    index,
    counts,
    lengths,
    key_lengths,
    table,
    sinks,
    results,
    lse,
    scale_log2,
    tokens,
    requests,
    reach,
    table_stride,
    pages,
    chosen,
    per_split,
    strides,
    C: gl.constexpr,
):
    (
        q_row,
        q_head,
        key_page,
        key_slot,
        key_head,
        value_page,
        value_slot,
        value_head,
        index_head,
        index_row,
        count_head,
        count_row,
    ) = strides
    S: gl.constexpr = _products(C.BLOCK_H)
    GROUP: gl.constexpr = C.HEADS // C.SHARED
    HEAD_TILES: gl.constexpr = (GROUP + C.BLOCK_H - 1) // C.BLOCK_H
    KEY_TILES: gl.constexpr = C.STAGES
    dtype: gl.constexpr = key.dtype.element_ty
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_tile = gl.allocate_shared_memory(dtype, [C.BLOCK_H, C.D], SWIZZLED)
    keys = gl.allocate_shared_memory(dtype, [KEY_TILES, C.BLOCK_N, C.D], SWIZZLED)
    values = gl.allocate_shared_memory(dtype, [C.BLOCK_N, C.D], SWIZZLED)
    weights = gl.allocate_shared_memory(
        dtype, [C.BLOCK_N, C.BLOCK_H], gl.NVMMASharedLayout(2 * C.BLOCK_H, 16, 2)
    )
    places = gl.allocate_shared_memory(gl.int32, [ROOM, C.BLOCK_N], FLAT)
    program = gl.program_id(0)
    tile = program % HEAD_TILES
    # neighbours read one head of keys and one part of the lists: L2 holds more of that than of all
    row = (program // HEAD_TILES % tokens).to(gl.int64)
    shared = (program // HEAD_TILES // tokens % C.SHARED).to(gl.int64)
    split = program // HEAD_TILES // tokens // C.SHARED
    listed = index + shared * index_head + row * index_row
    lo = split * per_split
    last = chosen * C.BLOCK
    first_entry = lo + gl.arange(0, KEY_TILES * C.BLOCK_N, layout=LINE)
    first_block = gl.load(listed + first_entry // C.BLOCK, mask=first_entry < last, other=-1)
    entry = lo + KEY_TILES * C.BLOCK_N + gl.arange(0, C.BLOCK_N, layout=LINE)
    block = gl.load(listed + entry // C.BLOCK, mask=entry < last, other=-1)
    if counts is not None:
        count = gl.load(counts + shared * count_head + row * count_row)
        last = rows.within(count, chosen) * C.BLOCK
    of_group = tile * C.BLOCK_H + gl.arange(0, C.BLOCK_H, layout=ROW)
    d = gl.arange(0, C.D, layout=gl.SliceLayout(0, GATHER))
    q_rows = q + row * q_row + ((shared * GROUP + of_group) * q_head)[:, None] + d[None, :]
    cp_async(q_tile, q_rows, mask=(of_group < GROUP)[:, None])

    of = packed.Requests(lengths, key_lengths, table, tokens, requests, reach, table_stride, pages)
    request, limit = locate_packed(row, of, C.REQUESTS, _every(C.REQUESTS))
    hi = gl.minimum(lo + per_split, gl.where(limit > 0, last, 0))
    bounds = Bounds(hi, limit, table + request.to(gl.int64) * table_stride, pages)
    of_keys = Cache(key + shared * key_head, key_page, key_slot)
    of_values = Cache(value + shared * value_head, value_page, value_slot)

    position, page = _page(first_block, first_entry, bounds, C)
    place = _place(position, page, bounds, C)
    every = reinterpret(places, gl.int32, [ROOM * C.BLOCK_N], FLAT)
    every.slice(0, KEY_TILES * C.BLOCK_N).store(place)
    position, page = _page(block, entry, bounds, C)
    entry += C.BLOCK_N
    block = gl.load(listed + entry // C.BLOCK, mask=entry < hi, other=-1)
    barrier()
    for i in gl.static_range(KEY_TILES):
        _gather(of_keys, places.index(i), keys.index(i), C)
        async_copy.commit_group()

    row_max = gl.full([C.BLOCK_H], LOWEST, gl.float32, layout=gl.SliceLayout(0, S))
    sums = gl.full([C.BLOCK_N, C.BLOCK_H], 0.0, gl.float32, layout=S)
    acc = gl.full([C.D, C.BLOCK_H], 0.0, gl.float32, layout=S)
    for t in range((gl.maximum(hi - lo, 0) + C.BLOCK_N - 1) // C.BLOCK_N):
        places.index((t + KEY_TILES) % ROOM).store(_place(position, page, bounds, C))
        position, page = _page(block, entry, bounds, C)
        entry += C.BLOCK_N
        block = gl.load(listed + entry // C.BLOCK, mask=entry < hi, other=-1)
        async_copy.wait_group(KEY_TILES - 1)
        barrier()  # the keys are there, and the last values are read
        fence_async_shared()
        s = gl.full([C.BLOCK_N, C.BLOCK_H], 0.0, gl.float32, layout=S)
        s = warpgroup_mma(
            keys.index(t % KEY_TILES), q_tile.permute((1, 0)), s, use_acc=False, is_async=True
        )
        _gather(of_values, places.index(t % ROOM), values, C)
        async_copy.commit_group()
        there = places.index(t % ROOM).load(gl.SliceLayout(1, S)) >= 0
        s = warpgroup_mma_wait(0, deps=[s]) * scale_log2
        s = gl.where(there[:, None], s, float("-inf"))
        new_max = gl.maximum(row_max, _highest(s, C))  # all warps have read the keys
        _gather(of_keys, places.index((t + KEY_TILES) % ROOM), keys.index(t % KEY_TILES), C)
        async_copy.commit_group()
        alpha = gl.exp2(row_max - new_max)
        row_max = new_max
        weight = gl.exp2(s - row_max[None, :])
        weights.store(weight.to(dtype))
        sums = sums * alpha[None, :] + weight
        acc = acc * alpha[None, :]
        async_copy.wait_group(1)
        barrier()
        fence_async_shared()
        acc = warpgroup_mma(values.permute((1, 0)), weights, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
    async_copy.wait_group(0)
    barrier()  # what follows has this memory
    _finish(acc, row_max, gl.sum(sums, 0), row, split, shared, tile, sinks, lse, results, C)


def supports(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Heads of whole stripes of shared memory, steps of 16 numbers, by which the compiler knows
    that rows are aligned."""
    steps = (*query.stride()[:2], *key.stride()[:3], *value.stride()[:3])
    return (
        gpu.is_hopper(query.device)
        and query.shape[-1] in (64, 128, 256)
        and not any(step % 16 for step in steps)
        and aligned(query, key, value)
    )


def launch(programs: int, C: Any, **x: Any) -> None:
    """The call of the file above; C.STAGES tiles of keys are on their way at a time."""
    launches.kernel(_attend, programs)(**x, C=C, num_warps=4)
