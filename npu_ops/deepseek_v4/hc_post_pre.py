# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""hc_post, and hc_pre of the streams that it gives: what lies between two sublayers.

The products of hc_pre are taken of the streams while they are made, with the roundings of both ops
(hc_pre.py, BEHIND).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import memory
from ...dispatch.common.hyper_connections import outputs
from ...dispatch.ops.deepseek_v4.hc_post_pre import Arguments
from . import hc_post
from .hc_pre import gated, products


def unsupported(residual: Tensor, **_: Any) -> str | None:
    return hc_post.unsupported(residual)


def forward(**a: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    residual, hc_fn = a["residual"], a["hc_fn"]
    streams = memory.empty(residual.shape, residual.dtype, residual.device)
    gates = outputs(residual, hc_fn)
    if residual.numel():
        made = streams.flatten(0, -3)
        behind = (a["x"], a["post"], a["comb"], made)
        gated(made, products(residual.flatten(0, -3), hc_fn, behind), a, gates)
    return streams, *gates
