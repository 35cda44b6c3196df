# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The attention of sparse_flash_attention.py on a Hopper GPU: latents.py with keys that are copied
as they are, every half tile as soon as both products let go of it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...common import rows
from ...common.gluon_names import cp_async
from ...common.hopper.layouts import GATHER, LINE
from ...common.hopper.rows import locate, slots
from ...common.selection import Attention
from .mla_consumers import (
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
    fits,
    gather,
    item,
    run,
    strides,
    tiles_of,
)


@gluon.jit
def _producer(
    q,
    q_rope,
    key,
    key_rope,
    indices,
    of,
    entries,
    per_split,
    strides,
    items,
    tiles,
    LAYOUT: gl.constexpr,
    C: gl.constexpr,
):
    q_row, q_head, qr_row, qr_head, key_stride, rope_stride, index_stride = strides
    q_left, q_right, qr, left, right, rope, _exchange, places, bars = tiles
    ROW: gl.constexpr = gl.SliceLayout(1, GATHER)
    column = gl.arange(0, 128, layout=LINE)
    steps = per_split // 128
    programs = gl.num_programs(0)
    this = gl.program_id(0)
    row, split, head = item(this, C.HEADS, C.SPLITS)
    lo = split * per_split
    request, start, kv_len = locate(row, of, LAYOUT, LINE)
    entry = lo + column
    hi = gl.minimum(lo + per_split, entries)
    index = gl.load(
        indices + row * index_stride + entry // C.SPARSE_BLOCK, mask=entry < hi, other=-1
    )
    slot = slots(index, entry, kv_len, request, start, of, C.SPARSE_BLOCK, LAYOUT)
    places.index(0).store(slot)
    arrive(bars, PLACED)
    line = gl.arange(0, 64, layout=ROW)
    d = gl.arange(0, 256, layout=gl.SliceLayout(0, GATHER))
    r = gl.arange(0, 64, layout=gl.SliceLayout(0, GATHER))
    step = 0
    phase = 1
    query_phase = 1
    total = (items - this + programs - 1) // programs * steps
    for t in range(total):
        if step == 0:
            # the queries of an item come as soon as both consumers have no more scores to make
            mbarrier.wait(bars.index(QUERY_FREE), query_phase)
            query_phase = query_phase ^ 1
            h = (head + line).to(gl.int64)
            mask = (h < C.HEADS)[:, None]
            at = (q + row * q_row + h * q_head)[:, None] + d[None, :]
            cp_async(q_left.index(0), at, mask=mask)
            cp_async(q_right.index(0), at + 256, mask=mask)
            if C.ROPE > 0:
                at = (q_rope + row * qr_row + h * qr_head)[:, None] + r[None, :]
                cp_async(qr.index(0), at, mask=mask)
            async_copy.mbarrier_arrive(bars.index(QUERY), increment_count=False)
        # the next step, of this item or of the next one: its indices are asked for now
        step += 1
        if step == steps:
            step = 0
            this = gl.minimum(this + programs, items - 1)
            row, split, head = item(this, C.HEADS, C.SPLITS)
            lo = split * per_split
            request, start, kv_len = locate(row, of, LAYOUT, LINE)
            hi = gl.minimum(lo + per_split, entries)
        entry = lo + step * 128 + column
        index = gl.load(
            indices + row * index_stride + entry // C.SPARSE_BLOCK, mask=entry < hi, other=-1
        )
        now = places.index(t & 1)
        slot0 = now.slice(0, 64).load(ROW)
        mbarrier.wait(bars.index(LEFT_FREE), phase)
        gather(key, slot0, key_stride, left.index(0), 0)
        async_copy.mbarrier_arrive(bars.index(LEFT), increment_count=False)
        mbarrier.wait(bars.index(RIGHT_FREE), phase)  # the odd consumer has read the weights too
        if C.ROPE > 0:
            gather(key_rope, slot0, rope_stride, rope.index(0), 0)
        gather(key, slot0, key_stride, right.index(0), 256)
        async_copy.mbarrier_arrive(bars.index(RIGHT), increment_count=False)
        slot1 = now.slice(64, 64).load(ROW)
        mbarrier.wait(bars.index(LEFT_FREE + 1), phase)
        if C.ROPE > 0:
            gather(key_rope, slot1, rope_stride, rope.index(1), 0)
        gather(key, slot1, key_stride, left.index(1), 0)
        async_copy.mbarrier_arrive(bars.index(LEFT + 1), increment_count=False)
        mbarrier.wait(bars.index(RIGHT_FREE + 1), phase)
        gather(key, slot1, key_stride, right.index(1), 256)
        async_copy.mbarrier_arrive(bars.index(RIGHT + 1), increment_count=False)
        # the places of the step before are free, since both consumers let go of its tiles
        slot = slots(index, entry, kv_len, request, start, of, C.SPARSE_BLOCK, LAYOUT)
        places.index((t + 1) & 1).store(slot)
        arrive(bars, PLACED + ((t + 1) & 1))
        phase = phase ^ 1
    async_copy.wait_group(0)


@gluon.jit(do_not_specialize=[*rows.NUMBERS, "entries", "per_split", "items"])
def _attend(
    q,
    q_rope,
    key,
    key_rope,
    indices,
    seqlens_q,
    seqlens_k,
    table,
    sinks,
    results,
    softmax_max,
    softmax_sum,
    scale_log2,
    entries,
    per_split,
    tokens,
    requests,
    max_kv_len,
    table_stride,
    pages,
    strides,
    items,
    LAYOUT: gl.constexpr,
    C: gl.constexpr,
):
    of = rows.Requests(
        seqlens_q, seqlens_k, table, tokens, requests, max_kv_len, table_stride, pages
    )
    to = Output(results, softmax_max, softmax_sum, sinks)
    tiles = tiles_of(key.dtype.element_ty, C.ROPE, [2, 128], 128, 128, 128)
    gl.warp_specialize(
        [
            (consumer, (tiles, per_split, items, scale_log2, to, C, 0)),
            (consumer, (tiles, per_split, items, scale_log2, to, C, 1)),
            (
                _producer,
                (
                    q,
                    q_rope,
                    key,
                    key_rope,
                    indices,
                    of,
                    entries,
                    per_split,
                    strides,
                    items,
                    tiles,
                    LAYOUT,
                    C,
                ),
            ),
        ],
        [4, 4],
        [208, 96],
    )


def supports(call: Attention) -> bool:
    """Rows of whole 16-byte pieces, too; keys are evenly spaced and hold the values."""
    return fits(call, 64, 0) and not any(step % 16 for step in strides(call)[:-1])


def launch(call: Attention) -> None:
    run(_attend, call, strides(call))
