# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Hyper-connections in front of a sublayer; see dispatch/reference/deepseek_v4/hc_pre.py.

    mix     cube + vector   runs of channels: their products with hc_fn, and sums of squares
    gates   vector          gates and sweeps of some tokens, and their y

Products are float32's, of float32 operands: the vector cores widen the streams for the cube, and
sum the squares.  Behind a sublayer they make the streams, too (hc_post_pre.py).  What `mix` leaves
is [runs, 32, tokens]: tokens lie on the lanes of all gates, and a division of the sweeps is one of
whole tiles.  How channels are cut into runs follows from the shapes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import memory
from ...dispatch.common.hyper_connections import outputs
from ...dispatch.ops.deepseek_v4.hc_pre import Arguments, Gates
from ..common import cores, entry, tiling, tune, tuples
from ..common.front_end import extract_slice, get_element
from .hc_post import blended, wide_tile

ROWS = 32  # of what `mix` leaves a run: products with the rows of hc_fn, then the sum of squares


@triton.jit
def _column(at, there, WHOLE_T: tl.constexpr):
    """A gate of every token."""
    if WHOLE_T:
        gate = tl.load(at)
    else:
        gate = tl.load(at, mask=there, other=0.0)
    return gate[:, None]


@triton.jit
def _columns(at, there, WHOLE_T: tl.constexpr):
    """Four gates of every token."""
    return (
        _column(at, there, WHOLE_T),
        _column(at + 1, there, WHOLE_T),
        _column(at + 2, there, WHOLE_T),
        _column(at + 3, there, WHOLE_T),
    )


@entry.jit(do_not_specialize=["tokens", "hidden", "span", "columns"])
def mix(
    x,
    fn,
    partial,
    layer,
    post,
    comb,
    streams,
    tokens,
    hidden,
    span,
    columns,
    COUNT: tl.constexpr,
    BEHIND: tl.constexpr,
    WHOLE_T: tl.constexpr,
    WHOLE_K: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Of streams x [tokens, 4, hidden], `span` channels a run; partial [runs, 32, columns].
    BEHIND: x are the streams in front of a sublayer that gave `layer`; those behind it are made,
    written to `streams`, and multiplied."""
    d = tl.arange(0, DEPTH)
    m = tl.arange(0, 32)
    blocks = (tokens + TOKENS - 1) // TOKENS
    runs = (hidden + span - 1) // span
    for work in range(tl.program_id(0), blocks * runs, tl.num_programs(0)):
        run = work // blocks
        first = work % blocks * TOKENS
        t = first + tl.arange(0, TOKENS)
        on = t < tokens
        t = t.to(tl.int64)
        acc = tl.zeros((32, TOKENS), tl.float32)
        squares = tl.zeros((TOKENS,), tl.float32)
        if BEHIND:
            of_p = post + t * 4
            of_c = comb + t * 16
            p0, p1, p2, p3 = _columns(of_p, on, WHOLE_T)
            c00, c01, c02, c03 = _columns(of_c, on, WHOLE_T)
            c10, c11, c12, c13 = _columns(of_c + 4, on, WHOLE_T)
            c20, c21, c22, c23 = _columns(of_c + 8, on, WHOLE_T)
            c30, c31, c32, c33 = _columns(of_c + 12, on, WHOLE_T)
        for step in range(0, span, DEPTH):
            k = run * span + step
            row = (t * 4 * hidden)[:, None] + (k + d)[None]
            there = on[:, None]
            of_w = (m < COUNT)[:, None]
            if not WHOLE_K:
                there = there & (d < hidden - k)[None]
                of_w = of_w & (d < hidden - k)[None]
            if BEHIND:
                WHOLE: tl.constexpr = WHOLE_T and WHOLE_K
                u = wide_tile(layer + (t * hidden)[:, None] + (k + d)[None], there, WHOLE)
                r0 = wide_tile(x + row, there, WHOLE)
                r1 = wide_tile(x + row + hidden, there, WHOLE)
                r2 = wide_tile(x + row + 2 * hidden, there, WHOLE)
                r3 = wide_tile(x + row + 3 * hidden, there, WHOLE)
            for j in tl.static_range(4):
                if BEHIND:
                    if j == 0:
                        wide = blended(u, r0, r1, r2, r3, p0, c00, c10, c20, c30)
                    elif j == 1:
                        wide = blended(u, r0, r1, r2, r3, p1, c01, c11, c21, c31)
                    elif j == 2:
                        wide = blended(u, r0, r1, r2, r3, p2, c02, c12, c22, c32)
                    else:
                        wide = blended(u, r0, r1, r2, r3, p3, c03, c13, c23, c33)
                    made = wide.to(streams.dtype.element_ty)
                    tl.store(streams + row + j * hidden, made, mask=there)
                    tile = made.to(tl.float32)
                else:
                    tile = wide_tile(x + row + j * hidden, there, WHOLE_T and WHOLE_K)
                w = tl.load(
                    fn + ((m * 4 + j) * hidden)[:, None] + (k + d)[None], mask=of_w, other=0.0
                )
                squares += tl.sum(tile * tile, 1)
                acc = tl.dot(w, tl.trans(tile), acc)
        to = partial + run.to(tl.int64) * 32 * columns + first + tl.arange(0, TOKENS)
        tl.store(to[None] + m[:, None] * columns, acc, mask=(m < COUNT)[:, None])
        tl.store(to + COUNT * columns, squares)


@triton.jit
def _collapsed(x, p0, p1, p2, p3, d, hidden, there, WIDTH: tl.constexpr):
    """sum_j pre_j x_j of a token's streams, channels d."""
    j = tl.arange(0, 4)
    streams = tl.load(x + j[:, None] * hidden + d[None], mask=there[None], other=0.0).to(tl.float32)
    y = p0 * extract_slice(streams, (0, 0), (1, WIDTH), (1, 1))
    y += p1 * extract_slice(streams, (1, 0), (1, WIDTH), (1, 1))
    y += p2 * extract_slice(streams, (2, 0), (1, WIDTH), (1, 1))
    y += p3 * extract_slice(streams, (3, 0), (1, WIDTH), (1, 1))
    return y.reshape(WIDTH)


@triton.jit
def _sweeps(logits, iters, eps):
    """comb of logits [4, 4, L], from the stream of the first axis to that of the second."""
    comb = tl.exp(logits - tl.max(logits, 1)[:, None, :])
    comb = comb / tl.sum(comb, 1)[:, None, :] + eps
    comb = comb / (tl.sum(comb, 0) + eps)[None]
    for _ in range(1, iters):
        comb = comb / (tl.sum(comb, 1) + eps)[:, None, :]
        comb = comb / (tl.sum(comb, 0) + eps)[None]
    return comb


class Made(NamedTuple):
    """What the layer takes, and the gates behind it."""

    y: Tensor
    post: Tensor
    comb: Tensor


class Sums(NamedTuple):
    """How the products lie, and what becomes of them."""

    runs: int
    columns: int
    hidden: int
    iters: int
    norm_eps: float
    hc_eps: float


class Gating(NamedTuple):
    COUNT: tl.constexpr  # gates
    NORM: tl.constexpr  # the layer takes a norm
    LANES: tl.constexpr  # tokens at a time
    WIDTH: tl.constexpr


@tuples.jit(["tokens", "each"])
def gates(
    x,
    partial,
    scale,
    base,
    weight,
    made: Made,
    tokens,
    each,
    of: Sums,
    C: Gating,
):
    """A program takes `each` tokens at a time, at most LANES."""
    m = tl.arange(0, 32)
    q = tl.arange(0, 4)
    lane = tl.arange(0, C.LANES)
    d = tl.arange(0, C.WIDTH)
    e = tl.arange(0, 8)
    by = tl.load(scale)
    beside = tl.load(base + e, mask=e < C.COUNT, other=0.0)[:, None]
    if C.COUNT > 4:
        by = tl.where(e < 4, by, tl.load(scale + 1))[:, None]
        by_comb = tl.load(scale + 2)
        beside_comb = tl.load(base + 8 + tl.arange(0, 16))[:, None]
    for first in range(tl.program_id(0) * each, tokens, tl.num_programs(0) * each):
        count = tl.minimum(each, tokens - first)
        on = lane < count
        at = partial + m[:, None] * of.columns + first + lane[None]
        sums = tl.load(at, mask=on[None], other=0.0)
        for run in range(1, of.runs):
            sums += tl.load(at + run.to(tl.int64) * 32 * of.columns, mask=on[None], other=0.0)
        squares = extract_slice(sums, (C.COUNT, 0), (1, C.LANES), (1, 1))
        root = 1.0 / tl.sqrt(squares / (4 * of.hidden) + of.norm_eps)
        logits = extract_slice(sums, (0, 0), (8, C.LANES), (1, 1)) * root * by + beside
        opened = 1.0 / (1.0 + tl.exp(-logits))
        pre = extract_slice(opened, (0, 0), (4, C.LANES), (1, 1)) + of.hc_eps
        if C.COUNT > 4:
            t = (first + lane).to(tl.int64)[:, None]
            back = 2.0 * extract_slice(opened, (4, 0), (4, C.LANES), (1, 1))
            tl.store(made.post + t * 4 + q[None], tl.trans(back), mask=on[:, None])
            mixed = (
                extract_slice(sums, (8, 0), (16, C.LANES), (1, 1)) * root * by_comb + beside_comb
            )
            mixed = _sweeps(mixed.reshape(4, 4, C.LANES), of.iters, of.hc_eps)
            of_comb = made.comb + t[:, :, None] * 16 + q[None, :, None] * 4 + q[None, None]
            # not as rows of 16: build 1.0.0 refuses them, turned and masked
            tl.store(of_comb, tl.permute(mixed, (2, 0, 1)), mask=on[:, None, None])
        for i in range(0, count):
            token = (first + i).to(tl.int64)
            of_x = x + token * 4 * of.hidden
            p0 = get_element(pre, (0, i))
            p1 = get_element(pre, (1, i))
            p2 = get_element(pre, (2, i))
            p3 = get_element(pre, (3, i))
            if C.NORM:
                total = tl.zeros((C.WIDTH,), tl.float32)
                for k in range(0, of.hidden, C.WIDTH):
                    v = _collapsed(
                        of_x + k, p0, p1, p2, p3, d, of.hidden, d < of.hidden - k, C.WIDTH
                    )
                    total += v * v
                of_y = 1.0 / tl.sqrt(tl.sum(total, 0) / of.hidden + of.norm_eps)
            for k in range(0, of.hidden, C.WIDTH):
                v = _collapsed(of_x + k, p0, p1, p2, p3, d, of.hidden, d < of.hidden - k, C.WIDTH)
                if C.NORM:
                    v = v * of_y * tl.load(weight + k + d, mask=d < of.hidden - k, other=0.0)
                to = made.y + token * of.hidden + k + d
                tl.store(to, v.to(made.y.dtype.element_ty), mask=d < of.hidden - k)


def products(x: Tensor, fn: Tensor, behind: Sequence[Tensor] | None = None) -> Tensor:
    """What `mix` leaves of streams x [T, 4, h].  `behind` is (what a sublayer gave, post, comb, the
    streams to write), and x lies in front of the sublayer."""
    tokens, _, hidden = x.shape
    config = _tiles(tokens, behind is not None)
    height, depth = config.tiles["TOKENS"], config.tiles["DEPTH"]
    blocks, steps = triton.cdiv(tokens, height), triton.cdiv(hidden, depth)
    most = max(1, min(tiling.A3.cube_cores // blocks, steps))
    runs = next(n for n in range(most, 0, -1) if steps % n == 0)
    span = steps // runs * depth
    partial = memory.empty((runs, ROWS, blocks * height), torch.float32, x.device)
    layer, post, comb, streams = behind or (None, None, None, None)
    mix[(min(blocks * runs, cores.cube()),)](
        x,
        fn,
        partial,
        layer,
        post,
        comb,
        streams,
        tokens,
        hidden,
        span,
        blocks * height,
        COUNT=fn.shape[0],
        BEHIND=behind is not None,
        WHOLE_T=tokens % height == 0,
        WHOLE_K=hidden % depth == 0,
        **config.keywords,
    )
    return partial


def _tiles(tokens: int, behind: bool) -> tune.Config:
    """Those that cover the tokens; five tiles of streams and their sum leave less room."""
    most = 2048 if behind else 8192
    table = [c for c in tune.TABLE["hc_pre.mix"] if c.tiles["TOKENS"] * c.tiles["DEPTH"] <= most]
    tallest = max(c.tiles["TOKENS"] for c in table)
    return tune.choose("hc_pre.mix", tune.ranked(table, "TOKENS", min(tokens, tallest)), behind)


def gated(x: Tensor, partial: Tensor, of: Gates, made: tuple[Tensor, Tensor, Tensor]) -> None:
    """Of streams x [T, 4, h] and their products, into y, post and comb."""
    tokens, _, hidden = x.shape
    runs, _, columns = partial.shape
    share = triton.cdiv(tokens, cores.vector())
    config = tune.at_least("hc_pre.gates", "LANES", share)
    each = min(share, config.tiles["LANES"])
    gates[(min(triton.cdiv(tokens, each), cores.vector()),)](
        x,
        partial,
        of["hc_scale"],
        of["hc_base"],
        of["norm_weight"],
        *made,
        tokens,
        each,
        runs,
        columns,
        hidden,
        of["hc_sinkhorn_iters"],
        of["norm_eps"],
        of["hc_eps"],
        COUNT=of["hc_fn"].shape[0],
        NORM=of["norm_weight"] is not None,
        **config.keywords,
    )


def unsupported(x: Tensor, **_: Any) -> str | None:
    if x.dtype is torch.float64:
        return "`x` is float64, the vector units take float32, float16 and bfloat16"
    return None


def forward(**a: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor]:
    x, hc_fn = a["x"], a["hc_fn"]
    made = outputs(x, hc_fn)
    if x.numel():
        streams = x.flatten(0, -3)
        gated(streams, products(streams, hc_fn), a, made)
    return made
