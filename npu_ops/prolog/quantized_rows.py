# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What follows the products of the prologs where weights or caches have 8 bits, on the vector
cores: scales of the products, norms and rotations as in rows.py, scales of what is stored.

    latents       -> query norm, also as int8; latent rows, of 656 bytes or in two caches
    index_keys    -> index keys, int8 or not; head weights
    query_heads   -> heads for the absorption, and their rotated dims
    index_heads   -> rotated index heads, or int8 ones, whose scales go into the head weights

Rounding is where rows.py rounds, and quantization behind it: caches have the bytes of their
writers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dispatch.common import quantized
from ..common import cores, entry, quantize, ragged, tune, tuples
from ..common.cores import turn
from .product import Rows, Sums
from .rows import _angles, _pair, _summed, _summed_pair


@triton.jit
def _query_norms(
    x,
    gamma,
    smooth,
    out,
    c,
    c_scale,
    by_rows,
    by_column,
    rows,
    x_row,
    parts,
    part,
    epsilon,
    RANK: tl.constexpr,
):
    d = tl.arange(0, RANK)
    dtype = out.dtype.element_ty
    g = tl.load(gamma + d).to(tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = x + row.to(tl.int64) * x_row
        by_row = 1.0
        if by_column is not None:
            by_row = tl.load(by_rows + row)
        v = _summed(at, d, parts, part, by_row, by_column).to(dtype).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(v * v, 0) / RANK + epsilon)
        normed = (v * scale * g).to(dtype)
        to = row.to(tl.int64) * RANK + d
        tl.store(out + to, normed)
        if c is not None:
            u = normed.to(tl.float32)
            if smooth is not None:
                u *= tl.load(smooth + d)
            by_c = tl.max(tl.abs(u), 0) / 127.0
            tl.store(c_scale + row, by_c)
            tl.store(c + to, quantize.rounded(u / quantize.divisor(by_c)))


@triton.jit
def _latent_rows(
    x,
    gamma,
    sin,
    cos,
    index,
    alpha,
    latents,
    rotary,
    scales,
    by_rows,
    by_column,
    rows,
    x_row,
    parts,
    part,
    page,
    slots,
    latent_page,
    rotary_page,
    scale_page,
    epsilon,
    LATENT: tl.constexpr,
    ROTARY: tl.constexpr,
    LATENT_ROW: tl.constexpr,
    ROTARY_ROW: tl.constexpr,
    SCALE_ROW: tl.constexpr,
    TILES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """x [rows, LATENT + ROTARY]: the norm of the first, the rotation of the second, each to its
    token's slot."""
    d = tl.arange(0, LATENT)
    t = tl.arange(0, TILES)
    g = tl.load(gamma + d).to(tl.float32)
    fits = 1.0
    if alpha is not None:
        fits = tl.load(alpha)
    for row in range(turn(rows % tl.num_programs(0)), rows, tl.num_programs(0)):
        slot = tl.load(index + row)
        there = (slot >= 0) & (slot < slots)
        of_rotary = tl.where(there, ROTARY // 2, 0)
        slot = tl.where(there, slot, 0)
        outer = (slot // page).to(tl.int64)
        inner = slot % page
        at = x + row.to(tl.int64) * x_row
        by_row = 1.0
        if by_column is not None:
            by_row = tl.load(by_rows + row)
            of_rope = by_column + LATENT
        else:
            of_rope = by_column
        v = _summed(at, d, parts, part, by_row, by_column).to(DTYPE).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(v * v, 0) / LATENT + epsilon)
        normed = (v * scale * g).to(DTYPE)
        to = latents + outer * latent_page + inner * LATENT_ROW
        if scales is not None:
            of_tiles = tl.where(there, TILES, 0)
            tiles = normed.to(tl.float32).reshape(TILES, LATENT // TILES)
            values, by = quantize.of_floats(tiles, fits)
            e = t[:, None] * (LATENT // TILES) + tl.arange(0, LATENT // TILES)[None]
            tl.store(to + e, values, mask=(t < of_tiles)[:, None])
            tl.store(scales + outer * scale_page + inner * SCALE_ROW + t, by, mask=t < of_tiles)
        else:
            of_latent = tl.where(there, LATENT, 0)
            tl.store(to + d, normed, mask=d < of_latent)
        if ROTARY > 0:
            h = tl.arange(0, ROTARY // 2)
            from_rope = at + LATENT
            left, right = _summed_pair(from_rope, parts, part, ROTARY, INTERLEAVED, by_row, of_rope)
            left = left.to(DTYPE).to(tl.float32)
            right = right.to(DTYPE).to(tl.float32)
            angle = row.to(tl.int64) * ROTARY
            s0, s1, c0, c1 = _angles(sin + angle, cos + angle, ROTARY)
            to = rotary + outer * rotary_page + inner * ROTARY_ROW + h
            tl.store(to, (left * c0 - right * s0).to(DTYPE), mask=h < of_rotary)
            tl.store(to + ROTARY // 2, (right * c1 + left * s1).to(DTYPE), mask=h < of_rotary)


class Parts(NamedTuple):
    """Of a sum."""

    row: int
    parts: int
    part: int  # how far they are apart


class Pages(NamedTuple):
    page: int  # rows of a page
    slots: int
    latent_page: int
    rotary_page: int
    scale_page: int


class Constants(NamedTuple):
    LATENT: tl.constexpr
    ROTARY: tl.constexpr
    LATENT_ROW: tl.constexpr  # how far the rows of each part of a cache are apart
    ROTARY_ROW: tl.constexpr
    SCALE_ROW: tl.constexpr
    TILES: tl.constexpr  # of a latent, each with a scale
    INTERLEAVED: tl.constexpr  # the dims that an angle turns are neighbours


@tuples.jit(["rows", "epsilon_cq", "epsilon_ckv"])
def latents(
    x,
    y,
    by_rows,
    rows,
    of_x: Parts,
    by_rank,
    gamma_cq,
    smooth,
    query_norm,
    c,
    c_scale,
    epsilon_cq,
    by_latent,
    gamma_ckv,
    sin,
    cos,
    index,
    alpha,
    latent_cache,
    rotary_cache,
    scale_cache,
    pages: Pages,
    epsilon_ckv,
    RANK: tl.constexpr,
    C: Constants,
    MOST: tl.constexpr,
    multibuffer: tl.constexpr = True,
):
    """x [parts, rows, RANK] and y [.., LATENT + ROTARY], whose strides are those of x, RANK at
    most MOST; pages are so far apart in numbers of each part's own dtype, and rows in them."""
    _query_norms(
        x,
        gamma_cq,
        smooth,
        query_norm,
        c,
        c_scale,
        by_rows,
        by_rank,
        rows,
        *of_x,
        epsilon_cq,
        RANK,
    )
    _latent_rows(
        y,
        gamma_ckv,
        sin,
        cos,
        index,
        alpha,
        latent_cache,
        rotary_cache,
        scale_cache,
        by_rows,
        by_latent,
        rows,
        *of_x,
        *pages,
        epsilon_ckv,
        *C,
        query_norm.dtype.element_ty,
    )


@entry.jit(
    do_not_specialize=[
        "rows", "x_row", "parts", "part", "y_row", "y_parts", "y_part", "page", "slots",
        "key_page", "scale_page", "epsilon",
    ]
)  # fmt: skip
def index_keys(
    x,
    y,
    by_rows,
    by_column,
    gamma,
    beta,
    sin,
    cos,
    index,
    keys,
    scales,
    weights,
    rows,
    x_row,
    parts,
    part,
    y_row,
    y_parts,
    y_part,
    page,
    slots,
    key_page,
    scale_page,
    epsilon,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """x [parts, rows, SIZE]: LayerNorm, rounded, the first ROTARY dims turned, to the token's slot;
    y [y_parts, rows, HEADS] are the head weights.  The dims are taken in three parts: both of the
    pairs, and those that do not turn."""
    REST: tl.constexpr = SIZE - ROTARY
    one = tl.arange(0, 1)
    w = tl.arange(0, HEADS)
    dtype = gamma.dtype.element_ty
    if ROTARY > 0:
        h = tl.arange(0, ROTARY // 2)
        g0, g1 = _pair(gamma, ROTARY, INTERLEAVED)
        b0, b1 = _pair(beta, ROTARY, INTERLEAVED)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        slot = tl.load(index + row)
        there = (slot >= 0) & (slot < slots)
        of_rotary = tl.where(there, ROTARY // 2, 0)
        of_rest = tl.where(there, REST, 0)
        slot = tl.where(there, slot, 0)
        outer = (slot // page).to(tl.int64)
        inner = slot % page
        at = x + row.to(tl.int64) * x_row
        by_row = 1.0
        if by_column is not None:
            by_row = tl.load(by_rows + row)
            of_rest_column = by_column + ROTARY
        else:
            of_rest_column = by_column
        of_heads = _summed(y + row.to(tl.int64) * y_row, w, y_parts, y_part)
        tl.store(weights + row.to(tl.int64) * HEADS + w, of_heads.to(dtype))
        total = 0.0
        if ROTARY > 0:
            left, right = _summed_pair(at, parts, part, ROTARY, INTERLEAVED, by_row, by_column)
            total = tl.sum(left, 0) + tl.sum(right, 0)
        if REST > 0:
            r = tl.arange(0, REST)
            rest = _summed(at + ROTARY, r, parts, part, by_row, of_rest_column)
            total += tl.sum(rest, 0)
        mean = total / SIZE
        squares = 0.0
        if ROTARY > 0:
            left -= mean
            right -= mean
            squares = tl.sum(left * left, 0) + tl.sum(right * right, 0)
        if REST > 0:
            rest -= mean
            squares += tl.sum(rest * rest, 0)
        scale = 1.0 / tl.sqrt(squares / SIZE + epsilon)
        if ROTARY > 0:
            left = left * scale * g0.to(tl.float32) + b0.to(tl.float32)
            right = right * scale * g1.to(tl.float32) + b1.to(tl.float32)
            left = left.to(dtype).to(tl.float32)
            right = right.to(dtype).to(tl.float32)
            angle = row.to(tl.int64) * ROTARY
            s0, s1, c0, c1 = _angles(sin + angle, cos + angle, ROTARY)
            first = (left * c0 - right * s0).to(dtype)
            second = (right * c1 + left * s1).to(dtype)
        if REST > 0:
            g = tl.load(gamma + ROTARY + r).to(tl.float32)
            b = tl.load(beta + ROTARY + r).to(tl.float32)
            others = (rest * scale * g + b).to(dtype)
        to = keys + outer * key_page + inner * SIZE
        if scales is not None:
            amax = 0.0
            if ROTARY > 0:
                first = first.to(tl.float32)
                second = second.to(tl.float32)
                amax = tl.maximum(tl.max(tl.abs(first), 0), tl.max(tl.abs(second), 0))
            if REST > 0:
                others = others.to(tl.float32)
                amax = tl.maximum(amax, tl.max(tl.abs(others), 0))
            by = amax / 127.0
            divisor = quantize.divisor(by)
            if ROTARY > 0:
                first = quantize.rounded(first / divisor)
                second = quantize.rounded(second / divisor)
            if REST > 0:
                others = quantize.rounded(others / divisor)
            by = tl.zeros((1,), tl.float32) + by
            by = quantize.stored(by, scales.dtype.element_ty)
            of_scale = scales + outer * scale_page + inner + one
            tl.store(of_scale, by, mask=one < tl.where(there, 1, 0))
        if ROTARY > 0:
            tl.store(to + h, first, mask=h < of_rotary)
            tl.store(to + ROTARY // 2 + h, second, mask=h < of_rotary)
        if REST > 0:
            tl.store(to + ROTARY + r, others, mask=r < of_rest)


@triton.jit
def _head_tile(x, by_row, by_column, at, there, dtype: tl.constexpr, WHOLE: tl.constexpr):
    """x[at], rounded; of integers what they stand for."""
    if WHOLE:
        tile = tl.load(x + at)
        if by_column is not None:
            tile = tile.to(tl.float32) * by_row * tl.load(by_column + at)
    else:
        tile = tl.load(x + at, mask=there, other=0)
        if by_column is not None:
            tile = tile.to(tl.float32) * by_row * tl.load(by_column + at, mask=there, other=0.0)
    return tile.to(dtype)


@triton.jit
def _turned_tile(
    x,
    by_row,
    by_column,
    at,
    there,
    sin,
    cos,
    dtype: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Of HEAD_TILE heads the ROTARY dims that begin at `at`, turned, in halves."""
    if INTERLEAVED:
        d = tl.arange(0, ROTARY)[None]
        both = _head_tile(x, by_row, by_column, at + d, there, dtype, WHOLE)
        left, right = tl.split(both.reshape(HEAD_TILE, ROTARY // 2, 2))
    else:
        h = tl.arange(0, ROTARY // 2)[None]
        left = _head_tile(x, by_row, by_column, at + h, there, dtype, WHOLE)
        right = _head_tile(x, by_row, by_column, at + ROTARY // 2 + h, there, dtype, WHOLE)
    left = left.to(tl.float32)
    right = right.to(tl.float32)
    s0, s1, c0, c1 = _angles(sin, cos, ROTARY)
    first = (left * c0[None] - right * s0[None]).to(dtype)
    second = (right * c1[None] + left * s1[None]).to(dtype)
    return first, second


@entry.jit(do_not_specialize=["rows", "heads", "x_row"])
def query_heads(
    x,
    by_rows,
    by_column,
    sin,
    cos,
    plain,
    turned,
    rows,
    heads,
    x_row,
    PLAIN: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WHOLE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
):
    """x [rows, heads, PLAIN + ROTARY] int32: what the first stand for, and the others, turned."""
    HEAD: tl.constexpr = PLAIN + ROTARY
    d = tl.arange(0, PLAIN)[None]
    tiles = (heads + HEAD_TILE - 1) // HEAD_TILE
    dtype = plain.dtype.element_ty
    for work in range(tl.program_id(0), rows * tiles, tl.num_programs(0)):
        row = (work // tiles).to(tl.int64)
        head = (work % tiles * HEAD_TILE + tl.arange(0, HEAD_TILE))[:, None]
        there = head < heads
        of_row = x + row * x_row
        by_row = tl.load(by_rows + row)
        of_plain = _head_tile(of_row, by_row, by_column, head * HEAD + d, there, dtype, WHOLE)
        to = plain + row * heads * PLAIN + head * PLAIN + d
        if WHOLE:
            tl.store(to, of_plain)
        else:
            tl.store(to, of_plain, mask=there)
        if ROTARY > 0:
            first, second = _turned_tile(
                of_row,
                by_row,
                by_column,
                head * HEAD + PLAIN,
                there,
                sin + row * ROTARY,
                cos + row * ROTARY,
                dtype,
                HEAD_TILE,
                ROTARY,
                INTERLEAVED,
                WHOLE,
            )
            h = tl.arange(0, ROTARY // 2)[None]
            to_turned = turned + row * heads * ROTARY + head * ROTARY + h
            if WHOLE:
                tl.store(to_turned, first)
                tl.store(to_turned + ROTARY // 2, second)
            else:
                tl.store(to_turned, first, mask=there)
                tl.store(to_turned + ROTARY // 2, second, mask=there)


@entry.jit(do_not_specialize=["rows", "heads", "x_row"])
def index_heads(
    x,
    by_rows,
    by_column,
    sin,
    cos,
    weights,
    out,
    folded,
    rows,
    heads,
    x_row,
    SIZE: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WHOLE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
):
    """x [rows, heads, SIZE], int32 or rounded already: the first ROTARY dims turned; where scales
    go into the weights, of int8."""
    REST: tl.constexpr = SIZE - ROTARY
    tiles = (heads + HEAD_TILE - 1) // HEAD_TILE
    dtype = weights.dtype.element_ty
    for work in range(tl.program_id(0), rows * tiles, tl.num_programs(0)):
        row = (work // tiles).to(tl.int64)
        n = work % tiles * HEAD_TILE + tl.arange(0, HEAD_TILE)
        head = n[:, None]
        there = head < heads
        of_row = x + row * x_row
        by_row = 1.0
        if by_column is not None:
            by_row = tl.load(by_rows + row)
        if ROTARY > 0:
            h = tl.arange(0, ROTARY // 2)[None]
            first, second = _turned_tile(
                of_row,
                by_row,
                by_column,
                head * SIZE,
                there,
                sin + row * ROTARY,
                cos + row * ROTARY,
                dtype,
                HEAD_TILE,
                ROTARY,
                INTERLEAVED,
                WHOLE,
            )
        if REST > 0:
            r = tl.arange(0, REST)[None]
            at = head * SIZE + ROTARY + r
            rest = _head_tile(of_row, by_row, by_column, at, there, dtype, WHOLE)
        to = out + row * heads * SIZE + head * SIZE
        if folded is not None:
            amax = 0.0
            if ROTARY > 0:
                first = first.to(tl.float32)
                second = second.to(tl.float32)
                amax = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
            if REST > 0:
                rest = rest.to(tl.float32)
                amax = tl.maximum(amax, tl.max(tl.abs(rest), 1))
            by = amax / 127.0
            divisor = quantize.divisor(by)[:, None]
            if ROTARY > 0:
                first = quantize.rounded(first / divisor)
                second = quantize.rounded(second / divisor)
            if REST > 0:
                rest = quantize.rounded(rest / divisor)
            w = tl.load(weights + row * heads + n, mask=n < heads, other=0.0).to(tl.float32)
            tl.store(folded + row * heads + n, w * by, mask=n < heads)
        if ROTARY > 0:
            if WHOLE:
                tl.store(to + h, first)
                tl.store(to + ROTARY // 2 + h, second)
            else:
                tl.store(to + h, first, mask=there)
                tl.store(to + ROTARY // 2 + h, second, mask=there)
        if REST > 0:
            if WHOLE:
                tl.store(to + ROTARY + r, rest)
            else:
                tl.store(to + ROTARY + r, rest, mask=there)


@dataclass
class Rotation:
    sin: Tensor
    cos: Tensor
    interleaved: bool


@dataclass
class Latent:
    """What `latents` takes of the attention's prolog; the caches and the query norm are written.
    `row_layout` names the order of a cache of rows, and is None where there are two caches."""

    gamma_cq: Tensor
    gamma_ckv: Tensor
    epsilon_cq: float
    epsilon_ckv: float
    kv_cache: Tensor
    kr_cache: Tensor
    index: Tensor
    row_layout: str | None
    alpha: Tensor | None
    smooth: Tensor | None


def of_latents(
    x: Sums, y: Sums, of: Latent, rotation: Rotation, query_norm: Tensor, c: Rows
) -> None:
    """x [parts, M, Rq] and y [parts, M, R + Dr] of one launch: the rows of the caches, the norm of
    the query's latent, and `c`, the same in int8, unless it is the norm itself."""
    parts, rows, rank = x.parts.shape
    latent, rotary = of.gamma_ckv.shape[0], rotation.sin.shape[-1]
    is_quantized = c.scale is not None
    caches: tuple[Tensor, Tensor, Tensor | None] = (of.kv_cache, of.kr_cache, None)
    if of.row_layout is not None:
        caches = quantized.row_parts(of.kv_cache, of.row_layout, torch.int8, query_norm.dtype)
    in_latents, in_rotary, scales = caches
    pages, page = of.kv_cache.shape[:2]
    config = tune.at_least("quantized_rows.latents", "MOST", rank, latent, rotary)
    latents[(min(2 * rows, cores.vector()),)](
        x.parts,
        y.parts,
        x.by_row,
        rows,
        x.parts.stride(1),
        parts,
        x.parts.stride(0),
        x.by_column,
        of.gamma_cq,
        of.smooth,
        query_norm,
        c.values if is_quantized else None,
        c.scale,
        of.epsilon_cq,
        y.by_column,
        of.gamma_ckv,
        rotation.sin,
        rotation.cos,
        ragged.int32(of.index),
        of.alpha,
        in_latents,
        in_rotary,
        scales,
        page,
        pages * page,
        in_latents.stride(0),
        in_rotary.stride(0),
        0 if scales is None else scales.stride(0),
        of.epsilon_ckv,
        RANK=rank,
        LATENT=latent,
        ROTARY=rotary,
        LATENT_ROW=in_latents.stride(1),
        ROTARY_ROW=in_rotary.stride(1),
        SCALE_ROW=0 if scales is None else scales.stride(1),
        TILES=1 if scales is None else scales.shape[-1],
        INTERLEAVED=rotation.interleaved,
        **config.keywords,
    )


def widest() -> int:
    """The longest latent of a query."""
    return max(config.tiles["MOST"] for config in tune.TABLE["quantized_rows.latents"])


@dataclass
class Index:
    """What `index_keys` takes of the indexer's prolog; `keys` is written, and `scales` where keys
    are of int8."""

    gamma: Tensor
    beta: Tensor
    epsilon: float
    keys: Tensor
    scales: Tensor | None
    index: Tensor


def of_index_keys(x: Sums, y: Sums, of: Index, rotation: Rotation, weights: Tensor) -> None:
    """x [parts, M, Di] to the cache, y [.., M, Ni] to the head weights."""
    parts, rows, _ = x.parts.shape
    pages, page = of.keys.shape[:2]
    index_keys[(min(rows, cores.vector()),)](
        x.parts,
        y.parts,
        x.by_row,
        x.by_column,
        of.gamma,
        of.beta,
        rotation.sin,
        rotation.cos,
        ragged.int32(of.index),
        of.keys,
        of.scales,
        weights,
        rows,
        x.parts.stride(1),
        parts,
        x.parts.stride(0),
        y.parts.stride(1),
        y.parts.shape[0],
        y.parts.stride(0),
        page,
        pages * page,
        of.keys.stride(0),
        0 if of.scales is None else of.scales.stride(0),
        of.epsilon,
        HEADS=weights.shape[1],
        SIZE=of.gamma.shape[0],
        ROTARY=rotation.sin.shape[-1],
        INTERLEAVED=rotation.interleaved,
        **tune.only("quantized_rows.index_keys").keywords,
    )


def of_query_heads(x: Sums, rotation: Rotation, plain: Tensor, turned: Tensor) -> None:
    """x [1, M, N (Dn + Dr)] to plain [M, N, Dn] and turned [M, N, Dr]."""
    rows, heads, size = plain.shape
    rotary = rotation.sin.shape[-1]
    config = tune.at_least("quantized_rows.query_heads", "HEAD_TILE", heads, size, rotary)
    tile = config.tiles["HEAD_TILE"]
    query_heads[(min(rows * -(-heads // tile), cores.vector()),)](
        x.parts,
        x.by_row,
        x.by_column,
        rotation.sin,
        rotation.cos,
        plain,
        turned,
        rows,
        heads,
        x.parts.stride(1),
        PLAIN=size,
        ROTARY=rotary,
        INTERLEAVED=rotation.interleaved,
        WHOLE=heads % tile == 0,
        **config.keywords,
    )


def of_index_heads(
    x: Sums, rotation: Rotation, weights: Tensor, out: Tensor, folded: Tensor | None
) -> None:
    """x [1, M, Ni Di] to out [M, Ni, Di]; of int8 where there is `folded` [M, Ni], the weights
    times the scales."""
    rows, heads, size = out.shape
    rotary = rotation.sin.shape[-1]
    # heads that do not turn are one piece, which takes more room
    wanted = heads if rotary else 1
    config = tune.at_least("quantized_rows.index_heads", "HEAD_TILE", wanted, size, rotary)
    tile = config.tiles["HEAD_TILE"]
    index_heads[(min(rows * -(-heads // tile), cores.vector()),)](
        x.parts,
        x.by_row,
        x.by_column,
        rotation.sin,
        rotation.cos,
        weights,
        out,
        folded,
        rows,
        heads,
        x.parts.stride(1),
        SIZE=size,
        ROTARY=rotary,
        INTERLEAVED=rotation.interleaved,
        WHOLE=heads % tile == 0,
        **config.keywords,
    )
