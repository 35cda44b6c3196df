# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The decode step of a gated-delta layer: convolution, gated delta rule, gated norm."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...common import gated_delta
from ..convolution import causal_conv1d_update
from . import fused_sigmoid_gating_delta_rule_update, gated_rms_norm


def forward(**x: Any) -> Tensor:
    mixed = causal_conv1d_update.forward(**gated_delta.convolution(x))
    out = fused_sigmoid_gating_delta_rule_update.forward(**gated_delta.delta_rule(x, mixed))
    return gated_rms_norm.forward(**gated_delta.norm(x, out))
