# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Latent attention over selected rows of 8 bits: sparse_flash_attention.py on what they stand for.

latent = values * scale of their tile, in float32, rounded to the query's dtype
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...common import quantized
from ...ops.sparse_attention.kv_quant_sparse_flash_attention import Arguments
from ..common import selection
from ..common.precision import accumulator
from . import sparse_flash_attention


def forward(**arguments: Any) -> Tensor:
    return with_statistics(**arguments)[0]


def with_statistics(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor]:
    """(out, softmax_max, softmax_sum)"""
    query, key, value = x["query"], x["key"], x["value"]
    wide = accumulator(query)
    rotary = quantized.rotary_dtype(query)
    of_key, key_rope, key_scale = quantized.row_parts(
        key, x["row_layout"], quantized.typed(key, x["key_dtype"]).dtype, rotary
    )
    of_value, _rope, value_scale = quantized.row_parts(
        value, x["row_layout"], quantized.typed(value, x["value_dtype"]).dtype, rotary
    )

    def latent(values: Tensor, scale: Tensor, slot: Tensor) -> Tensor:
        found = selection.gather(values, slot, torch.float32)
        by = selection.gather(scale, slot, torch.float32)
        return (found * by.repeat_interleave(quantized.TILE, -1)).to(query.dtype).to(wide)

    def gathered(slot: Tensor) -> tuple[Tensor, Tensor]:
        k = latent(of_key, key_scale, slot)
        same = value.data_ptr() == key.data_ptr() and value.stride() == key.stride()
        v = k if same else latent(of_value, value_scale, slot)
        return torch.cat([k, selection.gather(key_rope, slot, wide)], dim=-1), v

    return sparse_flash_attention.attend(
        x, query, of_key, quantized.LATENT, gathered, x["sparse_indices"]
    )
