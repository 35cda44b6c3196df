# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""out = sum_i exp(lse_i - lse) outs_i,  lse = log sum_i exp(lse_i), over the parts that count."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.precision import accumulator


def forward(outs: Tensor, lses: Tensor, sums: Tensor | None) -> tuple[Tensor, Tensor]:
    if outs.shape[0] == 0:
        return outs.new_zeros(outs.shape[1:]), lses.new_full(lses.shape[1:], -torch.inf)
    wide = torch.promote_types(accumulator(outs), lses.dtype)
    each = lses.to(wide) if sums is None else lses.to(wide) + sums.to(wide).log()
    counts = each.isfinite()
    each = each.masked_fill(~counts, -torch.inf)
    top = each.amax(0)
    # no part counts: exp(-inf - 0) is 0, not NaN
    weight = torch.exp(each - top.masked_fill(top == -torch.inf, 0))
    total = weight.sum(0)
    out = (weight[..., None] * outs.to(wide).masked_fill(~counts[..., None], 0)).sum(0)
    out = out / total.masked_fill(total == 0, 1)[..., None]
    return out.to(outs.dtype), (top + total.log()).to(lses.dtype)
