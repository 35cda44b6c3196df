# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Whether calls are recorded into a graph of the device."""

from __future__ import annotations

import torch

from .backends import made_current


def is_capturing(device: torch.device) -> bool:
    """Whether this thread records a graph, of the current device or of `device`."""
    if device.type == "cpu":
        return False
    module = getattr(torch, device.type)
    if module.is_current_stream_capturing():
        return True
    with made_current(device):
        return bool(module.is_current_stream_capturing())
