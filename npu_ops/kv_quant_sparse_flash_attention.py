# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Attention over selected int8 rows of 656 bytes: the kernels of sparse_flash_attention.py, but for
the copies, which make of values and scales what they stand for.

    gather    vector cores   the selected rows -> dense [T, K, 512] and [T, K, 64], rounded once
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ..dispatch.common import quantised
from . import cores, entry, ragged, sparse_flash_attention, tune


@entry.jit(do_not_specialize=["first", "rows", "wide", "stride", "rope_stride", "scale_stride"])
def gather(
    latent, rotary, scales, slots, last, dense_latent, dense_rotary,
    first, rows, wide, stride, rope_stride, scale_stride,
    TILES: tl.constexpr, SIZE: tl.constexpr, ROTARY: tl.constexpr, ROWS: tl.constexpr,
    KEY_TILE: tl.constexpr,
):  # fmt: skip
    LATENT: tl.constexpr = TILES * SIZE
    r = tl.arange(0, ROWS)
    d = tl.arange(0, LATENT)
    t = tl.arange(0, TILES)
    e = tl.arange(0, ROTARY)
    dtype = dense_latent.dtype.element_ty
    pieces = wide // ROWS
    for work in range(tl.program_id(0), rows * pieces, tl.num_programs(0)):
        row = work // pieces
        piece = work % pieces * ROWS
        end = tl.load(last + first + row)
        # a key tile is read as a whole
        if piece < (end + KEY_TILE - 1) // KEY_TILE * KEY_TILE:
            slot = tl.load(slots + (first + row).to(tl.int64) * wide + piece + r)
            top = tl.max(slot, 0)
            to = (row.to(tl.int64) * wide + piece + r)[:, None]
            if top >= 0:
                # a mask would not stop the read of an absent row, and 0 * NaN is NaN
                there = tl.where(slot >= 0, slot, top).to(tl.int64)[:, None]
                x = tl.load(latent + there * stride + d[None]).to(tl.float32)
                by = tl.load(scales + there * scale_stride + t[None])
                x = x.reshape(ROWS, TILES, SIZE) * by[:, :, None]
                tl.store(dense_latent + to * LATENT + d[None], x.reshape(ROWS, LATENT).to(dtype))
                tail = tl.load(rotary + there * rope_stride + e[None])
                tl.store(dense_rotary + to * ROTARY + e[None], tail)
            else:
                tl.store(dense_latent + to * LATENT + d[None], tl.zeros((ROWS, LATENT), dtype))
                tl.store(dense_rotary + to * ROTARY + e[None], tl.zeros((ROWS, ROTARY), dtype))


def unsupported(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor | None,
    sparse_indices: Tensor,
    sparse_block_size: int,
    key_dtype: int | None,
    **_: Any,
) -> str | None:
    if quantised.typed(key, key_dtype).dtype is not torch.int8:
        return "rows of fp8: the cube and vector units of A2 and A3 have int8 and no fp8"
    if key.ndim == 4 and key.shape[0] > 1 and key.stride(0) % max(key.stride(1), 1):
        return f"`key` has pages {key.stride(0)} bytes apart, not a multiple of its row stride"
    return sparse_flash_attention.unsupported(
        query.narrow(-1, 0, quantised.LATENT), key, value,
        query.narrow(-1, quantised.LATENT, quantised.ROTARY), None, block_table, sparse_indices,
        sparse_block_size,
    )  # fmt: skip


def forward(**arguments: Any) -> Tensor:
    return attended(**arguments)[0]


def attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    scale_value: float,
    block_table: Tensor | None,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_kv: Tensor | None,
    sparse_block_size: int,
    layout_query: str,
    layout_kv: str,
    sparse_mode: int,
    sinks: Tensor | None,
    row_layout: str,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, softmax_max, softmax_sum)"""
    parts = quantised.row_parts(key, row_layout, torch.int8, query.dtype)
    plan = ragged.plan(
        query, key, actual_seq_lengths_query, actual_seq_lengths_kv, block_table,
        layout_query, layout_kv, sparse_mode,
    )  # fmt: skip
    strides = [ragged.row_stride(part) for part in parts]
    copies = tune.only("kv_quant_sparse_flash_attention.gather")

    def copy(
        slots: Tensor, last: Tensor, dense_latent: Tensor, dense_rotary: Tensor, first: int,
        rows: int, key_tile: int,
    ) -> None:  # fmt: skip
        wide = slots.shape[1]
        gather[(min(rows * wide // copies.tiles["ROWS"], cores.vector()),)](
            *parts, slots, last, dense_latent, dense_rotary, first, rows, wide, *strides,
            TILES=quantised.LATENT // quantised.TILE, SIZE=quantised.TILE,
            ROTARY=quantised.ROTARY, KEY_TILE=key_tile, **copies.keywords,
        )  # fmt: skip

    return sparse_flash_attention.attended(
        query.narrow(-1, 0, quantised.LATENT),
        query.narrow(-1, quantised.LATENT, quantised.ROTARY), key, quantised.ROTARY,
        sparse_indices, scale_value, sparse_block_size, sinks, plan, copy,
    )  # fmt: skip
