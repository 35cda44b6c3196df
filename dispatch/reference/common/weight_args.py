# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Products with weights of 8 bits: activations are quantized token by token, see quantizers.py.

    int8   out[t, n] = float32(x[t] . w[:, n]) sx[t] sw[n]      the sum exact, then two products
    fp8    out[t, n] = sum over blocks of 128 k of (x[t, block] . w[block, n]) sx[t, b] sw[b, n/128]

A `smooth` scale is multiplied into the activations first.  Nothing is rounded but where it says so.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...common import nz, quantized
from . import quantizers
from .precision import matmul


class Rows(NamedTuple):
    """Activations [T, K]: floats, or values of 8 bits with their scales, int8 [T, 1], fp8 [T,
    blocks]."""

    values: Tensor
    scale: Tensor | None


def rows(
    x: Tensor,
    scale: Tensor | None,
    weight: Tensor,
    scale_format: str,
    smooth: Tensor | None = None,
) -> Rows:
    """x [.., K] as `weight` wants it; with a `scale` it came so."""
    x, kind = x.flatten(0, -2), quantized.kind_of(weight.dtype)
    if scale is not None or kind is None:
        return Rows(x, scale)
    if smooth is not None:
        x = x.float() * smooth
    if kind == "int8":
        values, by = quantizers.of_floats(x, kind, scale_format)
        return Rows(values, by[:, None])
    depth = x.shape[-1]
    x = torch.nn.functional.pad(x, (0, -depth % quantized.TILE))
    values, by = quantizers.of_floats(x.unflatten(-1, (-1, quantized.TILE)), kind, scale_format)
    return Rows(values.flatten(1)[:, :depth], by)


def product(x: Rows, weight: Tensor, scale: Tensor | None, weight_format: str) -> Tensor:
    """[T, N], not rounded."""
    w = nz.to_nd(weight, weight_format)
    if x.scale is None or scale is None:
        return matmul(x.values, w)
    if w.dtype is torch.int8:
        # whole numbers below 2**53
        return (x.values.double() @ w.double()).float() * x.scale * scale
    out = x.scale.new_zeros(x.values.shape[0], w.shape[1])
    columns = scale.repeat_interleave(quantized.TILE, 1)[:, : w.shape[1]]
    for block, k in enumerate(range(0, w.shape[0], quantized.TILE)):
        part = x.values[:, k : k + quantized.TILE].float() @ w[k : k + quantized.TILE].float()
        out += part * (x.scale[:, block, None] * columns[block])
    return out
