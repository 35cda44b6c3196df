# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The attention of kv_quant_sparse_flash_attention.py on a Hopper GPU: latents.py with keys made of
8 bits, so that scales which are powers of two give the bits of the op on floats.

The gathering warps hold a half tile's values in registers, 64 columns of its keys at a time, and
write what they stand for where the consumers look; the place of each piece is taken by one of the
half that is next, whose way takes a quarter of a step or more.  Rotary parts are copied.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ....dispatch.common import quantized
from ...common import quantize, rows
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
    item,
    run,
    tiles_of,
)

# 4 words a thread of 64 keys x 16 words, each of 4 values
PIECE = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
ROW = gl.constexpr(gl.SliceLayout(1, PIECE))
E4M3 = gl.constexpr("""{
    .reg .b16 low, high, x, y;
    .reg .b32 pair;
    mov.b32 {low, high}, $4;
    cvt.rn.f16x2.e4m3x2 pair, low;
    mov.b32 {x, y}, pair;
    cvt.f32.f16 $0, x;
    cvt.f32.f16 $1, y;
    cvt.rn.f16x2.e4m3x2 pair, high;
    mov.b32 {x, y}, pair;
    cvt.f32.f16 $2, x;
    cvt.f32.f16 $3, y;
}""")
INT8 = gl.constexpr("""{
    .reg .b32 byte;
    bfe.s32 byte, $4, 0, 8;
    cvt.rn.f32.s32 $0, byte;
    bfe.s32 byte, $4, 8, 8;
    cvt.rn.f32.s32 $1, byte;
    bfe.s32 byte, $4, 16, 8;
    cvt.rn.f32.s32 $2, byte;
    bfe.s32 byte, $4, 24, 8;
    cvt.rn.f32.s32 $3, byte;
}""")


FETCH = gl.constexpr(f"""{{
    .reg .pred there;
    setp.ge.s32 there, $2, 0;
    @there cp.async.bulk.prefetch.L2.global [$1], {quantized.ROW};
    mov.b32 $0, 0;
}}""")


@gluon.jit
def _ask(key, slot, pieces, WORD: gl.constexpr):
    """16 words of the rows `slot`, which are `pieces` x 16 bytes apart; zeros where absent."""
    d = WORD + gl.arange(0, 16, layout=gl.SliceLayout(0, PIECE))
    at = (key + gl.maximum(slot, 0).to(gl.int64) * pieces * 4)[:, None] + d[None, :]
    return gl.load(at, mask=(slot >= 0)[:, None], other=0)


@gluon.jit
def _ask_scale(scales, slot, stride, PART: gl.constexpr):
    at = scales + gl.maximum(slot, 0).to(gl.int64) * stride + PART
    return gl.load(at, mask=slot >= 0, other=0.0)


@gluon.jit
def _put(words, scale, half, PART: gl.constexpr, KIND: gl.constexpr):
    """The 64 columns that they stand for: the product in float32, rounded once."""
    # as words they take a register for four values, on their way from one step to the next too
    a, b, c, d = gl.inline_asm_elementwise(
        INT8 if KIND == quantize.INT8 else E4M3,
        "=f,=f,=f,=f,r",
        [words],
        (gl.float32, gl.float32, gl.float32, gl.float32),
        True,
        1,
    )
    by = scale[:, None]
    wide = gl.join(gl.join(a * by, c * by), gl.join(b * by, d * by))
    to = half.slice(PART * 64, 64, dim=1)
    values = gl.reshape(wide.to(half.dtype), [64, 64])
    to.store(values)


@gluon.jit
def _turn(
    x,
    y,
    z,
    w,
    by_xy,
    by_zw,
    half,
    key,
    scales,
    slot,
    key_stride,
    scale_stride,
    NEXT: gl.constexpr,
    KIND: gl.constexpr,
):
    """Put four pieces into a half tile, each of which makes room for one of the half that is next,
    the left one (0) or the right one (1) of the rows `slot`."""
    _put(x, by_xy, half, 0, KIND)
    x = _ask(key, slot, key_stride, NEXT * 64)
    _put(y, by_xy, half, 1, KIND)
    y = _ask(key, slot, key_stride, NEXT * 64 + 16)
    by_xy = _ask_scale(scales, slot, scale_stride, NEXT * 2)
    _put(z, by_zw, half, 2, KIND)
    z = _ask(key, slot, key_stride, NEXT * 64 + 32)
    _put(w, by_zw, half, 3, KIND)
    w = _ask(key, slot, key_stride, NEXT * 64 + 48)
    by_zw = _ask_scale(scales, slot, scale_stride, NEXT * 2 + 1)
    return x, y, z, w, by_xy, by_zw


@gluon.jit
def _fetch(key, slot, pieces):
    """Rows `slot`, one a thread, into L2: what registers hold on its way is too little for the time
    that memory takes."""
    at = key + gl.maximum(slot, 0).to(gl.int64) * pieces * 4
    gl.inline_asm_elementwise(
        FETCH, "=r,l,r", [at.to(gl.int64, bitcast=True), slot], gl.int32, False, 1
    )


@gluon.jit
def _copy_rope(key_rope, places, pieces, rope, bar, TILE: gl.constexpr):
    """The rotary parts of a tile, whose rows are `pieces` x 16 bytes apart; `bar` hears of it."""
    slot = places.slice(64 * TILE, 64).load(gl.SliceLayout(1, GATHER))
    r = gl.arange(0, 64, layout=gl.SliceLayout(0, GATHER))
    at = (key_rope + gl.maximum(slot, 0).to(gl.int64) * pieces * 8)[:, None] + r[None, :]
    cp_async(rope.index(TILE), at, mask=(slot >= 0)[:, None])
    async_copy.mbarrier_arrive(bar, increment_count=False)


@gluon.jit
def _producer(
    q,
    q_rope,
    key,
    key_rope,
    indices,
    key_scale,
    of,
    entries,
    per_split,
    strides,
    items,
    tiles,
    LAYOUT: gl.constexpr,
    C: gl.constexpr,
    KIND: gl.constexpr,
):
    q_row, q_head, qr_row, qr_head, key_stride, rope_stride, scale_stride, index_stride = strides
    q_left, q_right, qr, left, right, rope, _exchange, places, bars = tiles
    column = gl.arange(0, 128, layout=LINE)
    count = per_split // 128
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
    slot0 = places.index(0).slice(0, 64).load(ROW)
    x = _ask(key, slot0, key_stride, 0)
    y = _ask(key, slot0, key_stride, 16)
    z = _ask(key, slot0, key_stride, 32)
    w = _ask(key, slot0, key_stride, 48)
    by_xy = _ask_scale(key_scale, slot0, scale_stride, 0)
    by_zw = _ask_scale(key_scale, slot0, scale_stride, 1)
    line = gl.arange(0, 64, layout=gl.SliceLayout(1, GATHER))
    d = gl.arange(0, 256, layout=gl.SliceLayout(0, GATHER))
    r = gl.arange(0, 64, layout=gl.SliceLayout(0, GATHER))
    step = 0
    phase = 1
    query_phase = 1
    total = (items - this + programs - 1) // programs * count
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
        if step == count:
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
        after = places.index((t + 1) & 1)
        slot1 = now.slice(64, 64).load(ROW)
        mbarrier.wait(bars.index(LEFT_FREE), phase)
        x, y, z, w, by_xy, by_zw = _turn(
            x,
            y,
            z,
            w,
            by_xy,
            by_zw,
            left.index(0),
            key,
            key_scale,
            slot0,
            key_stride,
            scale_stride,
            1,
            KIND,
        )
        arrive(bars, LEFT)
        mbarrier.wait(bars.index(RIGHT_FREE), phase)  # the odd consumer has read the weights too
        if C.ROPE > 0:
            _copy_rope(key_rope, now, rope_stride, rope, bars.index(RIGHT), 0)
        slot = slots(index, entry, kv_len, request, start, of, C.SPARSE_BLOCK, LAYOUT)
        x, y, z, w, by_xy, by_zw = _turn(
            x,
            y,
            z,
            w,
            by_xy,
            by_zw,
            right.index(0),
            key,
            key_scale,
            slot1,
            key_stride,
            scale_stride,
            0,
            KIND,
        )
        arrive(bars, RIGHT)
        # the places of the step before are free, since both consumers let go of its first tile
        after.store(slot)
        _fetch(key, slot, key_stride)
        arrive(bars, PLACED + ((t + 1) & 1))
        mbarrier.wait(bars.index(LEFT_FREE + 1), phase)
        if C.ROPE > 0:
            _copy_rope(key_rope, now, rope_stride, rope, bars.index(RIGHT + 1), 1)
        x, y, z, w, by_xy, by_zw = _turn(
            x,
            y,
            z,
            w,
            by_xy,
            by_zw,
            left.index(1),
            key,
            key_scale,
            slot1,
            key_stride,
            scale_stride,
            1,
            KIND,
        )
        arrive(bars, LEFT + 1)
        slot0 = after.slice(0, 64).load(ROW)
        mbarrier.wait(bars.index(RIGHT_FREE + 1), phase)
        x, y, z, w, by_xy, by_zw = _turn(
            x,
            y,
            z,
            w,
            by_xy,
            by_zw,
            right.index(1),
            key,
            key_scale,
            slot0,
            key_stride,
            scale_stride,
            0,
            KIND,
        )
        arrive(bars, RIGHT + 1)
        phase = phase ^ 1
    async_copy.wait_group(0)


@gluon.jit(do_not_specialize=[*rows.NUMBERS, "entries", "per_split", "items"])
def _attend(
    q,
    q_rope,
    key,
    key_rope,
    indices,
    key_scale,
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
    KIND: gl.constexpr,
):
    of = rows.Requests(
        seqlens_q, seqlens_k, table, tokens, requests, max_kv_len, table_stride, pages
    )
    to = Output(results, softmax_max, softmax_sum, sinks)
    # the right halves: the rotary copies of 128 threads beside them
    RIGHTS: gl.constexpr = 129 if C.ROPE > 0 else 1
    tiles = tiles_of(q.dtype.element_ty, C.ROPE, [2, 128], 1, RIGHTS, 128)
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
                    key_scale,
                    of,
                    entries,
                    per_split,
                    strides,
                    items,
                    tiles,
                    LAYOUT,
                    C,
                    KIND,
                ),
            ),
        ],
        [4, 4],
        [208, 96],
    )


def supports(call: Attention) -> bool:
    """Rows of whole 16-byte pieces, too; keys are evenly spaced and hold the values."""
    return (
        fits(call, 64, 0)
        and call.key.dtype in (torch.float8_e4m3fn, torch.int8)
        and not any(step % 16 for step in call.query_strides)
        and call.key.stride(-3) % 16 == 0
        and call.kr.stride(-3) % 8 == 0
    )


def launch(call: Attention, key_scale: Tensor, kind: int) -> None:
    # keys and ropes in steps of 16 bytes
    strides = (
        *call.query_strides,
        call.key.stride(-3) // 16,
        call.kr.stride(-3) // 8,
        key_scale.stride(-3),
        call.index.stride(0),
    )
    words = replace(call, key=quantized.seen_as(call.key, torch.int32))
    run(_attend, words, strides, key_scale=key_scale, KIND=kind)
