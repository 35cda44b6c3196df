# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Latents [T, 512] as int8, in tiles of 128, and rotary keys [T, 64] to rows of 656 bytes; without
these to rows of 528.

A slot that is negative or past the cache makes empty copies: the mask is a bound on their length.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import quantized
from ...dispatch.ops.caches.latent_cache_write import Arguments
from ..common import cores, entry, quantize, ragged, tiling, tune


@entry.jit(
    do_not_specialize=[
        "rows", "page", "total", "ckv_row", "rope_row", "values_page", "rope_page", "scales_page",
    ]
)  # fmt: skip
def write(
    ckv,
    k_rope,
    values,
    rope,
    scales,
    slots,
    alpha,
    rows,
    page,
    total,
    ckv_row,
    rope_row,
    values_page,
    rope_page,
    scales_page,
    ROW: tl.constexpr,
    TILES: tl.constexpr,
    SIZE: tl.constexpr,
    ROTARY: tl.constexpr,
    ALPHA: tl.constexpr,
):
    """ROW: bytes of a row; the strides of the pages are in numbers of each part's own dtype."""
    t = tl.arange(0, TILES)
    d = t[:, None] * SIZE + tl.arange(0, SIZE)[None]
    fits = 1.0
    if ALPHA:
        fits = tl.load(alpha)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        slot = tl.load(slots + row)
        there = (slot >= 0) & (slot < total)
        of_tiles = tl.where(there, TILES, 0)
        of_rope = tl.where(there, ROTARY, 0)
        slot = tl.where(there, slot, 0)
        outer = (slot // page).to(tl.int64)
        inner = slot % page
        x = tl.load(ckv + row.to(tl.int64) * ckv_row + d).to(tl.float32)
        x, scale = quantize.of_floats(x, fits)
        to = values + outer * values_page + inner * ROW + d
        tl.store(to, x, mask=(t < of_tiles)[:, None])
        to = scales + outer * scales_page + inner * (ROW // 4) + t
        tl.store(to, scale, mask=t < of_tiles)
        if ROTARY > 0:
            r = tl.arange(0, ROTARY)
            turned = tl.load(k_rope + row.to(tl.int64) * rope_row + r)
            tl.store(rope + outer * rope_page + inner * (ROW // 2) + r, turned, mask=r < of_rope)


def unsupported(ckv: Tensor, kind: str, row_layout: str, **_: Any) -> str | None:
    if row_layout == quantized.V4:
        return f"row_layout={row_layout!r}, supported 'nope_rope_scale' and 'nope_scale_rope'"
    return quantize.only_int8(kind) or tiling.not_multiplied(ckv=ckv)


def forward(**x: Unpack[Arguments]) -> None:
    ckv, k_rope, rows, k_nope_clip_alpha = x["ckv"], x["k_rope"], x["rows"], x["k_nope_clip_alpha"]
    if ckv.shape[0] * rows.numel() == 0:
        return
    pages, page = rows.shape[:2]
    values, rope, scales = quantized.row_parts(rows, x["row_layout"], torch.int8, k_rope.dtype)
    write[(min(ckv.shape[0], cores.vector()),)](
        ckv,
        k_rope,
        values,
        rope,
        scales,
        ragged.int32(x["slots"]),
        ckv if k_nope_clip_alpha is None else k_nope_clip_alpha,
        ckv.shape[0],
        page,
        pages * page,
        ckv.stride(0),
        k_rope.stride(0),
        values.stride(0),
        rope.stride(0),
        scales.stride(0),
        ROW=rows.shape[-1],
        TILES=quantized.LATENT // quantized.TILE,
        SIZE=quantized.TILE,
        ROTARY=x["rope_head_dim"],
        ALPHA=k_nope_clip_alpha is not None,
        **tune.only("latent_cache_write.write").keywords,
    )
