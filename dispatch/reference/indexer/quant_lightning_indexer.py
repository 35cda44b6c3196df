# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Exact top-k of the indexer's scores on values of 8 bits, as lightning_indexer.py's.

    score[t, p] = key_scale[p] sum_n weights[t, n] query_scale[t, n] relu(query[t, n] . key[p])

in float32 throughout; the key's scale comes last.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...common import layout, paged, quantized
from ...ops.indexer.quant_lightning_indexer import Arguments
from . import lightning_indexer


def forward(**arguments: Any) -> Tensor:
    return scored(**arguments)[0]


def scored(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor]:
    """(indices, float32 scores)"""
    query, key, weights = x["query"], x["key"], x["weights"]
    query, key = quantized.typed(query, x["query_dtype"]), quantized.typed(key, x["key_dtype"])
    weights = weights.float()
    if x["query_dequant_scale"] is not None:
        weights = weights * x["query_dequant_scale"].float()
    scale = layout.as_pages(x["key_dequant_scale"][..., None])

    def score(rows: Tensor, by: Tensor, slots: Tensor) -> Tensor:
        found = lightning_indexer.scores(rows, layout.as_pages(key), by, slots)
        return found * paged.gather(scale, slots, torch.float32)[:, 0]

    return lightning_indexer.select(x, query.float(), weights, score)
