# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Attention over window rows and entries: ragged requests, their packing into every layout, and
their solution one query token at a time.  What no token sees is NaN, and its page is -1."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

import custom

from .ragged import ints, moved, pack, unpack
from .selected import attend

LAYOUTS = [("BSND", "PA_ND"), ("TND", "PA_ND"), ("BSND", "BSND"), ("TND", "TND")]
# (query tokens, source tokens) of each request: no entry yet, more tokens than there are, a whole
# prompt, one that ends inside an entry, none at all
RAGGED = [(3, 61), (0, 37), (5, 3), (1, 90), (12, 12), (0, 0), (2, 24)]


class Problem:
    """Drawn once, in float64; `arguments` packs it, `solved` solves it.

    `m` 0 is sliding, `count` None all entries; else indices with -1, hidden and equal ones."""

    def __init__(
        self,
        requests=RAGGED,
        m=4,
        count=None,
        window=8,
        heads=4,
        size=32,
        page=16,
        entry_page=2,
        sinks=True,
        scale=None,
        seed=0,
    ):
        draw = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=draw, dtype=torch.float64)

        self.used, self.length = ([*each] for each in zip(*requests, strict=True))
        self.m, self.window, self.page, self.entry_page = m, window, page, entry_page
        self.heads, self.size, self.scale = heads, size, scale
        self.q = [normal(n, heads, size) for n in self.used]
        self.rows = [normal(n, size) for n in self.length]
        self.entries = [normal(n // m, size) for n in self.length] if m else None
        self.sinks = normal(heads) if sinks else None
        self.indices = None
        if m and count is not None:
            pick = random.Random(seed)
            self.indices = [
                torch.tensor(
                    [self._some(count, n // m, pick) for _ in range(used)], dtype=torch.int32
                ).view(used, 1, count)
                for used, n in zip(self.used, self.length, strict=True)
            ]

    @staticmethod
    def _some(count: int, entries: int, pick: random.Random) -> list[int]:
        far = [*range(entries + 2), -1, -7, 2**31 - 1, -(2**31)]
        return [pick.choice(far) for _ in range(count)]

    def rounded_to(self, dtype) -> Problem:
        for name in ("q", "rows", "entries"):
            if (parts := getattr(self, name)) is not None:
                setattr(self, name, [part.to(dtype).double() for part in parts])
        if self.sinks is not None and dtype is not torch.float64:
            self.sinks = self.sinks.float().double()
        return self

    def positions(self, i: int) -> list[int]:
        """Of the tokens of a request; below 0 for one that is not there."""
        return [self.length[i] - self.used[i] + j for j in range(self.used[i])]

    def seen(self, i: int, j: int) -> tuple[list[int], list[int]]:
        """(rows, entries) that token j of request i sees."""
        p = self.positions(i)[j]
        rows = [t for t in range(p - self.window + 1, p + 1) if t >= 0]
        entries: list[int] = []
        if self.m and p >= 0:
            closed = (p + 1) // self.m
            chosen = range(closed) if self.indices is None else self.indices[i][j, 0].tolist()
            entries = [w for w in chosen if 0 <= w < closed]
        return rows, entries

    def solved(self, dtype=torch.float64) -> tuple[Tensor, Tensor]:
        """(out, lse) of all tokens of all requests in order, evaluated in `dtype`."""
        scale = self.size**-0.5 if self.scale is None else self.scale
        outs, lses = [], []
        for i, used in enumerate(self.used):
            for j in range(used):
                rows, entries = self.seen(i, j)
                k = [self.rows[i][rows]] + ([self.entries[i][entries]] if entries else [])
                k = torch.cat(k).to(dtype)
                q, every = self.q[i][j].to(dtype), [*range(len(k))]
                out, top, total = attend(q, None, k, None, k, every, scale, self.sinks)
                outs.append(out)
                lses.append(top + total.log())
        return torch.stack(outs), torch.stack(lses)

    def arguments(
        self, layouts: tuple[str, str], device, dtype=torch.float64, freed: bool = True
    ) -> dict:
        layout_q, layout_kv = layouts

        def floats(parts: Sequence[Tensor]) -> list[Tensor]:
            return [part.to(dtype) for part in parts]

        given = dict(
            q=pack(floats(self.q), layout_q, device),
            softmax_scale=self.scale,
            cmp_ratio=self.m,
            ori_win_left=self.window - 1,
            layout_q=layout_q,
            layout_kv=layout_kv,
            return_softmax_lse=True,
        )
        if self.sinks is not None:
            wide = torch.float64 if dtype is torch.float64 else torch.float32
            given["sinks"] = self.sinks.to(device, wide)
        if self.indices is not None:
            given["cmp_sparse_indices"] = pack(self.indices, layout_q, device)
        if layout_q == "TND":
            given["cu_seqlens_q"] = sums(self.used, device)
        else:
            given["seqused_q"] = ints(self.used, device)
        if layout_kv != "TND":
            given["seqused_kv"] = ints(self.length, device)
        caches = [("ori", self.rows, self.page)]
        if self.entries is not None:
            caches.append(("cmp", self.entries, self.entry_page))
        for kind, parts, page in caches:
            if layout_kv == "PA_ND":
                cache, table = in_pages(floats(parts), page)
                if kind == "ori" and freed:
                    self._free(cache, table)
                given[f"{kind}_kv"] = moved(cache, device)
                given[f"{kind}_block_table"] = table.to(device)
                continue
            given[f"{kind}_kv"] = pack([x[:, None] for x in floats(parts)], layout_kv, device)
            if layout_kv == "TND":
                given[f"cu_seqlens_{kind}_kv"] = sums([len(x) for x in parts], device)
        return given

    def in_slots(self, given: dict) -> dict:
        """A call on pages by slots: what each token sees, looked up on the host."""
        tokens = [(i, j) for i, used in enumerate(self.used) for j in range(used)]
        found = {}
        for place, (kind, page) in enumerate((("ori", self.page), ("cmp", self.entry_page))):
            table = given[f"{kind}_block_table"].cpu()
            rows = [
                [int(table[i, x // page]) * page + x % page for x in self.seen(i, j)[place]]
                for i, j in tokens
            ]
            width = max(map(len, rows)) + 2
            padded = [row + [-1, 2**31 - 1] + [0] * (width - len(row) - 2) for row in rows]
            found[f"{kind}_sparse_indices"] = ints(padded, given["q"].device)[:, None]
            found[f"{kind}_topk_length"] = ints([len(row) + 2 for row in rows], given["q"].device)
        kept = ("q", "ori_kv", "cmp_kv", "sinks", "softmax_scale", "layout_q", "return_softmax_lse")
        return {n: given[n] for n in kept} | found | dict(indices_are_slots=True)

    def _free(self, cache: Tensor, table: Tensor) -> None:
        """Pages of rows that no token of the call sees are given away."""
        for i, row in enumerate(table):
            first = max(0, self.length[i] - self.used[i] - self.window + 1)
            for column in range(first // self.page):
                if row[column] >= 0:
                    cache[row[column]] = torch.nan
                    row[column] = -1

    def unpack(self, out: Tensor, layout_q: str) -> tuple[Tensor, Tensor]:
        """(the rows of all requests, the padding)"""
        parts, padding = unpack(out, layout_q, self.used)
        return torch.cat(parts), padding


def sums(lengths: Sequence[int], device, first: int = 0) -> Tensor:
    return (torch.tensor([0, *lengths]).cumsum(0) + first).to(device, torch.int32)


def in_pages(parts: Sequence[Tensor], page: int) -> tuple[Tensor, Tensor]:
    """(cache [pages, P, 1, D] whose pages lie apart, table): NaN where nothing lies, -1 where no
    page does."""
    needed = [-(-len(part) // page) for part in parts]
    order = torch.randperm(sum(needed) + 2).tolist()
    pool = parts[0].new_full((len(order), page + 1, 1, parts[0].shape[-1]), torch.nan)
    cache = pool[:, :page]
    table = torch.full((len(parts), max(needed) + 1), -1, dtype=torch.int32)
    for row, part, count in zip(table, parts, needed, strict=True):
        for column in range(count):
            row[column] = order.pop()
            piece = part[column * page : (column + 1) * page]
            cache[row[column], : len(piece), 0] = piece
    return cache, table


def packed(cache: Tensor, between: int = 0) -> Tensor:
    """The "v4" rows of a cache [pages, P, 1, 512], in pages of a stride that engines have; NaN rows
    become the bytes of NaN."""
    pages, page = cache.shape[:2]
    step = -(-page * 584 // 576) * 576 + between
    raw = torch.full((pages, step), 0x7F, dtype=torch.uint8, device=cache.device)
    rows = raw[:, : page * 584].view(pages, page, 1, 584)
    flat = cache.flatten(0, 2)
    slots = torch.arange(len(flat), device=cache.device).masked_fill(flat.isnan().any(-1), -1)
    custom.npu_latent_cache_write(
        flat[:, :448].contiguous(),
        flat[:, 448:].bfloat16(),
        rows,
        slots,
        kind="fp8",
        row_layout="v4",
    )
    return rows


def unpacked(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """What they stand for, by a formula of the tests' own."""
    pages, page = rows.shape[:2]
    flat = rows.reshape(pages, -1).cpu()
    data = flat[:, : page * 576].reshape(pages, page, 576)
    exponents = flat[:, page * 576 :].reshape(pages, page, 8)[..., :7].double() - 127
    values = data[..., :448].contiguous().view(torch.float8_e4m3fn).double()
    values = values * torch.exp2(exponents).repeat_interleave(64, -1)
    rotary = data[..., 448:].contiguous().view(torch.bfloat16).double()
    return torch.cat([values, rotary], -1)[:, :, None].to(rows.device, dtype)
