# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Hyper-connections in front of a sublayer; see dispatch/reference/deepseek_v4/hc_pre.py.

`_mix` takes a block of tokens and some channels of all four streams, as one row: products with
hc_fn and sums of squares, in runs that the next kernel adds up.  Products are float32's: hc_fn goes
in as two numbers of the width of x.  `_gates`: the first programs make post and comb of several
tokens each, sweeps side by side; each other one loads a token's streams and makes its y.
The floor is x, read once; here it is read twice, the second time mostly from L2.

    condition    kernels
    any          _mix then _gates
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from typing_extensions import Unpack

from ...dispatch.common import memory
from ...dispatch.common.hyper_connections import outputs
from ...dispatch.ops.deepseek_v4.hc_pre import Arguments, Gates
from ..common import gpu, handover
from ..common.tiling import cdiv, power_of_two
from ..runtime import launches
from . import hyper_connections
from .hyper_connections import (
    MIX,
    Settings,
    entry,
    inverse_root,
    opened,
    product_of_streams,
    returned,
    runs_of,
    shares,
    sinkhorn,
)

MANY = 256  # tokens: more are bound by the bytes
MOST_RUNS = 128
BLOCK_D = 64  # channels of a step


@triton.jit(do_not_specialize=["tokens"])
def _mix(
    x,
    fn,
    partial,
    tokens,
    size,
    run,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHAINED: tl.constexpr,
    LATE: tl.constexpr,
):
    """x [T, size], fn [COUNT, size].  LATE: the next kernel's programs, which would take memory's
    time from this one's, begin behind the loop."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    m = tl.arange(0, WIDTH)
    there = t < tokens
    if CHAINED and LATE:
        gdc_wait()
    elif CHAINED:
        handover.begin(True)
    acc = tl.zeros([BLOCK_T, WIDTH], tl.float32)
    squares = tl.zeros([BLOCK_T, BLOCK_D // 8], tl.float32)
    first = tl.program_id(1) * run
    for at in range(first, tl.minimum(first + run, size), BLOCK_D):
        d = at + tl.arange(0, BLOCK_D)
        tile = tl.load(
            x + (t * size)[:, None] + d[None, :],
            mask=there[:, None] & (d < size)[None, :],
            other=0.0,
        )
        w = tl.load(
            fn + (m * size)[None, :] + d[:, None],
            mask=(m < COUNT)[None, :] & (d < size)[:, None],
            other=0.0,
        )
        wide = tile.to(tl.float32)
        squares += tl.sum(tl.reshape(wide * wide, [BLOCK_T, BLOCK_D // 8, 8]), 2)
        acc = product_of_streams(tile, w, acc)
    if CHAINED and LATE:
        gdc_launch_dependents()
    to = partial + ((tl.program_id(1).to(tl.int64) * tokens + t) * WIDTH)[:, None] + m[None, :]
    acc = tl.where((m == COUNT)[None, :], tl.sum(squares, 1)[:, None], acc)
    tl.store(to, acc, mask=there[:, None])


@triton.jit
def _sweep(
    partial,
    scale,
    base,
    post,
    comb,
    t,
    tokens,
    runs,
    hidden,
    settings,
    WIDTH: tl.constexpr,
    RUNS: tl.constexpr,
):
    """post and comb of tokens t."""
    j = tl.arange(0, 4)
    square = (4 * j[:, None] + j[None, :])[None, :, :]
    of_post, of_comb = tl.load(scale + 1), tl.load(scale + 2)
    base_post, base_comb = tl.load(base + 4 + j[None, :]), tl.load(base + 8 + square)
    step = tl.cast(tokens, tl.int64) * WIDTH
    there = t < tokens
    # absent tokens have the products of the last one
    at = partial + tl.minimum(t, tokens - 1) * WIDTH
    squares = runs_of(at + MIX, step, runs, RUNS)
    to_comb = runs_of(at[:, None, None] + 8 + square, step, runs, RUNS)
    to_post = runs_of(at[:, None] + 4 + j[None, :], step, runs, RUNS)
    root = inverse_root(tl.sum(squares, 0), 4 * hidden, settings.norm_eps)
    mixed = tl.sum(to_comb, 0) * root[:, None, None] * of_comb + base_comb
    mixed = sinkhorn(shares(mixed) + settings.hc_eps, settings.iters, settings.hc_eps)
    tl.store(comb + (t * 16)[:, None, None] + square, mixed, mask=there[:, None, None])
    mix = tl.sum(to_post, 0) * root[:, None]
    to = post + (t * 4)[:, None] + j[None, :]
    tl.store(to, returned(mix * of_post + base_post), mask=there[:, None])


@triton.jit(do_not_specialize=["tokens", "runs"])
def _gates(
    x,
    partial,
    scale,
    base,
    weight,
    y,
    post,
    comb,
    tokens,
    runs,
    hidden,
    settings,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    RUNS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """The first programs make post and comb of a block of tokens, each other one the y of a token,
    the last token first: of many, its streams are still in L2."""
    blocks = 0 if COUNT == 4 else tl.cdiv(tokens, BLOCK_T)
    program = tl.program_id(0)
    if CHAINED:
        handover.follow(False, False)
    if program < blocks:
        t = program.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
        _sweep(partial, scale, base, post, comb, t, tokens, runs, hidden, settings, WIDTH, RUNS)
    else:
        token = (tokens - 1 - (program - blocks)).to(tl.int64)
        d = tl.arange(0, BLOCK_D)
        mask = d < hidden
        m = tl.arange(0, WIDTH)
        of_pre, base_pre = tl.load(scale), tl.load(base + m, mask=m < 4, other=0.0)
        at = x + token * 4 * hidden + d
        x0 = tl.load(at, mask=mask, other=0.0)
        x1 = tl.load(at + hidden, mask=mask, other=0.0)
        x2 = tl.load(at + 2 * hidden, mask=mask, other=0.0)
        x3 = tl.load(at + 3 * hidden, mask=mask, other=0.0)
        step = tl.cast(tokens, tl.int64) * WIDTH
        wanted = tl.where(m < 4, m, COUNT)
        products = tl.sum(runs_of(partial + token * WIDTH + wanted, step, runs, RUNS), 0)
        root = inverse_root(entry(products, COUNT), 4 * hidden, settings.norm_eps)
        pre = opened(products * (root * of_pre) + base_pre, settings.hc_eps)
        out = x0.to(tl.float32) * entry(pre, 0)
        out = tl.fma(x1.to(tl.float32), entry(pre, 1) + tl.zeros_like(out), out)
        out = tl.fma(x2.to(tl.float32), entry(pre, 2) + tl.zeros_like(out), out)
        out = tl.fma(x3.to(tl.float32), entry(pre, 3) + tl.zeros_like(out), out)
        if NORM:
            gain = tl.load(weight + d, mask=mask, other=0.0)
            out = out * inverse_root(tl.sum(out * out, 0), hidden, settings.norm_eps) * gain
        tl.store(y + token * hidden + d, out.to(y.dtype.element_ty), mask=mask)


def mix(x: Tensor, fn: Tensor) -> Tensor:
    """[runs, T, WIDTH] of streams [T, 4, h]: products with fn's rows, then the squares' sum."""
    tokens, size = x.shape[0], fn.shape[1]
    many = tokens > MANY
    most = 32 if x.dtype is torch.float32 else 128 if many else 64
    BLOCK_T = min(most, max(16, power_of_two(tokens)))
    width = power_of_two(max(fn.shape[0] + 1, 16))
    blocks, chunks = cdiv(tokens, BLOCK_T), cdiv(size, BLOCK_D)
    programs = (2 if many else 1) * gpu.num_sms(x.device)
    run = cdiv(chunks, max(1, min(programs // blocks, MOST_RUNS))) * BLOCK_D
    runs = cdiv(size, run)
    partial = memory.empty((runs, tokens, width), torch.float32, x.device)
    chained = gpu.has_chained_launch(x.device)
    launches.kernel(_mix, blocks, runs)(
        x,
        fn,
        partial,
        tokens,
        size,
        run,
        COUNT=fn.shape[0],
        WIDTH=width,
        BLOCK_T=BLOCK_T,
        BLOCK_D=BLOCK_D,
        CHAINED=chained,
        LATE=many,
        num_warps=4,
        num_stages=4,
        launch_pdl=chained,
    )
    return partial


def gates(x: Tensor, partial: Tensor, y: Tensor, post: Tensor, comb: Tensor, a: Gates) -> None:
    """Of streams x [T, 4, h] and their products, into y, post and comb."""
    hc_base, norm_weight = a["hc_base"], a["norm_weight"]
    tokens, _, hidden = x.shape
    runs, _, width = partial.shape
    chained = gpu.has_chained_launch(x.device)
    RUNS = power_of_two(runs)
    BLOCK_T = min(power_of_two(tokens), max(1, 256 // RUNS), 64)
    blocks = 0 if a["hc_fn"].shape[0] == 4 else cdiv(tokens, BLOCK_T)
    warps = hyper_connections.warps(hidden)
    launches.kernel(_gates, blocks + tokens)(
        x,
        partial,
        a["hc_scale"],
        hc_base,
        hc_base if norm_weight is None else norm_weight,
        y,
        post,
        comb,
        tokens,
        runs,
        hidden,
        Settings(a["hc_sinkhorn_iters"], a["norm_eps"], a["hc_eps"]),
        COUNT=a["hc_fn"].shape[0],
        WIDTH=width,
        NORM=norm_weight is not None,
        RUNS=RUNS,
        BLOCK_T=BLOCK_T,
        BLOCK_D=power_of_two(hidden),
        CHAINED=chained,
        num_warps=warps if tokens > MANY else min(8, warps),
        launch_pdl=chained,
    )


def unsupported(x: Tensor, **_: Any) -> str | None:
    return hyper_connections.unsupported(x, "x")


def forward(**a: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor]:
    x, hc_fn = a["x"], a["hc_fn"]
    y, post, comb = outputs(x, hc_fn)
    streams = x.flatten(0, -3)
    if x.numel():
        gates(streams, mix(streams, hc_fn), y, post, comb, a)
    return y, post, comb
