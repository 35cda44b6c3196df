# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_hc_post, against the reference."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..case import Arguments, Case, Inputs
from ..controls import Control

KERNEL = "hc_post"
OP = f"npu_{KERNEL}"


def call(*shape: int) -> Callable[[Inputs], Arguments]:
    """`shape`: of what a sublayer gives."""

    def make(x: Inputs) -> Arguments:
        tokens, wide = shape[:-1], torch.float32
        return dict(
            x=x.normal(*shape),
            residual=x.normal(*tokens, 4, shape[-1]),
            post=x.normal(*tokens, 4, dtype=wide),
            comb=x.normal(*tokens, 4, 4, dtype=wide),
        )

    return make


CASES = (
    Case(OP, "whole tiles", call(2, 3, 2048)),
    Case(OP, "a tail", call(7, 2056)),
    Case(OP, "one channel, fp16", call(3, 1), torch.float16),
    Case(OP, "float32", call(5, 40), torch.float32),
    Case(OP, "Pro", call(13, 7168)),
)
CONTROLS = (
    Control(
        "comb not transposed",
        KERNEL,
        "r, c10, c11, c12, c13",
        "r, c01, c11, c21, c31",
        "whole tiles",
    ),
    Control(
        "the gate of the first stream",
        KERNEL,
        "p2 = tl.load(p + 2)",
        "p2 = tl.load(p)",
        "whole tiles",
    ),
    Control(
        "the tail is stored whole",
        KERNEL,
        "there = d < hidden - first",
        "there = d < WIDTH",
        "a tail",
    ),
    Control(
        "the first channels are left out",
        KERNEL,
        "range(work % groups * WIDTH, hidden,",
        "range(WIDTH, hidden,",
        "Pro",
    ),
)
# of a call by the case's name
LAUNCHES = {"a tail": 1, "Pro": 1}
