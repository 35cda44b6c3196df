# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Which calls have the values of their lengths, indices and tables looked at.

Those on CPU tensors, where nothing waits for it and a port is tried first, unless CUSTOM_DEBUG=0.
With CUSTOM_DEBUG=1 all, and then what is legal and absent (a page of a table that is not there) is
refused as well.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .env import config

on_cpu = os.environ.get("CUSTOM_DEBUG") != "0"


def looked_at(device: torch.device) -> bool:
    """On this device; kernels that an interpreter runs on CPU tensors are those of another one."""
    if config.debug:
        return True
    return on_cpu and device.type == "cpu" and config.backend not in ("cuda", "npu")


def where() -> str:
    """In words."""
    if config.debug:
        return "everywhere"
    return "on cpu tensors: CUSTOM_DEBUG is not set" if on_cpu else "nowhere"


def known(tensor: Tensor) -> bool:
    """Whether a check looks at the values of an argument: it has some, and no graph is made."""
    return is_real(tensor) and looked_at(tensor.device)


def is_real(tensor: Tensor) -> bool:
    """Neither meta nor fake: it has values."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)
