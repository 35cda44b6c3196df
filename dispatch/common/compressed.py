# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Windows of m tokens, and the entry that each becomes.

A request has `count` tokens in a call, the first at position `start`.  Window w holds positions
w m to (w + 1) m - 1, and closes in the call that brings the last of them.  Rows of the output:

    x [B, S, H]               row c of a request is window start // m + c, closed or not
    x [T, H], cu_seqlens      the closed windows of the requests one after the other

All in tensors, with no value read on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import layout, paged

HALVES, PAIRS = 1, 2  # rotary_mode
BY_PAGE, RING = 1, 2  # cache_mode
FIRST, LAST = SLICES = "first", "last"  # rope_slice


@dataclass(frozen=True)
class Tokens:
    """Those of x, counted as B * S where it is not packed."""

    request: Tensor  # [T] int64; of an absent token some valid number
    position: Tensor  # [T] int64, -1: absent
    first: Tensor  # [B] int64, where a request's tokens begin in x
    start: Tensor  # [B] int64, the position of the first
    count: Tensor  # [B] int64


@dataclass(frozen=True)
class Windows:
    """Those of the output's rows."""

    request: Tensor  # [E] int64
    number: Tensor  # [E] int64, -1: none closes


def tokens_of(
    x: Tensor, cu_seqlens: Tensor | None, seqused: Tensor | None, start_pos: Tensor | None
) -> Tokens:
    if cu_seqlens is None:
        batch, size = x.shape[:2]
        first = torch.arange(batch, device=x.device) * size
        count = torch.full_like(first, size)
    else:
        bounds = cu_seqlens.long().clamp(0, x.shape[0])
        first = bounds[:-1]
        count = (bounds[1:] - first).clamp(min=0)
    if seqused is not None:
        count = torch.minimum(seqused.long().clamp(min=0), count)
    start = torch.zeros_like(first) if start_pos is None else start_pos.long()
    token = torch.arange(x.shape[:-1].numel(), device=x.device)
    if not len(first):
        return Tokens(token, torch.full_like(token, -1), first, start, count)
    if cu_seqlens is None:
        request = torch.div(token, max(x.shape[1], 1), rounding_mode="floor")
    else:
        request = (torch.searchsorted(first, token, right=True) - 1).clamp(min=0)
    j = token - first[request]
    position = (start[request] + j).clamp(min=-1)
    absent = (j < 0) | (j >= count[request])
    return Tokens(request, position.masked_fill(absent, -1), first, start, count)


def channels(wkv: Tensor, coff: int) -> int:
    """D, of an entry."""
    return wkv.shape[0] // coff


def rows(x: Tensor, cu_seqlens: Tensor | None, ratio: Any) -> list[Any]:
    """The shape of the output without its last dimension; sizes may be symbolic."""
    if cu_seqlens is None:
        return [x.shape[0], -(-x.shape[1] // ratio)]
    most = x.shape[0] // ratio + cu_seqlens.shape[0] - 1
    return [torch.sym_min(x.shape[0], most)]


def windows_of(tokens: Tokens, shape: list[int], ratio: int) -> Windows:
    """Of output rows of that `shape`."""
    row = torch.arange(torch.Size(shape).numel(), device=tokens.start.device)
    if not len(tokens.start):
        return Windows(row, torch.full_like(row, -1))
    low = torch.div(tokens.start, ratio, rounding_mode="floor")
    high = torch.div(tokens.start + tokens.count, ratio, rounding_mode="floor")
    if len(shape) == 2:
        request = torch.div(row, max(shape[1], 1), rounding_mode="floor")
        number = low[request] + row - request * shape[1]
    else:
        low = low.clamp(min=0)
        ends = (high - low).clamp(min=0).cumsum(0)
        request = torch.searchsorted(ends, row, right=True).clamp(max=len(ends) - 1)
        number = low[request] + row - layout.starts(ends)[request]
    open_ = (number < 0) | (number >= high[request])
    return Windows(request, number.masked_fill(open_, -1))


def state_slots(
    block_table: Tensor, request: Tensor, position: Tensor, pages: int, page: int, ring: bool
) -> Tensor:
    """The slot of every `position` [n, k] of `request` [n] in the state; -1: none."""
    if ring:
        reach = block_table.shape[1] * page
        position = position.where(position < 0, position % max(reach, 1))
    return paged.slots(block_table, request, position, pages, page)
