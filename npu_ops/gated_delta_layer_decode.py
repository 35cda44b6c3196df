# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The decode step of a gated-delta layer: the kernels of its three stages, one after the other.

Each stage has its own turn with the compiler: what it has refused is not launched, and a stage
before it is not run again, which would push the states of the convolution on twice.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..dispatch.common import gated_delta
from . import causal_conv1d_update as convolution
from . import fused_sigmoid_gating_delta_rule_update as rule
from . import gated_rms_norm as norm
from . import tune

_OP = "npu_gated_delta_layer_decode"
_convolve = tune.retrying(_OP, convolution.forward)
_recur = tune.retrying(_OP, rule.forward)
_normalise = tune.retrying(_OP, norm.forward)


def unsupported(**x: Any) -> str | None:
    # of the shapes alone: what is convolved is like what comes
    return (
        convolution.unsupported(**gated_delta.convolution(x))
        or rule.unsupported(**gated_delta.delta_rule(x, x["mixed_qkv"]))
        or norm.unsupported(**gated_delta.norm(x, x["z"]))
    )


def forward(**x: Any) -> Tensor:
    mixed = _convolve(**gated_delta.convolution(x))
    out = _recur(**gated_delta.delta_rule(x, mixed))
    normed: Tensor = _normalise(**gated_delta.norm(x, out))
    return normed
