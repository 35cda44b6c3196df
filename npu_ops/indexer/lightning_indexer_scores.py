# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The positions and their scores: see lightning_indexer.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import lightning_indexer
from .lightning_indexer import unsupported

__all__ = ["forward", "unsupported"]


def forward(**arguments: Any) -> tuple[Tensor, Tensor]:
    return lightning_indexer.forward(**arguments, return_value=True, value_dtype=torch.float32)
