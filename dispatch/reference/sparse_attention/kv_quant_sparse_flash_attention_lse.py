# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The attention and its statistics: see kv_quant_sparse_flash_attention.py."""

from __future__ import annotations

from .kv_quant_sparse_flash_attention import with_statistics as forward

__all__ = ["forward"]
