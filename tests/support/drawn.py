# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What the arguments of a case are drawn with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def ints(values: Any) -> Tensor | None:
    return None if values is None else torch.tensor(values, dtype=torch.int64)
