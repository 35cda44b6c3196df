# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_indexer_loss_backward, on selections like those of the forward op."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..case import Arguments, Case, Inputs
from ..conditions import with_
from ..controls import Control
from .indexer_loss import beside_the_last, selected

KERNEL = "indexer_loss_backward"
OP = f"npu_{KERNEL}"


def call(
    count: int,
    scores: torch.dtype = torch.float32,
    kind: torch.dtype = torch.int32,
    offset: int = 257,
) -> Callable[[Inputs], Arguments]:
    def make(x: Inputs) -> Arguments:
        target = x.normal(2, 3, count, dtype=torch.float32)
        return dict(
            grad_loss=x.normal(2, 3, dtype=torch.float32),
            index_score=x.normal(2, 3, count, dtype=scores),
            indices=x.ints(selected(x, 2, 3, 300, count), kind),
            target=target.abs_(),
            key_length=300,
            chunk_offset=offset,
        )

    return make


CASES = (
    Case(OP, "200 slots", call(200)),
    Case(OP, "1500 slots, bf16 scores", call(1500, torch.bfloat16)),
    Case(OP, "every key is past", call(64, offset=2**31 - 2)),
    Case(
        OP,
        "the index after the last key's, every key is past",
        with_(call(200, offset=305), indices=beside_the_last()),
    ),
    Case(OP, "12 slots, fp16 scores, int64", call(12, torch.float16, torch.int64)),
)
CONTROLS = (
    Control(
        "the index after the last key's counts",
        "indexer_loss",
        "tl.minimum(offset + token % length, keys - 1)",
        "tl.minimum(offset + token % length, keys)",
        "the index after the last key's, every key is past",
    ),
    Control(
        "the loss's gradient forgotten",
        KERNEL,
        "(r - p) * tl.load(grad_loss + token)",
        "r - p",
        "200 slots",
    ),
    Control(
        "a row's position wraps",
        KERNEL,
        "min(chunk_offset, key_length)",
        "chunk_offset",
        "every key is past",
    ),
)
