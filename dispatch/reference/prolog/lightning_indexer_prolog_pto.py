# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The int8 prolog of the indexer; matrices transform queries and keys before they are quantised.

    query = int8(rnd(RoPE(rnd(c W_qb)) H_q))   key = int8(rnd(RoPE(rnd(LayerNorm(x W_k))) H_k))
    weights = fp16(rnd(x W_proj) N^-0.5 D^-0.5)

Pairs (0, 1), (2, 3)... rotate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...common import w8a8c8
from ..caches import index_cache_write, quantize_index_query
from ..common import quantizers
from . import indexer_prolog_pto


def forward(**a: Any) -> tuple[Tensor, Tensor, Tensor]:
    given = w8a8c8.as_pto(a, a["idx_k_cache"], a["idx_k_cache_index"])
    query, key, weights = indexer_prolog_pto.projected(**given)
    key = w8a8c8.transformed(key, a["hadamard_k"])
    index_cache_write.forward(**w8a8c8.of_cache_write(a, key))
    query = w8a8c8.transformed(query[0], a["hadamard_q"])
    values, scale = quantize_index_query.forward(**w8a8c8.of_query(query, weights[0]))
    half = quantizers.stored(scale, torch.float16)
    return values, half[..., None], w8a8c8.scaled(weights[0], key.shape[-1])
