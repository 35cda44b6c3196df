# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_localize_indices: rows of several tiles, stripes of one position and of many."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..case import Arguments, Case, Inputs
from ..controls import Control

KERNEL = "localize_indices"
OP = f"npu_{KERNEL}"


def call(
    rows: int,
    count: int,
    rank: int,
    size: int,
    interleave: int = 1,
    kind: torch.dtype = torch.int32,
) -> Callable[[Inputs], Arguments]:
    def make(x: Inputs) -> Arguments:
        drawn = torch.randint(0, 2**24, (rows, 1, count), generator=x.random)
        drawn[torch.rand(drawn.shape, generator=x.random) < 0.1] = -1
        drawn[0, 0, 5] = 0
        drawn[1] = -1
        drawn[-1].abs_()
        return dict(indices=x.ints(drawn, kind), rank=rank, size=size, interleave=interleave)

    return make


CASES = (
    Case(OP, "2048 of 2 ranks, pages of 64", call(5, 2048, 1, 2, 64)),
    Case(OP, "77 of 3 ranks, int64", call(5, 77, 2, 3, 1, torch.int64)),
    Case(OP, "2500 of one rank", call(3, 2500, 0, 1)),
)
CONTROLS = (
    Control(
        "another rank's positions",
        KERNEL,
        "(owner == rank)",
        "(owner == size - 1 - rank)",
        "2048 of 2 ranks, pages of 64",
    ),
    Control(
        "absent ones are packed",
        KERNEL,
        "(index >= 0) &",
        "(index >= -1) &",
        "2500 of one rank",
    ),
    Control(
        "the stripe's offset forgotten",
        KERNEL,
        "* interleave + inside",
        "* interleave",
        "2048 of 2 ranks, pages of 64",
    ),
    Control(
        "tiles over each other",
        KERNEL,
        "written += taken",
        "written = taken",
        "2500 of one rank",
    ),
    Control(
        "nothing behind the last",
        KERNEL,
        "for s in range(written, count, TILE)",
        "for s in range(count, count, TILE)",
        "77 of 3 ranks, int64",
    ),
)
