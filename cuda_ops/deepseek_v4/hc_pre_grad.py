# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The gradient of hc_pre; see dispatch/reference/deepseek_v4/hc_pre_grad.py.  Equal runs give
equal bits.

`_mix` (hc_pre.py) makes the products again.  `_inner` takes some tokens, one after the other: its
gates, its sweeps forward, each of which it notes in memory of its own, and back; it leaves what
the next two multiply, and its share of the gradients of scale, base and norm_weight.  `_streams`
takes a block of tokens and some channels, `_weights` some channels of a stream of all tokens.

    condition    kernels
    any          hc_pre.py then _inner, _streams, _weights
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import memory
from ...dispatch.ops.deepseek_v4.hc_pre_grad import Arguments
from ..common import gpu
from ..common.tiling import cdiv, power_of_two
from ..runtime import launches
from . import hyper_connections
from .hc_pre import mix
from .hyper_connections import (
    Settings,
    collapsed,
    inverse_root,
    opened,
    product,
    returned,
    runs_of,
    shares,
)

# what _inner leaves of a token behind the gradients of its products: pre, two factors of the norm's
# gradient, and the factor of the streams themselves
KEPT = 8


@triton.jit
def _back(first, grad, noted, settings):
    """The gradient of a comb [4, 4] before its sweeps, from that of the comb behind them."""
    j = tl.arange(0, 4)
    at = noted + 4 * j[:, None] + j[None, :]
    iters, eps = settings.iters, settings.hc_eps
    comb = first
    tl.store(at, comb)
    comb = comb / (tl.sum(comb, 0) + eps)[None, :]
    for sweep in range(1, iters):
        tl.store(at + (2 * sweep - 1) * 16, comb)
        comb = comb / (tl.sum(comb, 1) + eps)[:, None]
        tl.store(at + 2 * sweep * 16, comb)
        comb = comb / (tl.sum(comb, 0) + eps)[None, :]
    tl.debug_barrier()
    for back in range(1, iters):
        sweep = iters - back
        comb = tl.load(at + 2 * sweep * 16)
        sums = (tl.sum(comb, 0) + eps)[None, :]
        grad = (grad - tl.sum(grad * comb / sums, 0)[None, :]) / sums
        comb = tl.load(at + (2 * sweep - 1) * 16)
        sums = (tl.sum(comb, 1) + eps)[:, None]
        grad = (grad - tl.sum(grad * comb / sums, 1)[:, None]) / sums
    tl.debug_barrier()
    sums = (tl.sum(first, 0) + eps)[None, :]
    return (grad - tl.sum(grad * first / sums, 0)[None, :]) / sums


@triton.jit(do_not_specialize=["tokens", "runs", "each"])
def _inner(
    x,
    partial,
    scale,
    base,
    weight,
    d_y,
    d_post,
    d_comb,
    products,
    kept,
    noted,
    sums,
    of_norm,
    tokens,
    runs,
    hidden,
    settings,
    each,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    KEPT: tl.constexpr,
    NORM: tl.constexpr,
    RUNS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, 4)
    square = 4 * j[:, None] + j[None, :]
    d = tl.arange(0, BLOCK_D)
    mask = d < hidden
    noted += program * (2 * settings.iters * 16)
    sums += program * (2 * COUNT)
    base_pre = tl.zeros([4], tl.float32)
    scale_pre = tl.zeros([4], tl.float32)
    base_post = tl.zeros([4], tl.float32)
    scale_post = tl.zeros([4], tl.float32)
    base_comb = tl.zeros([4, 4], tl.float32)
    scale_comb = tl.zeros([4, 4], tl.float32)
    d_weight = tl.zeros([BLOCK_D], tl.float32)
    step = tl.cast(tokens, tl.int64) * WIDTH
    for token in range(program * each, tl.minimum(program * each + each, tokens)):
        mix = partial + token * WIDTH
        squares = tl.sum(runs_of(mix + COUNT + tl.zeros([1], tl.int32), step, runs, RUNS), 0)
        root = inverse_root(tl.sum(squares, 0), 4 * hidden, settings.norm_eps)
        of_pre = tl.sum(runs_of(mix + j, step, runs, RUNS), 0) * root
        pre = opened(of_pre * tl.load(scale) + tl.load(base + j), settings.hc_eps)
        at = x + token * 4 * hidden
        grad = tl.load(d_y + token * hidden + d, mask=mask, other=0.0).to(tl.float32)
        unit, along = 1.0, 0.0
        if NORM:
            y = collapsed(at, pre, d, mask, hidden)
            unit = 1.0 / tl.sqrt(tl.sum(y * y, 0) / hidden + settings.norm_eps)
            d_weight += grad * y * unit
            grad *= tl.load(weight + d, mask=mask, other=0.0)
            along = unit * unit * unit * (tl.sum(grad * y, 0) / hidden)
            grad = unit * grad - along * y
        d_pre = tl.zeros([4], tl.float32)
        for k in tl.static_range(4):
            stream = tl.load(at + k * hidden + d, mask=mask, other=0.0).to(tl.float32)
            d_pre = tl.where(j == k, tl.sum(grad * stream, 0), d_pre)
        share = pre - settings.hc_eps
        inner = d_pre * share * (1.0 - share)
        base_pre += inner
        scale_pre += inner * of_pre
        inner *= tl.load(scale)
        own = tl.sum(inner * of_pre, 0)
        to = products + token * WIDTH
        tl.store(to + j, inner * root)
        if COUNT > 4:
            of_post = tl.sum(runs_of(mix + 4 + j, step, runs, RUNS), 0) * root
            of_comb = tl.sum(runs_of(mix + 8 + square, step, runs, RUNS), 0) * root
            post = returned(of_post * tl.load(scale + 1) + tl.load(base + 4 + j))
            inner = tl.load(d_post + token * 4 + j) * post * (1.0 - 0.5 * post)
            base_post += inner
            scale_post += inner * of_post
            inner *= tl.load(scale + 1)
            own += tl.sum(inner * of_post, 0)
            tl.store(to + 4 + j, inner * root)
            rows = shares(of_comb * tl.load(scale + 2) + tl.load(base + 8 + square))
            first = rows + settings.hc_eps
            back = _back(first, tl.load(d_comb + token * 16 + square), noted, settings)
            mixed = rows * (back - tl.sum(back * rows, 1)[:, None])
            base_comb += mixed
            scale_comb += mixed * of_comb
            mixed *= tl.load(scale + 2)
            own += tl.sum(tl.sum(mixed * of_comb, 1), 0)
            tl.store(to + 8 + square, mixed * root)
        tl.store(kept + token * KEPT + j, pre)
        tl.store(kept + token * KEPT + 4, unit)
        tl.store(kept + token * KEPT + 5, along)
        tl.store(kept + token * KEPT + 6, own * root * root / (4 * hidden))
    tl.store(sums + j, base_pre)
    tl.store(sums + COUNT + j, scale_pre)
    if COUNT > 4:
        tl.store(sums + 4 + j, base_post)
        tl.store(sums + COUNT + 4 + j, scale_post)
        tl.store(sums + 8 + square, base_comb)
        tl.store(sums + COUNT + 8 + square, scale_comb)
    if NORM:
        tl.store(of_norm + program * hidden + d, d_weight, mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _streams(
    x,
    fn,
    weight,
    d_y,
    products,
    kept,
    d_x,
    tokens,
    hidden,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    KEPT: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    m = tl.arange(0, WIDTH)
    there = t < tokens
    mask = there[:, None] & (d < hidden)[None, :]
    row = (t * 4 * hidden)[:, None] + d[None, :]
    of = kept + t * KEPT
    grad = tl.load(d_y + (t * hidden)[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        y = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
        for k in tl.static_range(4):
            stream = tl.load(x + row + k * hidden, mask=mask, other=0.0).to(tl.float32)
            y += stream * tl.load(of + k, mask=there, other=0.0)[:, None]
        grad *= tl.load(weight + d, mask=d < hidden, other=0.0)[None, :]
        grad *= tl.load(of + 4, mask=there, other=0.0)[:, None]
        grad -= y * tl.load(of + 5, mask=there, other=0.0)[:, None]
    p = tl.load(
        products + (t * WIDTH)[:, None] + m[None, :],
        mask=there[:, None] & (m < COUNT)[None, :],
        other=0.0,
    )
    own = tl.load(of + 6, mask=there, other=0.0)[:, None]
    for k in tl.static_range(4):
        w = tl.load(
            fn + (m * 4 * hidden + k * hidden)[:, None] + d[None, :],
            mask=(m < COUNT)[:, None] & (d < hidden)[None, :],
            other=0.0,
        )
        stream = tl.load(x + row + k * hidden, mask=mask, other=0.0).to(tl.float32)
        acc = tl.dot(p, w, input_precision="ieee") - own * stream
        acc += grad * tl.load(of + k, mask=there, other=0.0)[:, None]
        tl.store(d_x + row + k * hidden, acc.to(d_x.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _weights(
    x,
    products,
    d_fn,
    tokens,
    deep,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    m = tl.arange(0, WIDTH)
    acc = tl.zeros([BLOCK_D, WIDTH], tl.float32)
    for first in range(0, tokens, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T).to(tl.int64)
        p = tl.load(
            products + (t * WIDTH)[:, None] + m[None, :],
            mask=(t < tokens)[:, None] & (m < COUNT)[None, :],
            other=0.0,
        )
        tile = tl.load(
            x + (t * deep)[None, :] + d[:, None],
            mask=(t < tokens)[None, :] & (d < deep)[:, None],
            other=0.0,
        )
        acc = product(tile.to(tl.float32), p, acc, HALF)
    to = d_fn + (m * deep)[None, :] + d[:, None]
    tl.store(to, acc, mask=(m < COUNT)[None, :] & (d < deep)[:, None])


def unsupported(x: Tensor, **_: Any) -> str | None:
    return hyper_connections.unsupported(x, "x")


def backward(**a: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, hc_fn, norm_weight = a["x"], a["hc_fn"], a["norm_weight"]
    device, count, hidden = x.device, hc_fn.shape[0], x.shape[-1]
    streams = x.flatten(0, -3)
    tokens = streams.shape[0]
    d_x = memory.empty(x.shape, x.dtype, device)
    d_fn = memory.empty(hc_fn.shape, torch.float32, device)
    # four programs a multiprocessor, each with as many tokens
    each = max(1, cdiv(tokens, 4 * gpu.num_sms(device)))
    programs = cdiv(tokens, each)
    sums = memory.empty((programs, 2, count), torch.float32, device)
    of_norm = memory.empty((programs, 0 if norm_weight is None else hidden), torch.float32, device)
    if tokens:
        partial = mix(streams, hc_fn)
        runs, width = partial.shape[0], partial.shape[2]
        products = memory.empty((tokens, width), torch.float32, device)
        kept = memory.empty((tokens, KEPT), torch.float32, device)
        noted = memory.empty((programs, 2 * a["hc_sinkhorn_iters"], 16), torch.float32, device)
        weight = a["hc_base"] if norm_weight is None else norm_weight
        shape = dict(COUNT=count, WIDTH=width)
        norm = dict(KEPT=KEPT, NORM=norm_weight is not None)
        launches.kernel(_inner, programs)(
            streams,
            partial,
            a["hc_scale"],
            a["hc_base"],
            weight,
            a["d_y"],
            a["d_post"],
            a["d_comb"],
            products,
            kept,
            noted,
            sums,
            of_norm,
            tokens,
            runs,
            hidden,
            Settings(a["hc_sinkhorn_iters"], a["norm_eps"], a["hc_eps"]),
            each,
            RUNS=power_of_two(runs),
            BLOCK_D=power_of_two(hidden),
            num_warps=hyper_connections.warps(hidden),
            **shape,
            **norm,
        )
        BLOCK_T = min(32, max(16, power_of_two(tokens)))
        launches.kernel(_streams, cdiv(tokens, BLOCK_T), cdiv(hidden, 64))(
            streams,
            hc_fn,
            weight,
            a["d_y"],
            products,
            kept,
            d_x,
            tokens,
            hidden,
            BLOCK_T=BLOCK_T,
            BLOCK_D=64,
            num_warps=4,
            **shape,
            **norm,
        )
        launches.kernel(_weights, cdiv(4 * hidden, 64))(
            streams,
            products,
            d_fn,
            tokens,
            4 * hidden,
            HALF=x.dtype is not torch.float32,
            BLOCK_T=BLOCK_T,
            BLOCK_D=64,
            num_warps=4,
            **shape,
        )
    else:
        d_fn.zero_()
    total = sums.sum(0)
    parts = total[1].split([4] if count == 4 else [4, 4, 16])
    d_scale = torch.stack([part.sum() for part in parts])
    return d_x, d_fn, d_scale, total[0].contiguous(), of_norm.sum(0)
