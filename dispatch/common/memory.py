# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The one allocator of every launcher, so that tests can poison what a kernel must overwrite."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised contiguous tensor.  Call it as `memory.empty(...)`: tests replace it."""
    # by keyword: for a tuple in the first place torch tries another signature first
    return torch.empty(size=shape, dtype=dtype, device=device)
