# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""To 8 bits and back, tile by tile, with the bytes of every other backend.

    fp8    ue8m0   s = 2 ** ceil(log2(max(amax, 1e-4) / 448)), found in the bits of amax
           fp32    s = max(amax, 1e-4) / 448
           value = x / s to the nearest e4m3, ties to even, within +-448
    int8   s = amax / 127, value = x / s to the nearest integer, ties to even, within +-127
           zeros give s = 0 and zeros

Divisions are IEEE's.  e4m3 is made and, on GPUs that have no conversion, read by integer
arithmetic on its bits, so that one code serves them all.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dispatch.common import quantized
from . import gpu

# what a kernel reads: floats, e4m3 that the GPU converts, e4m3 as bytes, int8
PLAIN, NATIVE_FP8, FP8, INT8 = (tl.constexpr(kind) for kind in range(4))


@triton.jit
def hadamard(x, scale, ROUNDS: tl.constexpr = 7):
    """Of [ROWS, 2**ROUNDS] floats: sums and differences of neighbours go into halves; after so many
    rounds each number is where it belongs."""
    ROWS: tl.constexpr = x.shape[0]
    SIZE: tl.constexpr = x.shape[1]
    for _ in tl.static_range(ROUNDS):
        low, high = tl.split(tl.reshape(x, [ROWS, SIZE // 2, 2]))
        both = tl.permute(tl.join(low + high, low - high), (0, 2, 1))
        x = tl.reshape(both, [ROWS, SIZE])
    return x * scale


@triton.jit
def bf16_rounded(x):
    """Floats to the nearest of bfloat16, ties to even; Triton's interpreter cuts off."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    # the bits of a GPU's NaN would wrap
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), float("nan"))


@triton.jit
def rotated(x, HADAMARD: tl.constexpr, BF16: tl.constexpr):
    """An index query or key before it is quantized."""
    if HADAMARD:
        x = hadamard(x, 0.08838834764831845)
        if BF16:
            x = bf16_rounded(x)
    return x


@triton.jit
def _as_e4m3(y):
    """The bytes of floats within +-448, or NaN."""
    bits = y.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # at 2**14 floats are 2**-9 apart, as e4m3's are below 2**-6
    small = (tl.abs(y) + 16384.0).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(size < (121 << 23), small, tl.where(size > 0x7F800000, 0x7F, normal))
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def of_floats(x, alpha, KIND: tl.constexpr, UE8M0: tl.constexpr):
    """(bytes [ROWS, SIZE], scales [ROWS]) of floats; `alpha` times the largest magnitude is what
    fits."""
    # the bits of magnitudes rise with them, and a NaN's are the highest
    bits = tl.max(tl.abs(x).to(tl.int32, bitcast=True), 1)
    amax = bits.to(tl.float32, bitcast=True) * alpha
    if KIND == INT8:
        scale = tl.div_rn(amax, amax * 0.0 + 127.0)
        by = tl.where(scale > 0, scale, 1.0)
        y = tl.div_rn(x, tl.broadcast_to(by[:, None], x.shape))
        y = tl.where(scale[:, None] > 0, tl.minimum(tl.maximum(y, -127.0), 127.0), 0.0)
        # at 1.5 * 2**23 floats are 1 apart
        values = ((y + 12582912.0) - 12582912.0).to(tl.int8)
    else:
        amax = tl.maximum(amax, 1e-4, propagate_nan=tl.PropagateNan.ALL)
        if UE8M0:
            bits = amax.to(tl.int32, bitcast=True)
            # 448 is 1.75 * 2**8
            exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
            scale = (exponent << 23).to(tl.float32, bitcast=True)
            y = x * ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
        else:
            scale = tl.div_rn(amax, amax * 0.0 + 448.0)
            y = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
        if KIND == NATIVE_FP8:
            # ends at +-448 by itself
            values = y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
            return values, scale
        y = tl.maximum(y, -448.0, propagate_nan=tl.PropagateNan.ALL)
        values = _as_e4m3(tl.minimum(y, 448.0, propagate_nan=tl.PropagateNan.ALL))
    return values, scale


@triton.jit
def to_float16(x, KIND: tl.constexpr):
    """Values as float16, which has all of both kinds."""
    if KIND == FP8:
        x = x.to(tl.int16)
        size = x & 0x7F
        # the exponent is biased by 8 less
        bits = ((x & 0x80) << 8) | (size << 7)
        half = bits.to(tl.float16, bitcast=True) * 256.0
        half = tl.where(size == 0x7F, float("nan"), half)
    else:
        half = x.to(tl.float16)
    return half.to(tl.float16)


@triton.jit
def multiplied(x, KIND: tl.constexpr):
    """Values as a product takes them: e4m3 as float16, which rounds nothing and sums in all bits
    of float32, int8 as it is."""
    if KIND != PLAIN and KIND != INT8:
        x = to_float16(x, KIND)
    return x


@triton.jit
def stored(scale, dtype: tl.constexpr):
    """A scale as a cache keeps it: float16 ends at its largest number."""
    if dtype == tl.float16:
        scale = tl.minimum(scale, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    return scale.to(dtype)


def as_bytes(values: Tensor) -> Tensor:
    """What a kernel is given to write values of either kind."""
    return values if values.dtype is torch.int8 else values.view(torch.uint8)


def to_read(values: Tensor) -> tuple[Tensor, int]:
    """(what a kernel is given to read values, its KIND): e4m3 where the GPU converts it."""
    if values.dtype is torch.int8:
        return values, INT8.value
    if gpu.converts_fp8(values.device):
        return values.view(torch.float8_e4m3fn), NATIVE_FP8.value
    return values.view(torch.uint8), FP8.value


def to_write(device: torch.device) -> int:
    """The KIND of a writer of e4m3 on this GPU alone, which converts it where it can."""
    return NATIVE_FP8.value if gpu.converts_fp8(device) else FP8.value


def unsupported(**inputs: Any) -> str | None:
    """Why these are not quantized, or None."""
    for name, x in inputs.items():
        if x.dtype is torch.float64:
            return f"{name} is {x.dtype}, supported float16, bfloat16 and float32"
    return None


def kind_of(kind: str) -> int:
    """The KIND that a writer is compiled for."""
    return INT8.value if quantized.VALUES[kind] is torch.int8 else FP8.value
