# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_indexer_prolog_pto: the model's sizes, both rotations, sizes without a plain rest."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ..case import Arguments, Case, Inputs
from ..controls import Control
from .mla_prolog_pto import HIDDEN, PAGE, RANK, ROTARY, row_major, slots, weight


def prolog(
    batch: int,
    length: int,
    heads: int = 64,
    *,
    hidden: int = HIDDEN,
    rank: int = RANK,
    size: int = 128,
    rotary: int = ROTARY,
    form: str = "nz",
    interleaved: bool = False,
    past: int = 3,
    scale: float = 1.0,
) -> Callable[[Inputs], Arguments]:
    def make(inputs: Inputs) -> Arguments:
        pages = -(-batch * length // PAGE) + 1
        tokens = (batch, length)
        return dict(
            token_x=inputs.normal(*tokens, hidden, scale=scale),
            query_norm=inputs.normal(*tokens, rank),
            weight_qb=weight(inputs, rank, heads * size, form),
            weight_k=weight(inputs, hidden, size, form),
            weight_proj=weight(inputs, hidden, heads, form),
            ln_gamma_k=inputs.normal(size),
            ln_beta_k=inputs.normal(size),
            rope_sin=inputs.normal(*tokens, rotary),
            rope_cos=inputs.normal(*tokens, rotary),
            index_k_cache=inputs.normal(pages, PAGE, 1, size),
            cache_index=inputs.ints(slots(inputs, batch * length, pages, past).view(tokens)),
            rope_interleaved=interleaved,
            weight_format="nz" if form == "flat" else form,
        )

    return make


OP = "npu_indexer_prolog_pto"
SMALL = dict(hidden=512, rank=256)
case = partial(Case, OP, widen=row_major)
CASES = (
    case("model, 4 tokens", prolog(4, 1)),
    case("model, 2 x 3 tokens, interleaved", prolog(2, 3, interleaved=True)),
    case("64 heads, 130 tokens", prolog(65, 2, **SMALL)),
    case("16 heads, fp16, row-major", prolog(5, 2, 16, form="nd", **SMALL), dtype=torch.float16),
    case("32 heads, NZ bytes", prolog(5, 1, 32, form="flat", hidden=208, rank=112)),
    case("sizes of the tests", prolog(2, 2, 16, hidden=64, rank=32, size=32, rotary=16)),
    case("all 64 dims rotate", prolog(3, 1, 16, size=64, **SMALL)),
    case("the slot past the last", prolog(3, 1, 16, size=64, past=0, hidden=208, rank=112)),
    case("5 heads", prolog(3, 1, 5, hidden=208, rank=112, size=32, rotary=16, form="nd")),
    case(
        "5 heads, nn.Linear's",
        prolog(3, 1, 5, hidden=208, rank=112, size=32, rotary=16, form="linear"),
    ),
    case("no rotary part, 5 heads", prolog(3, 1, 5, rotary=0, form="nd", **SMALL)),
    case("tiny rows", prolog(3, 1, 16, scale=1e-3, hidden=208, rank=112)),
)
CONTROLS = (
    Control("mean not taken off", "rows", "            right -= mean\n", "", "32 heads, NZ bytes"),
    Control(
        "another mean without a rotary part",
        "rows",
        "total = 0.0",
        "total = 9.0",
        "no rotary part, 5 heads",
    ),
    Control(
        "half of the sum",
        "rows",
        "total = tl.sum(left, 0) + tl.sum(right, 0)",
        "total = tl.sum(left, 0)",
        "32 heads, NZ bytes",
    ),
    Control(
        "the slot past the last is written",
        "rows",
        "there = (slot >= 0) & (slot < slots)\n        of_rotary",
        "there = (slot >= 0) & (slot <= slots)\n        of_rotary",
        "the slot past the last",
    ),
    Control("no epsilon", "rows", "squares / SIZE + epsilon", "squares / SIZE", "tiny rows"),
)
