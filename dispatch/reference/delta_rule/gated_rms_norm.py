# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""RMSNorm and a gate, in groups of channels."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...ops.delta_rule.gated_rms_norm import Arguments
from ..common.precision import accumulator


def forward(**a: Unpack[Arguments]) -> Tensor:
    x = a["x"]
    kind = accumulator(x)
    wide, opened = x.to(kind), opening(a["gate"].to(kind), a["activation"])
    if a["norm_before_gate"]:
        normed = unit(wide, a["epsilon"], a["group_size"]) * a["weight"].to(kind) * opened
    else:
        normed = unit(wide * opened, a["epsilon"], a["group_size"]) * a["weight"].to(kind)
    return normed.to(x.dtype).contiguous()


def opening(gate: Tensor, activation: str) -> Tensor:
    share = torch.sigmoid(gate)
    return share if activation == "sigmoid" else gate * share


def unit(x: Tensor, epsilon: float, group_size: int | None) -> Tensor:
    """x over the root of its mean square, group by group."""
    groups = x.unflatten(-1, (-1, group_size or max(1, x.shape[-1])))
    scale = torch.rsqrt(groups.square().mean(-1, keepdim=True) + epsilon)
    out: Tensor = (groups * scale).flatten(-2)
    return out
