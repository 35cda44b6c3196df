# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The Hadamard transform of 128 numbers, see _quantise.py."""

from __future__ import annotations

from torch import Tensor

from . import _quantise


def forward(x: Tensor, scale: float) -> Tensor:
    return _quantise.hadamard(x, scale).to(x.dtype)
