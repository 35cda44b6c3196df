# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_quantize_index_query in int8: every byte; heads and tokens may lie apart."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import memory
from ..case import Arguments, Case, Inputs
from ..controls import Control


def queries(
    *rows: int, heads: int = 64, apart: bool = False, fold: bool = True
) -> Callable[[Inputs], Arguments]:
    def make(x: Inputs) -> Arguments:
        q = x.normal(*rows, heads * (1 + apart), 128)
        q[..., 0, :] = 0
        return dict(
            q=q[..., :: 1 + apart, :],
            weights=memory.guarded(torch.randn(*rows, heads, generator=x.random).to(x.dtype)),
            kind="int8",
            fold=fold,
        )

    return make


def not_wider(arguments: Arguments) -> Arguments:
    """The bytes are those of the op's own dtypes."""
    return arguments


OP = "npu_quantize_index_query"
CASES = (
    Case(OP, "64 heads", queries(2, 3), widen=not_wider),
    Case(
        OP,
        "5 heads, apart, not folded",
        queries(7, heads=5, apart=True, fold=False),
        widen=not_wider,
    ),
    Case(OP, "70 heads, fp16", queries(3, heads=70), torch.float16, widen=not_wider),
)
CONTROLS = (
    Control("not folded", OP[4:], "w.to(tl.float32) * scale", "scale", "64 heads"),
    Control(
        "heads side by side",
        OP[4:],
        "h[:, None] * q_head",
        "h[:, None] * SIZE",
        "5 heads, apart, not folded",
    ),
)
