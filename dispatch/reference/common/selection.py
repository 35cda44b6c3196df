# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The keys that a query token selected, gathered a block of tokens at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...common import layout, paged

# gathered numbers held at a time: 64 MiB in float32
BLOCK = 1 << 24
# keeps 0 / 0 of a row without keys and sink at 0; any other row divides by at least 1
_TINY = torch.finfo(torch.float32).tiny


def slots(
    key: Tensor,
    sparse_indices: Tensor,
    block_size: int,
    rows: layout.Rows,
    keys: layout.Keys,
    numbers: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """(tokens, slots [tokens, K * block_size]), -1 for an absent position; tokens that see nothing
    are left out.  A slot's `numbers` numbers, times the slots of a step, fit into the block."""
    indices = sparse_indices.flatten(0, -3).squeeze(-2)
    # what a longer block holds behind the last key is absent
    block_size = min(block_size, int(rows.limit.max())) if rows.limit.numel() else 1
    inside = torch.arange(block_size, device=key.device)
    width = max(1, indices.shape[1] * block_size)
    seeing = torch.nonzero(rows.limit).flatten()
    for tokens in seeing.split(max(1, BLOCK // (width * numbers))):
        # no product of an index that is out of range, which could overflow into it
        index = indices[tokens].long().clamp(min=-1).minimum(rows.limit[tokens, None])
        position = (index[..., None] * block_size + inside).flatten(1)
        slot = keys.slots(key, rows.request[tokens], position)
        slot = slot.masked_fill(position >= rows.limit[tokens, None], -1)
        if slot.numel():
            yield tokens, slot


def gather(key: Tensor, slot: Tensor, dtype: torch.dtype) -> Tensor:
    """[tokens, slots, D]; 0 at absent slots."""
    return paged.gather(layout.as_pages(key), slot, dtype)


def logits(query: Tensor, key: Tensor, scale: float, slot: Tensor) -> Tensor:
    """[tokens, N, slots] of queries [tokens, N, D] and gathered keys; -inf at absent slots."""
    z = query.to(key.dtype) @ key.mT * scale
    return z.masked_fill_((slot < 0)[:, None], -torch.inf)


def attended(z: Tensor, value: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(out [tokens, N, D], max, sum [tokens, N]) of `logits` and values [tokens, slots, D]."""
    top = z.amax(-1)
    # a row that sees nothing: exp(-inf - 0) is 0, not NaN
    shift = top.masked_fill(top == -torch.inf, 0)
    p = torch.exp(z - shift[..., None])
    total = denominator = p.sum(-1)
    if sinks is not None:
        denominator = total + torch.exp(sinks - shift)
    return p @ value / denominator.clamp(min=_TINY)[..., None], top, total


class Sums:
    """A gradient like `key`, added up over the queries that selected each key."""

    def __init__(self, key: Tensor, dtype: torch.dtype) -> None:
        self.shape, self.dtype = key.shape, key.dtype
        # the last row takes what belongs to absent slots
        self.sums = key.new_zeros([key.shape[:-1].numel() + 1, key.shape[-1]], dtype=dtype)

    def add(self, slot: Tensor, rows: Tensor) -> None:
        """`rows` are [tokens, slots, D], or fewer dims than D: the first."""
        index = slot.masked_fill(slot < 0, len(self.sums) - 1).flatten()
        self.sums[:, : rows.shape[-1]].index_add_(0, index, rows.flatten(0, 1))

    def rounded(self) -> Tensor:
        return self.sums[:-1].view(self.shape).to(self.dtype)
