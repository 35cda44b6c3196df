# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""hc_post, and hc_pre of the streams that it gives: what lies between two sublayers.

condition    kernels
any          hc_post.py then hc_pre.py, each begun while the one ahead ends
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import memory
from ...dispatch.common.hyper_connections import outputs
from ...dispatch.ops.deepseek_v4.hc_post_pre import Arguments
from . import hyper_connections
from .hc_post import blend
from .hc_pre import gates, mix


def unsupported(residual: Tensor, **_: Any) -> str | None:
    return hyper_connections.unsupported(residual, "residual")


def forward(**a: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    residual, hc_fn = a["residual"], a["hc_fn"]
    streams = memory.empty(residual.shape, residual.dtype, residual.device)
    y, next_post, next_comb = outputs(residual, hc_fn)
    if residual.numel():
        blend(a["x"], residual, a["post"], a["comb"], streams)
        made = streams.flatten(0, -3)
        gates(made, mix(made, hc_fn), y, next_post, next_comb, a)
    return streams, y, next_post, next_comb
