# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Attention over window rows and compressed entries, which are keys and values at once.

    z[h, j] = scale q[h] . k[j]    out[h] = sum_j exp(z[h, j]) k[j] / (exp(lse[h]) + exp(sink[h]))

The keys of a query row are its window rows, and behind them its entries: all that are closed, those
that its indices name, or the slots that they name (common/sharedkv.py).  One walk over both, tile
by tile, with tiles that hold keys of one kind alone.  What is absent is not read.

    condition                                         kernels
    Hopper, D 512, floats, steps from key to key of   hopper/sparse_attn_sharedkv.py
      16 elements, scale above 0
    Hopper, rows of 584 bytes, scale above 0          hopper/kv_quant_sparse_attn_sharedkv.py
    either, a row or two                              hopper/sparse_attn_sharedkv_decode.py
    else                                              _attend

Few rows: the keys are split over programs, whose parts common/combine.py puts together.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory, quantized
from ...dispatch.common.sharedkv import scale_of
from ..common import gpu, quantize, sharedkv, softmax
from ..common.combine import Parts, combine, is_chained
from ..common.log2 import LOG2E
from ..common.tiling import cdiv, power_of_two
from ..runtime import launches
from ..sparse_attention import sparse_flash_attention
from ..sparse_attention.sparse_flash_attention import LOWEST
from .hopper import kv_quant_sparse_attn_sharedkv as kv_quantized
from .hopper import sparse_attn_sharedkv as hopper
from .hopper import sparse_attn_sharedkv_decode as decode

# from row to row of a page of 8 bits, in rotary channels and in scales: views of no page have none
ROTARY_ROW = tl.constexpr(quantized.V4_DATA // 2)
SCALE_ROW = tl.constexpr(quantized.V4_SCALES)

Rows = tuple[Any, Tensor | None, Tensor | None]
Pair = tuple[Tensor, Tensor]


class Constants(NamedTuple):
    """KIND says what the first NOPE channels of a row are; those of 8 bits have scales, and the
    other channels lie apart."""

    HEADS: int
    D: int
    NOPE: int
    KIND: int
    HAS_SINK: bool
    STATS: bool
    SPLITS: int
    BLOCK_H: int
    BLOCK_N: int
    BLOCK_D: int
    PLACE: int
    STAGES: int
    BRANCH: bool
    CHAINED: bool


@triton.jit
def _scaled(
    values,
    rotary,
    scales,
    row,
    rotary_row,
    scale_row,
    valid,
    d,
    some,
    dtype: tl.constexpr,
    C: tl.constexpr,
):
    """[keys, D] of what rows of 8 bits stand for: 64 values to a scale, the product in float32
    rounded once, then channels of bfloat16."""
    nope = (d < C.NOPE)[None, :]
    there = valid[:, None]
    x = tl.load(values + row[:, None] + d[None, :], mask=there & nope, other=0.0)
    at = scales + scale_row[:, None] + (d // 64)[None, :]
    exponent = tl.load(at, mask=there & nope, other=0)
    at = rotary + rotary_row[:, None] + (d - C.NOPE)[None, :]
    turned = tl.load(at, mask=there & (d >= C.NOPE)[None, :] & (d < C.D)[None, :], other=0.0)
    # in a branch the product does not see that these were 8 bits, for which it takes the numbers of
    # a row in another order: not the bits of the op on floats
    out = tl.full([valid.shape[0], C.BLOCK_D], 0.0, dtype)
    if C.BRANCH or some > 0:
        scale = (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        wide = quantize.to_float16(x, C.KIND).to(tl.float32) * scale
        out = tl.where(nope, wide, turned.to(tl.float32)).to(dtype)
    return out


@triton.jit(do_not_specialize=["ori_pages", "cmp_pages", "ori_size", "cmp_size"])
def _attend(
    q,
    ori,
    cmp,
    ori_rotary,
    cmp_rotary,
    ori_scales,
    cmp_scales,
    names,
    notes,
    slots,
    sinks,
    results,
    lse,
    scale_log2,
    ori_pages,
    cmp_pages,
    ori_size,
    cmp_size,
    q_steps,
    name_steps,
    key_steps,
    P: tl.constexpr,
    C: tl.constexpr,
):
    (
        ori_o,
        ori_i,
        cmp_o,
        cmp_i,
        ori_rotary_o,
        cmp_rotary_o,
        ori_scale_o,
        cmp_scale_o,
        slot_row,
    ) = key_steps
    HEAD_TILES: tl.constexpr = (C.HEADS + C.BLOCK_H - 1) // C.BLOCK_H
    program = tl.program_id(0)
    split = program // HEAD_TILES % C.SPLITS
    row = (program // (HEAD_TILES * C.SPLITS)).to(tl.int64)
    note = sharedkv.noted(notes, row)
    pages, sizes = (ori_pages, cmp_pages), (ori_size, cmp_size)
    named = sharedkv.Named(names, name_steps, row, pages, sizes)
    near, total = sharedkv.tiles_of(note, P, C.BLOCK_N)
    each = (total + C.SPLITS - 1) // C.SPLITS
    lo = split * each
    hi = tl.minimum(lo + each, total)
    # where the keys lie is found first, so that the loop over keys reads one number before each;
    # programs of other heads of the row write the same numbers
    slots += row * slot_row
    for n in tl.range(lo * C.BLOCK_N, hi * C.BLOCK_N, C.PLACE, num_stages=1):
        entry = n + tl.arange(0, C.PLACE)
        slot = sharedkv.slots_of(entry, near * C.BLOCK_N, note, named, P)
        tl.store(slots + entry, slot, mask=entry < hi * C.BLOCK_N)
    tl.debug_barrier()
    head = (program % HEAD_TILES * C.BLOCK_H + tl.arange(0, C.BLOCK_H)).to(tl.int64)
    head_mask = head < C.HEADS
    d = tl.arange(0, C.BLOCK_D)
    q_rows = q + row * q_steps[0] + (head * q_steps[1])[:, None] + d[None, :]
    q_tile = tl.load(q_rows, mask=head_mask[:, None] & (d < C.D)[None, :], other=0.0)
    heads = (row, split, head, head_mask)
    row_max = tl.full([C.BLOCK_H], LOWEST, tl.float32)
    row_sum = tl.full([C.BLOCK_H], 0.0, tl.float32)
    acc = tl.full([C.BLOCK_H, C.BLOCK_D], 0.0, tl.float32)
    for tile in tl.range(lo, hi, num_stages=C.STAGES):
        slot = tl.load(slots + tile * C.BLOCK_N + tl.arange(0, C.BLOCK_N))
        valid = slot >= 0
        keys = ori
        rotary = ori_rotary
        scales = ori_scales
        size = ori_size
        key_o = ori_o
        key_i = ori_i
        rotary_o = ori_rotary_o
        scale_o = ori_scale_o
        if P.ENTRIES:
            is_near = tile < near
            keys = tl.where(is_near, ori, cmp)
            size = tl.where(is_near, ori_size, cmp_size)
            key_o = tl.where(is_near, ori_o, cmp_o)
            key_i = tl.where(is_near, ori_i, cmp_i)
            if C.KIND != quantize.PLAIN:
                rotary = tl.where(is_near, ori_rotary, cmp_rotary)
                rotary_o = tl.where(is_near, ori_rotary_o, cmp_rotary_o)
                scales = tl.where(is_near, ori_scales, cmp_scales)
                scale_o = tl.where(is_near, ori_scale_o, cmp_scale_o)
        outer = (slot // size).to(tl.int64)
        inner = (slot % size).to(tl.int64)
        if C.KIND == quantize.PLAIN:
            k_rows = keys + (outer * key_o + inner * key_i)[:, None] + d[None, :]
            k_tile = tl.load(k_rows, mask=valid[:, None] & (d < C.D)[None, :], other=0.0)
        else:
            k_tile = _scaled(
                keys,
                rotary,
                scales,
                outer * key_o + inner * key_i,
                outer * rotary_o + inner * ROTARY_ROW,
                outer * scale_o + inner * SCALE_ROW,
                valid,
                d,
                ori_pages + cmp_pages,
                q_tile.dtype,
                C,
            )
        p = tl.broadcast_to(row_max[:, None], [C.BLOCK_H, C.BLOCK_N]).to(k_tile.dtype)
        alpha = row_max
        # in a branch the product for the scores is not seen to feed the next one, for which each of
        # two warpgroups would compute all of it
        if not C.BRANCH or tile < hi:
            s = tl.dot(q_tile, k_tile.T, input_precision="ieee") * scale_log2
            s = tl.where(valid[None, :], s, float("-inf"))
            weight, alpha, row_sum, row_max = softmax.step(s, row_max, row_sum)
            p = weight.to(k_tile.dtype)
        acc = tl.dot(p, k_tile, acc * alpha[:, None], input_precision="ieee")
    softmax.store(acc, row_max, row_sum, heads, sinks, results, lse, d, C.D, C)


def unsupported(q: Tensor, ori_kv: Tensor, cmp_kv: Tensor | None, **arguments: Any) -> str | None:
    if q.is_cuda and q.dtype not in (torch.float16, torch.bfloat16):
        return f"q is {q.dtype}, supported float16 and bfloat16"
    if q.shape[-1] > 512:
        return f"head_dim={q.shape[-1]}, supported up to 512"
    if _tiles(q, 1, ori_kv.itemsize) is None:
        return gpu.too_small(q.device, N=q.shape[-2], D=q.shape[-1])
    return sharedkv.too_many(ori_kv, cmp_kv, arguments)


def _tiles(q: Tensor, most: int, itemsize: int) -> sparse_flash_attention.Tiles | None:
    """Those of the selection of as many keys."""
    heads, size = q.shape[-2:]
    count = q.shape[:-2].numel()
    # a tile of keys and what is made of it lie beside the queries: of heads x keys of 512,
    # 64 x 64 take 192 KiB, 16 x 64 take 112
    limit = gpu.shared_memory(q.device)
    tile = sparse_flash_attention.tiles(
        count, heads, most, size, 0, False, itemsize, q.device, 64 if limit >= 192 * 1024 else 32
    )
    if tile is None:
        return None
    if itemsize > 1 and tile.heads == 16 and tile.splits > 1 and limit >= 160 * 1024:
        # so few rows that a program has one tile: one row on an H200, 2026-11, of 64 heads and 640
        # keys 11.6 us instead of 12.6, of 128 heads and 1152 keys 13.5 instead of 19.7
        programs = count * cdiv(heads, 16)
        for keys in (32, 128):
            if programs * cdiv(most, keys) <= gpu.num_sms(q.device):
                return replace(tile, keys=keys, stages=2, splits=power_of_two(cdiv(most, keys)))
    if limit >= 112 * 1024:
        return tile
    return replace(tile, keys=min(tile.keys, 32))


def forward(q: Tensor, ori_kv: Tensor, cmp_kv: Tensor | None, **arguments: Any) -> Pair:
    floats = (ori_kv, None, None), (cmp_kv, None, None)
    return attend(q, *floats, ori_kv=ori_kv, cmp_kv=cmp_kv, **arguments)


def attend(
    q: Tensor,
    ori: Rows,
    cmp: Rows,
    *,
    sinks: Tensor | None,
    softmax_scale: float | None,
    return_softmax_lse: bool,
    **arguments: Any,
) -> Pair:
    """(out, lse) over rows (values, rotary channels, scales): floats alone, or of 8 bits."""
    heads, size = q.shape[-2:]
    device, kind, nope = q.device, quantize.PLAIN.value, size
    values, cmp_values = ori[0], cmp[0]
    if ori[2] is not None:
        nope = values.shape[-1]
        values, kind = quantize.to_read(values)
        cmp_values = None if cmp_values is None else quantize.to_read(cmp_values)[0]
    out = memory.empty(q.shape, q.dtype, device)
    shape = (*q.shape[:-3], 1, *q.shape[-3:-1]) if return_softmax_lse else (0,)
    lse = memory.empty(shape, torch.float32, device)
    if out.numel() == 0:
        return out, lse
    keys = sharedkv.keys(q, **arguments)
    flat = q.reshape(keys.count, heads, size)
    scale_log2 = scale_of(softmax_scale, size) * LOG2E.value
    rows = (arguments["ori_kv"], arguments["cmp_kv"]) if kind else (values, cmp_values)
    call = sharedkv.Attention(flat, *rows, keys, sinks, out, lse, scale_log2)
    kernel = kv_quantized if kind else hopper
    if kernel.supports(call):
        (decode if decode.supports(keys, heads, device) else kernel).launch(call)
        return out, lse
    tile = _tiles(q, keys.near + keys.far, values.itemsize)
    assert tile is not None
    parts = Parts.of(tile.splits, keys.count * heads, size, lse)
    width = (cdiv(keys.near, tile.keys) + cdiv(keys.far, tile.keys)) * tile.keys
    slots = memory.empty((keys.count, width), torch.int32, device)
    launches.kernel(_attend, keys.count * tile.splits * cdiv(heads, tile.heads))(
        flat,
        values,
        cmp_values,
        ori[1],
        cmp[1],
        ori[2],
        cmp[2],
        slots=slots,
        sinks=sinks,
        results=parts.results(out),
        lse=lse,
        scale_log2=scale_log2,
        notes=sharedkv.note(keys, device),
        **keys.arguments,
        q_steps=flat.stride()[:2],
        name_steps=keys.strides,
        key_steps=(
            *sharedkv.steps(values),
            *sharedkv.steps(cmp_values),
            *(sharedkv.steps(part)[0] for part in (ori[1], cmp[1], ori[2], cmp[2])),
            slots.stride(0),
        ),
        P=keys.places,
        C=Constants(
            HEADS=heads,
            D=size,
            NOPE=nope,
            KIND=kind,
            HAS_SINK=sinks is not None,
            STATS=return_softmax_lse,
            SPLITS=tile.splits,
            BLOCK_H=tile.heads,
            BLOCK_N=tile.keys,
            BLOCK_D=tile.left,
            PLACE=min(1024, power_of_two(cdiv(width, tile.splits) + tile.keys)),
            STAGES=tile.stages,
            BRANCH=tile.heads == 64 and gpu.reads_shared(device),
            CHAINED=is_chained(device, tile.splits),
        ),
        num_warps=tile.warps,
    )
    if tile.splits > 1:
        combine(parts, sinks, out, lse, None)
    return out, lse
