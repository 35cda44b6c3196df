# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_kv_quant_sparse_flash_attention_lse: the attention and its statistics.

    out [.., N, 512]   softmax_max, softmax_sum [B, 1, S, N] or [1, T, N], natural logarithm

A query that sees nothing gets out 0, max -inf, sum 0; sinks are not in the statistics.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import kv_quant_sparse_flash_attention, sparse_flash_attention

SCHEMA = (
    f"npu_kv_quant_sparse_flash_attention_lse{kv_quant_sparse_flash_attention.ARGUMENTS}"
    " -> (Tensor, Tensor, Tensor)"
)


def check(**arguments: Any) -> None:
    kv_quant_sparse_flash_attention.check_as("npu_kv_quant_sparse_flash_attention_lse", **arguments)


def fake(query: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    shape = sparse_flash_attention.statistics_shape(query)
    dtype = sparse_flash_attention.statistics(query)
    return (
        kv_quant_sparse_flash_attention.fake(query),
        query.new_empty(shape, dtype=dtype),
        query.new_empty(shape, dtype=dtype),
    )
