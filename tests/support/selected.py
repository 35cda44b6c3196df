# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Attention over selected keys: ragged inputs, and their solution one query token at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from .ragged import Packed, limits

# (query tokens, keys) of each request
RAGGED = [(3, 40), (1, 5), (2, 0), (4, 2), (0, 9), (2, 33)]
N, D, DR, SCALE = 4, 32, 16, 0.25


def attend(query, query_rope, key, key_rope, value, positions, scale, sink=None):
    """One query token [N, D] over the keys at `positions`, equal ones counted apart; in the dtype
    of the inputs.  (out, max, sum) by head."""
    if not positions:
        zero = query.new_zeros(len(query))
        return query.new_zeros(len(query), value.shape[-1]), zero - torch.inf, zero
    k, v = key[positions], value[positions]
    z = query @ k.T
    if query_rope is not None:
        z = z + query_rope @ key_rope[positions].T
    z = z * scale
    top = z.max(-1, keepdim=True).values
    p = torch.exp(z - top)
    total = p.sum(-1, keepdim=True)
    denominator = total if sink is None else total + torch.exp(sink[:, None].to(z.dtype) - top)
    return (p / denominator) @ v, top[:, 0], total[:, 0]


def chosen(indices: Tensor, block_size: int, limit: int) -> list[int]:
    """The positions that exist, of one row of indices."""
    every = [
        index * block_size + i
        for index in indices.tolist()
        if index >= 0
        for i in range(block_size)
    ]
    return [position for position in every if position < limit]


def random_indices(rows: int, keys: int, count: int, block_size: int) -> Tensor:
    """Distinct ones with -1, too large and repeated ones strewn in."""
    blocks = -(-keys // block_size)
    out = torch.stack(
        [torch.randperm(blocks + count)[:count] for _ in range(rows)] or [torch.zeros(0, count)]
    )
    out = out.to(torch.int32).view(rows, 1, count)
    wild = torch.rand(rows, 1, count)
    out[wild < 0.15] = -1
    out[(wild > 0.15) & (wild < 0.2)] = blocks + 7
    out[..., -1] = out[..., 0]
    return out


class Problem:
    """Ragged inputs, drawn once; `arguments` packs them, `exact` solves them by request."""

    def __init__(
        self,
        rows,
        keys,
        count=12,
        block_size=1,
        *,
        rope=DR,
        own_value=False,
        sinks=False,
    ):
        """`rope`: channels of the rotary part, or None: it is absent."""
        self.rows, self.keys, self.block_size = rows, keys, block_size
        self.query = [torch.randn(r, N, D).double() for r in rows]
        self.query_rope = self.key_rope = None
        self.key = [torch.randn(k, D).double() for k in keys]
        if rope is not None:
            self.query_rope = [torch.randn(r, N, rope).double() for r in rows]
            self.key_rope = [torch.randn(k, rope).double() for k in keys]
        self.value = [torch.randn(k, D).double() for k in keys] if own_value else None
        self.sinks = torch.randn(N) if sinks else None
        self.indices = [
            random_indices(r, k, count, block_size) for r, k in zip(rows, keys, strict=True)
        ]

    def rounded_to(self, dtype):
        """All inputs rounded to `dtype`, so that every evaluation starts from the same numbers."""
        for name in ("query", "query_rope", "key", "key_rope", "value"):
            parts = getattr(self, name)
            if parts is not None:
                setattr(self, name, [part.to(dtype).double() for part in parts])
        return self

    def arguments(self, packed: Packed, dtype) -> dict:
        def rows(parts):
            return None if parts is None else packed.rows([part.to(dtype) for part in parts])

        def keys(parts):
            return None if parts is None else packed.keys([part.to(dtype) for part in parts])

        sinks = self.sinks
        if sinks is not None:
            sinks = sinks.to(packed.device, torch.float64 if dtype is torch.float64 else None)
        return dict(
            query=rows(self.query),
            query_rope=rows(self.query_rope),
            key=keys(self.key),
            key_rope=keys(self.key_rope),
            value=keys(self.value),
            sparse_indices=packed.rows(self.indices),
            scale_value=SCALE,
            block_table=packed.block_table,
            actual_seq_lengths_query=packed.lengths_query,
            actual_seq_lengths_kv=packed.lengths_key,
            sparse_block_size=self.block_size,
            layout_query=packed.layout_query,
            layout_kv=packed.layout_key,
            sinks=sinks,
        )

    def solved(self, sparse_mode: int, dtype: torch.dtype) -> list[list[Tensor]]:
        """(out [Lq, N, D], max [Lq, N], sum [Lq, N]) by request, evaluated in `dtype`."""
        out = []
        value = self.key if self.value is None else self.value
        for i, (rows, keys) in enumerate(zip(self.rows, self.keys, strict=True)):
            results = [
                attend(
                    self.query[i][j].to(dtype),
                    self.query_rope[i][j].to(dtype) if self.query_rope else None,
                    self.key[i].to(dtype),
                    self.key_rope[i].to(dtype) if self.key_rope else None,
                    value[i].to(dtype),
                    chosen(self.indices[i][j, 0], self.block_size, limit),
                    SCALE,
                    self.sinks,
                )
                for j, limit in enumerate(limits(rows, keys, sparse_mode))
            ]
            empty = [torch.zeros(0, *size, dtype=dtype) for size in ((N, D), (N,), (N,))]
            out.append([*map(torch.stack, zip(*results, strict=True))] if rows else empty)
        return out
