# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What every backend of attention over window rows and entries takes for granted."""

from __future__ import annotations


def scale_of(softmax_scale: float | None, size: int) -> float:
    """0 and None stand for D ** -0.5."""
    return softmax_scale or float(size) ** -0.5
