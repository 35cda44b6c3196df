# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Latent attention over the keys that an index names, one key head shared by all query heads.

    s[h, j] = scale * (q[h] . key[p_j] + q_rope[h] . key_rope[p_j])     p_j = j-th selected position
    out[h]  = sum_j exp(s[h, j] - m[h]) value[p_j] / (l[h] + exp(sink[h] - m[h]))

m is the largest score of a head and l the sum of its exponentials; they are the softmax_max and
softmax_sum outputs, sinks left out.  A position that is negative, not among the keys that the row
sees, or on a page that the table does not name is absent: nothing is read for it.  A row without
any key gives zeros, m = -inf and l = 0.

query [B, S, N, R], query_rope [B, S, N, D], key and value [.., 1, R], key_rope [.., 1, D],
sparse_indices [B, S, 1, K]; without the ropes R is the whole width of a key.

    condition                                         kernels
    Hopper, R 512, rope 64 or none, values in keys    hopper/sparse_flash_attention_decode.py
      that are evenly spaced, whole 16 bytes;
      scale above 0; 1 to 4 rows
    the same, more rows                               hopper/sparse_flash_attention.py
    the same in 8 bits with a rope, any rows          hopper/kv_quant_sparse_flash_attention.py
    else                                              _attend

Few rows: the selection is split over programs, whose parts common/combine.py puts together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import memory
from ...dispatch.common import rope as rotary
from ...dispatch.ops.sparse_attention.sparse_flash_attention import Arguments, Selected
from ..common import gpu, quantize, rows, softmax
from ..common.combine import Parts, combine, is_chained
from ..common.log2 import LN2, LOG2E
from ..common.selection import Attention, selected, slot_of
from ..common.tiling import cdiv, power_of_two
from ..runtime import launches
from .hopper import kv_quant_sparse_flash_attention as kv_quantized
from .hopper import sparse_flash_attention as hopper
from .hopper import sparse_flash_attention_decode as decode

LOWEST = tl.constexpr(-1e30)  # below any score: keeps exp2(-inf - LOWEST) = 0 free of NaN


class Constants(NamedTuple):
    """KIND says what keys and values are; those of 8 bits have scales and come in one tile."""

    HEADS: int
    R: int
    D: int
    SPARSE_BLOCK: int
    KIND: int
    HAS_SINK: bool
    STATS: bool
    UNIFORM_STRIDE: bool
    SHARED: bool
    SPLITS: int
    BLOCK_H: int
    BLOCK_N: int
    LEFT: int
    RIGHT: int
    BLOCK_D: int
    PLACE: int
    STAGES: int
    BRANCH: bool
    CHAINED: bool


@triton.jit
def _row(slot, o_stride, i_stride, max_kv_len, UNIFORM_STRIDE: tl.constexpr, LAYOUT: tl.constexpr):
    """Where the slots' rows begin in a key tensor."""
    if UNIFORM_STRIDE:
        row = slot.to(tl.int64) * i_stride
    else:
        size = LAYOUT.PAGE if LAYOUT.KEYS == rows.PAGED else max_kv_len
        row = (slot // size).to(tl.int64) * o_stride + (slot % size).to(tl.int64) * i_stride
    return row


@triton.jit
def _scaled(
    base,
    scales,
    slot,
    o_stride,
    i_stride,
    scale_o,
    scale_i,
    max_kv_len,
    dtype: tl.constexpr,
    LAYOUT: tl.constexpr,
    C: tl.constexpr,
):
    """[keys, R] that values of 8 bits stand for, 128 of them to a scale: the product in float32,
    rounded once."""
    tile = tl.arange(0, C.R // 128)
    valid = slot >= 0
    row = _row(slot, o_stride, i_stride, max_kv_len, C.UNIFORM_STRIDE, LAYOUT)
    at = base + row[:, None, None] + (tile * 128)[None, :, None]
    x = tl.load(at + tl.arange(0, 128)[None, None, :], mask=valid[:, None, None], other=0.0)
    row = _row(slot, scale_o, scale_i, max_kv_len, C.UNIFORM_STRIDE, LAYOUT)
    scale = tl.load(scales + row[:, None] + tile[None, :], mask=valid[:, None], other=0.0)
    # in a branch the product (of mma.sync; wgmma does not ask) does not see that these were 8 bits,
    # for which it takes the numbers of a row in another order: not the bits of the op on floats
    out = tl.full([slot.shape[0], C.R], 0.0, dtype)
    if C.BRANCH or max_kv_len > 0:
        wide = quantize.to_float16(x, C.KIND).to(tl.float32) * scale[:, :, None]
        out = tl.reshape(wide.to(dtype), [slot.shape[0], C.R])
    return out


@triton.jit
def _load(
    base,
    slot,
    d,
    o_stride,
    i_stride,
    max_kv_len,
    UNIFORM_STRIDE: tl.constexpr,
    LAYOUT: tl.constexpr,
    D: tl.constexpr,
    END: tl.constexpr,
):
    """[keys, columns d] of a key tensor; D is where its columns end, END where d does."""
    row = _row(slot, o_stride, i_stride, max_kv_len, UNIFORM_STRIDE, LAYOUT)
    at = base + row[:, None] + d[None, :]
    if D >= END:
        tile = tl.load(at, mask=(slot >= 0)[:, None], other=0.0)
    else:
        tile = tl.load(at, mask=(slot >= 0)[:, None] & (d < D)[None, :], other=0.0)
    return tile


@triton.jit(do_not_specialize=[*rows.NUMBERS, "entries", "per_split"])
def _attend(
    q,
    q_rope,
    key,
    key_rope,
    value,
    key_scale,
    value_scale,
    indices,
    slots,
    seqlens_q,
    seqlens_k,
    table,
    sinks,
    results,
    softmax_max,
    softmax_sum,
    scale_log2,
    tokens,
    requests,
    max_kv_len,
    table_stride,
    pages,
    entries,
    per_split,
    strides,
    LAYOUT: tl.constexpr,
    C: tl.constexpr,
):
    (
        q_row,
        q_head,
        qr_row,
        qr_head,
        key_o,
        key_i,
        rope_o,
        rope_i,
        value_o,
        value_i,
        key_scale_o,
        key_scale_i,
        value_scale_o,
        value_scale_i,
        index_stride,
        slot_stride,
    ) = strides
    of = rows.Requests(
        seqlens_q, seqlens_k, table, tokens, requests, max_kv_len, table_stride, pages
    )
    HEAD_TILES: tl.constexpr = (C.HEADS + C.BLOCK_H - 1) // C.BLOCK_H
    program = tl.program_id(0)
    split = program // HEAD_TILES % C.SPLITS
    row = (program // (HEAD_TILES * C.SPLITS)).to(tl.int64)
    request, start, kv_len = rows.locate(row, of, LAYOUT)
    # where the keys lie is found first, so that the loop over keys reads one number before each;
    # programs of other heads of the row write the same numbers
    index_row = indices + row * index_stride
    slots += row * slot_stride
    lo = split * per_split
    hi = tl.minimum(lo + per_split, entries)
    for n in tl.range(lo, hi, C.PLACE, num_stages=1):
        entry = n + tl.arange(0, C.PLACE)
        outer, inner, valid = selected(
            entry, hi, index_row, kv_len, request, start, of, C.SPARSE_BLOCK, LAYOUT
        )
        slot = slot_of(outer, inner, valid, max_kv_len, LAYOUT)
        tl.store(slots + entry, slot, mask=entry < lo + per_split)
    tl.debug_barrier()
    head = (program % HEAD_TILES * C.BLOCK_H + tl.arange(0, C.BLOCK_H)).to(tl.int64)
    head_mask = head < C.HEADS
    # the R columns come in one tile, or in two (the second from column LEFT on)
    d = tl.arange(0, C.LEFT)
    e = C.LEFT + tl.arange(0, C.RIGHT if C.RIGHT > 0 else 16)
    r = tl.arange(0, C.BLOCK_D)
    q_rows = row * q_row + (head * q_head)[:, None]
    q_tile = tl.load(
        q + q_rows + d[None, :], mask=head_mask[:, None] & (d < C.R)[None, :], other=0.0
    )
    if C.RIGHT > 0:
        q_tile2 = tl.load(
            q + q_rows + e[None, :], mask=head_mask[:, None] & (e < C.R)[None, :], other=0.0
        )
    if C.D > 0:
        at = q_rope + row * qr_row + (head * qr_head)[:, None] + r[None, :]
        qr_tile = tl.load(at, mask=head_mask[:, None] & (r < C.D)[None, :], other=0.0)
    heads = (row, split, head, head_mask)
    row_max = tl.full([C.BLOCK_H], LOWEST, tl.float32)
    row_sum = tl.full([C.BLOCK_H], 0.0, tl.float32)
    acc = tl.full([C.BLOCK_H, C.LEFT], 0.0, tl.float32)
    if C.RIGHT > 0:
        acc2 = tl.full([C.BLOCK_H, C.RIGHT], 0.0, tl.float32)
    for n in tl.range(lo, hi, C.BLOCK_N, num_stages=C.STAGES):
        slot = tl.load(slots + n + tl.arange(0, C.BLOCK_N))
        if C.KIND == quantize.PLAIN:
            k_tile = _load(
                key, slot, d, key_o, key_i, max_kv_len, C.UNIFORM_STRIDE, LAYOUT, C.R, C.LEFT
            )
        else:
            k_tile = _scaled(
                key,
                key_scale,
                slot,
                key_o,
                key_i,
                key_scale_o,
                key_scale_i,
                max_kv_len,
                q_tile.dtype,
                LAYOUT,
                C,
            )
        if C.RIGHT > 0:
            k_tile2 = _load(
                key,
                slot,
                e,
                key_o,
                key_i,
                max_kv_len,
                C.UNIFORM_STRIDE,
                LAYOUT,
                C.R,
                C.LEFT + C.RIGHT,
            )
        if C.D > 0:
            kr_tile = _load(
                key_rope,
                slot,
                r,
                rope_o,
                rope_i,
                max_kv_len,
                C.UNIFORM_STRIDE,
                LAYOUT,
                C.D,
                C.BLOCK_D,
            )
        p = tl.broadcast_to(row_max[:, None], [C.BLOCK_H, C.BLOCK_N]).to(k_tile.dtype)
        alpha = row_max
        # in a branch the product for the scores is not seen to feed the next one, for which each of
        # two warpgroups would compute all of it: 128 heads, 128 rows 255 us instead of 294
        if not C.BRANCH or n < hi:
            s = tl.dot(q_tile, k_tile.T, input_precision="ieee")
            if C.RIGHT > 0:
                s = tl.dot(q_tile2, k_tile2.T, s, input_precision="ieee")
            if C.BRANCH and C.D > 0:  # scaled first, or one product becomes the other's accumulator
                rope = tl.dot(qr_tile, kr_tile.T, input_precision="ieee") * scale_log2
                s = s * scale_log2 + rope
            else:
                if C.D > 0:
                    s = tl.dot(qr_tile, kr_tile.T, s, input_precision="ieee")
                s *= scale_log2
            s = tl.where((slot >= 0)[None, :], s, float("-inf"))
            weight, alpha, row_sum, row_max = softmax.step(s, row_max, row_sum)
            p = weight.to(k_tile.dtype)
        if not C.SHARED:
            if C.KIND == quantize.PLAIN:
                k_tile = _load(
                    value,
                    slot,
                    d,
                    value_o,
                    value_i,
                    max_kv_len,
                    C.UNIFORM_STRIDE,
                    LAYOUT,
                    C.R,
                    C.LEFT,
                )
            else:
                k_tile = _scaled(
                    value,
                    value_scale,
                    slot,
                    value_o,
                    value_i,
                    value_scale_o,
                    value_scale_i,
                    max_kv_len,
                    q_tile.dtype,
                    LAYOUT,
                    C,
                )
            if C.RIGHT > 0:
                k_tile2 = _load(
                    value,
                    slot,
                    e,
                    value_o,
                    value_i,
                    max_kv_len,
                    C.UNIFORM_STRIDE,
                    LAYOUT,
                    C.R,
                    C.LEFT + C.RIGHT,
                )
        acc = tl.dot(p, k_tile, acc * alpha[:, None], input_precision="ieee")
        if C.RIGHT > 0:
            acc2 = tl.dot(p, k_tile2, acc2 * alpha[:, None], input_precision="ieee")
    inverse, to, seen = softmax.finish(row_max, row_sum, heads, sinks, results, C.R, C)
    if C.SPLITS == 1 and C.STATS:
        piece = row * C.HEADS + head
        top = tl.where(seen, row_max * LN2, float("-inf"))
        tl.store(softmax_max + piece, top, mask=head_mask)
        tl.store(softmax_sum + piece, row_sum, mask=head_mask)
    o = (acc * inverse[:, None]).to(to.dtype.element_ty)
    tl.store(to[:, None] + d[None, :], o, mask=head_mask[:, None] & (d < C.R)[None, :])
    if C.RIGHT > 0:
        o = (acc2 * inverse[:, None]).to(to.dtype.element_ty)
        tl.store(to[:, None] + e[None, :], o, mask=head_mask[:, None] & (e < C.R)[None, :])


@dataclass(frozen=True)
class Tiles:
    """`right`: columns of the second of two column tiles, 0 where one tile holds them all."""

    heads: int
    keys: int
    warps: int
    stages: int
    left: int
    right: int = 0
    splits: int = 1


def shared_bytes(tile: Tiles, rope: int, wgmma: bool) -> int:
    """Of shared memory that a program takes, at most: its queries, one tile of keys (two where
    wgmma reads them, and the first half again where there are two), and the probabilities."""
    wide = tile.left + tile.right + (max(16, power_of_two(rope)) if rope else 0)
    held = 2 if wgmma and tile.heads == 64 else 1
    keys = tile.keys * (held * wide + (tile.left if tile.right else 0))
    return 2 * (tile.heads * wide + keys + tile.heads * tile.keys) + 1024


def tiles(
    count: int,
    heads: int,
    entries: int,
    rank: int,
    rope: int,
    apart: bool,
    itemsize: int,
    device: torch.device,
    largest: int = 64,
) -> Tiles | None:
    """For `count` query rows, the first of up to `largest` heads that fits into this GPU.  On an
    H200, 2026-11, plain kernels alone, bf16, R = 512, K = 2048, 128 heads: 128 rows took 255 us by
    64 heads x 64 keys, 470 by 32 x 32 and 508 by 16 x 64; 1 row 16 us by 16 x 64 in 16 splits."""
    left, right = max(16, power_of_two(rank)), 0
    if rank > 512:
        left, right = 512, max(16, power_of_two(rank - 512))
    # so few rows that every 32 keys have a program of their own: 16 heads, 1 row 8.6 us, not 11.4
    lone = count * cdiv(heads, 16) * cdiv(entries, 32) <= gpu.num_sms(device)
    tiers: list[Tiles] = []
    if not apart and rank <= 512:
        if heads >= 64 and count > 8:
            # tensor memory has no place for both products: 345 KB of shared memory instead
            if largest == 64 and not gpu.has_tensor_memory(device):
                tiers.append(Tiles(64, 64, 8, 2, left))
            tiers.append(Tiles(32, 32, 4, 2, left))
        # 64 keys of 8 bits are 255 registers and 8 KB of spills before they are multiplied
        few = lone or itemsize == 1
        tiers.append(Tiles(16, 32, 4, 2, left) if few else Tiles(16, 64, 4, 3, left))
    tiers += [Tiles(16, keys, 4, 1, left, right) for keys in (32, 16)]
    limit, wgmma = gpu.shared_memory(device), gpu.reads_shared(device)
    fitting = (t for t in tiers if shared_bytes(t, rope, wgmma) <= limit)
    tile = next(fitting, None)
    if tile is None:
        return None
    # programs for every processor, one of 64 heads or two, of at least 128 keys each unless alone
    least = 32 if lone else 128
    room = gpu.num_sms(device) * (1 if tile.heads == 64 else 2)
    items, splits = count * cdiv(heads, tile.heads), 1
    while 2 * splits * items <= room and 2 * splits * least <= entries:
        splits *= 2
    # 8 bits that are on their way lie beside what they stand for
    stages = tile.stages if itemsize > 1 or limit > 200 * 1024 else 1
    return replace(tile, splits=splits, stages=stages)


def _apart(key: Tensor, value: Tensor | None) -> bool:
    return value is not None and (
        value.data_ptr() != key.data_ptr() or value.stride() != key.stride()
    )


def unsupported(
    query: Tensor,
    key: Tensor,
    block_table: Tensor | None = None,
    sparse_indices: Tensor | None = None,
    sparse_block_size: int = 1,
    value: Tensor | None = None,
    query_rope: Tensor | None = None,
    **_: object,
) -> str | None:
    if query.is_cuda and query.dtype not in (torch.float16, torch.bfloat16):
        return f"query is {query.dtype}, supported float16 and bfloat16"
    if query.shape[-1] > 1024:
        return f"head_dim={query.shape[-1]}, supported up to 1024"
    entries = 0 if sparse_indices is None else sparse_indices.shape[-1] * sparse_block_size
    count, (heads, rank) = query.shape[:-2].numel(), query.shape[-2:]
    rope = 0 if query_rope is None else query_rope.shape[-1]
    fitting = tiles(
        count, heads, entries, rank, rope, _apart(key, value), key.itemsize, query.device
    )
    if fitting is None:
        return gpu.too_small(query.device, N=heads, D=rank, Dr=rope)
    return rows.too_many_positions(key, block_table, entries)


def forward(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = x["query"], x["key"], x["value"]
    rope = rotary.given(x["query_rope"], x["key_rope"])
    value = key if value is None else value
    return attend(
        x, query, key, value, x["sparse_indices"], *rope, None, None, x["return_softmax_lse"]
    )


def attend(
    x: Selected,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    return_softmax_lse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, softmax_max, softmax_sum) over keys and values that are floats, or of 8 bits with
    scales [.., 4]."""
    layout_kv, sparse_block_size = x["layout_kv"], x["sparse_block_size"]
    device = query.device
    kind = quantize.PLAIN.value
    if key_scale is not None:
        (key, kind), (value, _) = quantize.to_read(key), quantize.to_read(value)
    heads, rank = query.shape[-2], query.shape[-1]
    out = memory.empty(query.shape, query.dtype, device)
    plan = rows.plan(
        query,
        key,
        x["actual_seq_lengths_query"],
        x["actual_seq_lengths_kv"],
        x["block_table"],
        x["layout_query"],
        layout_kv,
        x["sparse_mode"],
    )
    shape: tuple[int, ...] = (0,)
    if return_softmax_lse:  # [B, 1, S, N] and [1, T, N]: both lie as [rows, N]
        shape = (*query.shape[:-3], 1, *query.shape[-3:-1])
    softmax_max = memory.empty(shape, torch.float32, device)
    softmax_sum = memory.empty(shape, torch.float32, device)
    if out.numel() == 0:
        return out, softmax_max, softmax_sum
    q = query.reshape(plan.rows, heads, rank)
    qr = q if query_rope is None else query_rope.reshape(plan.rows, heads, -1)
    kr = key if key_rope is None else key_rope
    index = sparse_indices.reshape(plan.rows, sparse_indices.shape[-1])
    call = Attention(
        q,
        qr,
        key,
        kr,
        index,
        x["sinks"],
        out,
        softmax_max,
        softmax_sum,
        plan,
        index.shape[1] * sparse_block_size,
        sparse_block_size,
        x["scale_value"] * LOG2E.value,
        0 if query_rope is None else query_rope.shape[-1],
    )
    uniform = all(_uniform_stride(each, layout_kv) for each in (key, kr, value))
    together = uniform and not _apart(key, value)
    if together and key_scale is None and decode.supports(call):
        decode.launch(call)
    elif together and key_scale is None and hopper.supports(call):
        hopper.launch(call)
    elif together and key_scale is not None and kv_quantized.supports(call):
        kv_quantized.launch(call, key_scale, kind)
    else:
        scales = key, value
        if key_scale is not None:
            assert value_scale is not None
            scales = key_scale, value_scale
        _plain(call, value, layout_kv, uniform, kind, *scales)
    return out, softmax_max, softmax_sum


def _plain(
    call: Attention,
    value: Tensor,
    layout_kv: str,
    uniform: bool,
    kind: int,
    key_scale: Tensor,
    value_scale: Tensor,
) -> None:
    """`kind` says whether keys and values are floats; then their scales are not read."""
    (count, heads, rank), device, entries = call.q.shape, call.q.device, call.entries
    apart = _apart(call.key, value)
    tile = tiles(count, heads, entries, rank, call.rope, apart, call.key.itemsize, device)
    assert tile is not None
    parts = Parts.of(tile.splits, count * heads, rank, call.softmax_max)
    per_split = cdiv(cdiv(entries, tile.splits), tile.keys) * tile.keys
    slots = memory.empty((count, tile.splits * per_split), torch.int32, device)
    of_keys = rows.strides(layout_kv, call.key, call.kr, value, key_scale, value_scale)
    launches.kernel(_attend, count * tile.splits * cdiv(heads, tile.heads))(
        call.q,
        call.qr,
        call.key,
        call.kr,
        value,
        key_scale,
        value_scale,
        call.index,
        slots,
        **call.arguments(parts, per_split),
        strides=(*call.query_strides, *of_keys, call.index.stride(0), slots.stride(0)),
        LAYOUT=call.plan.layout,
        C=Constants(
            HEADS=heads,
            R=rank,
            D=call.rope,
            SPARSE_BLOCK=call.span,
            KIND=kind,
            HAS_SINK=call.sinks is not None,
            STATS=call.softmax_max.numel() > 0,
            UNIFORM_STRIDE=uniform,
            SHARED=not apart,
            SPLITS=tile.splits,
            BLOCK_H=tile.heads,
            BLOCK_N=tile.keys,
            LEFT=tile.left,
            RIGHT=tile.right,
            BLOCK_D=max(16, power_of_two(call.rope)),
            PLACE=min(1024, triton.next_power_of_2(max(per_split, tile.keys))),
            STAGES=tile.stages,
            BRANCH=tile.heads == 64 and gpu.reads_shared(device),
            CHAINED=is_chained(device, tile.splits),
        ),
        num_warps=tile.warps,
    )
    if tile.splits > 1:
        combine(parts, call.sinks, call.out, call.softmax_max, call.softmax_sum)


def _uniform_stride(key: Tensor, layout: str) -> bool:
    """Whether all keys are the same distance apart, also across pages or requests."""
    outer, inner = rows.strides(layout, key)
    return layout == "TND" or outer == inner * key.shape[1]
