# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Accumulation in float32, or in float64 for float64 inputs."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, not rounded."""
    wide = accumulator(a)
    return a.to(wide) @ b.to(wide)
