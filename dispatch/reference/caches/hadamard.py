# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The Hadamard transform of 128 numbers, see quantizers.py."""

from __future__ import annotations

from torch import Tensor

from ..common import quantizers


def forward(x: Tensor, scale: float) -> Tensor:
    return quantizers.hadamard(x, scale).to(x.dtype)
