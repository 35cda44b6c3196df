# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Lengths and prefix sums that the caller gave, int32 or int64."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def within(lengths, valid, most):
    """What `lengths` point to, from 0 to `most`, as int32; 0 where not `valid`."""
    # before it is cast: what does not fit 32 bits wraps
    return tl.minimum(tl.maximum(tl.load(lengths, mask=valid, other=0), 0), most).to(tl.int32)
