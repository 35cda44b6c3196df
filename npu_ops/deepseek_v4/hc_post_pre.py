# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""hc_post, and hc_pre of the streams that it gives: what lies between two sublayers.

The products of hc_pre are taken of the streams while they are made, with the roundings of both ops
(hc_pre.py, BEHIND).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...dispatch.common import memory
from ...dispatch.common.hyper_connections import outputs
from . import hc_post
from .hc_pre import gated, products


def unsupported(residual: Tensor, **_: Any) -> str | None:
    return hc_post.unsupported(residual)


def forward(
    x: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    hc_fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    hc_sinkhorn_iters: int,
    norm_eps: float,
    hc_eps: float,
    norm_weight: Tensor | None,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    streams = memory.empty(residual.shape, residual.dtype, residual.device)
    y, next_post, next_comb = outputs(residual, hc_fn)
    if residual.numel():
        made = streams.flatten(0, -3)
        partial = products(residual.flatten(0, -3), hc_fn, (x, post, comb, made))
        gated(
            made,
            partial,
            hc_fn,
            hc_scale,
            hc_base,
            hc_sinkhorn_iters,
            norm_eps,
            hc_eps,
            norm_weight,
            y,
            next_post,
            next_comb,
        )
    return streams, y, next_post, next_comb
