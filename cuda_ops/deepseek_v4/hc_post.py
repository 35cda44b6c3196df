# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Hyper-connections behind a sublayer: out[k] = post_k x + sum_j comb[j, k] residual[j].

A program takes a token and some channels of all streams.  The floor is x, residual and out, once
each.

    condition    kernels
    any          _blend
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory
from ..common.tiling import cdiv, power_of_two
from ..runtime import launches
from . import hyper_connections
from .hyper_connections import blended


@triton.jit
def _blend(x, residual, post, comb, out, hidden, BLOCK_D: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = d < hidden
    u = tl.load(x + token * hidden + d, mask=mask, other=0.0).to(tl.float32)
    row = token * 4 * hidden + d
    r0 = tl.load(residual + row, mask=mask, other=0.0).to(tl.float32)
    r1 = tl.load(residual + row + hidden, mask=mask, other=0.0).to(tl.float32)
    r2 = tl.load(residual + row + 2 * hidden, mask=mask, other=0.0).to(tl.float32)
    r3 = tl.load(residual + row + 3 * hidden, mask=mask, other=0.0).to(tl.float32)
    for k in tl.static_range(4):
        c = comb + token * 16 + k
        tile = blended(
            u,
            r0,
            r1,
            r2,
            r3,
            tl.load(post + token * 4 + k),
            tl.load(c),
            tl.load(c + 4),
            tl.load(c + 8),
            tl.load(c + 12),
        )
        tl.store(out + row + k * hidden, tile.to(out.dtype.element_ty), mask=mask)


def unsupported(residual: Tensor, **_: Any) -> str | None:
    return hyper_connections.unsupported(residual, "residual")


def forward(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    out = memory.empty(residual.shape, residual.dtype, residual.device)
    if out.numel():
        hidden = x.shape[-1]
        BLOCK_D = min(1024, power_of_two(hidden))
        launches.kernel(_blend, x.numel() // hidden, cdiv(hidden, BLOCK_D))(
            x, residual, post, comb, out, hidden, BLOCK_D=BLOCK_D, num_warps=4
        )
    return out
