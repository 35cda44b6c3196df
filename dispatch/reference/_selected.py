# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The keys that a query token selected, gathered a block of tokens at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..common import layout, paged

# gathered numbers held at a time: 64 MiB in float32
_BLOCK = 1 << 24


def slots(
    key: Tensor,
    sparse_indices: Tensor,
    block_size: int,
    rows: layout.Rows,
    keys: layout.Keys,
    numbers: int,
) -> Iterator[tuple[slice, Tensor]]:
    """(tokens, slots [tokens, K * block_size]) with -1 for an absent position, so many tokens that
    `numbers` numbers of each slot fit."""
    indices = sparse_indices.flatten(0, -3).squeeze(-2)
    inside = torch.arange(block_size, device=key.device)
    width = indices.shape[1] * block_size
    step = max(1, _BLOCK // max(1, width * numbers))
    for start in range(0, len(indices) if width else 0, step):
        tokens = slice(start, start + step)
        position = (indices[tokens].long()[..., None] * block_size + inside).flatten(1)
        slot = keys.slots(key, rows.request[tokens], position)
        yield tokens, slot.masked_fill(position >= rows.limit[tokens, None], -1)


def gather(key: Tensor | None, slot: Tensor, dtype: torch.dtype) -> Tensor | None:
    """[tokens, slots, D] of a key tensor that may be absent; 0 at absent slots."""
    return None if key is None else paged.gather(layout.as_pages(key), slot, dtype)


def logits(
    query: Tensor,
    query_rope: Tensor | None,
    key: Tensor,
    key_rope: Tensor | None,
    scale: float,
    slot: Tensor,
) -> Tensor:
    """[tokens, N, slots] of queries [tokens, N, D] and gathered keys; -inf at absent slots."""
    z = query.to(key.dtype) @ key.mT
    if query_rope is not None and key_rope is not None:
        z += query_rope.to(key.dtype) @ key_rope.mT
    return (z * scale).masked_fill_((slot < 0)[:, None], -torch.inf)
