# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_fused_causal_conv1d, whose output is copied to x: blocks of tokens are made at once, each of
the tokens before it as well, so that none can be written where it is read.

    condition    kernels
    any          fused_causal_conv1d.py
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import fused_causal_conv1d

unsupported = fused_causal_conv1d.unsupported


def forward(x: Tensor, **others: Any) -> None:
    x.copy_(fused_causal_conv1d.forward(x=x, **others))
