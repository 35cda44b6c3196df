# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_lightning_indexer_grad: absent, future, out-of-range and equal indices, every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..case import Arguments, Case, Finding, Inputs, in_rounds
from ..conditions import with_
from ..controls import Control

KERNEL = "lightning_indexer_grad"
OP = f"npu_{KERNEL}"


def selected(x: Inputs, rows: tuple[int, ...], keys: int, count: int) -> torch.Tensor:
    """Any position, so that late ones are out of sight; -1 and out of range between them, and
    every row has one position twice."""
    drawn = torch.randint(0, keys, (*rows, 1, count), generator=x.random)
    drawn[..., 1] = drawn[..., 0]
    drawn[..., 2] = -1
    drawn[..., 3] = keys + 7
    drawn[..., 4] = 2**30  # the first one, were it times 4 in 32 bits
    drawn[..., 5] = 2**31 - 1
    return drawn


def rows(
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    heads: int,
    count: int,
    lengths: tuple[list[int], list[int]] | None = None,
    size: int = 128,
    kind: torch.dtype = torch.int32,
    **options: Any,
) -> Callable[[Inputs], Arguments]:
    """`queries` and `keys` are the leading sizes: [B, S] or [T]."""

    def make(x: Inputs) -> Arguments:
        given = {}
        if lengths is not None:
            names = ("actual_seq_lengths_query", "actual_seq_lengths_key")
            given = {n: x.ints(v, kind) for n, v in zip(names, lengths, strict=True)}
        return dict(
            query=x.normal(*queries, heads, size),
            key=x.normal(*keys, 1, size),
            dy=x.normal(*queries, 1, count),
            sparse_indices=x.ints(selected(x, queries, keys[-1], count), kind),
            weights=x.normal(*queries, heads),
            layout="TND" if len(queries) == 1 else "BSND",
            **given,
            **options,
        )

    return make


def tnd(heads: int, count: int, **options: Any) -> Callable[[Inputs], Arguments]:
    return rows((7,), (330,), heads, count, ([3, 4, 6], [150, 151, 328]), **options)


def to_whole(name: str) -> Callable[[Arguments], torch.Tensor]:
    """Small whole numbers: a product may be 0, where relu has no slope."""
    return lambda arguments: arguments[name].round_().clamp_(-1, 1)


def undefined(*_: Any) -> list[Finding]:
    """Any result will do; reading or writing out of range would have ended the process."""
    return [(0.0, "nothing out of range was touched")]


CASES = (
    Case(OP, "64 heads", rows((2, 5), (2, 300), 64, 96)),
    Case(OP, "32 heads, lengths", rows((3, 4), (3, 160), 32, 48, ([3, 1, 2], [150, 1, 77]))),
    Case(
        OP,
        "whole numbers",
        with_(rows((1, 3), (1, 140), 16, 96), query=to_whole("query"), key=to_whole("key")),
    ),
    Case(OP, "16 heads, all keys", rows((1, 3), (1, 260), 16, 200, sparse_mode=0)),
    Case(OP, "128 heads", rows((1, 2), (1, 140), 128, 40)),
    Case(OP, "24 heads, fp16", rows((1, 3), (1, 140), 24, 40), torch.float16),
    Case(OP, "4 heads of 32, more queries than keys", rows((2, 9), (2, 6), 4, 8, size=32)),
    Case(OP, "TND", tnd(64, 40)),
    Case(
        OP,
        "TND, all keys, beyond 32 bits",
        rows(
            (7,),
            (330,),
            16,
            40,
            ([3, 4, 2**40], [150, 151, 2**32 + 100]),
            kind=torch.int64,
            sparse_mode=0,
        ),
    ),
    Case(
        OP,
        "TND, sums of queries beyond the tokens",
        rows((7,), (330,), 16, 40, ([-(2**31), 4, 2**31 - 1], [150, 151, 328])),
    ),
    Case(OP, "TND, no request", rows((7,), (330,), 16, 40, ([], []))),
    Case(
        OP,
        "TND, a negative prefix sum",
        rows((7,), (330,), 16, 40, ([3, 4, 7], [-150, 151, 328]), sparse_mode=0),
        judge=undefined,
    ),
    Case(OP, "three tokens a round", in_rounds(3 * 4 * 8192, rows((2, 5), (2, 300), 16, 48))),
    Case(OP, "more keys than a tile", rows((1, 2), (1, 8400), 4, 70, size=32)),
    Case(OP, "TND, int64, 16 heads of 64", tnd(16, 64, size=64, kind=torch.int64)),
)
CONTROLS = (
    Control("the last round alone", KERNEL, "sums += part", "sums = part", "three tokens a round"),
    Control(
        "the last slots alone",
        KERNEL,
        "tl.trans(ones), values, acc)",
        "tl.trans(ones), values)",
        "64 heads",
    ),
    Control(
        "every tile is the first",
        KERNEL,
        "(high - tile)",
        "(high + 0 * tile)",
        "more keys than a tile",
    ),
    Control(
        "future keys count",
        KERNEL,
        "usable(position, limit - 1)",
        "usable(position, wide - 1)",
        "64 heads",
    ),
    Control(
        "rows before the first key",
        "ragged",
        "tl.maximum(before, 0), 0)",
        "before, 0)",
        "TND, a negative prefix sum",
    ),
    Control(
        "relu's gradient forgotten",
        KERNEL,
        "seen = tl.where(s > 0, grad[None], 0.0)",
        "seen = grad[None] + 0.0 * s",
        "64 heads",
    ),
    Control(
        "one token too few",
        KERNEL,
        "position - keys + count",
        "position - keys + count + 1",
        "4 heads of 32, more queries than keys",
    ),
    Control(
        "the second half of the heads",
        KERNEL,
        "step % steps_of_token * HEAD_TILE",
        "0 * step",
        "128 heads",
    ),
)
