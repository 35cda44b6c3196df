# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""hc_post, and hc_pre of the rounded streams that it gives."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import hc_post, hc_pre


def forward(
    x: Tensor, residual: Tensor, post: Tensor, comb: Tensor, **rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    streams = hc_post.forward(x, residual, post, comb)
    return streams, *hc_pre.forward(x=streams, **rest)
