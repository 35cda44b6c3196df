# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Latents [T, 512], quantized by tiles of 128, and rotary keys [T, 64] to rows of 656 bytes, or
none to rows of 528; or
[T, 448] by tiles of 64, and rotary channels, to the pages of row_layout "v4".

A tile is a row of the kernel; in the first it takes a quarter of its token's rotary keys along, in
the second the rotary channels are the eighth.

    condition          kernels
    row_layout "v4"    _write_v4
    else               _write
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import quantized
from ...dispatch.ops.caches.latent_cache_write import Arguments
from ..common import gpu, handover, quantize
from ..runtime import launches

TILES = 8  # that a program takes: two tokens


class Constants(NamedTuple):
    KIND: int
    UE8M0: bool  # scales are powers of two
    ALPHA: bool  # `alpha` is given
    TILES: int  # of a program
    OF_ROW: int  # tiles of a row
    SIZE: int  # of a tile
    ROTARY: int  # rotary channels of a row


@triton.jit(do_not_specialize=["tiles", "page", "total"])
def _write(
    ckv,
    k_rope,
    values,
    rope,
    scales,
    slots,
    alpha,
    tiles,
    page,
    total,
    strides,
    C: tl.constexpr,
):
    ckv_row, rope_row, values_page, values_row, rope_page, rope_slot = strides[0:6]
    scales_page, scales_row = strides[6:8]
    at = tl.program_id(0).to(tl.int64) * C.TILES + tl.arange(0, C.TILES)
    token = at // C.OF_ROW
    tile = at % C.OF_ROW
    d = tile[:, None] * C.SIZE + tl.arange(0, C.SIZE)[None, :]
    slot = tl.load(slots + token, mask=at < tiles, other=-1).to(tl.int64)
    valid = (slot >= 0) & (slot < total)
    slot = tl.where(valid, slot, 0)
    outer = slot // page
    inner = slot % page
    x = tl.load(ckv + token[:, None] * ckv_row + d, mask=valid[:, None], other=0.0)
    fits = 1.0
    if C.ALPHA:
        fits = tl.load(alpha)
    x, scale = quantize.of_floats(x.to(tl.float32), fits, C.KIND, C.UE8M0)
    to = values + (outer * values_page + inner * values_row)[:, None] + d
    tl.store(to, x, mask=valid[:, None])
    tl.store(scales + outer * scales_page + inner * scales_row + tile, scale, mask=valid)
    if C.ROTARY > 0:
        r = tile[:, None] * (C.ROTARY // C.OF_ROW) + tl.arange(0, C.ROTARY // C.OF_ROW)[None, :]
        turned = tl.load(k_rope + token[:, None] * rope_row + r, mask=valid[:, None], other=0)
        to = rope + (outer * rope_page + inner * rope_slot)[:, None] + r
        tl.store(to, turned, mask=valid[:, None])


@triton.jit(do_not_specialize=["tiles", "page", "total"])
def _write_v4(
    ckv,
    k_rope,
    values,
    rope,
    scales,
    slots,
    tiles,
    page,
    total,
    ckv_row,
    rope_row,
    page_bytes,
    values_row,
    scales_row,
    TILES: tl.constexpr,
    OF_ROW: tl.constexpr,
    SIZE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """page_bytes: from page to page; `rope` holds 16 bits."""
    if CHAINED:
        handover.begin(True)
    at = tl.program_id(0).to(tl.int64) * TILES + tl.arange(0, TILES)
    token = at // OF_ROW
    tile = at % OF_ROW
    d = tl.arange(0, SIZE)[None, :]
    slot = tl.load(slots + token, mask=at < tiles, other=-1).to(tl.int64)
    valid = (slot >= 0) & (slot < total)
    slot = tl.where(valid, slot, 0)
    outer = slot // page
    inner = slot % page
    quantized = (valid & (tile < OF_ROW - 1))[:, None]
    rotary = (valid & (tile == OF_ROW - 1))[:, None]
    column = tile[:, None] * SIZE + d
    x = tl.load(ckv + token[:, None] * ckv_row + column, mask=quantized, other=0.0)
    x, scale = quantize.of_floats(quantize.bf16_rounded(x.to(tl.float32)), 1.0, quantize.FP8, True)
    first = outer * page_bytes + inner * values_row
    tl.store(values + first[:, None] + column, x, mask=quantized)
    exponent = tl.where(tile < OF_ROW - 1, scale.to(tl.int32, bitcast=True) >> 23, 0)
    to = scales + outer * page_bytes + inner * scales_row + tile
    tl.store(to, exponent.to(tl.uint8), mask=valid)
    turned = tl.load(k_rope + token[:, None] * rope_row + d, mask=rotary, other=0)
    tl.store(rope + (first // 2)[:, None] + d, turned, mask=rotary)


def unsupported(ckv: Tensor, **_: Any) -> str | None:
    return quantize.unsupported(ckv=ckv)


def forward(**x: Unpack[Arguments]) -> None:
    ckv, k_rope, rows, k_nope_clip_alpha = x["ckv"], x["k_rope"], x["rows"], x["k_nope_clip_alpha"]
    if ckv.shape[0] * rows.numel() == 0:
        return
    pages, page = rows.shape[:2]
    if x["row_layout"] == quantized.V4:
        values, rope, scales = quantized.v4_parts(rows)
        tiles = ckv.shape[0] * quantized.V4_SCALES
        chained = gpu.has_chained_launch(ckv.device)
        launches.kernel(_write_v4, triton.cdiv(tiles, 2 * TILES))(
            ckv,
            k_rope.view(torch.int16),
            values.view(torch.uint8),
            rope.view(torch.int16),
            scales,
            x["slots"],
            tiles,
            page,
            pages * page,
            ckv.stride(0),
            k_rope.stride(0),
            rows.stride(0),
            quantized.V4_DATA,
            quantized.V4_SCALES,
            TILES=2 * TILES,
            OF_ROW=quantized.V4_SCALES,
            SIZE=quantized.V4_TILE,
            CHAINED=chained,
            num_warps=4,
            launch_pdl=chained,
        )
        return
    parts = quantized.row_parts(rows, x["row_layout"], quantized.VALUES[x["kind"]], torch.int16)
    values, rope, scales = parts
    of_row = quantized.LATENT // quantized.TILE
    tiles = ckv.shape[0] * of_row
    launches.kernel(_write, triton.cdiv(tiles, TILES))(
        ckv,
        k_rope.view(torch.int16),
        quantize.as_bytes(values),
        rope,
        scales,
        x["slots"],
        ckv if k_nope_clip_alpha is None else k_nope_clip_alpha,
        tiles,
        page,
        pages * page,
        (ckv.stride(0), k_rope.stride(0), *(step for y in parts for step in y.stride()[:2])),
        C=Constants(
            KIND=quantize.kind_of(x["kind"]),
            UE8M0=x["scale_format"] == "ue8m0",
            ALPHA=k_nope_clip_alpha is not None,
            TILES=TILES,
            OF_ROW=of_row,
            SIZE=quantized.TILE,
            ROTARY=x["rope_head_dim"],
        ),
        num_warps=4,
    )
