# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Attention over selected int8 rows: the kernels of sparse_flash_attention.py, whose
copies make of values and scales what they stand for, rounded once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import quantized
from ...dispatch.ops.sparse_attention.kv_quant_sparse_flash_attention import Arguments
from . import sparse_flash_attention


def unsupported(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor | None,
    sparse_indices: Tensor,
    sparse_block_size: int,
    key_dtype: int | None,
    **_: Any,
) -> str | None:
    if quantized.typed(key, key_dtype).dtype is not torch.int8:
        return "rows of fp8: the cube and vector units of A2 and A3 have int8 and no fp8"
    if key.ndim == 4 and key.shape[0] > 1 and key.stride(0) % max(key.stride(1), 1):
        return f"`key` has pages {key.stride(0)} bytes apart, not a multiple of its row stride"
    return sparse_flash_attention.unsupported(
        query.narrow(-1, 0, quantized.LATENT),
        key,
        value,
        query[..., quantized.LATENT :],
        None,
        block_table,
        sparse_indices,
        sparse_block_size,
    )


def forward(**arguments: Any) -> Tensor:
    return attended(**arguments)[0]


def with_statistics(**arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """npu_kv_quant_sparse_flash_attention_lse"""
    return attended(**arguments)


def attended(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor]:
    """(out, softmax_max, softmax_sum)"""
    query, key = x["query"], x["key"]
    return sparse_flash_attention.attended(
        query.narrow(-1, 0, quantized.LATENT),
        query.narrow(-1, quantized.LATENT, x["rope_head_dim"]),
        *quantized.row_parts(key, x["row_layout"], torch.int8, query.dtype),
        x["sparse_indices"],
        x["scale_value"],
        x["sparse_block_size"],
        x["sinks"],
        sparse_flash_attention.selecting(query, key, x),
        ROTARY=x["rope_head_dim"],
        TILES=quantized.LATENT // quantized.TILE,
    )
