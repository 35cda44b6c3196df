# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_grouped_o_proj_pto: DeepSeek-V4-Flash's sizes and small uneven ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from custom.dispatch.common import nz

from .. import memory
from ..case import Arguments, Case, Inputs, in_float64, in_rounds
from ..controls import Control
from .mla_prolog_pto import weight

OP = "npu_grouped_o_proj_pto"


def projected(
    batch: int,
    steps: int,
    heads: int,
    groups: int,
    size: int = 512,
    rotary: int = 64,
    ranks: int = 1024,
    hidden: int = 4096,
    form: str = "nz",
) -> Callable[[Inputs], Arguments]:
    def make(x: Inputs) -> Arguments:
        depth = heads // groups * size
        of_groups = x.normal(groups, depth, ranks, scale=depth**-0.5)
        if form == "linear":
            of_groups = memory.guarded(of_groups.mT.contiguous())
        elif form != "nd":
            of_groups = memory.guarded(nz.to_nz(of_groups, flat=form == "flat"))
        arguments = dict(
            attn_out=x.normal(batch, steps, heads, size),
            w_o_a=of_groups,
            w_o_b=weight(x, groups * ranks, hidden, form),
            rope_sin=x.normal(batch, steps, rotary),
            rope_cos=x.normal(batch, steps, rotary),
            weight_format="nz" if form == "flat" else form,
        )
        for name in ("rope_sin", "rope_cos"):
            arguments[name][..., 1::2] = float("nan")  # entry 2i is pair i's
        return arguments

    return make


def row_major(arguments: Arguments) -> Arguments:
    """In float64, whose NZ tiles would be narrower."""
    form = arguments["weight_format"]
    groups = [nz.to_nd(each, form) for each in arguments["w_o_a"]]
    arguments |= dict(w_o_a=torch.stack(groups), w_o_b=nz.to_nd(arguments["w_o_b"], form))
    return in_float64(arguments) | dict(weight_format="nd")


case = partial(Case, OP, widen=row_major)
SMALL = dict(size=64, rotary=32, hidden=256)
# 24 tiles of 8 panels: a core's one
MANY = dict(ranks=128, hidden=64)
CASES = (
    case("model, a shard of 8 heads, 4 tokens", projected(4, 1, 8, 1), cores=(24,)),
    case("3 groups of 3 heads, uneven", projected(3, 2, 9, 3, ranks=48, **SMALL)),
    case("1 token, all dims turn", projected(1, 1, 4, 2, 32, 32, ranks=16, hidden=48)),
    case("20 tokens, fp16", projected(10, 2, 8, 2, ranks=144, **SMALL), torch.float16),
    case("40 tokens", projected(20, 2, 4, 2, ranks=80, **SMALL)),
    case("130 tokens", projected(65, 2, 4, 2, ranks=80, **SMALL)),
    *(
        case(f"24 groups, {batch} tokens", projected(batch, 1, 24, 24, **MANY), cores=(24, 7))
        for batch in (3, 32, 60, 128)
    ),
    *(
        case(f"one head, {batch} tokens", projected(batch, 1, 1, 1, hidden=64), cores=(24, 7))
        for batch in (32, 128)
    ),
    # as many columns as 24 cores have tiles of 10 and 11 panels; 3 and 128 rows are held where they
    # fit into L1, and do not here
    *(
        case(
            f"{columns} columns, {batch} tokens",
            projected(batch, 1, 1, 1, ranks=ranks, hidden=columns),
            cores=(24, 7),
        )
        for columns in (3776, 4096)
        for batch, ranks in ((3, 6144), (32, 512), (60, 512), (128, 2048))
    ),
    *(
        case(f"8 groups of 1024, {batch} tokens", projected(batch, 1, 8, 8, hidden=64), cores=(24,))
        for batch in (3, 32, 60, 128)
    ),
    case(
        "NZ bytes under the ND shape",  # and whole heads
        projected(3, 1, 16, 2, 32, 32, ranks=48, hidden=256, form="flat"),
    ),
    case("nn.Linear's", projected(5, 1, 6, 2, ranks=40, form="linear", **SMALL)),
    case("row-major", projected(5, 1, 6, 2, ranks=40, form="nd", **SMALL)),
    case("no tokens", projected(2, 0, 6, 2, ranks=48, **SMALL)),
    case("heads of 1024", projected(2, 1, 3, 1, 1024, 128, ranks=32, hidden=32)),
    # the last panel of the last tile is the first one behind the weight
    case("4208 columns, 60 tokens", projected(60, 1, 1, 1, ranks=512, hidden=4208), cores=(24,)),
    case(
        "rounds of 2 tokens",
        in_rounds(2 * 708 * 2, projected(5, 1, 9, 3, ranks=44, form="nd", **SMALL)),
    ),
    *(
        case(
            f"{columns} columns, 32 tokens, 1008 deep",
            projected(32, 1, 1, 1, ranks=1008, hidden=columns),
            cores=(24,),
        )
        for columns in (3776, 4096)
    ),
)
CONTROLS = (
    Control(
        "turned on, not back",
        OP[4:],
        "-s[None], c[None]",
        "s[None], c[None]",
        "3 groups of 3 heads, uneven",
    ),
    Control(
        "the odd entries of the angles",
        "last_rotation",
        "s, _ = tl.split",
        "_, s = tl.split",
        "3 groups of 3 heads, uneven",
    ),
    Control(
        "pairs as halves",
        "last_rotation",
        "return tl.join(left * c - right * s, right * c + left * s)",
        "return tl.trans(tl.join(left * c - right * s, right * c + left * s), 0, 2, 1)",
        "1 token, all dims turn",
    ),
    Control(
        "a head of the next token",
        OP[4:],
        "there = (h < heads)[:, None]",
        "there = (h < HEAD_TILE)[:, None]",
        "3 groups of 3 heads, uneven",
    ),
    Control(
        "the first group's weight",
        OP[4:],
        "w + g * columns * depth",
        "w + g * 0",
        "3 groups of 3 heads, uneven",
    ),
    Control(
        "every round the first tokens",
        OP[4:],
        "turned = x[here]",
        "turned = x[:2][: x[here].shape[0]]",
        "rounds of 2 tokens",
    ),
)
