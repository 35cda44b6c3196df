# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The gradient of hc_post: products of the streams' gradients with gates, and with what the gates
were multiplied by.

A program takes a token, block of channels by block of channels, and sums over them itself.  The
floor is x, residual and the three gradients of their size, once each.

    condition    kernels
    any          _backward
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory
from ..common.tiling import power_of_two
from ..runtime import launches
from . import hyper_connections


@triton.jit
def _backward(
    x, residual, post, comb, d_out, d_x, d_residual, d_post, d_comb, hidden, BLOCK_D: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, 4)
    of_comb = token * 16 + 4 * j[:, None] + j[None, :]
    gates = tl.load(comb + of_comb)
    of_post = tl.load(post + token * 4 + j)
    sum_post = tl.zeros([4], tl.float32)
    sum_comb = tl.zeros([4, 4], tl.float32)
    for at in range(0, hidden, BLOCK_D):
        d = at + tl.arange(0, BLOCK_D)
        mask = (d < hidden)[None, :]
        u = tl.load(x + token * hidden + d, mask=d < hidden, other=0.0).to(tl.float32)
        row = ((token * 4 + j) * hidden)[:, None] + d[None, :]
        g = tl.load(d_out + row, mask=mask, other=0.0).to(tl.float32)
        r = tl.load(residual + row, mask=mask, other=0.0).to(tl.float32)
        sum_post += tl.sum(g * u[None, :], 1)
        to = tl.sum(g * of_post[:, None], 0)
        tl.store(d_x + token * hidden + d, to.to(d_x.dtype.element_ty), mask=d < hidden)
        back = tl.zeros([4, BLOCK_D], tl.float32)
        for k in tl.static_range(4):
            chosen = j == k
            g_k = tl.sum(tl.where(chosen[:, None], g, 0.0), 0)
            sum_comb += tl.where(chosen[None, :], tl.sum(r * g_k[None, :], 1)[:, None], 0.0)
            column = tl.sum(tl.where(chosen[None, :], gates, 0.0), 1)
            back += column[:, None] * g_k[None, :]
        tl.store(d_residual + row, back.to(d_residual.dtype.element_ty), mask=mask)
    tl.store(d_post + token * 4 + j, sum_post)
    tl.store(d_comb + of_comb, sum_comb)


def unsupported(residual: Tensor, **_: Any) -> str | None:
    return hyper_connections.unsupported(residual, "residual")


def backward(
    x: Tensor, residual: Tensor, post: Tensor, comb: Tensor, d_out: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given = (x, residual, post, comb)
    grads = [memory.empty(each.shape, each.dtype, each.device) for each in given]
    if x.numel():
        hidden = x.shape[-1]
        BLOCK_D = min(512, power_of_two(hidden))
        launches.kernel(_backward, x.numel() // hidden)(
            *given, d_out, *grads, hidden, BLOCK_D=BLOCK_D, num_warps=4
        )
    d_x, d_residual, d_post, d_comb = grads
    return d_x, d_residual, d_post, d_comb
