# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""RMSNorm and a gate, in groups of channels."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.precision import accumulator


def forward(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    epsilon: float,
    group_size: int | None,
    norm_before_gate: bool,
    activation: str,
) -> Tensor:
    kind = accumulator(x)
    wide, opened = x.to(kind), opening(gate.to(kind), activation)
    if norm_before_gate:
        normed = unit(wide, epsilon, group_size) * weight.to(kind) * opened
    else:
        normed = unit(wide * opened, epsilon, group_size) * weight.to(kind)
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
