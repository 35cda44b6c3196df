# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What both dialects of topk.py agree on, and who makes samples for it."""

from __future__ import annotations

BLOCK = 4096  # scores a program handles at once
EVERY = 16  # a sample that comes with the scores has every 16th of them
