# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Which blocks of paged keys each head of a packed token chooses, a product at a time."""

from __future__ import annotations

import math

import torch

from .blocks import pool, sees
from .ragged import ints

# tiles of 128 rows by blocks of 128, which Hopper has a kernel for: requests that share a tile,
# heads that leave some of it empty, pages of two blocks
WIDE = {
    "MiniMax-M3": dict(
        rows=(40, 0, 33, 9), lengths=(330, 5, 33, 140), heads=4, size=128, block=128, page=128
    ),
    "three heads of 64": dict(
        rows=(40, 45), lengths=(520, 130), heads=3, size=64, block=128, page=256, init_blocks=1
    ),
    "one head": dict(rows=(150,), lengths=(400,), heads=1, size=64, block=128, page=128),
}


class Problem:
    """Whole numbers, so that every product is exact in any dtype: ties are real, and many."""

    def __init__(self, rows, lengths, *, heads=3, size=32, block=8, page=16, top_k=3, **options):
        self.rows, self.lengths, self.block, self.top_k = rows, lengths, block, top_k
        self.seen = sees(rows, lengths, spare=2)
        self.init, self.local = options.get("init_blocks", 0), options.get("local_blocks", 1)
        self.options = options
        self.query = torch.randint(-3, 4, (len(self.seen), heads, size)).double()
        cache, self.table = pool(lengths, page, 1, size)
        self.key = cache.mul(1.5).round().clamp(-4, 4)

    def arguments(self, device, dtype):
        return dict(
            query=self.query.to(device, dtype),
            key=self.key.to(device, dtype),
            block_table=self.table.to(device),
            actual_seq_lengths=ints(self.rows, device),
            actual_seq_lengths_key=ints(self.lengths, device),
            block_size=self.block,
            top_k=self.top_k,
            return_value=True,
            **self.options,
        )

    def solved(self):
        tokens, heads, _ = self.query.shape
        index = torch.full((heads, tokens, self.top_k), -1)
        values = torch.zeros(heads, tokens, self.top_k, dtype=torch.float64)
        page = self.key.shape[1]
        for t, (request, limit) in enumerate(self.seen):
            for n in range(heads):
                best = {}
                for p in range(limit):
                    number = int(self.table[request, p // page])
                    if not 0 <= number < len(self.key):
                        continue
                    key = self.key[number, p % page, 0]
                    product = math.fsum((self.query[t, n] * key).tolist())
                    best[p // self.block] = max(best.get(p // self.block, -math.inf), product)
                blocks = -(-limit // self.block)
                forced = {w for w in best if w < self.init or w >= blocks - self.local}
                order = sorted(best, key=lambda w: (w not in forced, -best[w], w))
                for i, w in enumerate(sorted(order[: self.top_k])):
                    index[n, t, i], values[n, t, i] = w, best[w]
        return index, values
