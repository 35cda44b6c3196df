# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Hyper-connections in front of a sublayer; see dispatch/reference/deepseek_v4/hc_pre.py.

`_mix` takes a block of tokens and some channels of all four streams: products with hc_fn and sums
of squares, in runs that the next kernel adds up in order.  Products are float32's: x is exact in
TF32, hc_fn goes in as two numbers that are.  `_gates` takes a token: its gates, sweeps, and y.
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
from ...dispatch.ops.deepseek_v4.hc_pre import Arguments, Gates
from ..common import gpu, handover
from ..common.tiling import cdiv, power_of_two
from ..runtime import launches
from . import hyper_connections
from .hyper_connections import (
    blended,
    by_columns,
    by_rows,
    collapsed,
    mixes,
    opened,
    product,
    returned,
    shares,
)

MOST_RUNS = 64
BLOCK_D = 64  # channels of a step: two of them with their rows of hc_fn take 87 KiB at most


@triton.jit(do_not_specialize=["tokens"])
def _mix(
    x,
    fn,
    partial,
    layer,
    post,
    comb,
    streams,
    tokens,
    hidden,
    run,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    BEHIND: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """BEHIND: x are the streams in front of a sublayer that gave `layer`; those behind it are
    made, written to `streams`, and multiplied."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    m = tl.arange(0, WIDTH)
    there = t < tokens
    if CHAINED:
        handover.begin(True)
    acc = tl.zeros([BLOCK_T, WIDTH], tl.float32)
    squares = tl.zeros([BLOCK_T], tl.float32)
    first = tl.program_id(1) * run
    for at in range(first, tl.minimum(first + run, hidden), BLOCK_D):
        d = at + tl.arange(0, BLOCK_D)
        mask = there[:, None] & (d < hidden)[None, :]
        row = (t * 4 * hidden)[:, None] + d[None, :]
        if BEHIND:
            u = tl.load(layer + (t * hidden)[:, None] + d[None, :], mask=mask, other=0.0)
            u = u.to(tl.float32)
            r0 = tl.load(x + row, mask=mask, other=0.0).to(tl.float32)
            r1 = tl.load(x + row + hidden, mask=mask, other=0.0).to(tl.float32)
            r2 = tl.load(x + row + 2 * hidden, mask=mask, other=0.0).to(tl.float32)
            r3 = tl.load(x + row + 3 * hidden, mask=mask, other=0.0).to(tl.float32)
        for k in tl.static_range(4):
            if BEHIND:
                c = comb + t * 16 + k
                tile = blended(
                    u,
                    r0,
                    r1,
                    r2,
                    r3,
                    tl.load(post + t * 4 + k, mask=there, other=0.0)[:, None],
                    tl.load(c, mask=there, other=0.0)[:, None],
                    tl.load(c + 4, mask=there, other=0.0)[:, None],
                    tl.load(c + 8, mask=there, other=0.0)[:, None],
                    tl.load(c + 12, mask=there, other=0.0)[:, None],
                ).to(streams.dtype.element_ty)
                tl.store(streams + row + k * hidden, tile, mask=mask)
            else:
                tile = tl.load(x + row + k * hidden, mask=mask, other=0.0)
            tile = tile.to(tl.float32)
            squares += tl.sum(tile * tile, 1)
            w = tl.load(
                fn + (m * 4 * hidden + k * hidden)[None, :] + d[:, None],
                mask=(m < COUNT)[None, :] & (d < hidden)[:, None],
                other=0.0,
            )
            acc = product(tile, w, acc, HALF)
    to = partial + ((tl.program_id(1).to(tl.int64) * tokens + t) * WIDTH)[:, None] + m[None, :]
    acc = tl.where((m == COUNT)[None, :], squares[:, None], acc)
    tl.store(to, acc, mask=there[:, None])


@triton.jit(do_not_specialize=["tokens", "runs", "iters", "norm_eps", "hc_eps"])
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
    iters,
    norm_eps,
    hc_eps,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHAINED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    _, of_pre, of_post, of_comb = mixes(
        partial, token, tokens, runs, hidden, norm_eps, WIDTH, COUNT
    )
    d = tl.arange(0, BLOCK_D)
    mask = d < hidden
    out = collapsed(x + token * 4 * hidden, opened(of_pre, scale, base, hc_eps), d, mask, hidden)
    if NORM:
        root = 1.0 / tl.sqrt(tl.sum(out * out, 0) / hidden + norm_eps)
        out = out * root * tl.load(weight + d, mask=mask, other=0.0)
    tl.store(y + token * hidden + d, out.to(y.dtype.element_ty), mask=mask)
    if COUNT > 4:
        j = tl.arange(0, 4)
        tl.store(post + token * 4 + j, returned(of_post, scale, base))
        mixed = by_columns(shares(of_comb, scale, base) + hc_eps, hc_eps)
        for _ in range(1, iters):
            mixed = by_columns(by_rows(mixed, hc_eps), hc_eps)
        tl.store(comb + token * 16 + 4 * j[:, None] + j[None, :], mixed)


def mix(
    x: Tensor, fn: Tensor, behind: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
) -> Tensor:
    """[runs, T, WIDTH] of streams [T, 4, h]: products with the rows of fn, then the sum of squares.
    `behind` is (what a sublayer gave, post, comb, the streams to write), and x lies in front."""
    tokens, _, hidden = x.shape
    BLOCK_T = min(64, max(16, power_of_two(tokens)))
    width = power_of_two(max(fn.shape[0] + 1, 16))
    blocks, chunks = cdiv(tokens, BLOCK_T), cdiv(hidden, BLOCK_D)
    wanted = max(1, min(2 * gpu.num_sms(x.device) // blocks, MOST_RUNS, chunks))
    run = cdiv(chunks, wanted) * BLOCK_D
    runs = cdiv(hidden, run)
    partial = memory.empty((runs, tokens, width), torch.float32, x.device)
    chained = gpu.has_chained_launch(x.device)
    layer, post, comb, streams = behind or (x, fn, fn, x)
    launches.kernel(_mix, blocks, runs)(
        x,
        fn,
        partial,
        layer,
        post,
        comb,
        streams,
        tokens,
        hidden,
        run,
        COUNT=fn.shape[0],
        WIDTH=width,
        BEHIND=behind is not None,
        HALF=x.dtype is not torch.float32,
        BLOCK_T=BLOCK_T,
        BLOCK_D=BLOCK_D,
        CHAINED=chained,
        num_warps=4,
        num_stages=2,
        launch_pdl=chained,
    )
    return partial


def gates(x: Tensor, partial: Tensor, y: Tensor, post: Tensor, comb: Tensor, a: Gates) -> None:
    """Of streams x [T, 4, h] and their products, into y, post and comb."""
    hc_base, norm_weight = a["hc_base"], a["norm_weight"]
    tokens, _, hidden = x.shape
    runs, _, width = partial.shape
    chained = gpu.has_chained_launch(x.device)
    launches.kernel(_gates, tokens)(
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
        a["hc_sinkhorn_iters"],
        a["norm_eps"],
        a["hc_eps"],
        COUNT=a["hc_fn"].shape[0],
        WIDTH=width,
        NORM=norm_weight is not None,
        BLOCK_D=power_of_two(hidden),
        CHAINED=chained,
        num_warps=hyper_connections.warps(hidden),
        launch_pdl=chained,
    )


def outputs(x: Tensor, hc_fn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for y, post and comb of streams x [.., 4, h]."""
    y = memory.empty((*x.shape[:-2], x.shape[-1]), x.dtype, x.device)
    head = hc_fn.shape[0] == x.shape[-2]
    shapes = ((0,), (0,)) if head else (x.shape[:-1], (*x.shape[:-1], x.shape[-2]))
    post, comb = (memory.empty(shape, torch.float32, x.device) for shape in shapes)
    return y, post, comb


def unsupported(x: Tensor, **_: Any) -> str | None:
    return hyper_connections.unsupported(x, "x")


def forward(**a: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor]:
    x, hc_fn = a["x"], a["hc_fn"]
    y, post, comb = outputs(x, hc_fn)
    streams = x.flatten(0, -3)
    if x.numel():
        gates(
            streams,
            mix(streams, hc_fn),
            y,
            post,
            comb,
            a,
        )
    return y, post, comb
