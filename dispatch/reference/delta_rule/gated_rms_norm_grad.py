# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The gradient of RMSNorm with a gate.

n = u r,  r = (mean u^2 + epsilon)^(-1/2)      du = r (dn - n mean(dn n))
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.precision import accumulator
from .gated_rms_norm import opening, unit


def backward(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    d_out: Tensor,
    epsilon: float,
    group_size: int | None,
    norm_before_gate: bool,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    kind = accumulator(x)
    wide, z, w, d = x.to(kind), gate.to(kind), weight.to(kind), d_out.to(kind)
    opened, share = opening(z, activation), torch.sigmoid(z)
    slope = share * (1 - share) if activation == "sigmoid" else share * (1 + z * (1 - share))
    size = group_size or max(1, x.shape[-1])

    def through_norm(u: Tensor, n: Tensor, grad: Tensor) -> Tensor:
        u, n, grad = (y.unflatten(-1, (-1, size)) for y in (u, n, grad))
        scale = torch.rsqrt(u.square().mean(-1, keepdim=True) + epsilon)
        return (scale * (grad - n * (grad * n).mean(-1, keepdim=True))).flatten(-2)

    if norm_before_gate:
        n = unit(wide, epsilon, group_size)
        dx, d_gate = through_norm(wide, n, d * w * opened), d * w * n * slope
        d_weight = d * n * opened
    else:
        n = unit(wide * opened, epsilon, group_size)
        du = through_norm(wide * opened, n, d * w)
        dx, d_gate, d_weight = du * opened, du * wide * slope, d * n
    return (
        dx.to(x.dtype).contiguous(),
        d_gate.to(gate.dtype).contiguous(),
        d_weight.flatten(0, -2).sum(0).to(weight.dtype),
    )
