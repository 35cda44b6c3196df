# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_hc_post_pre, against the reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..case import Arguments, Case, Finding, Inputs, judge_floats, reference
from ..controls import Control
from . import hc_post, hc_pre

KERNEL = "hc_post_pre"
OP = f"npu_{KERNEL}"


def call(
    *shape: int, rows: int = 24, norm: bool = False, **options: Any
) -> Callable[[Inputs], Arguments]:
    """`shape`: of what a sublayer gives."""

    def make(x: Inputs) -> Arguments:
        return hc_post.call(*shape)(x) | hc_pre.gates(x, shape[-1], rows, norm) | options

    return make


def judge(case: Case, got: Arguments, exact: Arguments, rounded: Arguments) -> list[Finding]:
    """The streams, and the gates of these streams as they were rounded."""
    streams, *others = got
    found = [judge_floats(streams, got[streams], exact[streams], rounded[streams])]
    given = case.make(Inputs(case.dtype, case.seed))
    given = {n: x for n, x in given.items() if n not in ("x", "residual", "post", "comb")}
    given["x"] = got[streams]
    plain = reference(hc_pre.OP, given).values()
    true = reference(hc_pre.OP, case.widen(given)).values()
    for name, one, other in zip(others, true, plain, strict=True):
        found.append(judge_floats(name, got[name], one, other))
    return found


case = partial(Case, OP, judge=judge)
CASES = (
    case("whole tiles", call(2, 32, 256)),
    case("tails, normed", call(7, 200, norm=True, norm_eps=0.1, hc_eps=0.01)),
    case("blocks and tails, fp16", call(70, 136), torch.float16),
    case("Pro", call(3, 7168, norm=True)),
)
CONTROLS = (
    Control(
        "products of what is not rounded",
        "hc_pre",
        "tile = made.to(tl.float32)",
        "tile = wide",
        "whole tiles",
    ),
)
# of a call by the case's name
LAUNCHES = {"tails, normed": 2, "Pro": 2}
