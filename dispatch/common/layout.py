# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Which keys a query token can see, and where they lie, for every layout of torch_npu's ops.

    query  BSND [B, S, N, D]   lengths [B], None: all S      TND [T, N, D]   prefix sums [B]
    key    BSND [B, S2, 1, D]  lengths [B], None: all S2     TND [T2, 1, D]  prefix sums [B]
           PA_BSND [pages, P, 1, D] with block_table [B, max_pages] and lengths [B]

Token j of the Lq query tokens of a request with L keys sees the positions below
`limit` = L (sparse_mode 0), or L - Lq + 1 + j (sparse_mode 3: causal, aligned at the last key).
Padding tokens (j >= Lq, or behind the last prefix sum) see nothing: limit 0.
Keys that each stand for m tokens (cmp_ratio): lengths count tokens, and limit // m are visible.
Lengths beyond the tensors end with them.
All in tensors, with no value read on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import paged


@dataclass(frozen=True)
class Rows:
    """For every query token, BSND ones counted as B * S."""

    request: Tensor  # [T] int64; of a padding token some valid number
    limit: Tensor  # [T] int64, the positions it sees are those below


@dataclass(frozen=True)
class Keys:
    """Where the keys of every request lie, as pages [pages, P, 1, D]."""

    layout: str
    length: Tensor  # [B] int64, of source tokens
    start: Tensor  # [B] int64, first row of a request (TND)
    block_table: Tensor | None

    def slots(self, key: Tensor, request: Tensor, position: Tensor) -> Tensor:
        """The slot in `as_pages(key)` of `position` [n, k] of `request` [n]; -1: absent."""
        pages, page = as_pages(key).shape[:2]
        if self.block_table is not None:
            return paged.slots(self.block_table, request, position, pages, page)
        if self.length.shape[0] == 0:
            return torch.full_like(position, -1)
        if self.layout == "TND":
            first, size = self.start[request, None], self.length[request, None]
        else:
            first, size = request[:, None] * page, torch.full_like(request[:, None], page)
        slot = first + position
        exists = (position >= 0) & (position < size) & (slot >= 0) & (slot < pages * page)
        return torch.where(exists, slot, -1)


def as_pages(key: Tensor) -> Tensor:
    """Keys of any layout as [pages, P, 1, D], a view."""
    return key if key.ndim == 4 else key[None]


def starts(prefix: Tensor) -> Tensor:
    """[l0, l0 + l1, ...] -> [0, l0, ...]"""
    return torch.cat([prefix.new_zeros(1), prefix])[:-1]


def keys_of(
    key: Tensor,
    layout: str,
    lengths: Tensor | None,
    block_table: Tensor | None,
    cmp_ratio: int = 1,
) -> Keys:
    if lengths is None:
        length = torch.full((key.shape[0],), key.shape[1], device=key.device)
        return Keys(layout, length, torch.zeros_like(length), None)
    if layout == "TND":
        ends = lengths.long().clamp(0, key.shape[0])
        start = starts(ends)
        return Keys(layout, ends - start, start, None)
    entries = key.shape[1] * (1 if block_table is None else block_table.shape[1])
    reach = entries * cmp_ratio + cmp_ratio - 1  # a window behind the last entry may be open
    return Keys(layout, lengths.long().clamp(0, reach), torch.zeros_like(lengths), block_table)


def rows_of(
    query: Tensor,
    layout: str,
    lengths: Tensor | None,
    keys: Keys,
    sparse_mode: int | None,
    cmp_ratio: int = 1,
) -> Rows:
    requests = keys.length.shape[0]
    if layout == "TND":
        assert lengths is not None  # the check said so
        token = torch.arange(query.shape[0], device=query.device)
        ends = lengths.long().clamp(0, query.shape[0])
        # how many sums it has passed, in whatever order they are
        request = torch.searchsorted(ends.sort().values, token, right=True)
        padding = request >= requests
        request = request.clamp(max=max(requests - 1, 0))
        start = starts(ends)
        length = ends - start
    else:
        batch, size = query.shape[:2]
        token = torch.arange(batch * size, device=query.device)
        request = torch.div(token, max(size, 1), rounding_mode="floor")
        start = torch.arange(batch, device=query.device) * size
        length = torch.full_like(start, size)
        if lengths is not None:
            length = lengths.long().clamp(0, size)
        padding = torch.zeros_like(token, dtype=torch.bool)
    if requests == 0:
        return Rows(request, torch.zeros_like(token))
    j = token - start[request]
    limit = keys.length[request]
    if sparse_mode != 0:  # None is the default, 3
        limit = limit - length[request] + 1 + j
    limit = limit.clamp(min=0).masked_fill(padding | (j >= length[request]), 0)
    if cmp_ratio > 1:
        limit = torch.div(limit, cmp_ratio, rounding_mode="floor")
    return Rows(request, limit)


def open_entries(limit: Tensor, cmp_ratio: int) -> Tensor:
    """The entry that rows which see `limit` tokens see a part of, or -1; int32."""
    number = torch.div(limit, cmp_ratio, rounding_mode="floor")
    return number.masked_fill(limit == number * cmp_ratio, -1).to(torch.int32)


def with_tail(indices: Tensor, values: Tensor, open_: Tensor) -> tuple[Tensor, Tensor]:
    """Entries [.., K], of every row a number of them and then -1, and behind them the row's open
    one [..], of value 0."""
    wide = torch.nn.functional.pad(indices, (0, 1), value=-1)
    before = torch.nn.functional.pad(indices, (1, 0), value=0)
    ends = (wide < 0) & (before >= 0)
    return torch.where(ends, open_[..., None], wide), torch.nn.functional.pad(values, (0, 1))


def lengths_of_rows(
    lo: int,
    hi: int,
    query: Tensor,
    key: Tensor,
    of_queries: Tensor | None,
    of_keys: Tensor | None,
    layout_query: str,
    layout_key: str,
    sparse_mode: int,
) -> tuple[Tensor, Tensor]:
    """The lengths with which query rows lo to hi alone see what they see among all rows: a request
    that goes on behind `hi` ends that much earlier, for its keys as well where the op is causal."""
    if of_keys is None:
        of_keys = torch.full((key.shape[0],), key.shape[1], device=key.device, dtype=torch.int32)
    if of_queries is None:
        of_queries = torch.full_like(of_keys, query.shape[1])
    if layout_query == "TND":
        # what begins behind `hi` has no row here
        behind = (of_queries - hi).clamp(min=0).masked_fill(starts(of_queries) >= hi, 0)
        rows = of_queries.clamp(lo, hi) - lo
    else:
        behind = (of_queries - hi).clamp(min=0)
        rows = (of_queries - lo).clamp(0, hi - lo)
    if sparse_mode == 0:
        return rows, of_keys
    floor = starts(of_keys) if layout_key == "TND" else torch.zeros_like(of_keys)
    return rows, torch.maximum(of_keys - behind.to(of_keys.dtype), floor)
