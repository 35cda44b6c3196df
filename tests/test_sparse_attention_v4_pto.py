# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The whole layer of DeepSeek-V4: against Transformers in float64, driven as engines drive it, and
against its stages composed by hand, bit by bit, on every backend."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import custom

from .support.deepseek_v4 import Attention, pairs

OP = "npu_sparse_attention_v4_pto"
F64 = torch.float64
NAN = float("nan")
PAGE, ENTRY_PAGE = 16, 2
KINDS = ["sliding", "CSA", "HCA"]
LENGTHS = [61, 0, 37, 90, 3]
RATIO, COFF = {"sliding": 0, "CSA": 4, "HCA": 8}, {"CSA": 2, "HCA": 1}
STATES = {"CSA": ("cmp_state", "idx_state"), "HCA": ("cmp_state",), "sliding": ()}
ENTRIES = {"CSA": ("cmp_kv", "idx_k"), "HCA": ("cmp_kv",), "sliding": ()}


# ------------------------------------------------------------ Transformers


@cache
def layer(kind: str) -> Attention:
    torch.manual_seed(KINDS.index(kind))
    return Attention(KINDS.index(kind))


@cache
def prompts(kind: str) -> tuple[list[Tensor], list[Tensor]]:
    """(hidden states of each request, what Transformers makes of them)"""
    torch.manual_seed(9)
    xs = [torch.randn(t, layer(kind).config.hidden_size, dtype=F64) for t in LENGTHS]
    return xs, [layer(kind).whole(x) if len(x) else x for x in xs]


def table(requests: int, columns: int, g: random.Random) -> tuple[Tensor, int]:
    """Distinct pages in any order, and how many there are."""
    pages = list(range(requests * columns + 3))
    g.shuffle(pages)
    return torch.tensor(pages[: requests * columns]).long().view(requests, columns), len(pages)


class Engine:
    """Requests in caches full of NaN, and what an engine keeps about them."""

    def __init__(
        self, kind: str, requests: int, *, rewound: int = 1, fewer: int = 0, reach: int = 128,
        **options: Any,
    ) -> None:  # fmt: skip
        """`rewound`: the most tokens of a call that may be taken back; a ring has exactly the rows
        that this takes, less `fewer`."""
        self.kind, self.layer, self.m = kind, layer(kind), RATIO[kind]
        c, g = self.layer.config, random.Random(requests)
        self.options = dict(
            ori_win_left=c.sliding_window - 1, sparse_count=c.index_topk, cmp_ratio=self.m,
            rms_norm_eps=c.rms_norm_eps, weight_format="nd",
        ) | options  # fmt: skip
        self.weights = self.layer.weights()
        self.length, self.margin = [0] * requests, float("inf")

        def full(*shape: int) -> Tensor:
            return torch.full(shape, NAN, dtype=F64)

        rows, pages = table(requests, -(-reach // PAGE), g)
        self.caches = dict(ori_kv=full(pages, PAGE, 1, c.head_dim), ori_block_table=rows)
        if self.m:
            coff = COFF[kind]
            states, pages = table(requests, coff * self.m + rewound - 2 - fewer, g)
            entries, entry_pages = table(requests, -(-(reach // self.m + 1) // ENTRY_PAGE), g)
            self.caches |= dict(state_block_table=states, cmp_block_table=entries)
            sizes = c.head_dim, c.index_head_dim
            for state, keys, size in zip(STATES[kind], ENTRIES[kind], sizes, strict=False):
                self.caches[state] = full(pages, 1, 2 * coff * size)
                self.caches[keys] = full(entry_pages, ENTRY_PAGE, 1, size)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        of = self.layer.angles(positions)["compress" if self.m else "main"]
        cos, sin = (pairs(u).nan_to_num(1e300) for u in of)
        return sin, cos

    def arguments(self, pieces: Sequence[Tensor]) -> dict[str, Any]:
        used = torch.tensor([len(x) for x in pieces])
        act, size = torch.tensor(self.length) + used, max([1, *map(len, pieces)])
        x = torch.full((len(pieces), size, self.layer.config.hidden_size), NAN, dtype=F64)
        for row, piece in zip(x, pieces, strict=True):
            row[: len(piece)] = piece
        sin, cos = self.angles((act - used)[:, None] + torch.arange(size))
        given = dict(x=x, sin=sin, cos=cos, act_seqs=act, seqused=used)
        if self.m:
            at = custom.entry_positions(act, size, self.m, used)
            given["cmp_sin"], given["cmp_cos"] = self.angles(at)
        return given | self.weights | self.caches | self.options

    def step(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """One call with the next tokens of each request."""
        given = self.arguments(pieces)
        y = getattr(custom, OP)(**given)
        self.length = given["act_seqs"].tolist()
        for row, piece in zip(y, pieces, strict=True):
            assert not row[len(piece) :].any(), "an absent token"
        return [row[: len(piece)] for row, piece in zip(y, pieces, strict=True)]

    def free(self) -> None:
        """Pages of the window that no later token sees: gone, and poisoned."""
        window, rows = self.options["ori_win_left"] + 1, self.caches["ori_block_table"]
        for i, length in enumerate(self.length):
            for column in range(max(0, length - window + 1) // PAGE):
                if rows[i, column] >= 0:
                    self.caches["ori_kv"][rows[i, column]] = NAN
                    rows[i, column] = -1


def drive(
    e: Engine, xs: Sequence[Tensor], plan: Callable[[int], int], drafts: int = 0
) -> list[Tensor]:
    """plan(left): how many tokens come next; with up to `drafts` tokens a call, some wrong ones
    stand behind them, and all from some place on are taken back."""
    g = random.Random(3)
    out: list[list[Tensor]] = [[] for _ in xs]
    while any(at < len(x) for at, x in zip(e.length, xs, strict=True)):
        pieces, accepted = [], []
        for x, at in zip(xs, e.length, strict=True):
            good = min(len(x) - at, plan(len(x) - at))
            piece = x[at : at + good]
            if drafts and good:
                wrong = torch.randn(g.randrange(drafts - good + 1), x.shape[1], dtype=F64)
                piece, good = torch.cat([piece, wrong]), g.randrange(1, good + 1)
            pieces.append(piece)
            accepted.append(good)
        for i, y in enumerate(e.step(pieces)):
            out[i].append(y[: accepted[i]])
            e.length[i] -= len(y) - accepted[i]
        e.free()
    return [torch.cat(each) if each else x for each, x in zip(out, xs, strict=True)]


def worst(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True) if len(b))


def _mixed() -> Callable[[int], int]:
    g = random.Random(5)
    return lambda left: g.choice([0, 1, 1, 2, 5, 13, 23])


def _drafts() -> Callable[[int], int]:
    g = random.Random(7)
    return lambda left: g.randrange(1, 5)


WAYS: dict[str, Any] = {
    "one by one": dict(plan=lambda: lambda left: 1),
    "sevens": dict(plan=lambda: lambda left: 7),
    "prefill beside decodes": dict(plan=_mixed),
    "whole": dict(plan=lambda: lambda left: left),
    "drafts rejected": dict(plan=_drafts, drafts=6),
}


@pytest.fixture
def exact(monkeypatch):
    """The reference's float64, whatever backend is under test."""
    monkeypatch.setattr(custom.config, "backend", "reference")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_transformers_however_it_is_driven(kind, way, exact):
    plan, drafts = WAYS[way]["plan"](), WAYS[way].get("drafts", 0)
    xs, want = prompts(kind)
    e = Engine(kind, len(xs), rewound=max(1, drafts))
    assert worst(drive(e, xs, plan, drafts), want) < 1e-10
