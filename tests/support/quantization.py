# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Numbers of 8 bits by formulas of their own, in numpy: what every backend must give byte by byte,
and what products of them are."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

# of e4m3: every number that is not negative, by its code
CODES = np.array(
    [(c & 7) * 2.0**-9 if c < 8 else (1 + (c & 7) / 8) * 2.0 ** ((c >> 3) - 7) for c in range(127)]
)


def e4m3(y: np.ndarray) -> np.ndarray:
    """Codes of float64 numbers: the nearest, of two as near the even one."""
    size = np.minimum(np.abs(y), 448.0)
    above = np.searchsorted(CODES, size).clip(0, 126)
    below = np.maximum(above - 1, 0)
    far, near = CODES[above] - size, size - CODES[below]
    lower = (near < far) | ((near == far) & (below % 2 == 0))
    code = np.where((CODES[above] == size) | ~lower, above, below)
    return (code | np.where(np.signbit(y), 0x80, 0)).astype(np.uint8)


def quantized(x: Tensor, kind: str, scale_format: str, alpha: float = 1.0):
    """(bytes [.., D], float32 scales [..])"""
    x = x.float().cpu().numpy()
    amax = np.abs(x).max(-1) * np.float32(alpha)
    if kind == "int8":
        scale = (amax / np.float32(127)).astype(np.float32)
        with np.errstate(all="ignore"):
            y = np.where(scale[..., None] > 0, x / scale[..., None], np.float32(0))
        return np.rint(y).clip(-127, 127).astype(np.int8).view(np.uint8), scale
    amax = np.maximum(amax, np.float32(1e-4))
    if scale_format == "fp32":
        scale = (amax / np.float32(448)).astype(np.float32)
    else:
        power = np.vectorize(lambda a: 2.0 ** math.ceil(math.log2(a / 448)))
        scale = power(amax.astype(np.float64)).astype(np.float32)
    return e4m3((x / scale[..., None]).astype(np.float64)), scale


def dequantized(values: Tensor, scale: Tensor) -> Tensor:
    """float64 [K, N] of a weight: int8 with a scale for each column, e4m3 for each 128 x 128."""
    if values.dtype is torch.int8:
        return values.double() * scale.double()
    rows, columns = values.shape
    whole = scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return values.double() * whole[:rows, :columns]


def weight(w: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """(values [K, N], scales) of floats [K, N], as checkpoints have them: scales as they come."""
    if kind == "int8":
        scale = w.abs().amax(0, keepdim=True).float() / 127
        return (w / scale).round().to(torch.int8), scale
    rows, columns = w.shape
    padded = torch.nn.functional.pad(w, (0, -columns % 128, 0, -rows % 128))
    tiles = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scale = (tiles.abs().amax((1, 3)) / 448).float()
    values = (tiles / scale[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns]
    return values.contiguous().to(torch.float8_e4m3fn), scale


def activations(x: Tensor, kind: str, scale_format: str = "ue8m0") -> tuple[Tensor, Tensor]:
    """(values, scales [T, 1] or [T, blocks]) of tokens [T, K]."""
    if kind == "int8":
        values, scale = quantized(x, kind, scale_format)
        return torch.from_numpy(values.view(np.int8)), torch.from_numpy(scale)[:, None]
    depth = x.shape[1]
    tiles = torch.nn.functional.pad(x, (0, -depth % 128)).unflatten(1, (-1, 128))
    values, scale = quantized(tiles, kind, scale_format)
    there = torch.from_numpy(values).flatten(1)[:, :depth].contiguous()
    return there.view(torch.float8_e4m3fn), torch.from_numpy(scale)


def stands_for(values: Tensor, scale: Tensor) -> Tensor:
    """float64 [T, K] of quantized activations."""
    if values.dtype is torch.int8:
        return values.double() * scale.double()
    return values.double() * scale.double().repeat_interleave(128, 1)[:, : values.shape[1]]
