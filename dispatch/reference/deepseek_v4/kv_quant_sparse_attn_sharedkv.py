# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""sparse_attn_sharedkv.py on what rows of 584 bytes stand for, rounded to the query's dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...common import paged, quantized
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
        values, rotary, scales = quantized.v4_parts(kv)
        kind = values.dtype
        values, rotary, scales = (  # torch 2.8 moves no fp8 by an index
            paged.gather(part[:, :, None], slot, part.dtype)
            for part in (values.view(torch.uint8), rotary, scales)
        )
        return quantizers.unpack_v4_rows(values.view(kind), rotary, scales, q.dtype).to(wide)

    return sparse_attn_sharedkv.attend(q, gather, **arguments)
