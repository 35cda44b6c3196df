# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Attention over selected rows of 8 bits: the kernel of sparse_flash_attention.py, which makes
of values and scales, on their way to the product, what they stand for.

The order is that of the bf16 op: with its tiles, scales which are powers of two give its bits.

    condition    kernels
    any          sparse_flash_attention.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import quantized
from ...dispatch.common import rope as rotary
from ...dispatch.ops.sparse_attention.kv_quant_sparse_flash_attention import Arguments
from . import sparse_flash_attention


def _parts(rows: Tensor, number: int | None, row_layout: str, query: Tensor) -> tuple[Tensor, ...]:
    """(values, rotary keys, scales), views."""
    values = quantized.typed(rows, number).dtype
    return quantized.row_parts(rows, row_layout, values, quantized.rotary_dtype(query))


def unsupported(
    query: Tensor, key: Tensor, value: Tensor, sparse_indices: Tensor, **arguments: Any
) -> str | None:
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"query is {query.dtype}, supported float16 and bfloat16"
    return sparse_flash_attention.unsupported(
        query=query.narrow(-1, 0, quantized.LATENT),
        query_rope=query.narrow(-1, quantized.LATENT, arguments["rope_head_dim"]),
        key=key,
        value=value,
        sparse_indices=sparse_indices,
        block_table=arguments.get("block_table"),
        sparse_block_size=arguments.get("sparse_block_size", 1),
    )


def forward(**arguments: Any) -> Tensor:
    return attended(False, **arguments)[0]


def with_statistics(**arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """npu_kv_quant_sparse_flash_attention_lse"""
    return attended(True, **arguments)


def attended(
    statistics: bool, query_rope: Tensor | None = None, **x: Unpack[Arguments]
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, softmax_max, softmax_sum), the last two empty without `statistics`; `query_rope`: the
    rotary part of the queries, where it is no part of `query`."""
    query = x["query"]
    if query_rope is None:
        query, query_rope = query.split([quantized.LATENT, x["rope_head_dim"]], -1)
    key, rope, key_scale = _parts(x["key"], x["key_dtype"], x["row_layout"], query)
    value, _rope, value_scale = _parts(x["value"], x["value_dtype"], x["row_layout"], query)
    of_rows = (*rotary.given(query_rope, rope), key_scale, value_scale, statistics)
    return sparse_flash_attention.attend(x, query, key, value, x["sparse_indices"], *of_rows)
