# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""To int8, one scale a row of a tile: s = amax / 127, value = x / s to the nearest integer, ties to
even.  The vector unit of A2 and A3 has int8 and no fp8."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def of_floats(x, alpha):
    """(int8 [ROWS, SIZE], float32 scales [ROWS]); `alpha` times the largest magnitude fits."""
    amax = tl.max(tl.abs(x), 1) * alpha
    scale = amax / 127.0
    y = tl.minimum(tl.maximum(x / scale[:, None], -127.0), 127.0)
    y = tl.where(scale[:, None] > 0, y, 0.0)  # zeros
    # at 1.5 * 2**23 floats are 1 apart
    return ((y + 12582912.0) - 12582912.0).to(tl.int8), scale


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
