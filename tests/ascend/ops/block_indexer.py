# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_block_indexer: blocks below, above and of the size of a page, forced ones, absent pages.  Of
whole numbers, so that scores are exact and tie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..case import Arguments, Case, Inputs, in_rounds
from ..controls import Control
from ..pages import shuffled

OP = "npu_block_indexer"
Make = Callable[[Inputs], Arguments]


def paged(
    rows: list[int],
    lengths: list[int],
    heads: int,
    size: int,
    block: int,
    k: int,
    page: int = 128,
    spare: int = 0,
    absent: bool = False,
    values: bool = True,
    rising: bool = False,
    blind: bool = False,
    **options: Any,
) -> Make:
    """Pages that no request owns may not be touched."""

    def make(x: Inputs) -> Arguments:
        table, order, total = shuffled(x, lengths, page, 2)
        key = x.whole(total, page, 1, size, low=-3, high=4)
        if absent:
            table[0, 1] = -1
            table[0, 2] = len(key)
        query = x.whole(sum(rows) + spare, heads, size, low=-3, high=4)
        if rising:  # the last key in sight is the best of its block
            query.abs_().add_(1)
            for i, n in enumerate(lengths):
                for p in range(-(-n // page) * page):
                    number = int(table[i, p // page])
                    if 0 <= number < len(key):
                        key[number, p % page] = p
        if blind:  # the second block of the first request has no number
            for p in range(block, 2 * block):
                key[table[0, p // page], p % page] = torch.nan
        x.forbid(key, order)
        return dict(
            query=query,
            key=key,
            block_table=x.ints(table),
            actual_seq_lengths=x.ints(rows),
            actual_seq_lengths_key=x.ints(lengths),
            block_size=block,
            top_k=k,
            return_value=values,
            **options,
        )

    return make


CASES = (
    Case(OP, "MiniMax-M3", paged([1, 2], [2500, 300], 4, 128, 128, 16)),
    Case(
        OP,
        "blocks of 48, pages of 16, absent ones",
        paged(
            [2, 0, 1],
            [170, 9, 40],
            3,
            32,
            48,
            3,
            16,
            spare=1,
            absent=True,
            rising=True,
            init_blocks=1,
        ),
    ),
    Case(
        OP,
        "20 heads, blocks of 4, no values",
        paged([3], [90], 20, 32, 4, 6, 32, values=False, local_blocks=2),
    ),
    Case(OP, "70 heads", paged([2], [300], 70, 64, 256, 2)),
    Case(
        OP,
        "a block that is NaN",
        paged([2], [40], 2, 32, 4, 12, 16, values=False, blind=True),
    ),
    Case(OP, "a token a round", in_rounds(1, paged([2, 1], [40, 30], 2, 32, 4, 3, 16))),
)
CONTROLS = tuple(
    Control(title, OP[4:], old, new, case)
    for title, old, new, case in (
        (
            "the open block is not scored",
            "blocks = (limit + block - 1) // block",
            "blocks = limit // block",
            "MiniMax-M3",
        ),
        (
            "a key behind the token is seen",
            "tl.minimum(limit - position, step)",
            "tl.minimum(limit + 1 - position, step)",
            "blocks of 48, pages of 16, absent ones",
        ),
        (
            "an absent page scores 0",
            "tl.where(there, tl.minimum(limit - position, step), 0)",
            "tl.where(there, tl.minimum(limit - position, step), 1)",
            "blocks of 48, pages of 16, absent ones",
        ),
        (
            "one local block less",
            "(w >= blocks - local)",
            "(w > blocks - local)",
            "20 heads, blocks of 4, no values",
        ),
        (
            "the first part of a block alone",
            "range(0, tl.minimum(block, limit - w * block), step)",
            "range(0, tl.minimum(step, limit - w * block), step)",
            "70 heads",
        ),
    )
)
