# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Norms and rotations of the prologs, and the rows that they write into paged caches.

    finish         products of x -> norms, rotated keys, rows of the caches, head weights
    rotate_heads   the heads of a query

A rotation pairs dims (0, 1), (2, 3)... (interleaved) or the halves; its result lies in halves.
Interleaved rows are loaded once and taken apart by the vector unit, before they are widened.
A slot that is negative or past the cache makes an empty copy: the mask is a bound on its length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..common import cores, entry, ragged, tune
from ..common.cores import turn


@triton.jit
def _summed(x, d, parts, part, by_row=1.0, by_column=None):
    """x[d], summed over the parts of a product's depth; of int32 what they stand for."""
    total = tl.load(x + d)
    for i in range(1, parts):
        total += tl.load(x + i.to(tl.int64) * part + d)
    if by_column is not None:
        total = total.to(tl.float32) * by_row * tl.load(by_column + d)
    return total


@triton.jit
def _summed_to(x, d, size, parts, part):
    """The same of the first `size`, and zeros."""
    total = tl.load(x + d, mask=d < size, other=0.0)
    for i in range(1, parts):
        total += tl.load(x + i.to(tl.int64) * part + d, mask=d < size, other=0.0)
    return total


@triton.jit
def _pair(x, SIZE: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The two dims that each angle turns, [SIZE / 2] each, as stored."""
    if INTERLEAVED:
        left, right = tl.split(tl.load(x + tl.arange(0, SIZE)).reshape(SIZE // 2, 2))
    else:
        h = tl.arange(0, SIZE // 2)
        left = tl.load(x + h)
        right = tl.load(x + SIZE // 2 + h)
    return left, right


@triton.jit
def _summed_pair(
    x,
    parts,
    part,
    SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    by_row=1.0,
    by_column=None,
):
    """The two dims that each angle turns, summed."""
    if INTERLEAVED:
        both = _summed(x, tl.arange(0, SIZE), parts, part, by_row, by_column)
        left, right = tl.split(both.reshape(SIZE // 2, 2))
    else:
        h = tl.arange(0, SIZE // 2)
        left = _summed(x, h, parts, part, by_row, by_column)
        right = _summed(x, SIZE // 2 + h, parts, part, by_row, by_column)
    return left, right


@triton.jit
def _angles(sin, cos, SIZE: tl.constexpr):
    """The halves of a token's sines and cosines."""
    h = tl.arange(0, SIZE // 2)
    s0 = tl.load(sin + h).to(tl.float32)
    s1 = tl.load(sin + SIZE // 2 + h).to(tl.float32)
    c0 = tl.load(cos + h).to(tl.float32)
    c1 = tl.load(cos + SIZE // 2 + h).to(tl.float32)
    return s0, s1, c0, c1


@triton.jit
def _query_norms(
    x, gamma, out, first, rows, x_row, parts, part, size, epsilon, WIDTH: tl.constexpr
):
    d = tl.arange(0, WIDTH)
    dtype = out.dtype.element_ty
    g = tl.load(gamma + d, mask=d < size, other=0.0).to(tl.float32)
    for row in range(turn(first), rows, tl.num_programs(0)):
        at = x + row.to(tl.int64) * x_row
        v = _summed_to(at, d, size, parts, part).to(dtype).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(v * v, 0) / size + epsilon)
        to = out + row.to(tl.int64) * size
        tl.store(to + d, (v * scale * g).to(dtype), mask=d < size)


@triton.jit
def _latent_rows(
    x,
    gamma,
    sin,
    cos,
    index,
    latent_cache,
    rotary_cache,
    first,
    rows,
    x_row,
    parts,
    part,
    slots,
    epsilon,
    LATENT: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """x [rows, LATENT + ROTARY]: the norm of the first, the rotation of the second, each to its
    token's slot."""
    d = tl.arange(0, LATENT)
    dtype = latent_cache.dtype.element_ty
    g = tl.load(gamma + d).to(tl.float32)
    for row in range(turn(first), rows, tl.num_programs(0)):
        slot = tl.load(index + row)
        there = (slot >= 0) & (slot < slots)
        of_latent = tl.where(there, LATENT, 0)
        of_rotary = tl.where(there, ROTARY // 2, 0)
        slot = tl.where(there, slot, 0).to(tl.int64)
        at = x + row.to(tl.int64) * x_row
        v = _summed(at, d, parts, part).to(dtype).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(v * v, 0) / LATENT + epsilon)
        tl.store(latent_cache + slot * LATENT + d, (v * scale * g).to(dtype), mask=d < of_latent)
        if ROTARY > 0:
            h = tl.arange(0, ROTARY // 2)
            left, right = _summed_pair(at + LATENT, parts, part, ROTARY, INTERLEAVED)
            left = left.to(dtype).to(tl.float32)
            right = right.to(dtype).to(tl.float32)
            angle = row.to(tl.int64) * ROTARY
            s0, s1, c0, c1 = _angles(sin + angle, cos + angle, ROTARY)
            to = rotary_cache + slot * ROTARY + h
            tl.store(to, (left * c0 - right * s0).to(dtype), mask=h < of_rotary)
            tl.store(to + ROTARY // 2, (right * c1 + left * s1).to(dtype), mask=h < of_rotary)


@triton.jit
def _index_rows(
    x,
    gamma,
    beta,
    sin,
    cos,
    index,
    cache,
    weights,
    first,
    rows,
    x_row,
    parts,
    part,
    slots,
    epsilon,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """x [rows, SIZE + HEADS]: LayerNorm of the first, rounded, the first ROTARY dims turned, to the
    token's slot; the others are the head weights.  The dims are taken in three parts: both of the
    pairs, and those that do not turn."""
    REST: tl.constexpr = SIZE - ROTARY
    w = tl.arange(0, HEADS)
    dtype = cache.dtype.element_ty
    if ROTARY > 0:
        h = tl.arange(0, ROTARY // 2)
        g0, g1 = _pair(gamma, ROTARY, INTERLEAVED)
        b0, b1 = _pair(beta, ROTARY, INTERLEAVED)
    for row in range(turn(first), rows, tl.num_programs(0)):
        slot = tl.load(index + row)
        there = (slot >= 0) & (slot < slots)
        of_rotary = tl.where(there, ROTARY // 2, 0)
        of_rest = tl.where(there, REST, 0)
        slot = tl.where(there, slot, 0).to(tl.int64)
        at = x + row.to(tl.int64) * x_row
        of_heads = _summed(at + SIZE, w, parts, part)
        tl.store(weights + row.to(tl.int64) * HEADS + w, of_heads.to(dtype))
        total = 0.0
        if ROTARY > 0:
            left, right = _summed_pair(at, parts, part, ROTARY, INTERLEAVED)
            total = tl.sum(left, 0) + tl.sum(right, 0)
        if REST > 0:
            r = tl.arange(0, REST)
            rest = _summed(at + ROTARY, r, parts, part)
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
        to = cache + slot * SIZE
        if ROTARY > 0:
            left = left * scale * g0.to(tl.float32) + b0.to(tl.float32)
            right = right * scale * g1.to(tl.float32) + b1.to(tl.float32)
            left = left.to(dtype).to(tl.float32)
            right = right.to(dtype).to(tl.float32)
            angle = row.to(tl.int64) * ROTARY
            s0, s1, c0, c1 = _angles(sin + angle, cos + angle, ROTARY)
            tl.store(to + h, (left * c0 - right * s0).to(dtype), mask=h < of_rotary)
            tl.store(to + ROTARY // 2 + h, (right * c1 + left * s1).to(dtype), mask=h < of_rotary)
        if REST > 0:
            g = tl.load(gamma + ROTARY + r).to(tl.float32)
            b = tl.load(beta + ROTARY + r).to(tl.float32)
            normed = (rest * scale * g + b).to(dtype)
            tl.store(to + ROTARY + r, normed, mask=r < of_rest)


@entry.jit(
    do_not_specialize=[
        "rows", "x_row", "parts", "rank", "latent_slots", "index_slots", "epsilon_cq",
        "epsilon_ckv", "epsilon_k",
    ]
)  # fmt: skip
def finish(
    x,
    sin,
    cos,
    index,
    rows,
    x_row,
    parts,
    gamma_cq,
    query_norm,
    rank,
    epsilon_cq,
    gamma_ckv,
    latent_cache,
    rotary_cache,
    latent_slots,
    epsilon_ckv,
    gamma_k,
    beta_k,
    index_cache,
    weights,
    index_slots,
    epsilon_k,
    LATENT: tl.constexpr,
    INDEX: tl.constexpr,
    HEADS: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INDEX_INTERLEAVED: tl.constexpr,
    WIDTH: tl.constexpr,
    multibuffer: tl.constexpr = True,
):
    """x [parts, rows, x_row]: rank, LATENT + ROTARY and INDEX + HEADS numbers of a token, of which
    some may be missing.  Each pass begins at the core where the one before it ended."""
    part = rows.to(tl.int64) * x_row
    of_latent = x
    first = 0
    if gamma_cq is not None:
        _query_norms(
            x,
            gamma_cq,
            query_norm,
            0,
            rows,
            x_row,
            parts,
            part,
            rank,
            epsilon_cq,
            WIDTH,
        )
        of_latent = x + rank
        first = rows % tl.num_programs(0)
    of_index = of_latent
    if gamma_ckv is not None:
        _latent_rows(
            of_latent,
            gamma_ckv,
            sin,
            cos,
            index,
            latent_cache,
            rotary_cache,
            first,
            rows,
            x_row,
            parts,
            part,
            latent_slots,
            epsilon_ckv,
            LATENT,
            ROTARY,
            INTERLEAVED,
        )
        of_index = of_latent + LATENT + ROTARY
        first = (first + rows) % tl.num_programs(0)
    if gamma_k is not None:
        _index_rows(
            of_index,
            gamma_k,
            beta_k,
            sin,
            cos,
            index,
            index_cache,
            weights,
            first,
            rows,
            x_row,
            parts,
            part,
            index_slots,
            epsilon_k,
            HEADS,
            INDEX,
            ROTARY,
            INDEX_INTERLEAVED,
        )


@triton.jit
def rotated(
    x,
    sin,
    cos,
    out,
    first,
    rows,
    heads,
    x_row,
    x_head,
    out_row,
    out_head,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WHOLE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
):
    """The rotation of ROTARY dims of every head, of which core `first` begins; the core where they
    end.  `out` may be `x` itself."""
    d = tl.arange(0, ROTARY)
    j = tl.arange(0, ROTARY // 2)
    tiles = (heads + HEAD_TILE - 1) // HEAD_TILE
    dtype = out.dtype.element_ty
    for work in range(turn(first), rows * tiles, tl.num_programs(0)):
        row = (work // tiles).to(tl.int64)
        h = (work % tiles * HEAD_TILE + tl.arange(0, HEAD_TILE))[:, None]
        at = x + row * x_row + h * x_head
        to = out + row * out_row + h * out_head + j[None]
        if INTERLEAVED:
            if WHOLE:
                both = tl.load(at + d[None])
            else:
                both = tl.load(at + d[None], mask=h < heads, other=0.0)
            left, right = tl.split(both.reshape(HEAD_TILE, ROTARY // 2, 2))
        elif WHOLE:
            left = tl.load(at + j[None])
            right = tl.load(at + ROTARY // 2 + j[None])
        else:
            left = tl.load(at + j[None], mask=h < heads, other=0.0)
            right = tl.load(at + ROTARY // 2 + j[None], mask=h < heads, other=0.0)
        left = left.to(tl.float32)
        right = right.to(tl.float32)
        s0, s1, c0, c1 = _angles(sin + row * ROTARY, cos + row * ROTARY, ROTARY)
        left_out = (left * c0[None] - right * s0[None]).to(dtype)
        right_out = (right * c1[None] + left * s1[None]).to(dtype)
        if WHOLE:
            tl.store(to, left_out)
            tl.store(to + ROTARY // 2, right_out)
        else:
            tl.store(to, left_out, mask=h < heads)
            tl.store(to + ROTARY // 2, right_out, mask=h < heads)
    return (first + rows * tiles) % tl.num_programs(0)


@entry.jit(do_not_specialize=["rows", "heads", "x_row", "x_head"])
def rotate_heads(
    x,
    sin,
    cos,
    rows,
    heads,
    x_row,
    x_head,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WHOLE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
):
    rotated(
        x,
        sin,
        cos,
        x,
        0,
        rows,
        heads,
        x_row,
        x_head,
        x_row,
        x_head,
        ROTARY,
        INTERLEAVED,
        WHOLE,
        HEAD_TILE,
    )


@dataclass
class Latent:
    """The attention's share of `norms`; the caches and the norm of the query's latent, if there is
    one, are written."""

    gamma_cq: Tensor | None
    gamma_ckv: Tensor
    latent_cache: Tensor
    rotary_cache: Tensor
    query_norm: Tensor | None
    epsilon_cq: float
    epsilon_ckv: float
    interleaved: bool


@dataclass
class Index:
    """The indexer's share of `norms`; the cache and the head weights are written."""

    gamma: Tensor
    beta: Tensor
    cache: Tensor
    weights: Tensor
    epsilon: float
    interleaved: bool


def widest() -> int:
    """The longest row of a latent."""
    return max(config.tiles["WIDTH"] for config in tune.TABLE["rows.finish"])


def norms(
    x: Tensor, sin: Tensor, cos: Tensor, index: Tensor, latent: Latent | None, key: Index | None
) -> None:
    """x [parts, M, rank + (R + Dr) + (Di + heads)], as `product.in_parts` leaves it: what the
    caches and the next products take of it."""
    _, rows, x_row = x.shape
    given: dict[str, Any] = dict.fromkeys(
        (
            "gamma_cq",
            "query_norm",
            "gamma_ckv",
            "latent_cache",
            "rotary_cache",
            "gamma_k",
            "beta_k",
            "index_cache",
            "weights",
        )
    )
    given |= dict.fromkeys(("rank", "latent_slots", "index_slots", "LATENT", "INDEX", "HEADS"), 0)
    given |= dict.fromkeys(("epsilon_cq", "epsilon_ckv", "epsilon_k"), 0.0)
    given |= dict.fromkeys(("INTERLEAVED", "INDEX_INTERLEAVED"), False)
    jobs, width = 0, 0
    if latent is not None and latent.gamma_cq is not None:
        jobs, width = 1, latent.gamma_cq.shape[0]
        given |= dict(
            gamma_cq=latent.gamma_cq,
            query_norm=latent.query_norm,
            rank=width,
            epsilon_cq=latent.epsilon_cq,
        )
    if latent is not None:
        jobs, width = jobs + 1, max(width, latent.latent_cache.shape[-1])
        given |= dict(
            gamma_ckv=latent.gamma_ckv,
            latent_cache=latent.latent_cache,
            rotary_cache=latent.rotary_cache,
            latent_slots=latent.latent_cache.shape[0] * latent.latent_cache.shape[1],
            epsilon_ckv=latent.epsilon_ckv,
            LATENT=latent.latent_cache.shape[-1],
            INTERLEAVED=latent.interleaved,
        )
    if key is not None:
        jobs += 1
        given |= dict(
            gamma_k=key.gamma,
            beta_k=key.beta,
            index_cache=key.cache,
            weights=key.weights,
            index_slots=key.cache.shape[0] * key.cache.shape[1],
            epsilon_k=key.epsilon,
            INDEX=key.cache.shape[-1],
            HEADS=key.weights.shape[-1],
            INDEX_INTERLEAVED=key.interleaved,
        )
    config = tune.at_least("rows.finish", "WIDTH", width)
    finish[(min(jobs * rows, cores.vector()),)](
        x,
        sin,
        cos,
        ragged.int32(index),
        rows=rows,
        x_row=x_row,
        parts=x.shape[0],
        ROTARY=sin.shape[-1],
        **given,
        **config.keywords,
    )


def rotate(x: Tensor, sin: Tensor, cos: Tensor, interleaved: bool) -> None:
    """Turns the first Dr dims of the heads of x [M, N, ..] in place."""
    if not sin.shape[-1]:
        return
    rows, heads = x.shape[:2]
    config = tune.at_least("rows.rotate_heads", "HEAD_TILE", heads, sin.shape[-1])
    tile = config.tiles["HEAD_TILE"]
    rotate_heads[(min(rows * -(-heads // tile), cores.vector()),)](
        x,
        sin,
        cos,
        rows,
        heads,
        *x.stride()[:2],
        ROTARY=sin.shape[-1],
        INTERLEAVED=interleaved,
        WHOLE=heads % tile == 0,
        **config.keywords,
    )
