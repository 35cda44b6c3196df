# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The positions and their scores: see quant_lightning_indexer.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .quant_lightning_indexer import selected, unsupported

__all__ = ["forward", "unsupported"]


def forward(**arguments: Any) -> tuple[Tensor, Tensor]:
    return selected(torch.float32, **arguments)
