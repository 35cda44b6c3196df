# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Products with weights, on the cube alone: no vector core, no workspace.

    nz_products     x [M, K] @ W for up to four W, as FRACTAL_NZ bytes [N/16, K, 16] each, or
                    [N/32, K, 32] of int8
    held_products   the same of 65 to 128 rows and a short depth: x stays in L1
    nd_product      x [M, heads, K] @ W [heads, K, N], row-major, head by head; or W [heads, N, K]

The codec is the dtype of x and W: floats of 16 bits are summed up in float32, int8 in int32, whose
scales the vector kernel that comes next multiplies in (quantized_rows.py).

An NZ panel is 32 bytes of columns, and its K rows lie one after the other: a step of DEPTH of them
is one bulk copy of contiguous bytes into L1, and one multiply.  The panels' sums stay in L0C, and
the x tile is loaded once for all of them; of one weight 10 or 11 panels, where that makes as many
tiles as there are cores.  Wider tiles out of panels (a 3-D load, reshaped) are miscompiled or go
through the vector cores.

Where tiles are few, the depth is cut as well: `out` then has sums of parts, for the next launch to
add.  How it is cut follows from the shapes alone: sums are the same on any number of cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory, nz
from ..common import cores, tiling, tune, tuples
from ..common.cores import turn

_WEIGHTS = "one", "two", "three", "four"  # of a launch
_PARTS = 8  # of the depth, at most
_PART = 32_000  # bytes that are loaded while a part's few copies of the next launch begin
_COPY = 3_500  # bytes that are loaded while a copy begins
_PANEL = 32  # bytes of columns
_STEP = 256  # bytes of a row that `nd_product` multiplies at once
_CACHED = 3  # how many times as fast the cache is as the memory


@triton.jit
def _step(
    x_tile,
    w,
    panel,
    panels,
    depth,
    k,
    at,
    acc,
    WHOLE_N: tl.constexpr,
    WHOLE_K: tl.constexpr,
):
    DEPTH: tl.constexpr = x_tile.shape[1]
    WIDE: tl.constexpr = acc.shape[1]
    ZERO: tl.constexpr = 0 if acc.dtype == tl.int32 else 0.0
    if not WHOLE_N:  # a panel past the last one is the last one
        panel = tl.minimum(panel, panels - 1)
    start = w + panel.to(tl.int64) * depth * WIDE + at
    if WHOLE_K:
        w_tile = tl.load(start)
    else:
        w_tile = tl.load(start, mask=(tl.arange(0, DEPTH) < depth - k)[:, None], other=ZERO)
    return tl.dot(x_tile, w_tile, acc, out_dtype=acc.dtype)


@triton.jit
def _put(out, row, m, panel, panels, columns, acc, WHOLE_N: tl.constexpr):
    WIDE: tl.constexpr = acc.shape[1]
    n = tl.arange(0, WIDE)
    at = out + row * columns + panel * WIDE + n[None]
    there = m[:, None]
    if not WHOLE_N:
        there = there & (n < (panels - panel) * WIDE)[None]
    tl.store(at, acc.to(out.dtype.element_ty), mask=there)


@triton.jit
def row_tile(
    x, row, m, depth, k, x_row, WHOLE_M: tl.constexpr, WHOLE_K: tl.constexpr, DEPTH: tl.constexpr
):
    """DEPTH numbers from k on of rows of `depth`, 0 where there are none."""
    ZERO: tl.constexpr = 0 if x.dtype.element_ty == tl.int8 else 0.0
    d = tl.arange(0, DEPTH)
    at = x + row * x_row + (k + d)[None]
    if WHOLE_M and WHOLE_K:
        tile = tl.load(at)
    elif WHOLE_K:
        tile = tl.load(at, mask=m[:, None], other=ZERO)
    else:
        tile = tl.load(at, mask=m[:, None] & (d < depth - k)[None], other=ZERO)
    return tile


@triton.jit
def panel_tiles(
    x,
    w,
    out,
    columns,
    out_row,
    first,
    rows,
    depth,
    parts,
    out_part,
    WHOLE_M: tl.constexpr,
    WHOLE_N: tl.constexpr,
    WHOLE_K: tl.constexpr,
    ROWS: tl.constexpr,
    PANELS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDE: tl.constexpr = 16,
    x_row=None,
):
    """The tiles of one weight, of which core `first` takes the first; the core where they end.
    Panels of 32 columns are int8, summed up in int32.  `x_row`: from row to row of x, where they
    lie apart."""
    KIND: tl.constexpr = tl.int32 if WIDE == 32 else tl.float32
    panels = columns // WIDE
    across = (panels + PANELS - 1) // PANELS
    tiles = (rows + ROWS - 1) // ROWS * across
    span = depth // parts
    n = tl.arange(0, WIDE)
    d = tl.arange(0, DEPTH)
    if x_row is None:
        x_row = depth
    for work in range(turn(first), tiles * parts, tl.num_programs(0)):
        part = work // tiles
        tile = work % tiles
        row = tile // across * ROWS + tl.arange(0, ROWS)
        m = row < rows
        row = row.to(tl.int64)[:, None]
        panel = tile % across * PANELS
        acc0 = tl.zeros((ROWS, WIDE), KIND)
        acc1 = tl.zeros((ROWS, WIDE), KIND)
        acc2 = tl.zeros((ROWS, WIDE), KIND)
        acc3 = tl.zeros((ROWS, WIDE), KIND)
        if PANELS >= 8:
            acc4 = tl.zeros((ROWS, WIDE), KIND)
            acc5 = tl.zeros((ROWS, WIDE), KIND)
            acc6 = tl.zeros((ROWS, WIDE), KIND)
            acc7 = tl.zeros((ROWS, WIDE), KIND)
        if PANELS >= 10:
            acc8 = tl.zeros((ROWS, WIDE), KIND)
            acc9 = tl.zeros((ROWS, WIDE), KIND)
        if PANELS == 11:
            acc10 = tl.zeros((ROWS, WIDE), KIND)
        for step in range(0, span, DEPTH):
            k = part * span + step
            x_tile = row_tile(x, row, m, depth, k, x_row, WHOLE_M, WHOLE_K, DEPTH)
            at = (k + d)[:, None] * WIDE + n[None]
            acc0 = _step(x_tile, w, panel, panels, depth, k, at, acc0, WHOLE_N, WHOLE_K)
            acc1 = _step(x_tile, w, panel + 1, panels, depth, k, at, acc1, WHOLE_N, WHOLE_K)
            acc2 = _step(x_tile, w, panel + 2, panels, depth, k, at, acc2, WHOLE_N, WHOLE_K)
            acc3 = _step(x_tile, w, panel + 3, panels, depth, k, at, acc3, WHOLE_N, WHOLE_K)
            if PANELS >= 8:
                acc4 = _step(x_tile, w, panel + 4, panels, depth, k, at, acc4, WHOLE_N, WHOLE_K)
                acc5 = _step(x_tile, w, panel + 5, panels, depth, k, at, acc5, WHOLE_N, WHOLE_K)
                acc6 = _step(x_tile, w, panel + 6, panels, depth, k, at, acc6, WHOLE_N, WHOLE_K)
                acc7 = _step(x_tile, w, panel + 7, panels, depth, k, at, acc7, WHOLE_N, WHOLE_K)
            if PANELS >= 10:
                acc8 = _step(x_tile, w, panel + 8, panels, depth, k, at, acc8, WHOLE_N, WHOLE_K)
                acc9 = _step(x_tile, w, panel + 9, panels, depth, k, at, acc9, WHOLE_N, WHOLE_K)
            if PANELS == 11:
                acc10 = _step(x_tile, w, panel + 10, panels, depth, k, at, acc10, WHOLE_N, WHOLE_K)
        to = out + part.to(tl.int64) * out_part
        _put(to, row, m, panel, panels, out_row, acc0, WHOLE_N)
        _put(to, row, m, panel + 1, panels, out_row, acc1, WHOLE_N)
        _put(to, row, m, panel + 2, panels, out_row, acc2, WHOLE_N)
        _put(to, row, m, panel + 3, panels, out_row, acc3, WHOLE_N)
        if PANELS >= 8:
            _put(to, row, m, panel + 4, panels, out_row, acc4, WHOLE_N)
            _put(to, row, m, panel + 5, panels, out_row, acc5, WHOLE_N)
            _put(to, row, m, panel + 6, panels, out_row, acc6, WHOLE_N)
            _put(to, row, m, panel + 7, panels, out_row, acc7, WHOLE_N)
        if PANELS >= 10:
            _put(to, row, m, panel + 8, panels, out_row, acc8, WHOLE_N)
            _put(to, row, m, panel + 9, panels, out_row, acc9, WHOLE_N)
        if PANELS == 11:
            _put(to, row, m, panel + 10, panels, out_row, acc10, WHOLE_N)
    return (first + tiles * parts) % tl.num_programs(0)


class Weight(NamedTuple):
    w: Tensor | None  # NZ; None: there is no such product
    out: Tensor | None  # [rows, columns] of its first part
    columns: int  # of w
    row: int  # from row to row of `out`


class Extent(NamedTuple):
    rows: int  # of x
    depth: int
    parts: int  # of the depth
    out_part: int  # from part to part of `out`


class Tiles(NamedTuple):
    WHOLE_M: tl.constexpr  # tiles divide the rows of x
    WHOLE_N: tl.constexpr  # the columns of each weight
    WHOLE_K: tl.constexpr  # the depth
    ROWS: tl.constexpr
    PANELS: tl.constexpr
    DEPTH: tl.constexpr


@tuples.jit()
def nz_products(
    x,
    one: Weight,
    two: Weight,
    three: Weight,
    four: Weight,
    of: Extent,
    C: Tiles,
    WIDE: tl.constexpr = 16,
):
    first = panel_tiles(x, *one, 0, *of, *C, WIDE)
    if two.w is not None:
        first = panel_tiles(x, *two, first, *of, *C, WIDE)
    if three.w is not None:
        first = panel_tiles(x, *three, first, *of, *C, WIDE)
    if four.w is not None:
        panel_tiles(x, *four, first, *of, *C, WIDE)


@triton.jit
def _held_panels(
    x_tile,
    w,
    out,
    columns,
    out_row,
    first,
    to,
    core,
    cores,
    k,
    rows,
    depth,
    WHOLE_N: tl.constexpr,
    ROWS: tl.constexpr,
    PANELS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """The tiles of one weight, of which core `first` of `cores` takes the first, `to` behind `out`;
    the core where they end."""
    out += to
    panels = columns // 16
    tiles = (panels + PANELS - 1) // PANELS
    row = tl.arange(0, ROWS)
    m = row < rows
    row = row.to(tl.int64)[:, None]
    at = (k + tl.arange(0, DEPTH))[:, None] * 16 + tl.arange(0, 16)[None]
    for tile in range(tl.where(core < first, core + cores, core) - first, tiles, cores):
        for i in tl.static_range(PANELS):
            panel = tile * PANELS + i
            acc = tl.zeros((ROWS, 16), tl.float32)
            acc = _step(x_tile, w, panel, panels, depth, k, at, acc, WHOLE_N, True)
            _put(out, row, m, panel, panels, out_row, acc, WHOLE_N)
    return (first + tiles) % cores


class Held(NamedTuple):
    WHOLE_N: tl.constexpr  # tiles divide the columns of each weight
    ROWS: tl.constexpr
    PANELS: tl.constexpr
    DEPTH: tl.constexpr


@tuples.jit()
def held_products(
    x,
    one: Weight,
    two: Weight,
    three: Weight,
    four: Weight,
    of: Extent,
    WHOLE_M: tl.constexpr,
    C: Held,
    multibuffer: tl.constexpr,
):
    """Of at most ROWS rows, in parts of DEPTH numbers: each program has one of them."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    part = program * of.parts // programs
    start = (part * programs + of.parts - 1) // of.parts
    cores = ((part + 1) * programs + of.parts - 1) // of.parts - start
    core = program - start
    k = part * C.DEPTH
    row = tl.arange(0, C.ROWS)
    m = row < of.rows
    row = row.to(tl.int64)[:, None]
    x_tile = row_tile(x, row, m, of.depth, k, of.depth, WHOLE_M, True, C.DEPTH)
    to = part.to(tl.int64) * of.out_part
    first = _held_panels(x_tile, *one, 0, to, core, cores, k, of.rows, of.depth, *C)
    if two.w is not None:
        first = _held_panels(x_tile, *two, first, to, core, cores, k, of.rows, of.depth, *C)
    if three.w is not None:
        first = _held_panels(x_tile, *three, first, to, core, cores, k, of.rows, of.depth, *C)
    if four.w is not None:
        _held_panels(x_tile, *four, first, to, core, cores, k, of.rows, of.depth, *C)


@triton.jit
def head_tiles(
    x,
    w,
    out,
    rows,
    heads,
    columns,
    depth,
    x_row,
    x_head,
    out_row,
    WHOLE_M: tl.constexpr,
    WHOLE_N: tl.constexpr,
    WHOLE_K: tl.constexpr,
    LINEAR: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """LINEAR: a weight is [columns, depth]."""
    KIND: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    ZERO: tl.constexpr = 0 if x.dtype.element_ty == tl.int8 else 0.0
    across = (columns + COLUMNS - 1) // COLUMNS
    tiles = (rows + ROWS - 1) // ROWS * across
    d = tl.arange(0, DEPTH)
    for work in range(tl.program_id(0), heads * tiles, tl.num_programs(0)):
        head = work // tiles
        tile = work % tiles
        row = tile // across * ROWS + tl.arange(0, ROWS)
        column = tile % across * COLUMNS + tl.arange(0, COLUMNS)
        m = (row < rows)[:, None]
        n = column < columns
        row = row.to(tl.int64)[:, None]
        of_head = w + head.to(tl.int64) * depth * columns
        acc = tl.zeros((ROWS, COLUMNS), KIND)
        for k in range(0, depth, DEPTH):
            from_x = x + row * x_row + head * x_head + (k + d)[None]
            if LINEAR:
                from_w = of_head + column[:, None].to(tl.int64) * depth + (k + d)[None]
                there = n[:, None] & (d < depth - k)[None]
            else:
                from_w = of_head + (k + d)[:, None].to(tl.int64) * columns + column[None]
                there = n[None] & (d < depth - k)[:, None]
            if WHOLE_M and WHOLE_K:
                x_tile = tl.load(from_x)
            elif WHOLE_K:
                x_tile = tl.load(from_x, mask=m, other=ZERO)
            else:
                x_tile = tl.load(from_x, mask=m & (d < depth - k)[None], other=ZERO)
            if WHOLE_N and WHOLE_K:
                w_tile = tl.load(from_w)
            else:
                w_tile = tl.load(from_w, mask=there, other=ZERO)
            if LINEAR:
                w_tile = tl.trans(w_tile)
            acc = tl.dot(x_tile, w_tile, acc, out_dtype=KIND)
        to = out + row * out_row + head * columns + column[None]
        tl.store(to, acc.to(out.dtype.element_ty), mask=m & n[None])


class Heads(NamedTuple):
    rows: int  # of x
    heads: int
    columns: int  # of a head's weight
    depth: int
    x_row: int  # from row to row of x
    x_head: int
    out_row: int


class HeadTiles(NamedTuple):
    WHOLE_M: tl.constexpr  # tiles divide the rows of x
    WHOLE_N: tl.constexpr  # the columns
    WHOLE_K: tl.constexpr  # the depth
    LINEAR: tl.constexpr
    ROWS: tl.constexpr
    COLUMNS: tl.constexpr
    DEPTH: tl.constexpr


@tuples.jit()
def nd_product(x, w, out, of: Heads, C: HeadTiles):
    head_tiles(x, w, out, *of, *C)


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


def weights(x: Tensor, pairs: Sequence[tuple[Tensor, Tensor]], weight_format: str) -> None:
    """out [M, N] = x [M, K] @ w for each of the pairs (w, out); w is NZ as `nz.is_nz` finds, else
    row-major, [K, N] or "linear"'s [N, K], and the rows of `out` may lie apart."""
    tiled = [pair for pair in pairs if nz.is_nz(pair[0], weight_format)]
    if tiled:
        _launch(x, tiled, _cut(x, [out.shape[1] for _, out in tiled], 1), 0)
    for w, out in pairs:
        if not any(w is each for each, _ in tiled):
            heads(x[:, None], w[None], out[:, None], weight_format == "linear")


def in_parts(
    x: Tensor, columns: Sequence[tuple[Tensor, int]], weight_format: str, most: int = _PARTS
) -> Tensor:
    """[parts, M, sum of N], whose sum over the parts, at `most` so many, is x [M, K] @ w of each
    (w, N), one beside the other."""
    sizes = [size for _, size in columns]
    whole = all(nz.is_nz(w, weight_format) for w, _ in columns)
    config, parts = _cut(x, sizes, most if whole else 1)
    kind = torch.int32 if x.dtype is torch.int8 else torch.float32
    out = memory.empty((parts, x.shape[0], sum(sizes)), kind, x.device)
    pairs = list(zip([w for w, _ in columns], out[0].split(sizes, dim=1), strict=True))
    if whole:
        _launch(x, pairs, (config, parts), out.stride(0))
    else:
        weights(x, pairs, weight_format)
    return out


def sums(
    x: Rows, scaled: Sequence[tuple[Tensor, Tensor]], weight_format: str, most: int = _PARTS
) -> list[Sums]:
    """The products of int8 rows with int8 weights, given with their scales [1, N], as `in_parts`
    makes them."""
    sizes = [scale.shape[1] for _, scale in scaled]
    columns = [(w, size) for (w, _), size in zip(scaled, sizes, strict=True)]
    made = in_parts(x.values, columns, weight_format, most).split(sizes, -1)
    return [Sums(out, x.scale, scale) for out, (_, scale) in zip(made, scaled, strict=True)]


def _launch(
    x: Tensor, pairs: list[tuple[Tensor, Tensor]], cut: tuple[tune.Config, int], out_part: int
) -> None:
    (rows, depth), (config, parts) = x.shape, cut
    held = None if x.dtype is torch.int8 else _held(rows, depth // parts, len(pairs))
    config = held or config
    given: dict[str, Any] = {}
    for name, (w, out) in zip_longest(_WEIGHTS, pairs, fillvalue=(None, None)):
        columns, row = (0, 0) if out is None else (out.shape[1], out.stride(0))
        weight = Weight(w, out, columns, row)
        given |= {f"{name}_{field}": value for field, value in weight._asdict().items()}
    extent = Extent(rows, depth, parts, out_part)
    given |= {f"of_{field}": value for field, value in extent._asdict().items()}
    given["WHOLE_N"] = all(out.shape[1] % _wide(config) == 0 for _, out in pairs)
    works = min(parts * _tile_count(rows, [out.shape[1] for _, out in pairs], config), cores.cube())
    if held is None:
        nz_products[(works,)](x, **given, **whole_tiles(config, rows, depth), **config.keywords)
        return
    held_products[(max(works, parts),)](
        x,
        **given,
        WHOLE_M=rows == held.tiles["ROWS"],
        DEPTH=depth // parts,
        **held.keywords,
    )


def heads(x: Tensor, w: Tensor, out: Tensor, linear: bool = False) -> None:
    """out [M, heads, N] = x [M, heads, K] @ w [heads, K, N], or [heads, N, K] where `linear`; x may
    have strides, dense rows."""
    step = _STEP // x.element_size()
    found = covering("product.nd_product", x.shape[0])
    config = tune.choose(
        "product.nd_product", [config for config in found if config.tiles["DEPTH"] == step]
    )
    given = of_heads(x, w, out, config) | {"LINEAR": linear}
    works = head_tile_count(x, out.shape[2], config)
    nd_product[(min(works, cores.cube()),)](**given, **config.keywords)


def of_heads(x: Tensor, w: Tensor, out: Tensor, config: tune.Config) -> dict[str, Any]:
    """What `head_tiles` takes beside its tiles."""
    rows, heads, depth = x.shape
    columns = out.shape[2]
    of = Heads(rows, heads, columns, depth, x.stride(0), x.stride(1), out.stride(0))
    return dict(
        x=x,
        w=w,
        out=out,
        **{f"of_{field}": value for field, value in of._asdict().items()},
        WHOLE_N=columns % config.tiles["COLUMNS"] == 0,
        **whole_tiles(config, rows, depth),
    )


def head_tile_count(x: Tensor, columns: int, config: tune.Config) -> int:
    rows, heads, _ = x.shape
    return heads * -(-rows // config.tiles["ROWS"]) * -(-columns // config.tiles["COLUMNS"])


def by_height(kernel: str, rows: int) -> tune.Config:
    """The tiles of the least rows that cover M."""
    return tune.choose(kernel, covering(kernel, rows))


def covering(kernel: str, rows: int) -> list[tune.Config]:
    """First those of the least rows that cover M."""
    found = tune.TABLE[kernel]
    most = max(config.tiles["ROWS"] for config in found)
    return tune.ranked(found, "ROWS", min(rows, most))


def _cut(x: Tensor, columns: Sequence[int], most: int) -> tuple[tune.Config, int]:
    """The tiles and the number of parts, at most so many, that read the least on a core."""
    rows, depth = x.shape
    size = x.element_size()
    by_rows = [
        config
        for config in covering("product.nz_products", rows)
        if config.tiles.get("WIDE", 16) * size == _PANEL
        and (len(columns) == 1 or config.tiles["PANELS"] <= 8)
    ]
    least = by_rows[0].tiles["ROWS"]

    def parts(config: tune.Config) -> list[int]:
        step = config.tiles["DEPTH"]
        return [1] + [n for n in range(2, most + 1) if depth % (n * step) == 0]

    def cost(config: tune.Config, n: int) -> float:
        """Bytes that one of 24 cores waits for: weights, x out of the cache, sums of four bytes,
        which go out and in."""
        turns = -(-n * _tile_count(rows, columns, config) // tiling.A3.cube_cores)
        steps = turns * -(-depth // (n * config.tiles["DEPTH"]))
        wide = _wide(config) + min(rows, config.tiles["ROWS"]) / _CACHED
        loaded = size * config.tiles["DEPTH"] * wide + (config.tiles["PANELS"] + 1) * _COPY
        sums = 8 * n * rows * sum(columns) / tiling.A3.cube_cores
        return steps * loaded + sums + n * _PART

    fitting = [config for config in by_rows if config.tiles["ROWS"] == least]
    smaller = [config for config in by_rows if config.tiles["ROWS"] < least]
    best = {str(c): min(parts(c), key=lambda n: cost(c, n)) for c in by_rows}
    config = tune.choose(
        "product.nz_products",
        sorted(fitting, key=lambda c: cost(c, best[str(c)])) + smaller,
    )
    return config, best[str(config)]


def _held(rows: int, depth: int, weights: int) -> tune.Config | None:
    """The tiles of so many weights where x stays in L1 beside them: each has room of its own.  None
    where it does not fit, and where few rows are as quick to read again."""
    found = [
        config
        for config in tune.TABLE["product.held_products"]
        if config.tiles["ROWS"] == max(16, triton.next_power_of_2(rows))
        and 2 * depth * (config.tiles["ROWS"] + 16 * weights * config.tiles["PANELS"])
        <= tiling.A3.l1
    ]
    if depth % 128 or not found:
        return None
    return tune.choose("product.held_products", found, depth, weights)


def _wide(config: tune.Config) -> int:
    """Columns of a tile out of panels."""
    return config.tiles.get("WIDE", 16) * config.tiles["PANELS"]


def _tile_count(rows: int, columns: Sequence[int], config: tune.Config) -> int:
    across = sum(-(-each // _wide(config)) for each in columns)
    return -(-rows // config.tiles["ROWS"]) * across


def whole_tiles(config: tune.Config, rows: int, depth: int) -> dict[str, bool]:
    return {
        "WHOLE_M": rows % config.tiles["ROWS"] == 0,
        "WHOLE_K": depth % config.tiles["DEPTH"] == 0,
    }
