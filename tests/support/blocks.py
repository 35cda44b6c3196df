# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Packed queries over blocks of paged keys, and what they give, a number at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .ragged import shuffled_table

# heads of 64, 128 and 256, which Hopper has a kernel for: tiles of 64 keys within a page and a
# block and across, blocks of one key, the last tile a few, heads that fill no tile or many
WIDE: dict[str, dict[str, Any]] = {
    "a tile a page": dict(rows=(3, 1, 0), lengths=(150, 70, 5), heads=16, block=64, page=64),
    "half a page": dict(rows=(2,), lengths=(300,), heads=16, block=64, page=128, chosen=5),
    "MiniMax-M3": dict(rows=(1, 2), lengths=(700, 130), heads=64, shared=4, block=128, page=128),
    "Qwen4-Exp": dict(
        rows=(2, 0, 1), lengths=(90, 3, 270), heads=24, size=256, block=4, page=128, chosen=40,
        own=False,
    ),
    "blocks above the page": dict(rows=(2,), lengths=(200,), block=48, page=16, sinks=True),
    "blocks of one": dict(rows=(3,), lengths=(90,), heads=3, shared=1, block=1, page=16, chosen=70),
    "counts": dict(rows=(2, 3), lengths=(90, 300), block=16, page=32, chosen=9, counts=True),
    "33 heads on one": dict(rows=(2, 1), lengths=(40, 70), heads=66, size=64, block=12, page=32),
    "80 heads on one": dict(
        rows=(1, 1), lengths=(40, 70), heads=80, shared=1, size=256, sinks=True, counts=True
    ),
}  # fmt: skip


def pool(lengths: Sequence[int], page: int, *sizes: int) -> tuple[Tensor, Tensor]:
    """([pages, page, *sizes], table): random rows of every request, NaN wherever none lies."""
    table, pages = shuffled_table(lengths, page=page)
    cache = torch.full((pages, page, *sizes), torch.nan, dtype=torch.float64)
    for i, length in enumerate(lengths):
        for position in range(length):
            row = table[i, position // page], position % page
            cache[row] = torch.randn(sizes, dtype=torch.float64)
    return cache, table


def sees(rows: Sequence[int], lengths: Sequence[int], spare: int) -> list[tuple[int, int]]:
    """(request, how many positions it sees) of every token, `spare` ones of no request last."""
    each = [
        (i, max(0, length - count + 1 + j))
        for i, (count, length) in enumerate(zip(rows, lengths, strict=True))
        for j in range(count)
    ]
    return each + [(-1, 0)] * spare


class Problem:
    """Attention; `choice` says whether each head of keys has blocks of its own, with counts."""

    def __init__(
        self,
        rows: Sequence[int],
        lengths: Sequence[int],
        *,
        heads: int = 4,
        shared: int = 2,
        size: int = 32,
        block: int = 16,
        page: int = 16,
        chosen: int = 4,
        own: bool = True,
        counts: bool = False,
        sinks: bool = False,
        spare: int = 2,
    ) -> None:
        self.rows, self.lengths, self.block = rows, lengths, block
        self.seen = sees(rows, lengths, spare)
        tokens = len(self.seen)
        self.query = torch.randn(tokens, heads, size, dtype=torch.float64)
        cache, self.table = pool(lengths, page, 2, shared, size)
        self.key, self.value = cache.unbind(2)
        index_heads = shared if own else 1
        self.index = torch.full((index_heads, tokens, chosen), -1, dtype=torch.int32)
        for h in range(index_heads):
            for t, (_, limit) in enumerate(self.seen):
                blocks = -(-limit // block)
                # some behind the token, absent ones in between, one that comes twice
                row = torch.randperm(max(blocks + 1, chosen))[:chosen]
                row[torch.rand(chosen) < 0.2] = -1
                row[torch.rand(chosen) < 0.1] = 2**31 - 1
                row[-1] = row[0]
                self.index[h, t] = row
        self.counts = None
        if counts:
            self.counts = torch.randint(0, chosen + 1, (index_heads, tokens), dtype=torch.int32)
        self.sinks = torch.randn(heads, dtype=torch.float64) if sinks else None

    def rounded_to(self, dtype: torch.dtype) -> Problem:
        for name in ("query", "key", "value"):
            setattr(self, name, getattr(self, name).to(dtype).double())
        if self.sinks is not None:
            self.sinks = self.sinks.float().double()
        return self

    def arguments(self, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        # both are planes of one cache: pages lie farther apart than they are long
        cache = torch.stack([self.key, self.value], 1).to(dtype).to(device)
        return dict(
            query=self.query.to(dtype).to(device),
            key=cache[:, 0],
            value=cache[:, 1],
            select_idx=self.index.to(device),
            block_table=self.table.to(device),
            select_num_idx=None if self.counts is None else self.counts.to(device),
            actual_seq_lengths=torch.tensor(self.rows, dtype=torch.int32, device=device),
            actual_seq_lengths_kv=torch.tensor(self.lengths, dtype=torch.int32, device=device),
            num_key_value_heads=self.key.shape[2],
            scale_value=0.3,
            block_size=self.block,
            top_k=self.index.shape[2],
            sinks=None if self.sinks is None else self.sinks.to(device, wide),
        )

    def scored(self, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        """Of the block indexer, by the first head of keys."""
        every = self.arguments(device, dtype)
        return dict(
            query=every["query"],
            key=every["key"][:, :, :1],
            block_table=every["block_table"],
            actual_seq_lengths=every["actual_seq_lengths"],
            actual_seq_lengths_key=every["actual_seq_lengths_kv"],
            block_size=self.block,
        )

    def solved(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """(out, lse): every key of every token and head by itself."""
        tokens, heads, _ = self.query.shape
        group = heads // self.key.shape[2]
        query, key, value = (x.to(dtype) for x in (self.query, self.key, self.value))
        out = torch.zeros(query.shape, dtype=dtype)
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        lse = torch.full((tokens, heads), -torch.inf, dtype=wide)
        page = key.shape[1]
        for t, (request, limit) in enumerate(self.seen):
            for h in range(heads):
                g = h // group
                at = []
                row = min(g, len(self.index) - 1)
                picked = self.index[row, t].tolist()
                if self.counts is not None:
                    picked = picked[: int(self.counts[row, t])]
                for w in picked:
                    for p in range(w * self.block, min((w + 1) * self.block, limit)):
                        if w >= 0 and (number := int(self.table[request, p // page])) >= 0:
                            at.append((number, p % page, g))
                if not at:
                    continue
                pages, rows, each = map(list, zip(*at, strict=True))
                z = (key[pages, rows, each] @ query[t, h]).to(wide) * 0.3
                top = z.max()
                weight = torch.exp(z - top)
                lse[t, h] = top + weight.sum().log()
                below = weight.sum()
                if self.sinks is not None:
                    below = below + torch.exp(self.sinks[h].to(wide) - top)
                out[t, h] = ((weight / below).to(dtype)[:, None] * value[pages, rows, each]).sum(0)
        return out, lse
