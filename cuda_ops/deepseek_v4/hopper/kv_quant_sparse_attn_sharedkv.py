# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The attention of kv_quant_sparse_attn_sharedkv.py on a Hopper GPU: sparse_attn_sharedkv.py with
keys made of rows of 584 bytes, so that it gives the bits of the op on floats.

As in sparse_attention's kernel for 8 bits the gathering warps hold half a tile in registers,
64 columns of its keys at a time; the place of each is taken by one of the half that is next.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_wait

from ....dispatch.common import quantised
from ...common import sharedkv
from ...common.combine import combine
from ...common.gluon_names import barrier, cp_async
from ...runtime import launches
from ...sparse_attention.hopper.mla_consumers import (
    BARRIERS,
    GATHER,
    LEFT,
    LEFT_FREE,
    LINE,
    PLACED,
    QUERY,
    QUERY_FREE,
    RIGHT,
    RIGHT_FREE,
    Output,
    Tiles,
    arrive,
    consumer0,
    consumer1,
)
from .packed_rows import (
    ask_scales,
    ask_words,
    offsets_of,
    put,
    put_rotary,
    steps,
    unit,
)
from .places import Caches, begin, cache_of, cut, fits, keys_of, named, places_of

# 4 words a thread of 64 keys x 16 words, and of 64 keys x 32
PIECE = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
ROTARY = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def _left(x, y, z, w, by, half, words, place, offset, UNIT: gl.constexpr):
    """Put a left half, and ask for the right one of the same rows."""
    put(x, by, half, 0)
    x = ask_words(words, place, UNIT, 64, 16, PIECE)
    put(y, by, half, 1)
    y = ask_words(words, place, UNIT, 80, 16, PIECE)
    put(z, by, half, 2)
    z = ask_words(words, place, UNIT, 96, 16, PIECE)
    put(w, by, half, 3)
    by = ask_scales(words, place, offset, 1)
    return x, y, z, w, by


@gluon.jit
def _right(x, y, z, w, by, rotary, half, words, place, offset, UNIT: gl.constexpr):
    """Put a right half, and ask for the left one of the rows that are next."""
    put(x, by, half, 0)
    x = ask_words(words, place, UNIT, 0, 16, PIECE)
    put(y, by, half, 1)
    y = ask_words(words, place, UNIT, 16, 16, PIECE)
    put(z, by, half, 2)
    z = ask_words(words, place, UNIT, 32, 16, PIECE)
    put_rotary(rotary, half)
    w = ask_words(words, place, UNIT, 48, 16, PIECE)
    by = ask_scales(words, place, offset, 0)
    return x, y, z, w, by


@gluon.jit
def _producer(
    q,
    caches,
    of,
    strides,
    items,
    tiles,
    offsets,
    LAYOUT: gl.constexpr,
    P: gl.constexpr,
    C: gl.constexpr,
    UNIT: gl.constexpr,
):
    q_left, q_right, _q_rope, left, right, _weights, _exchange, places, bars = tiles
    steps_of_keys = strides[6], strides[7], strides[8], strides[9]
    ROW: gl.constexpr = gl.SliceLayout(1, PIECE)
    TURNED_ROW: gl.constexpr = gl.SliceLayout(1, ROTARY)
    column = gl.arange(0, 128, layout=LINE)
    line = gl.arange(0, 64, layout=gl.SliceLayout(1, GATHER))
    d = gl.arange(0, 256, layout=gl.SliceLayout(0, GATHER))
    programs = gl.num_programs(0)
    this = gl.program_id(0)
    (
        row,
        head,
        request,
        limit,
        near,
        far,
        closed,
        first_row,
        first_entry,
        near_tiles,
        lo,
        steps,
    ) = begin(this, of, LAYOUT, P, C)
    note = sharedkv.Note(request, limit, near, far, closed, first_row, first_entry)
    entry = lo * 64 + column
    of_near, of_far = named(entry, near_tiles, row, note, caches, strides, P)
    outer, inner, valid = keys_of(entry, near_tiles, of_near, of_far, note, caches, strides, P)
    places.index(0).store(places_of(entry, near_tiles, outer, inner, valid, steps_of_keys, P))
    offsets.index(0).store(
        offsets_of(entry, near_tiles, outer, inner, valid, caches, strides[10], strides[11], P)
    )
    arrive(bars, PLACED)
    base0 = cache_of(lo, near_tiles, caches, P)
    place0 = places.index(0).slice(0, 64).load(ROW)
    x = ask_words(base0, place0, UNIT, 0, 16, PIECE)
    y = ask_words(base0, place0, UNIT, 16, 16, PIECE)
    z = ask_words(base0, place0, UNIT, 32, 16, PIECE)
    w = ask_words(base0, place0, UNIT, 48, 16, PIECE)
    by = ask_scales(base0, place0, offsets.index(0).slice(0, 64).load(ROW), 0)
    t = 0
    step = 0
    phase = 1
    query_phase = 1
    while this < items:
        if step == 0:
            # the queries of an item come as soon as both consumers have no more scores to make
            mbarrier.wait(bars.index(QUERY_FREE), query_phase)
            query_phase = query_phase ^ 1
            places.index(2).store(gl.full([128], 0, gl.int32, layout=LINE) + steps)
            h = (head + line).to(gl.int64)
            mask = (h < C.HEADS)[:, None]
            at = (q + row * strides[0] + h * strides[1])[:, None] + d[None, :]
            cp_async(q_left.index(0), at, mask=mask)
            cp_async(q_right.index(0), at + 256, mask=mask)
            async_copy.mbarrier_arrive(bars.index(QUERY), increment_count=False)
            arrive(bars, QUERY)
        base1 = cache_of(lo + 2 * step + 1, near_tiles, caches, P)
        # the next step, of this item or of the next one: its indices are asked for now
        step += 1
        if step == steps:
            step = 0
            this += programs
            (
                row,
                head,
                request,
                limit,
                near,
                far,
                closed,
                first_row,
                first_entry,
                near_tiles,
                lo,
                steps,
            ) = begin(gl.minimum(this, items - 1), of, LAYOUT, P, C)
        note = sharedkv.Note(request, limit, near, far, closed, first_row, first_entry)
        entry = (lo + 2 * step) * 64 + column
        of_near, of_far = named(entry, near_tiles, row, note, caches, strides, P)
        now = places.index(t & 1)
        after = places.index((t + 1) & 1)
        now_scales = offsets.index(t & 1)
        after_scales = offsets.index((t + 1) & 1)
        place0 = now.slice(0, 64).load(ROW)
        mbarrier.wait(bars.index(LEFT_FREE), phase)
        rotary = ask_words(base0, now.slice(0, 64).load(TURNED_ROW), UNIT, 112, 32, ROTARY)
        x, y, z, w, by = _left(
            x, y, z, w, by, left.index(0), base0, place0, now_scales.slice(0, 64).load(ROW), UNIT
        )
        arrive(bars, LEFT)
        mbarrier.wait(bars.index(RIGHT_FREE), phase)
        place1 = now.slice(64, 64).load(ROW)
        x, y, z, w, by = _right(
            x,
            y,
            z,
            w,
            by,
            rotary,
            right.index(0),
            base1,
            place1,
            now_scales.slice(64, 64).load(ROW),
            UNIT,
        )
        arrive(bars, RIGHT)
        # the places of the step before are free, since both consumers let go of its first tile
        outer, inner, valid = keys_of(entry, near_tiles, of_near, of_far, note, caches, strides, P)
        after.store(places_of(entry, near_tiles, outer, inner, valid, steps_of_keys, P))
        after_scales.store(
            offsets_of(entry, near_tiles, outer, inner, valid, caches, strides[10], strides[11], P)
        )
        arrive(bars, PLACED + ((t + 1) & 1))
        base0 = cache_of(lo + 2 * step, near_tiles, caches, P)
        mbarrier.wait(bars.index(LEFT_FREE + 1), phase)
        rotary = ask_words(base1, now.slice(64, 64).load(TURNED_ROW), UNIT, 112, 32, ROTARY)
        x, y, z, w, by = _left(
            x, y, z, w, by, left.index(1), base1, place1, now_scales.slice(64, 64).load(ROW), UNIT
        )
        arrive(bars, LEFT + 1)
        place0 = after.slice(0, 64).load(ROW)
        mbarrier.wait(bars.index(RIGHT_FREE + 1), phase)
        x, y, z, w, by = _right(
            x,
            y,
            z,
            w,
            by,
            rotary,
            right.index(1),
            base0,
            place0,
            after_scales.slice(0, 64).load(ROW),
            UNIT,
        )
        arrive(bars, RIGHT + 1)
        phase = phase ^ 1
        t += 1
    async_copy.wait_group(0)


@gluon.jit(do_not_specialize=["tokens", "requests", "items"])
def _attend(
    q,
    ori,
    cmp,
    ori_index,
    cmp_index,
    ori_table,
    cmp_table,
    sinks,
    out,
    partial,
    partial_max,
    partial_sum,
    lse,
    cu_q,
    used_q,
    used_kv,
    cu_ori,
    cu_cmp,
    ori_length,
    cmp_length,
    scale_log2,
    tokens,
    requests,
    extents,
    strides,
    items,
    LAYOUT: gl.constexpr,
    P: gl.constexpr,
    C: gl.constexpr,
    UNIT: gl.constexpr,
):
    gdc_wait()
    (
        window,
        ratio,
        ori_reach,
        cmp_reach,
        ori_count,
        cmp_count,
        ori_pages,
        cmp_pages,
        ori_size,
        cmp_size,
    ) = extents
    of = sharedkv.Source(
        cu_q,
        used_q,
        used_kv,
        cu_ori,
        cu_cmp,
        ori_length,
        cmp_length,
        tokens,
        requests,
        window,
        ratio,
        ori_reach,
        cmp_reach,
        ori_count,
        cmp_count,
    )
    caches = Caches(
        ori,
        cmp,
        ori_index,
        cmp_index,
        ori_table,
        cmp_table,
        ori_pages,
        cmp_pages,
        ori_size,
        cmp_size,
    )
    to = Output(out, partial, partial_max, partial_sum, lse, lse, sinks)
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = q.dtype.element_ty
    q_left = gl.allocate_shared_memory(dtype, [1, 64, 256], SWIZZLED)
    q_right = gl.allocate_shared_memory(dtype, [1, 64, 256], SWIZZLED)
    left = gl.allocate_shared_memory(dtype, [2, 64, 256], SWIZZLED)
    right = gl.allocate_shared_memory(dtype, [2, 64, 256], SWIZZLED)
    weights = gl.allocate_shared_memory(dtype, [2, 64, 64], SWIZZLED)
    exchange = gl.allocate_shared_memory(gl.float32, [4, 64], FLAT)
    places = gl.allocate_shared_memory(gl.int32, [3, 128], FLAT)
    offsets = gl.allocate_shared_memory(gl.int64, [2, 128], FLAT)
    bars = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(QUERY):
        mbarrier.init(bars.index(i), count=1)
    mbarrier.init(bars.index(QUERY), count=129)  # copies of 128 threads, and the number of steps
    mbarrier.init(bars.index(QUERY_FREE), count=2)
    barrier()
    tiles = Tiles(q_left, q_right, q_left, left, right, weights, exchange, places, bars)
    gl.warp_specialize(
        [
            (consumer0, (tiles, 128, items, scale_log2, to, C)),
            (consumer1, (tiles, 128, items, scale_log2, to, C)),
            (_producer, (q, caches, of, strides, items, tiles, offsets, LAYOUT, P, C, UNIT)),
        ],
        [4, 4],
        [208, 96],
    )


def supports(q: Tensor, ori: Tensor, cmp: Tensor | None, scale_log2: float) -> bool:
    """Rows of 584 bytes in pages of whole 16 bytes."""
    return fits(q, ori, cmp, scale_log2) and unit(ori, cmp) > 0


def launch(
    q: Tensor,
    ori: Tensor,
    cmp: Tensor | None,
    keys: sharedkv.Keys,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale_log2: float,
) -> None:
    """`q` [rows, N, 512]."""
    words = [None if rows is None else quantised.seen_as(rows, torch.int32) for rows in (ori, cmp)]
    of_keys = steps(ori, cmp), unit(ori, cmp)
    programs, parts, given = cut(q, keys, sinks, out, lse, scale_log2, *of_keys)
    launches.kernel(_attend, programs)(q, *words, **given, launch_pdl=True)
    if given["C"].SPLITS > 1:
        combine(parts, sinks, out, lse, None)
