# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_kv_quant_sparse_attn_sharedkv: those of npu_sparse_attn_sharedkv, on
"v4" rows [pages, P, 1, 584] of common/quantized.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...check import Checker
from ...common import quantized
from ..common import quantization
from . import sharedkv
from . import sparse_attn_sharedkv as of_floats

SCHEMA = (
    "npu_kv_quant_sparse_attn_sharedkv(Tensor q, SymInt kv_quant_mode, *,"
    f" {sharedkv.ARGUMENTS}, SymInt tile_size=64, SymInt rope_head_dim=64) -> (Tensor, Tensor)"
)
# the only value of each, and what it means
_MODES = {
    "kv_quant_mode": (1, "rows of 584 bytes: 448 e4m3, 64 bfloat16, 8 scales"),
    "tile_size": (quantized.V4_TILE, "the values that share a scale"),
    "rope_head_dim": (quantized.ROTARY, "the rotary channels of a row"),
}


def check(c: Checker, x: Mapping[str, Any]) -> None:
    for name, (only, meaning) in _MODES.items():
        c.require(x[name] == only, f"`{name}` is {x[name]}, expected {only} ({meaning}).")
    c.require(
        x["layout_kv"] == "PA_ND",
        f"`layout_kv` is {x['layout_kv']!r}, expected 'PA_ND': rows of 8 bits lie in pages.",
    )
    sharedkv.inputs(c, x["q"], str(quantized.V4_WIDTH), str(quantized.V4_ROW), x)
    for name in ("ori_kv", "cmp_kv"):
        if x[name] is not None:
            quantization.v4_pages(c, name, x[name])


def fake(**x: Any) -> tuple[Tensor, Tensor]:
    return of_floats.fake(**x)
