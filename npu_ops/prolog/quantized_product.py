# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Products of int8 rows with int8 weights, in int32 and on the cube alone; the vector kernel that
comes next multiplies the scales in (quantized_rows.py).

    nz_sums   x [M, K] @ W for up to three W, as FRACTAL_NZ bytes [N/32, K, 32] each
    nd_sums   x [M, K] @ W, row-major [K, N] or a checkpoint's own [N, K]

Panels, steps and parts of the depth as in product.py; a panel is 32 columns.  Integers add up to
the same whatever their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory, nz
from ..common import cores, entry, tiling, tune
from . import product
from .product import panel_tiles, row_tile

_MOST = 3  # weights of a launch
_PARTS = 8  # of the depth, at most


@dataclass
class Rows:
    """Activations [M, K]: int8 with a scale for each, or floats without."""

    values: Tensor
    scale: Tensor | None = None


@dataclass
class Sums:
    """[parts, M, N], whose sum over the parts is a product: float32, or int32, to be multiplied by
    the scale of its row and that of its column.  Its rows may lie apart."""

    parts: Tensor
    by_row: Tensor | None = None
    by_column: Tensor | None = None


@entry.jit(
    do_not_specialize=[
        "columns0", "columns1", "columns2", "rows", "depth", "parts", "out_row", "out_part",
    ]
)  # fmt: skip
def nz_sums(
    x,
    w0,
    w1,
    w2,
    out,
    columns0,
    columns1,
    columns2,
    rows,
    depth,
    parts,
    out_row,
    out_part,
    WHOLE_M: tl.constexpr,
    WHOLE_N: tl.constexpr,
    WHOLE_K: tl.constexpr,
    ROWS: tl.constexpr,
    PANELS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    first = panel_tiles(
        x,
        w0,
        out,
        columns0,
        out_row,
        0,
        rows,
        depth,
        parts,
        out_part,
        WHOLE_M,
        WHOLE_N,
        WHOLE_K,
        ROWS,
        PANELS,
        DEPTH,
        32,
    )
    if w1 is not None:
        first = panel_tiles(
            x,
            w1,
            out + columns0,
            columns1,
            out_row,
            first,
            rows,
            depth,
            parts,
            out_part,
            WHOLE_M,
            WHOLE_N,
            WHOLE_K,
            ROWS,
            PANELS,
            DEPTH,
            32,
        )
    if w2 is not None:
        panel_tiles(
            x,
            w2,
            out + columns0 + columns1,
            columns2,
            out_row,
            first,
            rows,
            depth,
            parts,
            out_part,
            WHOLE_M,
            WHOLE_N,
            WHOLE_K,
            ROWS,
            PANELS,
            DEPTH,
            32,
        )


@entry.jit(do_not_specialize=["rows", "columns", "depth", "out_row"])
def nd_sums(
    x,
    w,
    out,
    rows,
    columns,
    depth,
    out_row,
    WHOLE_M: tl.constexpr,
    WHOLE_N: tl.constexpr,
    WHOLE_K: tl.constexpr,
    TURNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """TURNED: the weight is [columns, depth]."""
    across = (columns + COLUMNS - 1) // COLUMNS
    d = tl.arange(0, DEPTH)
    for tile in range(tl.program_id(0), (rows + ROWS - 1) // ROWS * across, tl.num_programs(0)):
        row = tile // across * ROWS + tl.arange(0, ROWS)
        column = tile % across * COLUMNS + tl.arange(0, COLUMNS)
        m = row < rows
        n = column < columns
        row = row.to(tl.int64)[:, None]
        acc = tl.zeros((ROWS, COLUMNS), tl.int32)
        for k in range(0, depth, DEPTH):
            x_tile = row_tile(x, row, m, depth, k, depth, WHOLE_M, WHOLE_K, DEPTH)
            if TURNED:
                from_w = w + column[:, None].to(tl.int64) * depth + (k + d)[None]
                there = n[:, None] & (d < depth - k)[None]
            else:
                from_w = w + (k + d)[:, None].to(tl.int64) * columns + column[None]
                there = n[None] & (d < depth - k)[:, None]
            if WHOLE_N and WHOLE_K:
                w_tile = tl.load(from_w)
            else:
                w_tile = tl.load(from_w, mask=there, other=0)
            if TURNED:
                w_tile = tl.trans(w_tile)
            acc = tl.dot(x_tile, w_tile, acc, out_dtype=tl.int32)
        tl.store(out + row * out_row + column[None], acc, mask=m[:, None] & n[None])


def sums(
    x: Rows, weights: Sequence[tuple[Tensor, Tensor]], weight_format: str, most: int = _PARTS
) -> list[Sums]:
    """x [M, K] by each of up to three int8 weights, given with their scales [1, N], in at `most` so
    many parts."""
    values = x.values
    sizes = [scale.shape[1] for _, scale in weights]
    tiled = [nz.is_nz(w, weight_format) for w, _ in weights]
    config, parts = _cut(values, sizes, most if all(tiled) else 1)
    out = memory.empty((parts, values.shape[0], sum(sizes)), torch.int32, values.device)
    each = out.split(sizes, -1)
    if all(tiled):
        _by_panels(values, [w for w, _ in weights], sizes, out, config)
    else:
        for (w, _), to, in_panels in zip(weights, each, tiled, strict=True):
            if in_panels:
                _by_panels(values, [w], [to.shape[-1]], to, config)
            else:
                _by_rows(values, w, to[0], weight_format == "linear")
    return [Sums(to, x.scale, scale) for to, (_, scale) in zip(each, weights, strict=True)]


def _by_panels(
    x: Tensor, weights: list[Tensor], sizes: list[int], out: Tensor, config: tune.Config
) -> None:
    rows, depth = x.shape
    works = out.shape[0] * _tile_count(rows, sizes, config)
    absent = _MOST - len(weights)
    nz_sums[(min(works, cores.cube()),)](
        x,
        *weights,
        *absent * [None],
        out,
        *sizes,
        *absent * [0],
        rows,
        depth,
        out.shape[0],
        out.stride(1),
        out.stride(0),
        **product.whole_tiles(config, rows, depth),
        WHOLE_N=all(size % (32 * config.tiles["PANELS"]) == 0 for size in sizes),
        **config.keywords,
    )


def _by_rows(x: Tensor, w: Tensor, out: Tensor, linear: bool) -> None:
    (rows, depth), columns = x.shape, out.shape[1]
    config = product.by_height("quantized_product.nd_sums", rows)
    tiles = -(-rows // config.tiles["ROWS"]) * -(-columns // config.tiles["COLUMNS"])
    nd_sums[(min(tiles, cores.cube()),)](
        x,
        w,
        out,
        rows,
        columns,
        depth,
        out.stride(0),
        **product.whole_tiles(config, rows, depth),
        WHOLE_N=columns % config.tiles["COLUMNS"] == 0,
        TURNED=linear,
        **config.keywords,
    )


def _cut(x: Tensor, sizes: Sequence[int], most: int) -> tuple[tune.Config, int]:
    """The tiles and the number of parts of the depth, at most so many, with which a core of 24
    reads the least: from the shapes alone, like all that decides about a sum."""
    rows, depth = x.shape
    found = product.covering("quantized_product.nz_sums", rows)

    def parts(config: tune.Config) -> list[int]:
        step = config.tiles["DEPTH"]
        return [1] + [n for n in range(2, most + 1) if depth % (n * step) == 0]

    def cost(config: tune.Config, n: int) -> int:
        """Bytes of weights; of two as good the deeper step and fewer parts."""
        turns = -(-n * _tile_count(rows, sizes, config) // tiling.A3.cube_cores)
        return turns * tiling.up(-(-depth // n), config.tiles["DEPTH"])

    def best(config: tune.Config) -> int:
        return min(parts(config), key=lambda n: cost(config, n))

    least = found[0].tiles["ROWS"]
    fitting = [config for config in found if config.tiles["ROWS"] == least]
    smaller = [config for config in found if config.tiles["ROWS"] < least]
    ranked = sorted(fitting, key=lambda config: cost(config, best(config)))
    config = tune.choose("quantized_product.nz_sums", ranked + smaller)
    return config, best(config)


def _tile_count(rows: int, sizes: Sequence[int], config: tune.Config) -> int:
    across = sum(-(-size // (32 * config.tiles["PANELS"])) for size in sizes)
    return -(-rows // config.tiles["ROWS"]) * across
