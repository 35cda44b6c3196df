# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_lightning_indexer_scores: the kernels of lightning_indexer, whose values stay in float32."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..case import Arguments, Case, Finding, Inputs
from ..controls import Control
from .lightning_indexer import by_score, of_tokens, paged, rows

KERNEL = "lightning_indexer_scores"
OP = f"npu_{KERNEL}"


def scored(make: Callable[[Inputs], Arguments]) -> Callable[[Inputs], Arguments]:
    def made(x: Inputs) -> Arguments:
        arguments = make(x)
        del arguments["return_value"]
        return arguments

    return made


def in_float32(case: Case, got: Arguments, exact: Arguments, rounded: Arguments) -> list[Finding]:
    wide = got["output 1"].dtype is torch.float32
    return [(0.0 if wide else float("inf"), "float32"), *by_score(case, got, exact, rounded)]


CASES = (
    Case(OP, "paged, random", scored(paged([900, 77], 2, whole=False)), judge=in_float32),
    Case(OP, "TND", scored(rows("TND", 64, 32))),
    Case(OP, "4 tokens a key", scored(of_tokens(paged([300, 7], 2), 4))),
)
CONTROLS = (
    Control(
        "scores rounded to the query's dtype",
        "lightning_indexer",
        '(value_dtype or x["query"].dtype) if',
        'x["query"].dtype if',
        "paged, random",
    ),
)
