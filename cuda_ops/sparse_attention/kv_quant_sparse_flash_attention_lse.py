# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The attention and its statistics: see kv_quant_sparse_flash_attention.py."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .kv_quant_sparse_flash_attention import attended, unsupported

__all__ = ["forward", "unsupported"]


def forward(**arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return attended(True, **arguments)
