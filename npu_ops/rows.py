# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Norms and rotations of the prologs, and the rows that they write into paged caches.

A rotation pairs dims (0, 1), (2, 3)... (interleaved) or the halves; its result lies in halves.
Interleaved rows are loaded once and taken apart by the vector unit, before they are widened.
A slot that is negative or past the cache makes an empty copy: the mask is a bound on its length.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from . import cores, entry, ragged, tune


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
def _angles(sin, cos, SIZE: tl.constexpr):
    """The halves of a token's sines and cosines."""
    h = tl.arange(0, SIZE // 2)
    s0 = tl.load(sin + h).to(tl.float32)
    s1 = tl.load(sin + SIZE // 2 + h).to(tl.float32)
    c0 = tl.load(cos + h).to(tl.float32)
    c1 = tl.load(cos + SIZE // 2 + h).to(tl.float32)
    return s0, s1, c0, c1


@entry.jit(do_not_specialize=["rows", "size", "epsilon"])
def rms_norm(x, gamma, out, rows, size, epsilon, WIDTH: tl.constexpr):
    d = tl.arange(0, WIDTH)
    g = tl.load(gamma + d, mask=d < size, other=0.0).to(tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = row.to(tl.int64) * size
        v = tl.load(x + at + d, mask=d < size, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(v * v, 0) / size + epsilon)
        tl.store(out + at + d, (v * scale * g).to(out.dtype.element_ty), mask=d < size)


@entry.jit(do_not_specialize=["rows", "slots", "epsilon"])
def latent_rows(
    x, gamma, sin, cos, index, latent_cache, rotary_cache, rows, slots, epsilon,
    LATENT: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """x [rows, LATENT + ROTARY]: the norm of the first, the rotation of the second, each to its
    token's slot."""
    d = tl.arange(0, WIDTH)
    h = tl.arange(0, ROTARY // 2)
    g = tl.load(gamma + d, mask=d < LATENT, other=0.0).to(tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        slot = tl.load(index + row)
        there = (slot >= 0) & (slot < slots)
        of_latent = tl.where(there, LATENT, 0)
        of_rotary = tl.where(there, ROTARY // 2, 0)
        slot = tl.where(there, slot, 0).to(tl.int64)
        at = x + row.to(tl.int64) * (LATENT + ROTARY)
        v = tl.load(at + d, mask=d < LATENT, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(v * v, 0) / LATENT + epsilon)
        normed = (v * scale * g).to(latent_cache.dtype.element_ty)
        tl.store(latent_cache + slot * LATENT + d, normed, mask=d < of_latent)
        left, right = _pair(at + LATENT, ROTARY, INTERLEAVED)
        left = left.to(tl.float32)
        right = right.to(tl.float32)
        angle = row.to(tl.int64) * ROTARY
        s0, s1, c0, c1 = _angles(sin + angle, cos + angle, ROTARY)
        to = rotary_cache + slot * ROTARY + h
        dtype = rotary_cache.dtype.element_ty
        tl.store(to, (left * c0 - right * s0).to(dtype), mask=h < of_rotary)
        tl.store(to + ROTARY // 2, (right * c1 + left * s1).to(dtype), mask=h < of_rotary)


@entry.jit(do_not_specialize=["rows", "slots", "epsilon"])
def index_rows(
    x, gamma, beta, sin, cos, index, cache, rows, slots, epsilon,
    SIZE: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """x [rows, SIZE] float32: LayerNorm, rounded; the first ROTARY dims turned, each row to its
    token's slot.  The dims are taken in three parts: both of the pairs, and the others."""
    REST: tl.constexpr = SIZE - ROTARY
    h = tl.arange(0, ROTARY // 2)
    dtype = cache.dtype.element_ty
    g0, g1 = _pair(gamma, ROTARY, INTERLEAVED)
    b0, b1 = _pair(beta, ROTARY, INTERLEAVED)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        slot = tl.load(index + row)
        there = (slot >= 0) & (slot < slots)
        of_rotary = tl.where(there, ROTARY // 2, 0)
        of_rest = tl.where(there, REST, 0)
        slot = tl.where(there, slot, 0).to(tl.int64)
        at = x + row.to(tl.int64) * SIZE
        left, right = _pair(at, ROTARY, INTERLEAVED)
        total = tl.sum(left, 0) + tl.sum(right, 0)
        if REST > 0:
            r = tl.arange(0, REST)
            rest = tl.load(at + ROTARY + r)
            total += tl.sum(rest, 0)
        mean = total / SIZE
        left -= mean
        right -= mean
        squares = tl.sum(left * left, 0) + tl.sum(right * right, 0)
        if REST > 0:
            rest -= mean
            squares += tl.sum(rest * rest, 0)
        scale = 1.0 / tl.sqrt(squares / SIZE + epsilon)
        left = left * scale * g0.to(tl.float32) + b0.to(tl.float32)
        right = right * scale * g1.to(tl.float32) + b1.to(tl.float32)
        left = left.to(dtype).to(tl.float32)
        right = right.to(dtype).to(tl.float32)
        angle = row.to(tl.int64) * ROTARY
        s0, s1, c0, c1 = _angles(sin + angle, cos + angle, ROTARY)
        to = cache + slot * SIZE
        tl.store(to + h, (left * c0 - right * s0).to(dtype), mask=h < of_rotary)
        tl.store(to + ROTARY // 2 + h, (right * c1 + left * s1).to(dtype), mask=h < of_rotary)
        if REST > 0:
            g = tl.load(gamma + ROTARY + r).to(tl.float32)
            b = tl.load(beta + ROTARY + r).to(tl.float32)
            normed = (rest * scale * g + b).to(dtype)
            tl.store(to + ROTARY + r, normed, mask=r < of_rest)


@entry.jit(do_not_specialize=["rows", "heads", "x_row", "x_head", "out_row", "out_head"])
def rotate_heads(
    x, sin, cos, out, rows, heads, x_row, x_head, out_row, out_head,
    ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, WHOLE: tl.constexpr, HEAD_TILE: tl.constexpr,
):  # fmt: skip
    """The rotation of ROTARY dims of every head; `out` may be `x` itself."""
    d = tl.arange(0, ROTARY)
    j = tl.arange(0, ROTARY // 2)
    tiles = (heads + HEAD_TILE - 1) // HEAD_TILE
    dtype = out.dtype.element_ty
    for work in range(tl.program_id(0), rows * tiles, tl.num_programs(0)):
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
        first = (left * c0[None] - right * s0[None]).to(dtype)
        second = (right * c1[None] + left * s1[None]).to(dtype)
        if WHOLE:
            tl.store(to, first)
            tl.store(to + ROTARY // 2, second)
        else:
            tl.store(to, first, mask=h < heads)
            tl.store(to + ROTARY // 2, second, mask=h < heads)


def norm(x: Tensor, gamma: Tensor, epsilon: float, out: Tensor) -> None:
    """out [M, D] = RMSNorm of x [M, D]."""
    rows, size = x.shape
    config = tune.at_least("rows.rms_norm", "WIDTH", size)
    rms_norm[(min(rows, cores.vector()),)](x, gamma, out, rows, size, epsilon, **config.keywords)


def widest() -> int:
    """The longest row that `norm` takes."""
    return max(config.tiles["WIDTH"] for config in tune.TABLE["rows.rms_norm"])


def latent(
    x: Tensor,
    gamma: Tensor,
    epsilon: float,
    sin: Tensor,
    cos: Tensor,
    index: Tensor,
    latent_cache: Tensor,
    rotary_cache: Tensor,
    interleaved: bool,
) -> None:
    """Rows [M, R + Dr] into the two caches of the latent keys."""
    config = tune.at_least("rows.latent_rows", "WIDTH", latent_cache.shape[-1])
    latent_rows[(min(x.shape[0], cores.vector()),)](
        x, gamma, sin, cos, ragged.int32(index), latent_cache, rotary_cache,
        x.shape[0], latent_cache.shape[0] * latent_cache.shape[1], epsilon,
        LATENT=latent_cache.shape[-1], ROTARY=rotary_cache.shape[-1], INTERLEAVED=interleaved,
        **config.keywords,
    )  # fmt: skip


def index_key(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    epsilon: float,
    sin: Tensor,
    cos: Tensor,
    index: Tensor,
    cache: Tensor,
    interleaved: bool,
) -> None:
    """Rows [M, Di], float32, into the cache of the index keys."""
    rows, size = x.shape
    config = tune.only("rows.index_rows")
    index_rows[(min(rows, cores.vector()),)](
        x, gamma, beta, sin, cos, ragged.int32(index), cache,
        rows, cache.shape[0] * cache.shape[1], epsilon,
        SIZE=size, ROTARY=sin.shape[-1], INTERLEAVED=interleaved, **config.keywords,
    )  # fmt: skip


def rotate(x: Tensor, sin: Tensor, cos: Tensor, interleaved: bool, out: Tensor) -> None:
    """The first Dr dims of the heads of x [M, N, ..], turned, into those of out [M, N, ..]."""
    rows, heads, _ = x.shape
    config = tune.at_least("rows.rotate_heads", "HEAD_TILE", heads, sin.shape[-1])
    tiles = -(-heads // config.tiles["HEAD_TILE"])
    rotate_heads[(min(rows * tiles, cores.vector()),)](
        x, sin, cos, out, rows, heads, x.stride(0), x.stride(1), out.stride(0), out.stride(1),
        ROTARY=sin.shape[-1], INTERLEAVED=interleaved,
        WHOLE=heads % config.tiles["HEAD_TILE"] == 0, **config.keywords,
    )  # fmt: skip
