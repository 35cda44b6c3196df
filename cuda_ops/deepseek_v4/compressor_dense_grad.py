# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Gradients of compressor_dense.py, whose products and sums are made again.

    d C from d out, backwards through Hadamard, RoPE and RMSNorm
    p = exp(z - log sum exp z)   d kv = p d C   d z = p (kv - C) d C   d ape: sums over t mod m

A channel of a token is in one window at most, so nothing is added up but `d ape`, in order.  The
products with weights and x are torch's, in x's dtype.

    condition    kernels
    any          compressor.py, _entry, _tokens, _places
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import compressed, memory
from ...dispatch.ops.deepseek_v4.compressor_dense_grad import Arguments
from ..common import quantize
from ..common.tiling import power_of_two
from ..runtime import launches
from .compressor import (
    BLOCK,
    Requests,
    angles,
    ending,
    members,
    nothing,
    partners,
    pool,
    spans,
    turned,
    unsupported,
    window_of,
)

__all__ = ["backward", "unsupported"]


@triton.jit(do_not_specialize=["tokens", "requests", "each"])
def _entry(
    d_out,
    d_row,
    pooled,
    norm,
    sin,
    cos,
    angle_row,
    eps,
    d_pooled,
    d_norm,
    bounds,
    used,
    starts,
    tokens,
    requests,
    each,
    C: tl.constexpr,
    E: tl.constexpr,
):
    """d C of a row, and what it adds to the gradient of the norm's weight."""
    of = Requests(bounds, used, starts, bounds, tokens, requests, 0, 0, 0, 0)
    row = tl.program_id(0)
    _, number = window_of(row, each, of, C)
    closed = number >= 0
    d = tl.arange(0, E.BLOCK_D)
    mask = (d < C.D) & closed
    at = row.to(tl.int64) * C.D + d
    g = tl.load(d_out + row.to(tl.int64) * d_row + d, mask=mask, other=0.0).to(tl.float32)
    if E.HADAMARD:
        g = tl.reshape(g, [1, E.BLOCK_D])
        g = tl.reshape(quantize.hadamard(g, E.SCALE, E.ROUNDS), [E.BLOCK_D])
    if E.DR > 0:
        rotated, first, other, angle = partners(d, C.D, E)
        angle += row.to(tl.int64) * angle_row
        s = tl.load(sin + angle, mask=rotated & closed, other=0.0).to(tl.float32)
        c = tl.load(cos + angle, mask=rotated & closed, other=0.0).to(tl.float32)
        z = tl.gather(g, tl.where(rotated, other, d), 0)
        g = tl.where(rotated, turned(g, z, -s, c, first), g)
    x = tl.load(pooled + at, mask=mask, other=0.0)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / C.D + eps)
    tl.store(d_norm + at, tl.where(closed, g * x * scale, 0.0), mask=d < C.D)
    g = g * tl.load(norm + d, mask=mask, other=0.0)
    g = scale * (g - x * scale * scale * (tl.sum(g * x, 0) / C.D))
    tl.store(d_pooled + at, g, mask=mask)


@triton.jit(do_not_specialize=["tokens", "requests", "each"])
def _tokens(
    product,
    run_stride,
    ape,
    pooled,
    logs,
    d_pooled,
    d_product,
    bounds,
    used,
    starts,
    tokens,
    requests,
    each,
    C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """d kv and d z of the tokens of a row's window, in some channels."""
    of = Requests(bounds, used, starts, bounds, tokens, requests, 0, 0, 0, 0)
    WIDTH: tl.constexpr = C.COFF * C.D
    row = tl.program_id(0)
    request, number = window_of(row, each, of, C)
    if number >= 0:
        d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        at = row.to(tl.int64) * C.D + d
        c = tl.load(pooled + at, mask=d < C.D, other=0.0)
        log = tl.load(logs + at, mask=d < C.D, other=0.0)
        g = tl.load(d_pooled + at, mask=d < C.D, other=0.0)
        for lo in tl.range(0, C.COFF * C.RATIO, BLOCK_L):
            i = lo + tl.arange(0, BLOCK_L)
            kv, z, token = members(
                i, d, request, number, product, run_stride, ape, product, 0, of, C
            )
            d_kv = tl.exp(z - log[None, :]) * g[None, :]
            d_z = d_kv * (kv - c[None, :])
            channel = (i // C.RATIO * C.D)[:, None] + d[None, :]
            to = d_product + token[:, None] * (2 * WIDTH) + channel
            mask = (token >= 0)[:, None] & (d < C.D)[None, :]
            tl.store(to, d_kv, mask=mask)
            tl.store(to + WIDTH, d_z, mask=mask)


@triton.jit(do_not_specialize=["tokens", "requests"])
def _places(
    d_product,
    d_ape,
    bounds,
    used,
    starts,
    tokens,
    requests,
    C: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """The gradient of one place in a window."""
    of = Requests(bounds, used, starts, bounds, tokens, requests, 0, 0, 0, 0)
    WIDTH: tl.constexpr = C.COFF * C.D
    place = tl.program_id(0)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    total = tl.zeros([BLOCK_W], tl.float32)
    for request in tl.range(0, requests):
        first, _, count = spans(place * 0 + request, of, C)
        for lo in tl.range(0, tl.cdiv(count, C.RATIO), BLOCK_L):
            j = (lo + tl.arange(0, BLOCK_L)).to(tl.int64) * C.RATIO + place
            at = (first + j)[:, None] * (2 * WIDTH) + WIDTH + w[None, :]
            mask = (j < count)[:, None] & (w < WIDTH)[None, :]
            total += tl.sum(tl.load(d_product + at, mask=mask, other=0.0), 0)
    tl.store(d_ape + place * WIDTH + w, total, mask=w < WIDTH)


def backward(**arguments: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, wkv, wgate, ape = arguments["x"], arguments["wkv"], arguments["wgate"], arguments["ape"]
    norm_weight, cu_seqlens = arguments["norm_weight"], arguments["cu_seqlens"]
    coff = arguments["coff"]
    size, device = norm_weight.shape[0], x.device
    width, shape = coff * size, [*arguments["d_out"].shape[:-1]]
    d_ape = memory.empty(ape.shape, ape.dtype, device)
    if nothing(x, cu_seqlens, size):
        d_norm = memory.empty(norm_weight.shape, norm_weight.dtype, device)
        d_x, d_wkv, d_wgate = (
            memory.empty(a.shape, a.dtype, device).zero_() for a in (x, wkv, wgate)
        )
        return d_x, d_wkv, d_wgate, d_ape.zero_(), d_norm.zero_()
    made = pool(arguments, shape, peaks=True)
    d_pooled = memory.empty(made.rows.shape, torch.float32, device)
    d_norm = memory.empty(made.rows.shape, torch.float32, device)
    grads = arguments["d_out"].flatten(0, -2)
    sin, cos, angle_row = angles(arguments["rope_sin"], arguments["rope_cos"], made.rows)
    given = {n: made.requests[n] for n in ("bounds", "used", "starts", "tokens", "requests")}
    launches.kernel(_entry, made.rows.shape[0])(
        grads,
        grads.stride(0),
        made.rows,
        norm_weight,
        sin,
        cos,
        angle_row,
        arguments["norm_eps"],
        d_pooled,
        d_norm,
        **given,
        each=made.each,
        C=made.constants,
        E=ending(arguments, size),
        num_warps=4,
    )
    tokens = made.product.shape[1]
    d_product = memory.empty((tokens, 2 * width), torch.float32, device).zero_()
    block = min(BLOCK, power_of_two(size))
    launches.kernel(_tokens, made.rows.shape[0], triton.cdiv(size, block))(
        made.product,
        made.product.stride(0),
        ape,
        made.rows,
        made.peaks,
        d_pooled,
        d_product,
        **given,
        each=made.each,
        C=made.constants,
        BLOCK_D=block,
        BLOCK_L=min(16, power_of_two(coff * arguments["cmp_ratio"])),
        num_warps=4,
    )
    block = min(BLOCK, power_of_two(width))
    launches.kernel(_places, arguments["cmp_ratio"], triton.cdiv(width, block))(
        d_product, d_ape, **given, C=made.constants, BLOCK_W=block, BLOCK_L=16, num_warps=4
    )
    absent = compressed.tokens_of(x, cu_seqlens, arguments["seqused"], None).position < 0
    flat = x.flatten(0, -2).masked_fill(absent[:, None], 0)
    d_kv, d_z = d_product.to(x.dtype).chunk(2, 1)
    d_x = torch.addmm(d_kv @ wkv, d_z, wgate).view(x.shape)
    return d_x, d_kv.mT @ flat, d_z.mT @ flat, d_ape, d_norm.sum(0)
