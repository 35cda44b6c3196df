# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Numbers to 8 bits: one scale for the last dimension, in float32 throughout.

    fp8    ue8m0   s = 2 ** ceil(log2(max(amax, 1e-4) / 448)), found in the bits of amax
           fp32    s = max(amax, 1e-4) / 448
           value = x / s to the nearest e4m3, ties to even, within +-448
    int8   s = amax / 127, value = x / s to the nearest integer, ties to even, within +-127
           zeros give s = 0 and zeros

A "v4" row is rounded to bfloat16 first; its first 448 channels are fp8 ue8m0 by tiles of 64.

The Hadamard transform is seven rounds of sums and differences, over neighbours first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...common import quantized

LEAST = 1e-4  # of the largest magnitude, in fp8
_MOST = {"fp8": 448.0, "int8": 127.0}
# the mantissa of 448 = 1.75 * 2**8
_MANTISSA, _EXPONENT = 0x600000, 8


def of_floats(
    x: Tensor, kind: str, scale_format: str, alpha: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(values [.., D], scales float32 [..]); `alpha` times the largest magnitude is what fits."""
    x = x.float()
    amax = x.abs().amax(-1)
    if alpha is not None:
        amax = amax * alpha
    most = _MOST[kind]
    if kind == "int8":
        scale = amax / most
        y = (x / scale.masked_fill(scale == 0, 1)[..., None]).masked_fill(
            (scale == 0)[..., None], 0
        )
        return y.round().clamp(-most, most).to(torch.int8), scale
    amax = amax.clamp(min=LEAST)
    scale = _power_of_two(amax) if scale_format == "ue8m0" else amax / most
    y = (x / scale[..., None]).clamp(-most, most)
    return y.to(quantized.VALUES[kind]), scale


def _power_of_two(amax: Tensor) -> Tensor:
    """The least one that is not below amax / 448."""
    bits = amax.view(torch.int32)
    above = ((bits & 0x7FFFFF) > _MANTISSA).int()
    return ((bits >> 23) - _EXPONENT + above << 23).view(torch.float32)


def pack_v4_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [.., 512] as (values [.., 448] e4m3, rotary channels [.., 64] bfloat16, scales [.., 8]
    uint8): the parts of quantized.v4_parts."""
    rounded = x.bfloat16()
    tiles = rounded[..., : quantized.V4_VALUES].unflatten(-1, (-1, quantized.V4_TILE))
    values, scale = of_floats(tiles, "fp8", "ue8m0")
    exponents = (scale.view(torch.int32) >> 23).to(torch.uint8)
    scales = torch.nn.functional.pad(exponents, (0, 1))
    return values.flatten(-2), rounded[..., quantized.V4_VALUES :], scales


def unpack_v4_rows(
    values: Tensor, rotary: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Rows [.., 512] of what `pack_v4_rows` gives; exact in bfloat16."""
    scale = (scales[..., :-1].int() << 23).view(torch.float32)
    wide = values.float() * scale.repeat_interleave(quantized.V4_TILE, -1)
    return torch.cat([wide.to(dtype), rotary.to(dtype)], -1)


def write_v4_rows(rows: Tensor, slots: Tensor, x: Tensor) -> None:
    """`x` [T, 512] into "v4" rows [pages, P, 1, 584]; a slot that is not there is passed over."""
    for part, new in zip(quantized.v4_parts(rows), pack_v4_rows(x), strict=True):
        if part.itemsize == 1:  # torch 2.8 moves no fp8 by an index
            part, new = part.view(torch.uint8), new.view(torch.uint8)
        write(part, slots, new)


def stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A scale as a cache keeps it: float16 ends at its largest number."""
    return scale.clamp(max=torch.finfo(dtype).max).to(dtype)


def hadamard(x: Tensor, scale: float) -> Tensor:
    """Of the last dimension, in float32 (float64 for float64)."""
    shape, size = x.shape, x.shape[-1]
    x = x if x.dtype is torch.float64 else x.float()
    step = 1
    while step < size:
        pairs = x.reshape(*shape[:-1], size // (2 * step), 2, step)
        low, high = pairs.unbind(-2)
        x = torch.stack([low + high, low - high], dim=-2)
        step *= 2
    return x.reshape(shape) * scale


def rotated(x: Tensor, index_hadamard: bool, hadamard_round: str) -> Tensor:
    """An index query or key before it is quantized."""
    if not index_hadamard:
        return x
    x = hadamard(x.float(), x.shape[-1] ** -0.5)
    return x.bfloat16() if hadamard_round == "bf16" else x


def write(cache: Tensor, slots: Tensor, new: Tensor) -> None:
    """Rows `new` [T, D] into `cache` [pages, P, D]; a slot that is not there is passed over."""
    pages, page = cache.shape[:2]
    there = (slots >= 0) & (slots < pages * page)
    at = slots[there].long()
    cache[torch.div(at, max(page, 1), rounding_mode="floor"), at % max(page, 1)] = new[there]
