# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Hyper-connections behind a sublayer, on the vector cores: out[k] = post_k x + sum_j comb[j, k]
residual[j], rounded once.

A core takes a token, or some of its channels where tokens are few, in all four streams: they are
loaded once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory
from ..common import cores, entry, tune


@triton.jit
def blended(u, r0, r1, r2, r3, post, c0, c1, c2, c3):
    """A stream behind a sublayer, in float32: the same roundings wherever it is made."""
    return post * u + c0 * r0 + c1 * r1 + c2 * r2 + c3 * r3


@triton.jit
def wide_tile(at, there, WHOLE: tl.constexpr):
    if WHOLE:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=there, other=0.0)
    return tile.to(tl.float32)


@triton.jit
def _further(y0, y1, y2, y3, r, c0, c1, c2, c3):
    """All streams one residual further, as `blended` adds them.  Side by side: a vector unit waits
    before an operation that takes what the last one made."""
    t0 = c0 * r
    t1 = c1 * r
    t2 = c2 * r
    t3 = c3 * r
    return y0 + t0, y1 + t1, y2 + t2, y3 + t3


@entry.jit(do_not_specialize=["tokens", "hidden", "groups"])
def blend(
    x,
    residual,
    post,
    comb,
    out,
    tokens,
    hidden,
    groups,
    WHOLE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    d = tl.arange(0, WIDTH)
    dtype = out.dtype.element_ty
    for work in range(tl.program_id(0), tokens * groups, tl.num_programs(0)):
        token = (work // groups).to(tl.int64)
        p = post + token * 4
        c = comb + token * 16
        p0 = tl.load(p)
        p1 = tl.load(p + 1)
        p2 = tl.load(p + 2)
        p3 = tl.load(p + 3)
        c00 = tl.load(c)
        c01 = tl.load(c + 1)
        c02 = tl.load(c + 2)
        c03 = tl.load(c + 3)
        c10 = tl.load(c + 4)
        c11 = tl.load(c + 5)
        c12 = tl.load(c + 6)
        c13 = tl.load(c + 7)
        c20 = tl.load(c + 8)
        c21 = tl.load(c + 9)
        c22 = tl.load(c + 10)
        c23 = tl.load(c + 11)
        c30 = tl.load(c + 12)
        c31 = tl.load(c + 13)
        c32 = tl.load(c + 14)
        c33 = tl.load(c + 15)
        for first in range(work % groups * WIDTH, hidden, groups * WIDTH):
            there = d < hidden - first
            row = token * 4 * hidden + first
            u = wide_tile(x + token * hidden + first + d, there, WHOLE)
            y0 = p0 * u
            y1 = p1 * u
            y2 = p2 * u
            y3 = p3 * u
            r = wide_tile(residual + row + d, there, WHOLE)
            y0, y1, y2, y3 = _further(y0, y1, y2, y3, r, c00, c01, c02, c03)
            r = wide_tile(residual + row + hidden + d, there, WHOLE)
            y0, y1, y2, y3 = _further(y0, y1, y2, y3, r, c10, c11, c12, c13)
            r = wide_tile(residual + row + 2 * hidden + d, there, WHOLE)
            y0, y1, y2, y3 = _further(y0, y1, y2, y3, r, c20, c21, c22, c23)
            r = wide_tile(residual + row + 3 * hidden + d, there, WHOLE)
            y0, y1, y2, y3 = _further(y0, y1, y2, y3, r, c30, c31, c32, c33)
            to = out + row + d
            tl.store(to, y0.to(dtype), mask=there)
            tl.store(to + hidden, y1.to(dtype), mask=there)
            tl.store(to + 2 * hidden, y2.to(dtype), mask=there)
            tl.store(to + 3 * hidden, y3.to(dtype), mask=there)


def unsupported(residual: Tensor, **_: Any) -> str | None:
    if residual.dtype is torch.float64:
        return "`residual` is float64, the vector units take float32, float16 and bfloat16"
    return None


def forward(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    out = memory.empty(residual.shape, residual.dtype, residual.device)
    if out.numel():
        hidden = x.shape[-1]
        tokens = x.numel() // hidden
        config = tune.only("hc_post.blend")
        pieces = triton.cdiv(hidden, config.tiles["WIDTH"])
        groups = min(pieces, triton.cdiv(cores.vector(), tokens))
        blend[(min(tokens * groups, cores.vector()),)](
            x,
            residual,
            post,
            comb,
            out,
            tokens,
            hidden,
            groups,
            WHOLE=hidden % config.tiles["WIDTH"] == 0,
            **config.keywords,
        )
    return out
