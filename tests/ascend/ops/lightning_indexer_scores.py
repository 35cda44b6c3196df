# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_lightning_indexer_scores: the kernels of lightning_indexer, whose values stay in float32."""

from __future__ import annotations

from collections.abc import Callable

from ..case import Arguments, Case, Inputs
from ..controls import Control
from .lightning_indexer import paged, rows

KERNEL = "lightning_indexer_scores"
OP = f"npu_{KERNEL}"


def scored(make: Callable[[Inputs], Arguments]) -> Callable[[Inputs], Arguments]:
    def made(x: Inputs) -> Arguments:
        arguments = make(x)
        del arguments["return_value"]
        return arguments

    return made


CASES = (
    Case(OP, "paged, 64 heads", scored(paged([300, 1, 129], 2))),
    Case(OP, "TND", scored(rows("TND", 64, 32))),
)
CONTROLS = (
    Control(
        "scores rounded to the query's dtype",
        "lightning_indexer",
        "kind = query.dtype if value_dtype is None else value_dtype",
        "kind = query.dtype",
        "paged, 64 heads",
    ),
)
