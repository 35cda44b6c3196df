# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The queries of a latent attention in one launch: the cube multiplies every head by its share of
W_uk, and the vector cores beside it turn the rotary dims of one query or two."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ..dispatch.common import memory
from . import cores, entry, product, rows
from .product import head_tiles
from .rows import rotated


@entry.jit(
    do_not_specialize=[
        "rows", "heads", "columns", "depth", "x_row", "x_head", "out_row", "heads0", "x_row0",
        "x_head0", "row0", "head0", "heads1", "x_row1", "x_head1", "row1", "head1",
    ]
)  # fmt: skip
def absorb(
    x, w, out, rows, heads, columns, depth, x_row, x_head, out_row,
    sin, cos, x0, out0, heads0, x_row0, x_head0, row0, head0,
    x1, out1, heads1, x_row1, x_head1, row1, head1,
    WHOLE_M: tl.constexpr, WHOLE_N: tl.constexpr, WHOLE_K: tl.constexpr, ROTARY: tl.constexpr,
    INTERLEAVED0: tl.constexpr, INTERLEAVED1: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, HEAD_TILE: tl.constexpr,
):  # fmt: skip
    head_tiles(
        x, w, out, rows, heads, columns, depth, x_row, x_head, out_row,
        WHOLE_M, WHOLE_N, WHOLE_K, ROWS, COLUMNS, DEPTH,
    )  # fmt: skip
    first = rotated(
        x0, sin, cos, out0, 0, rows, heads0, x_row0, x_head0, row0, head0,
        ROTARY, INTERLEAVED0, WHOLE, HEAD_TILE,
    )  # fmt: skip
    if x1 is not None:
        rotated(
            x1, sin, cos, out1, first, rows, heads1, x_row1, x_head1, row1, head1,
            ROTARY, INTERLEAVED1, WHOLE, HEAD_TILE,
        )  # fmt: skip


def room(
    batch: int, length: int, w: Tensor, rotary: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """For the queries [B, S, heads, R] and their rotary dims."""
    heads, _, latent = w.shape
    query = memory.empty((batch, length, heads, latent), dtype, w.device)
    return query, memory.empty((batch, length, heads, rotary), dtype, w.device)


def queries(
    x: Tensor, w: Tensor, out: Tensor, sin: Tensor, cos: Tensor, *turned: rows.Heads
) -> None:
    """out [M, heads, R] = x [M, heads, K] @ w [heads, K, R], and the rotations."""
    config = product.by_height("absorption.absorb", x.shape[0])
    works = max(product.head_tile_count(x, w, config), x.shape[0] * len(turned))
    given: dict[str, Any] = {}
    for i in range(2):
        each = rows.of_heads(turned[i] if i < len(turned) else None)
        given |= {f"{name}{i}": value for name, value in each.items()}
    absorb[(min(works, cores.cube()),)](
        **product.of_heads(x, w, out, config), sin=sin, cos=cos, **given, ROTARY=sin.shape[-1],
        WHOLE=all(each.x.shape[1] % config.tiles["HEAD_TILE"] == 0 for each in turned),
        **config.keywords,
    )  # fmt: skip
