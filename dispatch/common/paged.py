# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Paged caches [pages, P, 1, D]: a slot is page * P + offset, and -1 where there is none.

A key tensor that is not paged fits in: [B, S2, 1, D] is B pages of S2 slots, one for each request.
Nothing absent is ever read or written.
"""

from __future__ import annotations

import torch
from torch import Tensor


def slots(block_table: Tensor, request: Tensor, position: Tensor, pages: int, page: int) -> Tensor:
    """The slot of every `position` [n, k] of the request [n] it belongs to; -1: no such page."""
    requests, reach = block_table.shape
    if requests == 0 or reach == 0:
        return torch.full_like(position, -1)
    column = torch.div(position, page, rounding_mode="floor")
    exists = (column >= 0) & (column < reach)
    number = block_table[request[:, None], column.clamp(0, reach - 1)].long()
    exists &= (number >= 0) & (number < pages)
    return torch.where(exists, number * page + position % page, -1)


def gather(cache: Tensor, slot: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [..., D] of `cache` [pages, P, 1, D] at `slot` [...], as `dtype`; 0 where absent."""
    pages, page, _, size = cache.shape
    if pages * page == 0:
        return cache.new_zeros([*slot.shape, size], dtype=dtype)
    there = slot.clamp(min=0)
    rows = cache[torch.div(there, page, rounding_mode="floor"), there % page, 0].to(dtype)
    return rows.masked_fill_((slot < 0)[..., None], 0)


def scatter(cache: Tensor, slot: Tensor, rows: Tensor) -> None:
    """Write `rows` [n, D] into `cache` at `slot` [n]; negative or out of range: skipped."""
    flat = cache.flatten(0, -2)
    exists = (slot >= 0) & (slot < flat.shape[0])
    flat[slot[exists].long()] = rows[exists].to(cache.dtype)


def overwrite(cache: Tensor, slot: Tensor, rows: Tensor) -> None:
    """`scatter` of `rows` of the cache's dtype, into pages that may lie apart, that reads nothing
    on the host: a row without a slot repeats one that has one, and where none has, slot 0 keeps
    what it holds."""
    pages, page = cache.shape[:2]
    if not slot.numel() or not pages * page:
        return
    exists = (slot >= 0) & (slot < pages * page)
    other = exists.int().argmax()
    kept = torch.where(exists[other], rows[other], cache[0, 0, 0])
    at = torch.where(exists, slot, slot[other].where(exists[other], 0)).long()
    cache[torch.div(at, page, rounding_mode="floor"), at % page, 0] = torch.where(
        exists[:, None], rows, kept
    )
