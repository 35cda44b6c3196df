# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The decode step of a gated-delta layer: one launch for a token of KDA (kda_layer_decode.py), the
kernels of its three stages else, one after the other.

Each stage begins anew by itself where the compiler refuses a tile: one before it is not run again,
which would push the states of the convolution on twice.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...dispatch.common import gated_delta
from ..common import tune
from ..convolution import causal_conv1d_update as convolution
from . import fused_sigmoid_gating_delta_rule_update as rule
from . import gated_rms_norm as norm
from . import kda_layer_decode as kda


def unsupported(**x: Any) -> str | None:
    return gated_delta.unsupported(x, convolution.unsupported, rule.unsupported, norm.unsupported)


def forward(**x: Any) -> Tensor:
    if gated_delta.in_one_launch(**x):
        return kda.forward(**x)
    mixed = tune.stage(convolution.forward, **gated_delta.convolution(x))
    out = tune.stage(rule.forward, **gated_delta.delta_rule(x, mixed))
    normed: Tensor = tune.stage(norm.forward, **gated_delta.norm(x, out))
    return normed
