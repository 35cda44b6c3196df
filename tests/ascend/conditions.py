# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Conditions that several ops' cases put on their arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import memory
from .case import Arguments, Inputs

Make = Callable[[Inputs], Arguments]


def with_(make: Make, **changed: Callable[[Arguments], Tensor | None] | object) -> Make:
    """Some arguments anew; a function makes one from all that were drawn."""

    def made(x: Inputs) -> Arguments:
        arguments = make(x)
        return arguments | {
            name: value(arguments) if callable(value) else value for name, value in changed.items()
        }

    return made


def pages_apart(make: Make, *caches: str, rows: int = 16) -> Make:
    """The pages of these caches lie so many rows apart, and nothing may touch what is between."""

    def made(x: Inputs) -> Arguments:
        arguments = make(x)
        for name in caches:
            cache = arguments[name]
            pages, page, heads, size = cache.shape
            wide = memory.empty((pages, page + rows, heads, size), cache.dtype)
            closed = [blocks for tensor, blocks in x.forbidden if tensor is cache]
            arguments[name] = wide[:, :page].copy_(cache)
            for blocks in closed:
                x.forbid(wide, blocks)
        x.forbidden = [(t, b) for t, b in x.forbidden if t.shape[1] != page]
        return arguments

    return made


def a_page_past_the_last(make: Make, cache: str = "key") -> Make:
    """The table names the page that would follow the last one."""

    def made(x: Inputs) -> Arguments:
        arguments = make(x)
        arguments["block_table"][0, 1] = arguments[cache].shape[0]
        return arguments

    return made


def many_requests(requests: int, every: Sequence[int] = (1, 0, 2, 1)) -> tuple[int, list[int]]:
    """(tokens, prefix sums) of so many requests, some without a token."""
    sums = torch.tensor([every[i % len(every)] for i in range(requests)]).cumsum(0)
    return int(sums[-1]), sums.tolist()


def far_apart(make: Make, *pools: str, alike: bool = False) -> Make:
    """The slots, or pages, of these arguments lie 2**30 numbers apart: the offset of the third one
    needs 64 bits.  `alike`: as many rows in all of them, 2**30 numbers in that of the widest."""

    def made(x: Inputs) -> Arguments:
        arguments = make(x)
        widest = max(arguments[name].stride(1) for name in pools)
        # a pool that comes twice is one
        drawn = {id(arguments[name]): arguments[name] for name in pools}
        moved = {}
        for at, pool in drawn.items():
            row = widest if alike else pool.stride(1)
            moved[at] = memory.far_apart(pool, -(-(2**30) // row) * pool.stride(1))
        return arguments | {name: moved[id(arguments[name])] for name in pools}

    return made
