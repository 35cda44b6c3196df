# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The indexer on int8 queries and keys: exact integer products, scaled.  The kernels are those of
lightning_indexer.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import quantized
from ...dispatch.ops.indexer.quant_lightning_indexer import Arguments
from ..common import tiling
from . import lightning_indexer


def unsupported(
    query: Tensor,
    key: Tensor,
    block_table: Tensor | None,
    query_dtype: int | None,
    cmp_ratio: int,
    **_: Any,
) -> str | None:
    if quantized.typed(query, query_dtype).dtype is not torch.int8:
        return "fp8: the cube and vector units of A2 and A3 have int8 and no fp8"
    size = query.shape[-1]
    overflow = tiling.matmul_overflow(64, 128, size)
    if size % 32 or overflow:
        return overflow or f"head size {size}, the cube unit takes multiples of 32 in int8"
    return lightning_indexer.out_of_reach(key, block_table, cmp_ratio)


def forward(**arguments: Any) -> Tensor:
    return selected(False, **arguments)[0]


def scored(**arguments: Any) -> tuple[Tensor, Tensor]:
    """npu_quant_lightning_indexer_scores"""
    return selected(True, **arguments)


def selected(scored: bool, **x: Unpack[Arguments]) -> tuple[Tensor, Tensor]:
    """(indices, their scores in float32, or none)"""
    x["query"] = quantized.typed(x["query"], x["query_dtype"])
    x["key"] = quantized.typed(x["key"], x["key_dtype"])
    scales = x["query_dequant_scale"], x["key_dequant_scale"]
    return lightning_indexer.select(x, *scales, torch.float32 if scored else None)
