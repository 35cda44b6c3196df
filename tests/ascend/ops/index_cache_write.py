# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_index_cache_write in int8: every byte, with slots that are not there and rows of zeros."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from .. import memory
from ..case import Arguments, Case, Inputs
from ..conditions import far_apart
from ..controls import Control


def keys(tokens: int, page: int, scale: torch.dtype) -> Callable[[Inputs], Arguments]:
    def make(x: Inputs) -> Arguments:
        k = x.normal(tokens, 128)
        k[::5] = 0
        slots = x.permutation(4 * page)[:tokens]
        slots[slots == 0], slots[1] = slots[1].item(), 0
        slots[::4] = torch.tensor([-1, 4 * page, 2**31 - 1, -(2**31)])[
            torch.arange(len(slots[::4])) % 4
        ]
        values = memory.guarded(torch.full((4, page, 1, 128), 77, dtype=torch.int8))
        scales = memory.guarded(torch.full((4, page, 1), 3.0, dtype=scale))
        return dict(k=k, values=values, scales=scales, slots=x.ints(slots), kind="int8")

    return make


def vast(make: Callable[[Inputs], Arguments]) -> Callable[[Inputs], Arguments]:
    """Of some rows the scale is above float16's largest number."""

    def made(x: Inputs) -> Arguments:
        given = make(x)
        given["k"][::3] *= 2e7
        return given

    return made


def apart(make: Callable[[Inputs], Arguments]) -> Callable[[Inputs], Arguments]:
    """Pages with a gap behind each, in values and in scales."""

    def made(x: Inputs) -> Arguments:
        given = make(x)
        pages, page, _, size = given["values"].shape
        values = memory.guarded(torch.full((pages, page + 16, 1, size), 55, dtype=torch.int8))
        scales = memory.guarded(torch.full((pages, page + 16, 1), 5.0).to(given["scales"].dtype))
        return given | dict(values=values[:, :page], scales=scales[:, :page])

    return made


def not_wider(arguments: Arguments) -> Arguments:
    """The bytes are those of the op's own dtypes."""
    return arguments


OP = "npu_index_cache_write"
case = partial(Case, OP, widen=not_wider)
CASES = (
    case("float16 scales", keys(50, 16, torch.float16)),
    case("float32 scales, page 128, fp16", keys(50, 128, torch.float32), torch.float16),
    case("pages apart", apart(keys(50, 32, torch.float16))),
    case("scales that float16 does not reach", vast(keys(20, 16, torch.float16))),
    case("one token", keys(2, 16, torch.float16)),
    case("pages far apart", far_apart(keys(50, 16, torch.float16), "values", "scales")),
)
CONTROLS = (
    Control(
        "a page in 32 bits",
        "index_cache_write",
        "(slot // page).to(tl.int64)",
        "slot // page",
        "pages far apart",
    ),
    Control(
        "a scale of infinity",
        OP[4:],
        "tl.minimum(scale, 65504.0)",
        "scale",
        "scales that float16 does not reach",
    ),
    Control("a slot past the cache", OP[4:], "(slot < total)", "(slot >= 0)", "float16 scales"),
    Control("a slot below 0", OP[4:], "(slot >= 0) & ", "(slot == slot) & ", "float16 scales"),
    Control(
        "rows of zeros", "quantize", "scale[:, None] > 0", "scale[:, None] >= 0", "float16 scales"
    ),
    Control("cut off, not rounded", "quantize", "(y + 12582912.0) - 12582912.0", "y", "one token"),
    Control(
        "pages side by side",
        OP[4:],
        "outer * stride.values",
        "outer * of.page * SIZE",
        "pages apart",
    ),
)
