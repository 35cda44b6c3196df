# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_merge_topk: ties across parts, absent candidates, fewer than are asked for."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..case import Arguments, Case, Inputs
from ..controls import Control

KERNEL = "merge_topk"
OP = f"npu_{KERNEL}"


def call(
    parts: int,
    rows: int,
    count: int,
    k: int,
    kind: torch.dtype = torch.int32,
    high: int = 3,
    apart: int = 4,
) -> Callable[[Inputs], Arguments]:
    """Scores of few kinds; one in `apart` positions, those of a part ascend, as an indexer gives
    them, and its last tenth is absent."""

    def make(x: Inputs) -> Arguments:
        drawn = torch.stack(
            [x.permutation(apart * parts * count)[: parts * count] for _ in range(rows)]
        )
        positions = drawn.view(rows, parts, count).movedim(1, 0).sort(-1).values
        positions[..., count - count // 10 :] = -1
        values = x.whole(parts, rows, count, low=-2, high=high)
        return dict(values=values, positions=x.ints(positions, kind), k=k)

    return make


def hostile(x: Inputs) -> Arguments:
    arguments = call(2, 3, 40, 80)(x)
    values, positions = arguments["values"], arguments["positions"]
    values[0, 0, :6] = torch.tensor([float(v) for v in ("nan", "inf", "-inf", "-0.0", "3e38", "0")])
    positions[1, 1], positions[:, 2] = -1, -(2**31)
    positions[1, 0, 7] = 2**24 - 1
    return arguments


CASES = (
    Case(OP, "2 x 2048, k 2048", call(2, 3, 2048, 2048)),
    Case(OP, "3 x 700, k 100, int64", call(3, 5, 700, 100, torch.int64)),
    Case(OP, "8 x 3000, k 300, fp32", call(8, 1, 3000, 300), torch.float32, cores=(24,)),
    Case(OP, "all scores equal", call(2, 3, 90, 50, high=-1), torch.float16),
    Case(OP, "two scores, every position", call(2, 9, 90, 100, high=0, apart=1)),
    Case(OP, "fewer than k, infinities and NaN", hostile),
)
CONTROLS = (
    Control(
        "every tie is taken",
        KERNEL,
        "final = tl.where(ties > 0, last, -1)",
        "final = tl.where(ties > 0, 16777216, -1)",
        "2 x 2048, k 2048",
    ),
    Control(
        "one tie too few",
        KERNEL,
        "enough = tl.sum(equal, 0) >= ties",
        "enough = tl.sum(equal, 0) >= ties - 1.0",
        "all scores equal",
    ),
    Control(
        "the tie behind the last one too",
        KERNEL,
        "(position <= middle.to(tl.float32))",
        "(position < middle.to(tl.float32))",
        "two scores, every position",
    ),
    Control(
        "absent candidates count",
        KERNEL,
        "there = (position >= 0) &",
        "there = (position >= -1) &",
        "3 x 700, k 100, int64",
    ),
    Control(
        "the second part's positions from the first",
        KERNEL,
        "positions + part.to(tl.int64) * p_part + s",
        "positions + p_part * 0 + s",
        "2 x 2048, k 2048",
    ),
    Control(
        "a NaN is lost",
        KERNEL,
        "tl.where(score > LEAST_SCORE, score, LEAST_SCORE)",
        "tl.where(score < LEAST_SCORE, LEAST_SCORE, score)",
        "fewer than k, infinities and NaN",
    ),
)
