# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The gradient of RMSNorm with a gate.

n = u r,  r = (mean u^2 + epsilon)^(-1/2)      du = r (dn - n mean(dn n))
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...ops.delta_rule.gated_rms_norm_grad import Arguments
from ..common.precision import accumulator
from .gated_rms_norm import opening, unit


def backward(**a: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor]:
    x, epsilon, group_size = a["x"], a["epsilon"], a["group_size"]
    kind = accumulator(x)
    wide, z, w, d = x.to(kind), a["gate"].to(kind), a["weight"].to(kind), a["d_out"].to(kind)
    opened, share = opening(z, a["activation"]), torch.sigmoid(z)
    slope = share * (1 - share) if a["activation"] == "sigmoid" else share * (1 + z * (1 - share))
    size = group_size or max(1, x.shape[-1])

    def through_norm(u: Tensor, n: Tensor, grad: Tensor) -> Tensor:
        u, n, grad = (y.unflatten(-1, (-1, size)) for y in (u, n, grad))
        scale = torch.rsqrt(u.square().mean(-1, keepdim=True) + epsilon)
        return (scale * (grad - n * (grad * n).mean(-1, keepdim=True))).flatten(-2)

    if a["norm_before_gate"]:
        n = unit(wide, epsilon, group_size)
        dx, d_gate = through_norm(wide, n, d * w * opened), d * w * n * slope
        d_weight = d * n * opened
    else:
        n = unit(wide * opened, epsilon, group_size)
        du = through_norm(wide * opened, n, d * w)
        dx, d_gate, d_weight = du * opened, du * wide * slope, d * n
    return (
        dx.to(x.dtype).contiguous(),
        d_gate.to(a["gate"].dtype).contiguous(),
        d_weight.flatten(0, -2).sum(0).to(a["weight"].dtype),
    )
