# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The gradient of hc_post by formula; see hc_post.py."""

from __future__ import annotations

from torch import Tensor

from ..common.precision import accumulator


def backward(
    x: Tensor, residual: Tensor, post: Tensor, comb: Tensor, d_out: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = accumulator(x)
    d, u, streams = d_out.to(wide), x.to(wide), residual.to(wide)
    return (
        (post[..., None] * d).sum(-2).to(x.dtype),
        (comb @ d).to(x.dtype),
        (d * u[..., None, :]).sum(-1),
        streams @ d.transpose(-1, -2),
    )
