# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The positions and their scores: see lightning_indexer.py."""

from __future__ import annotations

from .lightning_indexer import scored as forward

__all__ = ["forward"]
