# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Latents [T, 512] as int8, in tiles of 128, and rotary keys [T, 64] to rows of 656 bytes; without
these to rows of 528.

A slot that is negative or past the cache makes empty copies: the mask is a bound on their length.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import quantized
from ...dispatch.ops.caches.latent_cache_write import Arguments
from ..common import cores, quantize, ragged, tiling, tune, tuples
from .index_cache_write import Slots, placed


class Parts(NamedTuple):
    """Of the rows in the cache."""

    values: Tensor
    rope: Tensor
    scales: Tensor


class Strides(NamedTuple):
    ckv: int
    rope: int
    values_page: int
    rope_page: int
    scales_page: int


@tuples.jit(["rows"])
def write(
    ckv,
    k_rope,
    to: Parts,
    slots,
    alpha,
    rows,
    of: Slots,
    stride: Strides,
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
        there, outer, inner = placed(slots, row, *of)
        of_tiles = tl.where(there, TILES, 0)
        x = tl.load(ckv + row.to(tl.int64) * stride.ckv + d).to(tl.float32)
        x, scale = quantize.of_floats(x, fits)
        of_row = to.values + outer * stride.values_page + inner * ROW
        tl.store(of_row + d, x, mask=(t < of_tiles)[:, None])
        of_row = to.scales + outer * stride.scales_page + inner * (ROW // 4)
        tl.store(of_row + t, scale, mask=t < of_tiles)
        if ROTARY > 0:
            r = tl.arange(0, ROTARY)
            turned = tl.load(k_rope + row.to(tl.int64) * stride.rope + r)
            of_row = to.rope + outer * stride.rope_page + inner * (ROW // 2)
            tl.store(of_row + r, turned, mask=r < tl.where(there, ROTARY, 0))


def unsupported(ckv: Tensor, kind: str, row_layout: str, **_: Any) -> str | None:
    if row_layout == quantized.V4:
        return f"row_layout={row_layout!r}, supported 'nope_rope_scale' and 'nope_scale_rope'"
    return quantize.only_int8(kind) or tiling.not_multiplied(ckv=ckv)


def forward(**x: Unpack[Arguments]) -> None:
    ckv, k_rope, rows, alpha = x["ckv"], x["k_rope"], x["rows"], x["k_nope_clip_alpha"]
    if ckv.shape[0] * rows.numel() == 0:
        return
    pages, page = rows.shape[:2]
    parts = quantized.row_parts(rows, x["row_layout"], torch.int8, k_rope.dtype)
    write[(min(ckv.shape[0], cores.vector()),)](
        ckv,
        k_rope,
        *parts,
        ragged.int32(x["slots"]),
        ckv if alpha is None else alpha,
        ckv.shape[0],
        page,
        pages * page,
        ckv.stride(0),
        k_rope.stride(0),
        *(part.stride(0) for part in parts),
        ROW=rows.shape[-1],
        TILES=quantized.LATENT // quantized.TILE,
        SIZE=quantized.TILE,
        ROTARY=x["rope_head_dim"],
        ALPHA=alpha is not None,
        **tune.only("latent_cache_write.write").keywords,
    )
