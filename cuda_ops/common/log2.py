# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Kernels take exponentials and logarithms to base 2, which are one instruction of a GPU: e^x is
2^(x LOG2E), and a natural logarithm is one to base 2 times LN2."""

from __future__ import annotations

import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
# of a scale times LOG2E: what is below counts as 0 in float32, and minus infinity times 0 is none
LEAST = 2.0**-126
