# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments of npu_fused_causal_conv1d_v2 (torch_npu's schema): npu_fused_causal_conv1d, whose
output takes the place of x."""

from __future__ import annotations

from typing import Any

from typing_extensions import Unpack

from ...check import Checker
from ..common import convolutions
from . import fused_causal_conv1d

SCHEMA = fused_causal_conv1d.IN_PLACE
GE = "InplaceFusedCausalConv1d"


def check(**a: Unpack[fused_causal_conv1d.Arguments]) -> None:
    x = a["x"]
    c = Checker("npu_fused_causal_conv1d_v2")
    fused_causal_conv1d.inputs(c, a)
    convolutions.pool(c, "x", x, "T D" if x.ndim == 2 else "B S D")


def fake(**_: Any) -> None:
    return None
