# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Attention's output turned back and projected, the first product a group of heads at a time; rnd
rounds to the dtype of attn_out.

    turn_back       vector cores   o = rnd(RoPE^-1(attn_out)); a layer's in place
    group_products  cube           rnd(o W_o_a[g]) of all groups, one beside the other
    prolog/product  cube           rnd(.. W_o_b)

The products are those of prolog/product.py; row-major weights of the groups are its `nd_product`.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory, nz
from ..common import cores, entry, tiling, tune
from ..prolog import product
from ..prolog.product import panel_tiles
from .last_rotation import angles, not_turned, turned

_CACHED = 3  # how many times as fast the cache is as the memory
_NARROW = 64  # dims that turn, of which UB holds many heads


@entry.jit(do_not_specialize=["rows", "heads"])
def turn_back(
    x,
    sin,
    cos,
    out,
    rows,
    heads,
    SIZE: tl.constexpr,
    ROTARY: tl.constexpr,
    WHOLE: tl.constexpr,
    APART: tl.constexpr,
    HEAD_TILE: tl.constexpr,
):
    """x [rows, heads, SIZE] with its last ROTARY dims turned back; the others are copied where
    `out` is APART from x."""
    PLAIN: tl.constexpr = SIZE - ROTARY
    r = tl.arange(0, ROTARY)[None]
    tiles = (heads + HEAD_TILE - 1) // HEAD_TILE
    dtype = out.dtype.element_ty
    for work in range(tl.program_id(0), rows * tiles, tl.num_programs(0)):
        row = work // tiles
        h = (work - row * tiles) * HEAD_TILE + tl.arange(0, HEAD_TILE)
        there = (h < heads)[:, None]
        h = h[:, None] * SIZE
        at = x + row.to(tl.int64) * heads * SIZE + h
        to = out + row.to(tl.int64) * heads * SIZE + h
        s, c = angles(sin + row.to(tl.int64) * ROTARY, cos + row.to(tl.int64) * ROTARY, ROTARY)
        if PLAIN > 0 and APART:
            p = tl.arange(0, PLAIN)[None]
        if WHOLE:
            both = tl.load(at + PLAIN + r)
            if PLAIN > 0 and APART:
                tl.store(to + p, tl.load(at + p))
        else:
            both = tl.load(at + PLAIN + r, mask=there, other=0.0)
            if PLAIN > 0 and APART:
                tl.store(to + p, tl.load(at + p, mask=there, other=0.0), mask=there)
        left, right = tl.split(both.reshape(HEAD_TILE, ROTARY // 2, 2))
        both = turned(left.to(tl.float32), right.to(tl.float32), -s[None], c[None])
        both = both.reshape(HEAD_TILE, ROTARY).to(dtype)
        if WHOLE:
            tl.store(to + PLAIN + r, both)
        else:
            tl.store(to + PLAIN + r, both, mask=there)


@entry.jit(do_not_specialize=["rows", "groups", "columns", "depth"])
def group_products(
    x,
    w,
    out,
    rows,
    groups,
    columns,
    depth,
    WHOLE_M: tl.constexpr,
    WHOLE_N: tl.constexpr,
    WHOLE_K: tl.constexpr,
    ROWS: tl.constexpr,
    PANELS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """x [rows, groups, depth] by NZ w [groups, columns / 16, depth, 16]: out [rows, groups,
    columns]."""
    first = rows * 0
    for group in range(0, groups):
        g = group.to(tl.int64)
        first = panel_tiles(
            x + g * depth,
            w + g * columns * depth,
            out + g * columns,
            columns,
            groups * columns,
            first,
            rows,
            depth,
            1,
            0,
            WHOLE_M,
            WHOLE_N,
            WHOLE_K,
            ROWS,
            PANELS,
            DEPTH,
            x_row=groups * depth,
        )


def unsupported(attn_out: Tensor, rope_sin: Tensor, weight_quant_mode: int, **_: Any) -> str | None:
    if weight_quant_mode != 0:
        return f"weight_quant_mode {weight_quant_mode}, supported 0: its products are of 16 bits"
    size, rotary = attn_out.shape[-1], rope_sin.shape[-1]
    if reason := tiling.not_multiplied(attn_out=attn_out):
        return reason
    return not_turned(size, rotary, "`attn_out`")


def forward(
    attn_out: Tensor,
    w_o_a: Tensor,
    w_o_b: Tensor,
    rope_sin: Tensor | None,
    rope_cos: Tensor | None,
    weight_format: str,
    **_: Any,
) -> Tensor:
    """Without sines and cosines `attn_out` is turned back already."""
    front, dtype, device = attn_out.shape[:2], attn_out.dtype, attn_out.device
    hidden, ranks = (nz.columns_of(w, weight_format) for w in (w_o_b, w_o_a))
    groups = w_o_a.shape[0]
    out = memory.empty((*front, hidden), dtype, device)
    if attn_out.numel() * hidden * ranks == 0:
        return out.zero_()
    x = attn_out.flatten(0, 1)
    angles = None
    if rope_sin is not None and rope_cos is not None:
        angles = rope_sin.flatten(0, 1), rope_cos.flatten(0, 1)
    tokens, heads, size = x.shape
    at_once = tiling.at_once(tokens, (heads * size + groups * ranks) * dtype.itemsize)
    for first in range(0, tokens, at_once):
        here = slice(first, first + at_once)
        turned = x[here]
        if angles is not None:
            sin, cos = angles
            turned = _turned_back(turned, sin[here], cos[here])
        turned = turned.view(-1, groups, heads // groups * size)
        middle = memory.empty((turned.shape[0], groups, ranks), dtype, device)
        if w_o_a.ndim == 5 or nz.is_nz(w_o_a[0], weight_format):
            _by_groups(turned, w_o_a, middle)
        else:
            product.heads(turned, w_o_a, middle, weight_format == "linear")
        product.weights(middle.flatten(1), [(w_o_b, out.flatten(0, 1)[here])], weight_format)
    return out


def turned_back(
    attn_out: Tensor, rope_sin: Tensor, rope_cos: Tensor, in_place: bool = False
) -> Tensor:
    """What `forward` multiplies, by itself."""
    if attn_out.numel() == 0:
        return attn_out
    x, sin, cos = (each.flatten(0, 1) for each in (attn_out, rope_sin, rope_cos))
    return _turned_back(x, sin, cos, in_place).view(attn_out.shape)


def _turned_back(x: Tensor, sin: Tensor, cos: Tensor, in_place: bool = False) -> Tensor:
    """x [M, N, D]."""
    rows, heads, size = x.shape
    out = x if in_place else memory.empty(x.shape, x.dtype, x.device)
    config = _turning(x, sin, in_place)
    tile = config.tiles["HEAD_TILE"]
    turn_back[(min(rows * -(-heads // tile), cores.vector()),)](
        x,
        sin,
        cos,
        out,
        rows,
        heads,
        SIZE=size,
        ROTARY=sin.shape[-1],
        WHOLE=heads % tile == 0,
        APART=not in_place,
        **config.keywords,
    )
    return out


def _turning(x: Tensor, sin: Tensor, in_place: bool) -> tune.Config:
    """Many heads a tile, which reads a token's angles once, where their other dims stay in place
    and all cores have a tile."""
    kernel = "grouped_o_proj_pto.turn_back"
    (rows, heads, size), rotary = x.shape, sin.shape[-1]
    many, few = tune.TABLE[kernel]
    tile = many.tiles["HEAD_TILE"]
    shared = heads % tile == 0 and rows * heads // tile >= cores.vector()
    fits = in_place and rotary <= _NARROW
    return tune.choose(kernel, (many, few) if shared and fits else (few,), size)


def _by_groups(x: Tensor, w: Tensor, out: Tensor) -> None:
    """x [M, groups, K] by NZ [groups, K, N]: out [M, groups, N]."""
    (rows, groups, depth), columns = x.shape, out.shape[2]
    config = _config(groups, rows, depth, columns)
    group_products[(min(groups * _tile_count(rows, columns, config), cores.cube()),)](
        x,
        w,
        out,
        rows,
        groups,
        columns,
        depth,
        **product.whole_tiles(config, rows, depth),
        WHOLE_N=columns % (16 * config.tiles["PANELS"]) == 0,
        **config.keywords,
    )


def _config(groups: int, rows: int, depth: int, columns: int) -> tune.Config:
    """Of the tiles of the least rows that cover M those with which a core waits for the least
    numbers: weights, and x out of the cache."""
    kernel = "grouped_o_proj_pto.group_products"
    found = product.covering(kernel, rows)
    least = found[0].tiles["ROWS"]

    def cost(config: tune.Config) -> float:
        turns = -(-groups * _tile_count(rows, columns, config) // tiling.A3.cube_cores)
        wide = 16 * config.tiles["PANELS"] + min(rows, config.tiles["ROWS"]) / _CACHED
        return turns * tiling.up(depth, config.tiles["DEPTH"]) * wide

    fitting = [config for config in found if config.tiles["ROWS"] == least]
    smaller = [config for config in found if config.tiles["ROWS"] < least]
    return tune.choose(kernel, sorted(fitting, key=cost) + smaller)


def _tile_count(rows: int, columns: int, config: tune.Config) -> int:
    return -(-rows // config.tiles["ROWS"]) * -(-columns // (16 * config.tiles["PANELS"]))
