# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Paged caches for `npu_sparse_attention_pto`: three pools a layer, one block table for all."""

from __future__ import annotations

from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from ..dispatch.common import quantized


class LayerCaches(NamedTuple):
    """The three pools of one layer, which share slots; the op updates them in place."""

    kv: Tensor  # [pages, P, 1, R] latents
    kr: Tensor  # [pages, P, 1, Dr] rotary keys
    index_k: Tensor  # [pages, P, 1, Di] index keys
    index_k_scale: Tensor | None = None  # [pages, P, 1], of int8 index keys

    @property
    def arguments(self) -> dict[str, Tensor | None]:
        """Under the op's own names."""
        return dict(
            kv_cache=self.kv,
            kr_cache=self.kr,
            index_k_cache=self.index_k,
            index_k_scale_cache=self.index_k_scale,
        )


def check_page(page_size: int) -> None:
    if page_size < 16 or page_size % 16:
        raise ValueError(
            f"PagedCaches: `page_size` is {page_size}, expected a multiple of 16, from 16 on."
        )


def token_positions(lengths: Tensor, tokens: int) -> Tensor:
    """Positions [B, S] of the last `tokens` tokens of requests with `lengths` [B].

    Negative where a request is shorter than that: such a row is padding (on the left).
    """
    return lengths[:, None] - tokens + torch.arange(tokens, device=lengths.device)


def slots_of(positions: Tensor, block_table: Tensor, page_size: int) -> Tensor:
    """Flat slot of every position [B, S], or -1 (not written) where there is none."""
    there = (positions >= 0) & (positions < block_table.shape[1] * page_size)
    safe = positions.where(there, 0).long()
    pages = block_table.gather(1, safe // page_size)
    slots = pages * page_size + safe % page_size
    return slots.where(there & (pages >= 0), -1).to(torch.int32)


def more_pages(block_table: Tensor, columns: int, random: torch.Generator) -> tuple[Tensor, int]:
    """(the table [B, columns] or wider, how many pages it names beyond those of before)"""
    requests, now = block_table.shape
    more = max(0, columns - now)
    pages = requests * more
    order = torch.randperm(pages, generator=random, dtype=torch.int32)
    new = (requests * now + order).view(requests, more).to(block_table.device)
    return torch.cat([block_table, new], 1), pages


def more_room(pool: Any, pages: int) -> Any:
    """A pool [pages, ..] with so many pages more, if there is one."""
    if pool is None or pages == 0:
        return pool
    return torch.cat([pool, pool.new_zeros(pages, *pool.shape[1:])])


_RATIOS_OF_PAGES = (1, 2, 4, 8)  # entries of a page; else a multiple of 16


def page_of(page_size: int, ratios: set[int]) -> int:
    """The next size from `page_size` on whose pages of entries, for each ratio, are legal."""

    def holds(page: int, ratio: int) -> bool:
        return page % ratio == 0 and (page // ratio in _RATIOS_OF_PAGES or page // ratio % 16 == 0)

    page = page_size
    while not all(holds(page, ratio) for ratio in ratios):
        page += page_size
    return page


class LayersOfPages:
    """Tuples of pools [pages, ..] a layer, whose pages share a block table, and room for more.

    A field named in `whole` has no pages.
    """

    whole: tuple[str, ...] = ()
    layers: list[Any]

    def __init__(
        self, requests: int, page_size: int, device: torch.device | str, seed: int = 0
    ) -> None:
        self.page_size = page_size
        self._random = torch.Generator().manual_seed(seed)
        self.block_table = torch.empty(requests, 0, dtype=torch.int32, device=device)

    @property
    def capacity(self) -> int:
        """Positions that a request can have."""
        return self.block_table.shape[1] * self.page_size

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` positions a request; what is cached stays where it is."""
        columns = -(-capacity // self.page_size)
        self.block_table, pages = more_pages(self.block_table, columns, self._random)
        self.layers = [
            layer._replace(
                **{
                    name: more_room(pool, pages)
                    for name, pool in layer._asdict().items()
                    if name not in self.whole
                }
            )
            for layer in self.layers
        ]


class Room(TypedDict):
    """For `requests` texts of `capacity` positions that may become more, in pages of `page_size`,
    of which the last `drafts` tokens may be taken back."""

    requests: int
    capacity: int
    page_size: int
    drafts: int
    dtype: torch.dtype
    device: torch.device


class PagesAndStates(LayersOfPages):
    """Pages that hold a row for every m tokens as well, and a ring of states a request: those of
    the tokens whose row is open."""

    whole = ("states",)

    def __init__(self, m: int, room: Room) -> None:
        requests, device = room["requests"], room["device"]
        super().__init__(requests, page_of(room["page_size"], {m}), device)
        self.drafts, self._dtype, self._device = room["drafts"], room["dtype"], device
        self.state_table = torch.arange(requests, dtype=torch.int32, device=device)[:, None]

    def pool(self, rows: int, width: int) -> Tensor:
        return torch.zeros(0, rows, 1, width, dtype=self._dtype, device=self._device)

    def states(self, m: int, width: int) -> Tensor:
        ring = max(1, m - 1 + self.drafts)  # a call has its own tokens in hand
        dtype = torch.float64 if self._dtype is torch.float64 else torch.float32
        shape = self.block_table.shape[0], ring, width
        return torch.zeros(shape, dtype=dtype, device=self._device)


class PagedCaches(LayersOfPages):
    """Pages of `page_size` positions for `requests` requests of up to `capacity` positions each.

    The pages of a request lie anywhere in the pools, as they do in a server that has been running
    for a while: page j of request b is `block_table[b, j]`.

    Args:
        layers: layers of the model; each has pools of its own.
        widths: (R, Dr, Di), the sizes of a latent, a rotary key and an index key; or one such
            triple a layer.
        kv_kind: "none", or "fp8" or "int8": latents and rotary keys in rows of 656 bytes.
        index_kind: likewise of index keys: fp8 in packed pages, int8 beside their scales.
        seed: shuffles the block table.

    >>> from custom.integrations.paged import PagedCaches, token_positions
    >>> caches = PagedCaches(2, (32, 16, 16), requests=3, capacity=40, page_size=16)
    >>> caches.layers[0].kv.shape, caches.block_table.shape
    (torch.Size([9, 16, 1, 32]), torch.Size([3, 3]))
    >>> caches.slots(token_positions(torch.tensor([5, 1, 0]), 2)).shape
    torch.Size([3, 2])
    """

    def __init__(
        self,
        layers: int,
        widths: tuple[int, int, int] | list[tuple[int, int, int]],
        *,
        requests: int,
        capacity: int,
        page_size: int = 64,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
        kv_kind: str = "none",
        index_kind: str = "none",
    ) -> None:
        check_page(page_size)
        for name, value in dict(requests=requests, capacity=capacity).items():
            if value < 0:
                raise ValueError(f"PagedCaches: `{name}` is {value}, expected 0 or more.")
        for name, kind in dict(kv_kind=kv_kind, index_kind=index_kind).items():
            if kind not in ("none", *quantized.VALUES):
                known = ", ".join(("none", *quantized.VALUES))
                raise ValueError(f"PagedCaches: `{name}` is {kind!r}, expected one of {known}.")
        super().__init__(requests, page_size, device, seed)
        self.kinds = dict(kv_kind=kv_kind, index_kind=index_kind)
        each = widths if isinstance(widths, list) else [widths] * layers
        if len(each) != layers:
            raise ValueError(
                f"PagedCaches: `widths` has {len(each)} entries, expected {layers}. Pass one for "
                "each layer, or a tuple for all."
            )

        def pool(dtype: torch.dtype, *sizes: int) -> Tensor:
            return torch.empty(0, page_size, *sizes, dtype=dtype, device=device)

        self.layers = []
        for latent, rope, index in each:
            kv, kr = pool(dtype, 1, latent), pool(dtype, 1, rope)
            keys, scale = pool(dtype, 1, index), None
            if kv_kind != "none":
                kv, kr = pool(torch.uint8, 1, quantized.ROW), pool(dtype, 1, 0)
            if index_kind == "fp8":
                keys = pool(torch.uint8, quantized.PACKED)
            elif index_kind == "int8":
                keys, scale = pool(torch.int8, 1, index), pool(torch.float16, 1)
            self.layers.append(LayerCaches(kv, kr, keys, scale))
        self.reserve(capacity)

    def slots(self, positions: Tensor, block_table: Tensor | None = None) -> Tensor:
        """Flat slot of every position [B, S], or -1 (not written) where there is none.

        `block_table` [B, columns] of these requests: by default that of all requests here.
        """
        table = self.block_table if block_table is None else block_table
        return slots_of(positions, table, self.page_size)
