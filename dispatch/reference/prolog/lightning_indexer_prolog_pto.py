# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The int8 prolog of the indexer; matrices transform queries and keys before they are quantized.

    query = int8(rnd(RoPE(rnd(c W_qb)) H_q))   key = int8(rnd(RoPE(rnd(LayerNorm(x W_k))) H_k))
    weights = fp16(rnd(x W_proj) N^-0.5 D^-0.5)

Pairs (0, 1), (2, 3)... rotate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...common import lightning_indexer_prolog
from ..caches import index_cache_write, quantize_index_query
from ..common import quantizers
from . import indexer_prolog_pto


def forward(**a: Any) -> tuple[Tensor, Tensor, Tensor]:
    given = lightning_indexer_prolog.as_pto(a, a["idx_k_cache"], a["idx_k_cache_index"])
    query, key, weights = indexer_prolog_pto.projected(**given)
    key = lightning_indexer_prolog.transformed(key, a["hadamard_k"])
    index_cache_write.forward(**lightning_indexer_prolog.of_cache_write(a, key))
    query = lightning_indexer_prolog.transformed(query[0], a["hadamard_q"])
    values, scale = quantize_index_query.forward(
        **lightning_indexer_prolog.of_query(query, weights[0])
    )
    half = quantizers.stored(scale, torch.float16)
    return values, half[..., None], lightning_indexer_prolog.scaled(weights[0], key.shape[-1])
