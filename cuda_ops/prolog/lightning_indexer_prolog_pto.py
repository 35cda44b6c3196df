# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The int8 prolog of the indexer: npu_indexer_prolog_pto gives queries and keys in the working
dtype, torch multiplies them by the transform, the writers quantize them.

    condition    kernels
    any          indexer_prolog_pto.py then caches/index_cache_write.py then
                 caches/quantize_index_query.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...dispatch.common import lightning_indexer_prolog, memory
from ..caches import index_cache_write, quantize_index_query
from . import indexer_prolog_pto
from .indexer_prolog_pto import unsupported as unsupported


def forward(**a: Any) -> tuple[Tensor, Tensor, Tensor]:
    tokens, dtype, device = a["token_x"].shape[0], a["token_x"].dtype, a["token_x"].device
    size = a["ln_gamma_k"].shape[0]
    if tokens == 0:
        shape = 0, a["weights_proj"].shape[-1]
        return (
            memory.empty((*shape, size), torch.int8, device),
            memory.empty((*shape, 1), torch.float16, device),
            memory.empty(shape, torch.float16, device),
        )
    keys = memory.empty((tokens, 1, 1, size), dtype, device)
    own = torch.arange(tokens, dtype=torch.int32, device=device)
    query, weights = indexer_prolog_pto.forward_quantized(
        **lightning_indexer_prolog.as_pto(a, keys, own)
    )
    keys = lightning_indexer_prolog.transformed(keys.view(tokens, size), a["hadamard_k"])
    index_cache_write.forward(**lightning_indexer_prolog.of_cache_write(a, keys))
    query = lightning_indexer_prolog.transformed(query[0], a["hadamard_q"])
    values, scale = quantize_index_query.forward(
        **lightning_indexer_prolog.of_query(query, weights[0])
    )
    half = scale.clamp(max=torch.finfo(torch.float16).max).to(torch.float16)
    return values, half[..., None], lightning_indexer_prolog.scaled(weights[0], size)
