# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The queries of a latent attention in one launch: the cube multiplies every head by its share of
W_uk, and the vector cores beside it turn the rotary dims of one query or two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory
from ..common import cores, tuples
from . import product
from .product import Heads, HeadTiles, head_tiles
from .rows import rotated


@tuples.jit(["index_heads", "index_row", "index_head"])
def absorb(
    x,
    w,
    out,
    of: Heads,
    sin,
    cos,
    out_rope,
    index,
    index_heads,
    index_row,
    index_head,
    C: HeadTiles,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INDEX_INTERLEAVED: tl.constexpr,
    WHOLE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
):
    """The rotary dims of a head of x lie behind its `depth`; `index` is turned in place."""
    head_tiles(x, w, out, *of, *C)
    if ROTARY > 0:
        first = rotated(
            x + of.depth,
            sin,
            cos,
            out_rope,
            0,
            of.rows,
            of.heads,
            of.x_row,
            of.x_head,
            of.heads * ROTARY,
            ROTARY,
            ROTARY,
            INTERLEAVED,
            WHOLE,
            HEAD_TILE,
        )
        if index is not None:
            rotated(
                index,
                sin,
                cos,
                index,
                first,
                of.rows,
                index_heads,
                index_row,
                index_head,
                index_row,
                index_head,
                ROTARY,
                INDEX_INTERLEAVED,
                WHOLE,
                HEAD_TILE,
            )


@dataclass
class Index:
    """Heads [M, Ni, ..] of an indexer's query, whose first Dr dims are turned in place."""

    query: Tensor
    interleaved: bool


def room(
    batch: int, length: int, w: Tensor, rotary: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """For the queries [B, S, heads, R] and their rotary dims."""
    heads, _, latent = w.shape
    query = memory.empty((batch, length, heads, latent), dtype, w.device)
    return query, memory.empty((batch, length, heads, rotary), dtype, w.device)


def queries(
    x: Tensor,
    w: Tensor,
    out: Tensor,
    out_rope: Tensor,
    sin: Tensor,
    cos: Tensor,
    interleaved: bool,
    index: Index | None = None,
) -> None:
    """Of x [M, heads, K + Dr] the products out [M, heads, R] with w [heads, K, R], and the
    rotations out_rope [M, heads, Dr]."""
    rows, heads, _ = x.shape
    plain = x[..., : w.shape[1]]
    config = product.by_height("absorption.absorb", rows)
    turned = [heads] if index is None else [heads, index.query.shape[1]]
    works = max(product.head_tile_count(plain, w.shape[2], config), rows * len(turned))
    given: dict[str, Any] = dict.fromkeys(("index_heads", "index_row", "index_head"), 0)
    given |= dict(index=None, INDEX_INTERLEAVED=False)
    if index is not None:
        given = dict(
            index=index.query,
            index_heads=index.query.shape[1],
            index_row=index.query.stride(0),
            index_head=index.query.stride(1),
            INDEX_INTERLEAVED=index.interleaved,
        )
    absorb[(min(works, cores.cube()),)](
        **product.of_heads(plain, w, out, config),
        sin=sin,
        cos=cos,
        out_rope=out_rope,
        **given,
        LINEAR=False,
        ROTARY=sin.shape[-1],
        INTERLEAVED=interleaved,
        WHOLE=all(each % config.tiles["HEAD_TILE"] == 0 for each in turned),
        **config.keywords,
    )
