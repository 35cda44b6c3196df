# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The int8 prolog of the indexer: indexer_prolog_pto.py gives queries and keys in the working
dtype, the cube multiplies them by the transform, the writers quantize them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...dispatch.common import lightning_indexer_prolog, memory
from ..caches import index_cache_write, quantize_index_query
from . import indexer_prolog_pto, product


def _transformed(x: Tensor, matrix: Tensor | None) -> Tensor:
    """x [M, Di] times its matrix, rounded to the dtype of x."""
    if matrix is None or not x.numel():
        return x
    out = memory.empty(tuple(x.shape), x.dtype, x.device)
    product.heads(x[:, None], matrix[None], out[:, None])
    return out


def unsupported(
    token_x: Tensor, ln_gamma_k: Tensor, sin_idx_rope: Tensor, idx_k_cache: Tensor, **_: Any
) -> str | None:
    return indexer_prolog_pto.unsupported(token_x, ln_gamma_k, sin_idx_rope, idx_k_cache)


def forward(**a: Any) -> tuple[Tensor, Tensor, Tensor]:
    (tokens, _), dtype, device = a["token_x"].shape, a["token_x"].dtype, a["token_x"].device
    size = a["ln_gamma_k"].shape[0]
    keys = memory.empty((tokens, 1, 1, size), dtype, device)
    own = torch.arange(tokens, dtype=torch.int32, device=device)
    query, weights = indexer_prolog_pto.forward(**lightning_indexer_prolog.as_pto(a, keys, own))
    keys = _transformed(keys.view(tokens, size), a["hadamard_k"])
    index_cache_write.forward(**lightning_indexer_prolog.of_cache_write(a, keys))
    query = _transformed(query.flatten(0, -2), a["hadamard_q"]).view(query.shape[1:])
    values, scale = quantize_index_query.forward(
        **lightning_indexer_prolog.of_query(query, weights[0])
    )
    half = scale.clamp(max=torch.finfo(torch.float16).max).to(torch.float16)
    return values, half[..., None], lightning_indexer_prolog.scaled(weights[0], size)
