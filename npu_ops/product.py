# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Products with weights, on the cube alone: no vector core, no workspace.

    nz_product   x [M, K] @ W, W as FRACTAL_NZ bytes [N/16, K, 16]
    nd_product   x [M, heads, K] @ W [heads, K, N], row-major, head by head

An NZ panel is 16 columns, and its K rows lie one after the other: a step of DEPTH of them is one
bulk copy of contiguous bytes into L1, and one multiply.  The panels' sums stay in L0C, and the x
tile is loaded once for all of them.  Wider tiles out of panels (a 3-D load, reshaped) are
miscompiled or go through the vector cores.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..dispatch.common import nz
from . import cores, entry, tune


def of_8_bits(weight_quant_mode: int, kv_cache_quant_mode: int) -> str | None:
    """Why a prolog of these modes has no kernel here, or None."""
    for name, mode in (
        ("weight_quant_mode", weight_quant_mode),
        ("kv_cache_quant_mode", kv_cache_quant_mode),
    ):
        if mode:
            return f"{name}={mode} has no kernel on NPUs yet, supported 0"
    return None


@triton.jit
def _panel(w, panel, panels, depth, at, WHOLE_N: tl.constexpr):
    """Where a step of one panel begins; a panel past the last one is the last one."""
    if not WHOLE_N:
        panel = tl.minimum(panel, panels - 1)
    return w + panel.to(tl.int64) * depth * 16 + at


@triton.jit
def _step(x_tile, w, panel, panels, depth, k, at, acc, WHOLE_N: tl.constexpr, WHOLE_K: tl.constexpr,
          DEPTH: tl.constexpr):  # fmt: skip
    start = _panel(w, panel, panels, depth, at, WHOLE_N)
    if WHOLE_K:
        w_tile = tl.load(start)
    else:
        w_tile = tl.load(start, mask=(tl.arange(0, DEPTH) < depth - k)[:, None], other=0.0)
    return tl.dot(x_tile, w_tile, acc)


@triton.jit
def _put(out, row, m, panel, panels, columns, acc, WHOLE_N: tl.constexpr):
    n = tl.arange(0, 16)
    at = out + row * columns + panel * 16 + n[None]
    there = m[:, None]
    if not WHOLE_N:
        there = there & (n < (panels - panel) * 16)[None]
    tl.store(at, acc.to(out.dtype.element_ty), mask=there)


@entry.jit(do_not_specialize=["rows", "columns", "depth"])
def nz_product(
    x, w, out, rows, columns, depth,
    WHOLE_M: tl.constexpr, WHOLE_N: tl.constexpr, WHOLE_K: tl.constexpr,
    ROWS: tl.constexpr, PANELS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    panels = columns // 16
    tiles = (panels + PANELS - 1) // PANELS
    n = tl.arange(0, 16)
    for tile in range(tl.program_id(0), (rows + ROWS - 1) // ROWS * tiles, tl.num_programs(0)):
        row = tile // tiles * ROWS + tl.arange(0, ROWS)
        m = row < rows
        row = row.to(tl.int64)[:, None]
        panel = tile % tiles * PANELS
        acc0 = tl.zeros((ROWS, 16), tl.float32)
        acc1 = tl.zeros((ROWS, 16), tl.float32)
        acc2 = tl.zeros((ROWS, 16), tl.float32)
        acc3 = tl.zeros((ROWS, 16), tl.float32)
        for k in range(0, depth, DEPTH):
            d = tl.arange(0, DEPTH)
            from_x = x + row * depth + (k + d)[None]
            if WHOLE_M and WHOLE_K:
                x_tile = tl.load(from_x)
            elif WHOLE_K:
                x_tile = tl.load(from_x, mask=m[:, None], other=0.0)
            else:
                x_tile = tl.load(from_x, mask=m[:, None] & (d < depth - k)[None], other=0.0)
            at = (k + d)[:, None] * 16 + n[None]
            acc0 = _step(x_tile, w, panel, panels, depth, k, at, acc0, WHOLE_N, WHOLE_K, DEPTH)
            acc1 = _step(x_tile, w, panel + 1, panels, depth, k, at, acc1, WHOLE_N, WHOLE_K, DEPTH)
            acc2 = _step(x_tile, w, panel + 2, panels, depth, k, at, acc2, WHOLE_N, WHOLE_K, DEPTH)
            acc3 = _step(x_tile, w, panel + 3, panels, depth, k, at, acc3, WHOLE_N, WHOLE_K, DEPTH)
        _put(out, row, m, panel, panels, columns, acc0, WHOLE_N)
        _put(out, row, m, panel + 1, panels, columns, acc1, WHOLE_N)
        _put(out, row, m, panel + 2, panels, columns, acc2, WHOLE_N)
        _put(out, row, m, panel + 3, panels, columns, acc3, WHOLE_N)


@entry.jit(do_not_specialize=["rows", "heads", "columns", "depth", "x_row", "x_head", "out_row"])
def nd_product(
    x, w, out, rows, heads, columns, depth, x_row, x_head, out_row,
    WHOLE_M: tl.constexpr, WHOLE_N: tl.constexpr, WHOLE_K: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    across = (columns + COLUMNS - 1) // COLUMNS
    tiles = (rows + ROWS - 1) // ROWS * across
    d = tl.arange(0, DEPTH)
    for work in range(tl.program_id(0), heads * tiles, tl.num_programs(0)):
        head = work // tiles
        tile = work % tiles
        row = tile // across * ROWS + tl.arange(0, ROWS)
        column = tile % across * COLUMNS + tl.arange(0, COLUMNS)
        m = (row < rows)[:, None]
        there = (column < columns)[None]
        row = row.to(tl.int64)[:, None]
        of_head = w + head.to(tl.int64) * depth * columns
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(0, depth, DEPTH):
            from_x = x + row * x_row + head * x_head + (k + d)[None]
            from_w = of_head + (k + d)[:, None].to(tl.int64) * columns + column[None]
            if WHOLE_M and WHOLE_K:
                x_tile = tl.load(from_x)
            elif WHOLE_K:
                x_tile = tl.load(from_x, mask=m, other=0.0)
            else:
                x_tile = tl.load(from_x, mask=m & (d < depth - k)[None], other=0.0)
            if WHOLE_N and WHOLE_K:
                w_tile = tl.load(from_w)
            else:
                w_tile = tl.load(from_w, mask=there & (d < depth - k)[:, None], other=0.0)
            acc = tl.dot(x_tile, w_tile, acc)
        to = out + row * out_row + head * columns + column[None]
        tl.store(to, acc.to(out.dtype.element_ty), mask=m & there)


def weight(x: Tensor, w: Tensor, weight_format: str, out: Tensor) -> None:
    """out [M, N] = x [M, K] @ w, which is NZ or row-major as `nz.is_nz` finds."""
    if not nz.is_nz(w, weight_format):
        heads(x[:, None], w[None], out[:, None])
        return
    rows, depth = x.shape
    columns = out.shape[1]
    config = _config("product.nz_product", rows, depth)
    whole = _whole(config, rows, depth)
    tiles = -(-rows // config.tiles["ROWS"]) * -(-columns // (16 * config.tiles["PANELS"]))
    nz_product[(min(tiles, cores.cube()),)](
        x, w, out, rows, columns, depth, **whole,
        WHOLE_N=columns % (16 * config.tiles["PANELS"]) == 0, **config.keywords,
    )  # fmt: skip


def heads(x: Tensor, w: Tensor, out: Tensor) -> None:
    """out [M, heads, N] = x [M, heads, K] @ w [heads, K, N]; x may have strides, dense rows."""
    rows, count, depth = x.shape
    columns = w.shape[2]
    config = _config("product.nd_product", rows, depth)
    tiles = -(-rows // config.tiles["ROWS"]) * -(-columns // config.tiles["COLUMNS"])
    nd_product[(min(count * tiles, cores.cube()),)](
        x, w, out, rows, count, columns, depth, x.stride(0), x.stride(1), out.stride(0),
        **_whole(config, rows, depth), WHOLE_N=columns % config.tiles["COLUMNS"] == 0,
        **config.keywords,
    )  # fmt: skip


def _config(kernel: str, rows: int, depth: int) -> tune.Config:
    """The least rows that cover M; a depth that divides K where there is one."""
    found = tune.TABLE[kernel]
    most = max(config.tiles["ROWS"] for config in found)
    by_rows = tune.ranked(found, "ROWS", min(rows, most))
    least = by_rows[0].tiles["ROWS"]
    fitting = [config for config in by_rows if config.tiles["ROWS"] == least]
    dividing = [config for config in fitting if depth % config.tiles["DEPTH"] == 0]
    smaller = [config for config in by_rows if config.tiles["ROWS"] < least]
    return tune.choose(kernel, dividing + fitting[::-1] + smaller)


def _whole(config: tune.Config, rows: int, depth: int) -> dict[str, bool]:
    return {
        "WHOLE_M": rows % config.tiles["ROWS"] == 0,
        "WHOLE_K": depth % config.tiles["DEPTH"] == 0,
    }
