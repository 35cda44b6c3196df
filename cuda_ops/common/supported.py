# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Why kernels cannot take a call, or None: what `unsupported` of more than one launcher says."""

from __future__ import annotations

import torch
from torch import Tensor


def half_precision(name: str, tensor: Tensor) -> str | None:
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return None
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{name} is {kind}, supported are float16 and bfloat16"


def up_to(most: int, **size: int) -> str | None:
    """A size by its letter."""
    [(letter, came)] = size.items()
    return f"{letter}={came}, supported up to {most}" if came > most else None
