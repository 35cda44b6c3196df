# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Selection and attention over paged caches of half precision or of 8 bits, each on its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import quantized
from .. import sparse_attention as sparse


def select(
    query: Tensor, weights: Tensor, keys: Tensor, scale: Tensor | None, **options: Any
) -> Tensor:
    """Positions. Keys with a `scale` are of 8 bits; so are queries, whose scales `weights` hold."""
    options = options | dict(layout_key="PA_BSND")
    if scale is None:
        return sparse.npu_lightning_indexer(query, keys, weights, **options)[0]
    return quantized.npu_quant_lightning_indexer(query, keys, weights, None, scale, 0, 0, **options)


def select_with_scores(
    query: Tensor, weights: Tensor, keys: Tensor, scale: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    options = options | dict(layout_key="PA_BSND")
    if scale is None:
        return sparse.npu_lightning_indexer_scores(query, keys, weights, **options)
    return quantized.npu_quant_lightning_indexer_scores(
        query, keys, weights, None, scale, 0, 0, **options
    )


def attend(
    query: Tensor,
    query_rope: Tensor,
    kv: Tensor,
    kr: Tensor | None,
    indices: Tensor,
    scale: float,
    row_layout: str,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, maximum, sum). Without a `kr` rows of `kv` are of 8 bits."""
    options = options | dict(layout_kv="PA_BSND")
    if kr is not None:
        return sparse.npu_sparse_flash_attention(
            query,
            kv,
            None,
            indices,
            scale,
            query_rope=query_rope,
            key_rope=kr,
            return_softmax_lse=True,
            **options,
        )
    return quantized.npu_kv_quant_sparse_flash_attention_lse(
        torch.cat([query, query_rope], -1),
        kv,
        kv,
        indices,
        scale,
        2,
        2,
        attention_mode=2,
        rope_head_dim=query_rope.shape[-1],
        row_layout=row_layout,
        **options,
    )
