# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Index queries [.., N, 128] as int8, with their scales or the weights times these."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory
from ..common import cores, entry, quantize, tiling, tune


@entry.jit(do_not_specialize=["rows", "heads", "q_row", "q_head", "w_row"])
def quantized(
    q,
    weights,
    values,
    scales,
    rows,
    heads,
    q_row,
    q_head,
    w_row,
    FOLD: tl.constexpr,
    SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
):
    d = tl.arange(0, SIZE)
    tiles = (heads + HEAD_TILE - 1) // HEAD_TILE
    for work in range(tl.program_id(0), rows * tiles, tl.num_programs(0)):
        row = (work // tiles).to(tl.int64)
        first = work % tiles * HEAD_TILE
        h = tl.arange(0, HEAD_TILE)
        there = h < heads - first
        of = q + row * q_row + first * q_head + h[:, None] * q_head + d[None]
        x = tl.load(of, mask=there[:, None], other=0.0)
        x, scale = quantize.of_floats(x.to(tl.float32), 1.0)
        at = row * heads + first + h
        tl.store(values + at[:, None] * SIZE + d[None], x, mask=there[:, None])
        if FOLD:
            w = tl.load(weights + row * w_row + first + h, mask=there, other=0.0)
            scale = w.to(tl.float32) * scale
        tl.store(scales + at, scale, mask=there)


def unsupported(
    q: Tensor, weights: Tensor, kind: str, index_hadamard: bool, **_: Any
) -> str | None:
    return (
        quantize.only_int8(kind)
        or quantize.without_transform(index_hadamard)
        or tiling.not_multiplied(q=q)
    )


def forward(
    q: Tensor,
    weights: Tensor,
    kind: str,
    fold: bool,
    scale_format: str,
    index_hadamard: bool,
    hadamard_round: str,
) -> tuple[Tensor, Tensor]:
    values = memory.empty(q.shape, torch.int8, q.device)
    scales = memory.empty(q.shape[:-1], torch.float32, q.device)
    if scales.numel() == 0:
        return values, scales
    heads, size = q.shape[-2:]
    flat, w = q.flatten(0, -3), weights.flatten(0, -2)
    config = tune.only("quantize_index_query.quantized")
    work = flat.shape[0] * -(-heads // config.tiles["HEAD_TILE"])
    quantized[(min(work, cores.vector()),)](
        flat,
        w,
        values,
        scales,
        flat.shape[0],
        heads,
        *flat.stride()[:2],
        w.stride(0),
        FOLD=fold,
        SIZE=size,
        **config.keywords,
    )
    return values, scales
