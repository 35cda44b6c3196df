# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What npu_hc_pre gives, for every backend with kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from . import memory


def outputs(x: Tensor, hc_fn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for y, post and comb of streams x [.., 4, h]."""
    y = memory.empty((*x.shape[:-2], x.shape[-1]), x.dtype, x.device)
    head = hc_fn.shape[0] == x.shape[-2]
    shapes = ((0,), (0,)) if head else (x.shape[:-1], (*x.shape[:-1], x.shape[-2]))
    post, comb = (memory.empty(shape, torch.float32, x.device) for shape in shapes)
    return y, post, comb
