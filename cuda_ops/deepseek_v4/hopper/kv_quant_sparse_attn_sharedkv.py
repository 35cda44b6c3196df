# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The attention of kv_quant_sparse_attn_sharedkv.py on a Hopper GPU: sparse_attn_sharedkv.py with
keys made of rows of 584 bytes, so that it gives the bits of the op on floats.

Values are asked for a whole tile ahead, 64 columns of its keys at a time: five pieces of eight wait
in the registers of the gathering warps, two in shared memory, the place of each taken by its
successor; rotary channels are copied as they are.  Scales wait in shared memory.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_wait

from ....dispatch.common import quantized
from ...common import sharedkv
from ...common.gluon_names import cp_async
from ...common.hopper.layouts import GATHER, LINE
from ...sparse_attention.hopper.mla_consumers import (
    LEFT,
    LEFT_FREE,
    PLACED,
    QUERY,
    QUERY_FREE,
    RIGHT,
    RIGHT_FREE,
    Output,
    arrive,
    consumer,
    tiles_of,
)
from .packed_rows import (
    ask_words,
    copy_rotary,
    copy_words,
    put,
    put_rotary,
    scales_of,
    steps,
    unit,
)
from .places import Caches, begin, cache_of, fits, keys_of, named, places_of, run

# 4 words a thread of 64 keys x 16 words, and of 64 keys x 32
PIECE = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
ROTARY = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def _ask_first(words, place, UNIT: gl.constexpr):
    """The pieces of a tile that wait in registers: the left half, the third of the right one."""
    x = ask_words(words, place, UNIT, 0, 16, PIECE)
    y = ask_words(words, place, UNIT, 16, 16, PIECE)
    z = ask_words(words, place, UNIT, 32, 16, PIECE)
    w = ask_words(words, place, UNIT, 48, 16, PIECE)
    v = ask_words(words, place, UNIT, 96, 16, PIECE)
    return x, y, z, w, v


@gluon.jit
def _left(x, y, z, w, by, half, words, place, UNIT: gl.constexpr):
    """Put a left half, and ask for that of the tile that is next."""
    put(x, by, half, 0)
    x = ask_words(words, place, UNIT, 0, 16, PIECE)
    put(y, by, half, 1)
    y = ask_words(words, place, UNIT, 16, 16, PIECE)
    put(z, by, half, 2)
    z = ask_words(words, place, UNIT, 32, 16, PIECE)
    put(w, by, half, 3)
    w = ask_words(words, place, UNIT, 48, 16, PIECE)
    return x, y, z, w


@gluon.jit
def _right(v, by, half, stage, words, place, UNIT: gl.constexpr):
    """Put a right half but for the rotary channels, and ask for that of the tile that is next."""
    put(v, by, half, 2)
    v = ask_words(words, place, UNIT, 96, 16, PIECE)
    async_copy.wait_group(0)
    for c in gl.static_range(2):
        put(stage.index(c).load(PIECE), by, half, c)
        copy_words(words, place, UNIT, 64 + 16 * c, stage.index(c), PIECE)
    async_copy.commit_group()
    return v


@gluon.jit
def _turned(base, places, half, bar, UNIT: gl.constexpr):
    """The rotary channels of a tile, of which `bar` hears as well."""
    if half.dtype == gl.bfloat16:
        copy_rotary(base, places.load(gl.SliceLayout(1, GATHER)), UNIT, half, GATHER)
        async_copy.mbarrier_arrive(bar, increment_count=False)
    else:
        place = places.load(gl.SliceLayout(1, ROTARY))
        put_rotary(ask_words(base, place, UNIT, 112, 32, ROTARY), half)


@gluon.jit
def _producer(
    q,
    caches,
    of,
    strides,
    items,
    tiles,
    scales,
    stage,
    LAYOUT: gl.constexpr,
    P: gl.constexpr,
    C: gl.constexpr,
    UNIT: gl.constexpr,
):
    q_left, q_right, _q_rope, left, right, _weights, _exchange, places, bars = tiles
    steps_of_keys = strides[6], strides[7], strides[8], strides[9]
    ROW: gl.constexpr = gl.SliceLayout(1, PIECE)
    column = gl.arange(0, 128, layout=LINE)
    line = gl.arange(0, 64, layout=gl.SliceLayout(1, GATHER))
    d = gl.arange(0, 256, layout=gl.SliceLayout(0, GATHER))
    programs = gl.num_programs(0)
    this = gl.program_id(0)
    work = begin(this, of, LAYOUT, P, C)
    entry = work.lo * 64 + column
    of_near, of_far = named(entry, work.near, work.row, work.note, caches, strides, P)
    outer, inner, valid = keys_of(entry, work.near, of_near, of_far, work.note, caches, strides, P)
    place = places_of(entry, work.near, outer, inner, valid, steps_of_keys, P)
    places.index(0).store(place)
    arrive(bars, PLACED)
    low, high = scales_of(entry, work.near, outer, inner, valid, caches, strides, P)
    base0 = cache_of(work.lo, work.near, caches, P)
    place0 = places.index(0).slice(0, 64).load(ROW)
    x, y, z, w, v = _ask_first(base0, place0, UNIT)
    for c in gl.static_range(2):
        copy_words(base0, place0, UNIT, 64 + 16 * c, stage.index(c), PIECE)
    async_copy.commit_group()
    scales.index(0).store(low)
    scales.index(1).store(high)
    t = 0
    step = 0
    phase = 1
    query_phase = 1
    while this < items:
        if step == 0:
            # the queries of an item come as soon as both consumers have no more scores to make
            mbarrier.wait(bars.index(QUERY_FREE), query_phase)
            query_phase = query_phase ^ 1
            places.index(2).store(gl.full([128], 0, gl.int32, layout=LINE) + work.steps)
            h = (work.head + line).to(gl.int64)
            mask = (h < C.HEADS)[:, None]
            at = (q + work.row * strides[0] + h * strides[1])[:, None] + d[None, :]
            cp_async(q_left.index(0), at, mask=mask)
            cp_async(q_right.index(0), at + 256, mask=mask)
            async_copy.mbarrier_arrive(bars.index(QUERY), increment_count=False)
            arrive(bars, QUERY)
        base1 = cache_of(work.lo + 2 * step + 1, work.near, caches, P)
        # the next step, of this item or of the next one: its indices are asked for now
        step += 1
        if step == work.steps:
            step = 0
            this += programs
            work = begin(gl.minimum(this, items - 1), of, LAYOUT, P, C)
        entry = (work.lo + 2 * step) * 64 + column
        of_near, of_far = named(entry, work.near, work.row, work.note, caches, strides, P)
        now = places.index(t & 1)
        after = places.index((t + 1) & 1)
        by = 2 * (t & 1)
        place1 = now.slice(64, 64).load(ROW)
        mbarrier.wait(bars.index(LEFT_FREE), phase)
        scale = scales.index(by).slice(0, 64).load(ROW)
        x, y, z, w = _left(x, y, z, w, scale, left.index(0), base1, place1, UNIT)
        arrive(bars, LEFT)
        outer, inner, valid = keys_of(
            entry, work.near, of_near, of_far, work.note, caches, strides, P
        )
        mbarrier.wait(bars.index(RIGHT_FREE), phase)
        _turned(base0, now.slice(0, 64), right.index(0), bars.index(RIGHT), UNIT)
        scale = scales.index(by + 1).slice(0, 64).load(ROW)
        v = _right(v, scale, right.index(0), stage, base1, place1, UNIT)
        arrive(bars, RIGHT)
        # the places of the step before are free, since both consumers let go of its first tile
        place = places_of(entry, work.near, outer, inner, valid, steps_of_keys, P)
        after.store(place)
        arrive(bars, PLACED + ((t + 1) & 1))
        low, high = scales_of(entry, work.near, outer, inner, valid, caches, strides, P)
        base0 = cache_of(work.lo + 2 * step, work.near, caches, P)
        place0 = after.slice(0, 64).load(ROW)
        mbarrier.wait(bars.index(LEFT_FREE + 1), phase)
        scale = scales.index(by).slice(64, 64).load(ROW)
        x, y, z, w = _left(x, y, z, w, scale, left.index(1), base0, place0, UNIT)
        arrive(bars, LEFT + 1)
        mbarrier.wait(bars.index(RIGHT_FREE + 1), phase)
        _turned(base1, now.slice(64, 64), right.index(1), bars.index(RIGHT + 1), UNIT)
        scale = scales.index(by + 1).slice(64, 64).load(ROW)
        v = _right(v, scale, right.index(1), stage, base0, place0, UNIT)
        arrive(bars, RIGHT + 1)
        scales.index(2 - by).store(low)
        scales.index(3 - by).store(high)
        phase = phase ^ 1
        t += 1
    async_copy.wait_group(0)


@gluon.jit(do_not_specialize=["tokens", "requests", "items"])
def _attend(
    q,
    ori,
    cmp,
    names,
    sinks,
    results,
    lse,
    lengths,
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
    of = sharedkv.Source(lengths, tokens, requests, extents)
    caches = Caches(ori, cmp, names, extents)
    to = Output(results, lse, lse, sinks)
    # the right halves: the rotary copies of 128 threads beside them
    RIGHTS: gl.constexpr = 129 if q.dtype.element_ty == gl.bfloat16 else 1
    # the queries: copies of 128 threads, and the number of steps
    tiles = tiles_of(q.dtype.element_ty, 0, [3, 128], 1, RIGHTS, 129)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    STAGE: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [1, 0])
    scales = gl.allocate_shared_memory(gl.int32, [4, 128], FLAT)
    stage = gl.allocate_shared_memory(gl.int32, [2, 64, 16], STAGE)
    gl.warp_specialize(
        [
            (consumer, (tiles, 128, items, scale_log2, to, C, 0)),
            (consumer, (tiles, 128, items, scale_log2, to, C, 1)),
            (_producer, (q, caches, of, strides, items, tiles, scales, stage, LAYOUT, P, C, UNIT)),
        ],
        [4, 4],
        [208, 96],
    )


def supports(call: sharedkv.Attention) -> bool:
    """Rows of 584 bytes in pages of whole 16 bytes."""
    return fits(call) and unit(call.ori, call.cmp) > 0


def launch(call: sharedkv.Attention) -> None:
    caches = call.ori, call.cmp
    words = tuple(x if x is None else quantized.seen_as(x, torch.int32) for x in caches)
    run(_attend, call, words, steps(*caches), unit(*caches))
