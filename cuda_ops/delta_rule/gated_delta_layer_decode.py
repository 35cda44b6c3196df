# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The decode step of a gated-delta layer in one launch for a token of KDA, else in two.

Where launches may be chained, the second loads its states during the first.  The last of a head's
programs to arrive norms and gates the head's rows, as the norm needs all columns.  The floor is the
states of the rule, read and written: everything else is a few per cent of them.

    condition                                    kernels
    KDA, N = Nv, Dk = Dv up to 128, one token    kda_layer_decode.py
      whose states are not kept apart
    else                                         convolution/causal_conv1d_update.py then
                                                 fused_sigmoid_gating_delta_rule_update.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...dispatch.common import gated_delta, memory
from ..convolution import causal_conv1d_update as convolution
from . import fused_sigmoid_gating_delta_rule_update as rule
from . import gated_rms_norm as norm
from . import kda_layer_decode as kda


def unsupported(**x: Any) -> str | None:
    return gated_delta.unsupported(x, convolution.unsupported, rule.unsupported, norm.unsupported)


def forward(**x: Any) -> Tensor:
    if gated_delta.in_one_launch(**x):
        return kda.forward(**x)
    z = x["z"]
    arrived = memory.empty([z.shape[0], z.shape[2]], torch.int32, z.device)
    mixed = convolution.launch(**gated_delta.convolution(x), zeroed=arrived)
    normed = memory.empty(z.shape, z.dtype, z.device)
    epilogue = rule.Epilogue(
        z, x["norm_weight"], arrived, normed, x["epsilon"], x["gate_activation"] != "sigmoid"
    )
    rule.launch(**gated_delta.delta_rule(x, mixed), epilogue=epilogue, given=None)
    return normed
