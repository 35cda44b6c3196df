# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""To int8, one scale a row of a tile: s = amax / 127, value = x / s to the nearest integer, ties to
even.  The vector unit of A2 and A3 has int8 and no fp8."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory
from . import cores, entry, tune


@triton.jit
def rounded(y):
    """To the nearest integer, within int8."""
    y = tl.minimum(tl.maximum(y, -127.0), 127.0)
    # at 1.5 * 2**23 floats are 1 apart
    return ((y + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def of_floats(x, alpha):
    """(int8 [ROWS, SIZE], float32 scales [ROWS]); `alpha` times the largest magnitude fits."""
    scale = tl.max(tl.abs(x), 1) * alpha / 127.0
    y = tl.where(scale[:, None] > 0, x / scale[:, None], 0.0)  # zeros
    return rounded(y), scale


@triton.jit
def divisor(scale):
    """What numbers are divided by, all of which fit: for a scale of 0 they are nearly 0."""
    return tl.where(scale > 0, scale, 1.0)


@triton.jit
def stored(scale, dtype: tl.constexpr):
    """As a cache keeps it: float16 ends at its largest number."""
    return tl.minimum(scale, 65504.0).to(dtype) if dtype == tl.float16 else scale.to(dtype)


@triton.jit
def _piece(x, smooth, d, size):
    u = tl.load(x + d, mask=d < size, other=0.0).to(tl.float32)
    if smooth is not None:
        u *= tl.load(smooth + d, mask=d < size, other=0.0)
    return u


@entry.jit(do_not_specialize=["rows", "size"])
def activations(x, smooth, values, scales, rows, size, PIECE: tl.constexpr):
    """Twice over a row, in pieces: for its scale, and for its numbers."""
    d = tl.arange(0, PIECE)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = row.to(tl.int64) * size
        amax = tl.zeros((PIECE,), tl.float32)
        for piece in range(0, size, PIECE):
            u = _piece(x + at, smooth, piece + d, size)
            amax = tl.maximum(amax, tl.abs(u))
        scale = tl.max(amax, 0) / 127.0
        tl.store(scales + row, scale)
        by = divisor(scale)
        for piece in range(0, size, PIECE):
            u = _piece(x + at, smooth, piece + d, size)
            tl.store(values + at + piece + d, rounded(u / by), mask=piece + d < size)


def of_rows(x: Tensor, smooth: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(int8 [M, K], float32 scales [M, 1]) of rows [M, K], times `smooth` [1, K] before."""
    rows, size = x.shape
    values = memory.empty((rows, size), torch.int8, x.device)
    scales = memory.empty((rows, 1), torch.float32, x.device)
    config = tune.only("quantize.activations")
    activations[(min(rows, cores.vector()),)](
        x, smooth, values, scales, rows, size, **config.keywords
    )
    return values, scales


def only_int8(kind: str) -> str | None:
    """Why this kind has no kernel here, or None."""
    if kind == "int8":
        return None
    return f"kind={kind!r}: the cube and vector units of A2 and A3 have int8 and no fp8"


def without_transform(index_hadamard: bool) -> str | None:
    """Why these bytes are not written here, or None."""
    if not index_hadamard:
        return None
    return "index_hadamard=True: the transform has no kernel for the NPU yet"
