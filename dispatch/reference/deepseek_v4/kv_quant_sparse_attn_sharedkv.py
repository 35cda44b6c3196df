# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""sparse_attn_sharedkv.py on what rows of 584 bytes stand for, rounded to the query's dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...common import paged, quantised
from ..common import quantizers
from ..common.precision import accumulator
from . import sparse_attn_sharedkv


def forward(
    q: Tensor,
    kv_quant_mode: int,
    tile_size: int,
    rope_head_dim: int,
    **arguments: Any,
) -> tuple[Tensor, Tensor]:
    wide = accumulator(q)

    def gather(kv: Tensor, slot: Tensor) -> Tensor:
        values, rotary, scales = (
            paged.gather(part[:, :, None], slot, dtype)
            for part, dtype in zip(
                quantised.v4_parts(kv), (torch.float32, torch.float32, torch.uint8), strict=True
            )
        )
        return quantizers.unpack_v4_rows(values, rotary, scales, q.dtype).to(wide)

    return sparse_attn_sharedkv.attend(q, gather, **arguments)
