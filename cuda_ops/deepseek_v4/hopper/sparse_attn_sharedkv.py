# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The attention of sparse_attn_sharedkv.py on a Hopper GPU: sparse_attention's mla_consumers.py
with keys without a rope, from two caches.

A tile holds 64 keys of one cache, the window's first; a place counts units of elements from where
its cache begins.  The gathering warps find out what a row sees, a step ahead, and how many steps
its part takes: lengths are read here, by no kernel ahead of it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_wait

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
    fetch,
    gather,
    item,
    tiles_of,
)
from .places import Caches, begin, cache_of, fits, keys_of, named, places_of, run, steps, unit


@gluon.jit
def _producer(
    q,
    caches,
    of,
    strides,
    items,
    tiles,
    LAYOUT: gl.constexpr,
    P: gl.constexpr,
    C: gl.constexpr,
    UNIT: gl.constexpr,
):
    q_left, q_right, _q_rope, left, right, _weights, _exchange, places, bars = tiles
    steps_of_keys = strides[6], strides[7], strides[8], strides[9]
    ROW: gl.constexpr = gl.SliceLayout(1, GATHER)
    column = gl.arange(0, 128, layout=LINE)
    line = gl.arange(0, 64, layout=ROW)
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
            # those of the next one are brought near
            later, _, first = item(this + programs, C.HEADS, C.SPLITS)
            h = (first + column).to(gl.int64)
            there = (this + programs < items) & (column < 64) & (h < C.HEADS)
            fetch(q + later * strides[0] + h * strides[1], there)
        base0 = cache_of(work.lo + 2 * step, work.near, caches, P)
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
        place0 = now.slice(0, 64).load(ROW)
        mbarrier.wait(bars.index(LEFT_FREE), phase)
        gather(base0, place0, UNIT, left.index(0), 0)
        async_copy.mbarrier_arrive(bars.index(LEFT), increment_count=False)
        mbarrier.wait(bars.index(RIGHT_FREE), phase)
        gather(base0, place0, UNIT, right.index(0), 256)
        async_copy.mbarrier_arrive(bars.index(RIGHT), increment_count=False)
        place1 = now.slice(64, 64).load(ROW)
        mbarrier.wait(bars.index(LEFT_FREE + 1), phase)
        gather(base1, place1, UNIT, left.index(1), 0)
        async_copy.mbarrier_arrive(bars.index(LEFT + 1), increment_count=False)
        mbarrier.wait(bars.index(RIGHT_FREE + 1), phase)
        gather(base1, place1, UNIT, right.index(1), 256)
        async_copy.mbarrier_arrive(bars.index(RIGHT + 1), increment_count=False)
        # the places of the step before are free, since both consumers let go of its tiles
        outer, inner, valid = keys_of(
            entry, work.near, of_near, of_far, work.note, caches, strides, P
        )
        place = places_of(entry, work.near, outer, inner, valid, steps_of_keys, P)
        places.index((t + 1) & 1).store(place)
        arrive(bars, PLACED + ((t + 1) & 1))
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
    # the queries: copies of 128 threads, and the number of steps
    tiles = tiles_of(ori.dtype.element_ty, 0, [3, 128], 128, 128, 129)
    gl.warp_specialize(
        [
            (consumer, (tiles, 128, items, scale_log2, to, C, 0)),
            (consumer, (tiles, 128, items, scale_log2, to, C, 1)),
            (_producer, (q, caches, of, strides, items, tiles, LAYOUT, P, C, UNIT)),
        ],
        [4, 4],
        [208, 96],
    )


def supports(call: sharedkv.Attention) -> bool:
    """Rows of floats that begin at whole pieces of 16 bytes."""
    return fits(call) and unit(call.ori, call.cmp) >= 16


def launch(call: sharedkv.Attention) -> None:
    caches = call.ori, call.cmp
    run(_attend, call, caches, steps(*caches), unit(*caches))
