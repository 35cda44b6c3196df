# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The rows of the gated norm as both backends address them."""

from __future__ import annotations

from torch import Tensor


def rows_of(x: Tensor) -> Tensor:
    """[..., D] as [A, H, D]; a copy only where the strides of A's dimensions do not chain."""
    return x[None] if x.ndim == 2 else x.reshape(-1, *x.shape[-2:])
