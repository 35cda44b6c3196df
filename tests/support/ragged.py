# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Requests of different lengths, and their packing into torch_npu's layouts.

A test states what it knows by request ([Lq, ...] queries, [L, D] keys), so that its oracle knows no
layout.  What no request owns (padding, unused pages) is NaN: reading it shows.
"""

from __future__ import annotations

import faulthandler
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .calls import runs_once

LAYOUTS = [("BSND", "BSND"), ("TND", "TND"), ("BSND", "PA_BSND"), ("TND", "PA_BSND")]
PAGE = 16
# no tensor is as long; cut to 32 bits some of them would be 0, 5, or below 0
BEYOND = [
    (2**31 - 1, torch.int32),
    (2**31 + 3, torch.int64),
    (2**32 + 5, torch.int64),
    (2**62, torch.int64),
]
# of queries, of keys: such as mean nothing, and CUSTOM_DEBUG refuses them
FALLING = [
    ([4, 2, 6], [5, 9, 14]),
    ([9, 3, 1], [7, 3, 12]),
    ([2, 4, 6], [9, -4, 3]),
    ([-(2**31), 2**31 - 1, 3], [2**31 - 1, 5, 2**31 - 1]),
]


def run(op: str, backend: str, **arguments: Any) -> Any:
    """Call `torch.ops.custom.<op>` and make sure that `backend` ran it."""
    with runs_once(op, backend):
        return getattr(torch.ops.custom, op)(**arguments)


def two_keys(page: int, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """`page` keys, the first two with logits 0 and ln 3 beside a sink of ln 4: weights 1/8, 3/8."""
    query, key, value = (
        torch.zeros(1, 1, 16),
        torch.zeros(1, page, 1, 16),
        torch.zeros(1, page, 1, 16),
    )
    query[..., 0] = math.log(3)
    key[0, 1, 0, 0] = 1
    value[0, 0, 0, 1], value[0, 1, 0, 2] = 8, 8
    given = dict(query=query, key=key, value=value)
    return {
        **{name: x.to(device, dtype) for name, x in given.items()},
        "sinks": torch.tensor([math.log(4)], device=device),
        "return_softmax_lse": True,
    }


def assert_two_keys(out: Tensor) -> None:
    """The first columns of what attends to `two_keys`."""
    wanted = torch.tensor([0.0, 1.0, 3.0])
    torch.testing.assert_close(out.flatten()[:3].cpu().float(), wanted, rtol=2e-3, atol=0)


@contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    """What does not end the process does: a kernel that hangs listens to nothing else."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def moved(x: Any, device: torch.device) -> Any:
    """A tensor on `device` with the strides it has, also where there is a gap behind each page."""
    if not isinstance(x, Tensor) or device.type == "cpu":
        return x
    there = torch.empty(0, dtype=x.dtype, device=device)
    storage = x.untyped_storage().to(device=device)
    return there.set_(storage, x.storage_offset(), x.shape, x.stride())


def ints(values: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def strided(
    arguments: dict[str, Any], rows: Sequence[str], numbers: Sequence[str]
) -> dict[str, Any]:
    """The same call: NaN between any two of these `rows`, and `numbers` of 64 bits."""
    made = dict(arguments)
    for name in rows:
        x = arguments[name]
        made[name] = torch.stack([x, torch.full_like(x, torch.nan)], dim=-2)[..., 0, :]
        assert not made[name].is_contiguous()
    return made | {name: arguments[name].long() for name in numbers}


def pack(parts: Sequence[Tensor], layout: str, device: torch.device, spare: int = 2) -> Tensor:
    """[L, ...] of every request to BSND or TND, with `spare` tokens of padding (in each request,
    or behind the last)."""
    fill = torch.nan if parts[0].is_floating_point() else 3
    if layout == "TND":
        tail = parts[0].new_full((spare, *parts[0].shape[1:]), fill)
        return torch.cat([*parts, tail]).to(device)
    longest = max(map(len, parts)) + spare
    out = parts[0].new_full((len(parts), longest, *parts[0].shape[1:]), fill)
    for row, part in zip(out, parts, strict=True):
        row[: len(part)] = part
    return out.to(device)


def unpack(out: Tensor, layout: str, lengths: Sequence[int]) -> tuple[list[Tensor], Tensor]:
    """The rows of every request, and all the padding rows."""
    if layout == "TND":
        *parts, tail = out.cpu().split([*lengths, len(out) - sum(lengths)])
        return parts, tail
    parts = [row[:length] for row, length in zip(out.cpu(), lengths, strict=True)]
    tails = [row[length:] for row, length in zip(out.cpu(), lengths, strict=True)]
    return parts, torch.cat(tails)


def shuffled_table(
    lengths: Sequence[int], spare_pages: int = 3, page: int = PAGE
) -> tuple[Tensor, int]:
    """(block table [B, max_pages] with -1 where unused, pages of the cache), pages in no order."""
    needed = [-(-length // page) for length in lengths]
    pages = sum(needed) + spare_pages
    order = torch.randperm(pages).tolist()
    table = torch.full((len(lengths), max([*needed, 0]) + 1), -1, dtype=torch.int32)
    for row, count in zip(table, needed, strict=True):
        row[:count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    return table, pages


def to_pages(
    parts: Sequence[Tensor], table: Tensor, pages: int, device: torch.device, page: int = PAGE
) -> Tensor:
    """[L, D] of every request to a cache [pages, P, 1, D], NaN where nothing lies."""
    cache = parts[0].new_full((pages, page, 1, parts[0].shape[-1]), torch.nan)
    for row, part in zip(table.tolist(), parts, strict=True):
        for position, key in enumerate(part):
            cache[row[position // page], position % page, 0] = key
    return cache.to(device)


class Packed:
    """Query and key sides of a call: packs tensors, and names the arguments both ops share."""

    def __init__(
        self,
        layouts: tuple[str, str],
        rows: Sequence[int],
        keys: Sequence[int],
        device: torch.device,
    ) -> None:
        self.layout_query, self.layout_key = layouts
        self.rows_lengths, self.keys_lengths, self.device = list(rows), list(keys), device
        self.table, self.pages = shuffled_table(keys)
        paged = self.layout_key == "PA_BSND"
        of = {"TND": lambda lengths: torch.tensor(lengths).cumsum(0).tolist()}
        self.lengths_query = ints(of.get(self.layout_query, list)(list(rows)), device)
        self.lengths_key = ints(of.get(self.layout_key, list)(list(keys)), device)
        self.block_table = self.table.to(device) if paged else None

    def rows(self, parts: Sequence[Tensor]) -> Tensor:
        return pack(parts, self.layout_query, self.device)

    def keys(self, parts: Sequence[Tensor]) -> Tensor:
        """[L, D] of every request."""
        if self.layout_key == "PA_BSND":
            return to_pages(parts, self.table, self.pages, self.device)
        return pack([part[:, None] for part in parts], self.layout_key, self.device)

    def unpack(self, out: Tensor) -> tuple[list[Tensor], Tensor]:
        return unpack(out, self.layout_query, self.rows_lengths)

    def unpack_keys(self, out: Tensor) -> tuple[list[Tensor], Tensor]:
        """[L, D] of every request, where keys are not paged."""
        return unpack(out.squeeze(-2), self.layout_key, self.keys_lengths)


def limits(rows: int, keys: int, sparse_mode: int) -> list[int]:
    """By query token: it sees the positions below (the rule of MTP)."""
    if sparse_mode == 0:
        return [keys] * rows
    return [max(0, keys - rows + 1 + j) for j in range(rows)]
