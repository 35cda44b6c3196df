# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_merge_states: parts that are empty in every way, rows as a collective leaves them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import memory
from ..case import Arguments, Case, Inputs
from ..controls import Control

KERNEL = "merge_states"
OP = f"npu_{KERNEL}"


def call(
    parts: int = 3, rows: int = 7, heads: int = 5, size: int = 512, sums: bool = False
) -> Callable[[Inputs], Arguments]:
    """The first rows have empty parts, whose outputs are NaN; the very first has no other."""

    def make(x: Inputs) -> Arguments:
        outs = x.normal(parts, rows, heads, size)
        lses = x.normal(parts, rows, heads, scale=4.0, dtype=torch.float32)
        for row, empty in enumerate((float("-inf"), float("inf"), float("nan"))):
            lses[0, row], outs[0, row] = empty, float("nan")
        lses[:, 0] = float("-inf")
        arguments = dict(outs=outs, lses=lses)
        if sums:
            arguments["sums"] = x.normal(parts, rows, heads, dtype=torch.float32).abs_().add_(1.0)
            arguments["sums"][0, 3], outs[0, 3] = 0.0, float("nan")
        return arguments

    return make


def packed(x: Inputs) -> Arguments:
    """Behind the numbers of a row its log-sum-exp, in one tensor."""
    both = memory.empty((3, 7, 5, 66), x.dtype)
    both.copy_(torch.randn(both.shape, generator=x.random))
    lses = both[..., 64:].view(torch.float32)
    lses.copy_(torch.randn(lses.shape, generator=x.random))
    return dict(outs=both[..., :64], lses=lses[..., 0])


CASES = (
    Case(OP, "3 parts of 512", call()),
    Case(OP, "max and sum, 80 wide, fp16", call(2, 7, 3, 80, sums=True), torch.float16),
    Case(OP, "64 parts of 1536", call(64, 4, 1, 1536)),
    Case(OP, "one part, fp32", call(1, 4, 1, 16), torch.float32),
    Case(OP, "rows with their log-sum-exp behind them", packed),
)
CONTROLS = (
    Control(
        "an empty part is read",
        KERNEL,
        "length = tl.where(here > 0, size, 0)",
        "length = size",
        "3 parts of 512",
    ),
    Control(
        "plus infinity counts",
        KERNEL,
        'tl.where(lse < float("inf"), 1.0, 0.0)',
        "1.0",
        "3 parts of 512",
    ),
    Control("the sums forgotten", KERNEL, "if SUMS:", "if False:", "max and sum, 80 wide, fp16"),
    Control(
        "shares of the greatest part",
        KERNEL,
        "weight / tl.where(total > 0, total, 1.0)",
        "weight",
        "64 parts of 1536",
    ),
    Control(
        "rows side by side",
        KERNEL,
        "part.to(tl.int64) * o_part + wide * o_row",
        "part.to(tl.int64) * o_part + wide * size",
        "rows with their log-sum-exp behind them",
    ),
    Control(
        "the last part forgotten",
        KERNEL,
        "for part in range(0, parts):",
        "for part in range(0, parts - 1):",
        "3 parts of 512",
    ),
)
