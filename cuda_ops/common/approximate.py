# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Functions of float32 that are one instruction of a GPU, whose last bits may be off."""

from __future__ import annotations

import triton
import triton.language as tl

from .gpu import INTERPRETED

SIMULATED = tl.constexpr(INTERPRETED)


@triton.jit
def _instruction(x, NAME: tl.constexpr):
    return tl.inline_asm_elementwise(NAME, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def power(x):
    """2^x; below 2^-126 it is 0."""
    return tl.exp2(x) if SIMULATED else _instruction(x, "ex2.approx.ftz.f32 $0, $1;")


@triton.jit
def logarithm(x):
    """To base 2, of at least 1."""
    return tl.log2(x) if SIMULATED else _instruction(x, "lg2.approx.ftz.f32 $0, $1;")


@triton.jit
def inverse(x):
    """1 / x"""
    return 1.0 / x if SIMULATED else _instruction(x, "rcp.approx.ftz.f32 $0, $1;")
