# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Lengths and prefix sums that the caller gave, int32 or int64, on the vector cores."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def within(length, most):
    """What `length` points to, from 0 to `most`, as int32."""
    # before it is cast: what does not fit 32 bits wraps
    return tl.minimum(tl.maximum(tl.load(length), 0), most).to(tl.int32)


@triton.jit
def latest(bounds, n, seen, start, most):
    """Where sequence n begins: where all before it have ended, of which those before `seen` do at
    `start`."""
    for i in range(seen, n + 1):
        start = tl.maximum(start, within(bounds + i, most))
    return start


@triton.jit
def left(bounds, n, start, most):
    """How many tokens sequence n has."""
    return tl.maximum(within(bounds + n + 1, most) - start, 0)
