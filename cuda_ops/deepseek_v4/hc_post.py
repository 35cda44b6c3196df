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
from ..common import gpu, handover
from ..common.tiling import cdiv, power_of_two
from ..runtime import launches
from . import hyper_connections


@triton.jit
def _blend(x, residual, post, comb, out, hidden, BLOCK_D: tl.constexpr, CHAINED: tl.constexpr):
    blocks = tl.cdiv(hidden, BLOCK_D)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    d = tl.program_id(0) % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    if CHAINED:
        handover.begin(True)
    mask = d < hidden
    u = tl.load(x + token * hidden + d, mask=mask, other=0.0).to(tl.float32)
    row = token * 4 * hidden + d
    r0 = tl.load(residual + row, mask=mask, other=0.0).to(tl.float32)
    r1 = tl.load(residual + row + hidden, mask=mask, other=0.0).to(tl.float32)
    r2 = tl.load(residual + row + 2 * hidden, mask=mask, other=0.0).to(tl.float32)
    r3 = tl.load(residual + row + 3 * hidden, mask=mask, other=0.0).to(tl.float32)
    for k in tl.static_range(4):
        c = comb + token * 16 + k
        by = tl.load(post + token * 4 + k)
        c0, c1, c2, c3 = tl.load(c), tl.load(c + 4), tl.load(c + 8), tl.load(c + 12)
        tile = tl.fma(r0, c0, by * u)
        tile = tl.fma(r1, c1, tile)
        tile = tl.fma(r2, c2, tile)
        tile = tl.fma(r3, c3, tile)
        tl.store(out + row + k * hidden, tile.to(out.dtype.element_ty), mask=mask)


def unsupported(residual: Tensor, **_: Any) -> str | None:
    return hyper_connections.unsupported(residual, "residual")


def blend(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor, out: Tensor) -> None:
    """Into out."""
    hidden = x.shape[-1]
    BLOCK_D = min(1024, power_of_two(hidden))
    chained = gpu.has_chained_launch(x.device)
    # one axis: programs start in the order in which the tokens lie
    launches.kernel(_blend, x.numel() // hidden * cdiv(hidden, BLOCK_D))(
        x,
        residual,
        post,
        comb,
        out,
        hidden,
        BLOCK_D=BLOCK_D,
        CHAINED=chained,
        num_warps=4,
        launch_pdl=chained,
    )


def forward(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    out = memory.empty(residual.shape, residual.dtype, residual.device)
    if out.numel():
        blend(x, residual, post, comb, out)
    return out
