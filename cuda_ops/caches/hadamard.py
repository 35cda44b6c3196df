# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The Hadamard transform of rows of 128, in float32; the sums are those of every backend.

A program takes 16 rows.

    condition    kernels
    any          _hadamard
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory
from ..common import quantize
from ..runtime import launches

ROWS = 16  # that a program takes


@triton.jit(do_not_specialize=["rows", "scale"])
def _hadamard(x, out, rows, scale, x_row, ROWS: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, SIZE)
    valid = (row < rows)[:, None]
    tile = tl.load(x + row[:, None] * x_row + d[None, :], mask=valid, other=0.0)
    tile = quantize.hadamard(tile.to(tl.float32), scale)
    to = out + row[:, None] * SIZE + d[None, :]
    tl.store(to, tile.to(out.dtype.element_ty), mask=valid)


def unsupported(x: Tensor, **_: Any) -> str | None:
    return quantize.unsupported(x=x)


def forward(x: Tensor, scale: float) -> Tensor:
    out = memory.empty(x.shape, x.dtype, x.device)
    if out.numel() == 0:
        return out
    rows = x.reshape(-1, x.shape[-1])
    launches.kernel(_hadamard, triton.cdiv(rows.shape[0], ROWS))(
        rows, out, rows.shape[0], scale, rows.stride(0), ROWS=ROWS, SIZE=x.shape[-1], num_warps=4
    )
    return out
