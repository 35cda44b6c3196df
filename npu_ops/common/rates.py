# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""How much of its key's value a token changes: beta, its sigmoid, or twice that, as BETA of
dispatch/common/gated_delta.py: kind_of_rate says."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rate_of(beta, there, BETA: tl.constexpr):
    """In float32; 0 where there is no token."""
    rate = beta.to(tl.float32)
    if BETA > 1:
        rate = tl.where(there, (BETA - 1.0) / (1.0 + tl.exp(-rate)), 0.0)
    return rate


@triton.jit
def of_beta(grad, rate, BETA: tl.constexpr):
    """The gradient of beta from that of the rate."""
    if BETA > 1:
        grad = grad * rate * (1.0 - rate / (BETA - 1.0))
    return grad
