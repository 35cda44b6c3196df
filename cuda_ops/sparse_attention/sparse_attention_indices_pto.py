# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The layer of sparse_attention_pto.py, and the positions that it attends to."""

from __future__ import annotations

from .sparse_attention_pto import unsupported
from .sparse_attention_pto import with_indices as forward

__all__ = ["forward", "unsupported"]
