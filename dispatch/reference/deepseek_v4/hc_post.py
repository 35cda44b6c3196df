# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Hyper-connections behind a sublayer: out[k] = post_k x + sum_j comb[j, k] residual[j], rounded
once."""

from __future__ import annotations

from torch import Tensor

from ..common.precision import accumulator


def forward(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    wide = accumulator(x)
    mixed = comb.transpose(-1, -2) @ residual.to(wide)
    return (post[..., None] * x.to(wide)[..., None, :] + mixed).to(x.dtype).contiguous()
