# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What a kernel forgets to write is NaN, not a lucky zero."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils._python_dispatch import _disable_current_modes


def poisoned(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """In place of `dispatch.common.memory.empty`."""
    out = torch.empty(shape, dtype=dtype, device=device)
    # bytes of work space: NaN in any float
    bad = {torch.uint8: 255, torch.int8: -1}.get(dtype, -(2**30))
    # the fill is no step of a launcher that is being recorded
    with _disable_current_modes():
        return out.fill_(float("nan") if dtype.is_floating_point else bad)
