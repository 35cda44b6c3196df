# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The indexer on queries and keys of 8 bits: the kernels of lightning_indexer.py and topk.py.

e4m3   as float16, sums in float32; by integer arithmetic on GPUs that have no conversion
int8   integer products

    condition    kernels
    any          lightning_indexer.py then topk.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import quantized
from ...dispatch.ops.indexer.quant_lightning_indexer import Arguments
from ..common import gpu
from . import lightning_indexer, topk


def unsupported(query: Tensor, key: Tensor, sparse_count: int, **arguments: Any) -> str | None:
    if sparse_count > topk.MOST:
        return f"sparse_count={sparse_count}, supported up to {topk.MOST}"
    heads, dim = query.shape[-2:]
    if dim > 256 or heads > 256:
        return f"heads and head_dim are {(heads, dim)}, supported up to 256"
    if lightning_indexer.shape(1, heads, dim, query.device) is None:
        return gpu.too_small(query.device, N=heads, D=dim)
    return lightning_indexer.too_many(key, arguments.get("block_table"), arguments["cmp_ratio"])


def forward(**arguments: Any) -> Tensor:
    return selected(None, **arguments)[0]


def scored(**arguments: Any) -> tuple[Tensor, Tensor]:
    """npu_quant_lightning_indexer_scores"""
    return selected(torch.float32, **arguments)


def selected(value_dtype: torch.dtype | None, **arguments: Any) -> tuple[Tensor, Tensor]:
    """(indices, scores of `value_dtype`, or none)"""
    found = scores(value_dtype, **arguments)
    found.select_last()
    return found.indices, found.values


def scores(value_dtype: torch.dtype | None, **x: Unpack[Arguments]) -> lightning_indexer.Scored:
    """As lightning_indexer.scores."""
    return lightning_indexer.scores_of(
        x,
        quantized.typed(x["query"], x["query_dtype"]),
        quantized.typed(x["key"], x["key_dtype"]),
        x["query_dequant_scale"],
        x["key_dequant_scale"],
        value_dtype,
    )
