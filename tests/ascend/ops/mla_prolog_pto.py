# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_mla_prolog_pto: DeepSeek-V3.2's sizes and small uneven ones, every way to pass a weight."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from custom.dispatch.common import nz
from torch import Tensor

from .. import memory
from ..case import Arguments, Case, Inputs, in_float64
from ..conditions import with_
from ..controls import Control

HIDDEN, RANK, PLAIN, LATENT, ROTARY, PAGE = 7168, 1536, 128, 512, 64, 128


def weight(inputs: Inputs, rows: int, columns: int, form: str = "nz") -> Tensor:
    """form: "nz" 4-D, "flat" NZ bytes under the ND shape, "nd" row-major, "linear" [N, K]."""
    if form == "linear":
        return inputs.normal(columns, rows, scale=rows**-0.5)
    w = inputs.normal(rows, columns, scale=rows**-0.5)
    return w if form == "nd" else memory.guarded(nz.to_nz(w, flat=form == "flat"))


def row_major(arguments: Arguments) -> Arguments:
    """In float64, whose NZ tiles would be narrower: the weights row-major."""
    form = arguments.get("weight_format", "nz")
    for name, value in arguments.items():
        weighed = name.startswith(("weight_", "w_")) and name not in ("weight_uk", "w_uk")
        if weighed and isinstance(value, Tensor):
            arguments[name] = nz.to_nd(value, form)
    return in_float64(arguments) | dict(weight_format="nd")


def slots(inputs: Inputs, tokens: int, pages: int, past: int = 3) -> Tensor:
    """Distinct, the first one, a -1 and one so far past the last among them."""
    drawn = inputs.permutation(pages * PAGE)[:tokens]
    drawn[drawn == 0] = drawn[-1].clone()
    drawn[-1] = 0
    drawn[tokens // 2] = -1
    drawn[tokens // 3] = pages * PAGE + past
    return drawn


def prolog(
    batch: int,
    length: int,
    heads: int,
    *,
    hidden: int = HIDDEN,
    rank: int = RANK,
    latent: int = LATENT,
    plain: int = PLAIN,
    rotary: int = ROTARY,
    form: str = "nz",
    interleaved: bool = True,
    past: int = 3,
    scale: float = 1.0,
    epsilons: tuple[float, float] = (1e-5, 1e-5),
) -> Callable[[Inputs], Arguments]:
    def make(inputs: Inputs) -> Arguments:
        pages = -(-batch * length // PAGE) + 1
        tokens = (batch, length)
        return dict(
            token_x=inputs.normal(*tokens, hidden, scale=scale),
            weight_dq=weight(inputs, hidden, rank, form),
            weight_uq_qr=weight(inputs, rank, heads * (plain + rotary), form),
            weight_uk=inputs.normal(heads, plain, latent, scale=plain**-0.5),
            weight_dkv_kr=weight(inputs, hidden, latent + rotary, form),
            rmsnorm_gamma_cq=inputs.normal(rank),
            rmsnorm_gamma_ckv=inputs.normal(latent),
            rope_sin=inputs.normal(*tokens, rotary),
            rope_cos=inputs.normal(*tokens, rotary),
            kv_cache=inputs.normal(pages, PAGE, 1, latent),
            kr_cache=inputs.normal(pages, PAGE, 1, rotary),
            cache_index=inputs.ints(slots(inputs, batch * length, pages, past).view(tokens)),
            rmsnorm_epsilon_cq=epsilons[0],
            rmsnorm_epsilon_ckv=epsilons[1],
            rope_interleaved=interleaved,
            weight_format="nz" if form == "flat" else form,
        )

    return make


def plain(*sizes: int, **options: Any) -> Callable[[Inputs], Arguments]:
    """Without a query latent: its size is the hidden one."""
    make = prolog(*sizes, **options, rank=options.get("hidden", HIDDEN))
    return with_(make, weight_dq=None, rmsnorm_gamma_cq=None)


def loud(arguments: Arguments) -> Tensor:
    """What stands behind a short query latent is far larger."""
    return arguments["weight_dkv_kr"].mul_(30)


OP = "npu_mla_prolog_pto"
SMALL = dict(hidden=1024, rank=512)
UNEVEN = dict(hidden=208, rank=176)
_ODD = dict(hidden=64, latent=128, rotary=16)
case = partial(Case, OP, widen=row_major)
CASES = (
    case("model, 128 heads, 4 tokens", prolog(4, 1, 128), cores=(24,)),
    case("model, 8 heads, 4 x 4 tokens, halves", prolog(4, 4, 8, interleaved=False)),
    case("16 heads, 30 tokens", prolog(15, 2, 16, **SMALL)),
    case("16 heads, 60 tokens", prolog(60, 1, 16, **SMALL)),
    case("32 heads, 100 tokens, fp16", prolog(25, 4, 32, **SMALL), dtype=torch.float16),
    case("8 heads, 256 tokens", prolog(128, 2, 8, **SMALL)),
    case("uneven, 1 token", prolog(1, 1, 3, **UNEVEN)),
    case("uneven, 18 tokens", prolog(9, 2, 8, **UNEVEN)),
    case("uneven, 40 tokens", prolog(40, 1, 8, **UNEVEN)),
    case("uneven, 130 tokens", prolog(65, 2, 8, **UNEVEN)),
    case("uneven, 256 tokens, 3 heads of 48", prolog(128, 2, 3, plain=48, **UNEVEN)),
    *(case(f"{n} panels", prolog(3, 1, 3, hidden=512, rank=16 * n)) for n in (9, 10)),
    case("sizes of the tests", prolog(2, 2, 2, hidden=64, rank=32, latent=32, plain=16, rotary=16)),
    case(
        "loud latents behind queries, in parts",
        with_(prolog(3, 1, 2, rank=32, latent=32, plain=16, rotary=16), weight_dkv_kr=loud),
    ),
    case(
        "GLM-5.3-Flash, 64 heads, no rotary part, 4 tokens",
        prolog(4, 1, 64, hidden=4096, plain=256, rotary=0),
        cores=(24,),
    ),
    case("no rotary part, 12 heads, 18 tokens", prolog(9, 2, 12, rotary=0, **UNEVEN)),
    case("wide rows", prolog(3, 2, 8, hidden=512, rank=2560, latent=640)),
    case("the widest rows", prolog(3, 1, 1, hidden=256, rank=4096, latent=4096)),
    case("NZ bytes under the ND shape", prolog(4, 2, 8, form="flat", **SMALL)),
    case("row-major", prolog(4, 2, 8, form="nd", **SMALL)),
    case("the slot past the last", prolog(3, 1, 3, past=0, **UNEVEN)),
    case("two epsilons", prolog(3, 1, 3, epsilons=(0.5, 0.1), **UNEVEN)),
    # 24 tiles of 8 panels, the last of 4, 5 and 6: memory ends behind each
    case("47 heads of 48, uneven depth", prolog(2, 8, 47, plain=48, rank=496, **_ODD)),
    case("21 heads of 128", prolog(2, 8, 21, rank=512, **_ODD)),
    case("38 heads of 64", prolog(2, 8, 38, plain=64, rank=512, **_ODD)),
    case("tiny rows", prolog(3, 1, 3, scale=1e-3, **UNEVEN)),
    case("nn.Linear's", prolog(4, 2, 8, form="linear", **SMALL)),
    case("nn.Linear's, uneven, 70 tokens", prolog(35, 2, 8, form="linear", hidden=200, rank=120)),
    case("row-major, 20 tokens", prolog(10, 2, 3, hidden=128, rank=64, form="nd")),
    case("row-major, 40 tokens", prolog(20, 2, 3, hidden=128, rank=64, form="nd")),
    case("Kimi-Linear, no query latent, 4 tokens", plain(4, 1, 32, hidden=2304), cores=(24,)),
    case("no query latent, 16 heads, 60 tokens", plain(60, 1, 16, hidden=1024)),
    case(
        "no query latent, uneven, 18 tokens, halves", plain(9, 2, 3, hidden=208, interleaved=False)
    ),
    case(
        "no query latent, 130 tokens, the slot past the last", plain(65, 2, 3, hidden=208, past=0)
    ),
    case("no query latent or rotary part", plain(9, 2, 12, hidden=208, rotary=0)),
    case("no query latent, nn.Linear's", plain(35, 2, 8, hidden=200, form="linear")),
    case("no query latent, two epsilons", plain(3, 1, 3, hidden=208, epsilons=(0.5, 0.1))),
    case("no query latent, row-major", plain(3, 1, 3, hidden=208, form="nd")),
    case("row-major, uneven, 70 tokens", prolog(35, 2, 8, hidden=200, rank=120, form="nd")),
)
_TILE = """                w_tile = tl.load(from_w)
"""
_THREE_D = """                from_w = of_head + (k + d)[:, None, None].to(tl.int64) * columns + (
                    tile % across * COLUMNS + tl.arange(0, COLUMNS // 16)[None, :, None] * 16
                    + tl.arange(0, 16)[None, None])
                w_tile = tl.load(from_w).reshape(DEPTH, COLUMNS)
"""
CONTROLS = (
    Control(
        "a weight of nn.Linear's that is not turned",
        "product",
        '{"LINEAR": linear}',
        '{"LINEAR": False}',
        "nn.Linear's, uneven, 70 tokens",
    ),
    Control(
        "a panel of another column",
        "product",
        "panel + 2, panels, depth",
        "panel + 1, panels, depth",
        "uneven, 18 tokens",
    ),
    Control(
        "depth not masked",
        "product",
        "mask=(tl.arange(0, DEPTH) < depth - k)[:, None], other=ZERO",
        "mask=(tl.arange(0, DEPTH) < DEPTH)[:, None], other=ZERO",
        "uneven, 18 tokens",
    ),
    Control(
        "wrong sign in the rotation",
        "rows",
        "left_out = (left * c0[None] - right",
        "left_out = (left * c0[None] + right",
        "uneven, 18 tokens",
    ),
    Control(
        "a slot of -1 is written",
        "rows",
        "there = (slot >= 0) & (slot < slots)\n        of_latent",
        "there = (slot >= -1) & (slot < slots)\n        of_latent",
        "uneven, 18 tokens",
    ),
    Control(
        "the slot past the last is written",
        "rows",
        "there = (slot >= 0) & (slot < slots)\n        of_latent",
        "there = (slot >= 0) & (slot <= slots)\n        of_latent",
        "the slot past the last",
    ),
    Control(
        "the other norm's epsilon",
        "mla_prolog_pto",
        'x["rmsnorm_epsilon_cq"]',
        'x["rmsnorm_epsilon_ckv"]',
        "two epsilons",
    ),
    Control(
        "no epsilon under a row of queries",
        "rows",
        "/ size + epsilon",
        "/ size + 1e-30",
        "tiny rows",
    ),
    Control(
        "no epsilon under a latent row",
        "rows",
        "/ LATENT + epsilon",
        "/ LATENT + 1e-30",
        "tiny rows",
    ),
    Control(
        "a part of the depth left out",
        "rows",
        "total = tl.load(x + d, mask=d < size, other=0.0)\n    for i in range(1, parts)",
        "total = tl.load(x + d, mask=d < size, other=0.0)\n    for i in range(2, parts)",
        "model, 8 heads, 4 x 4 tokens, halves",
    ),
    Control(
        "every part the first one",
        "product",
        "k = part * span + step",
        "k = step",
        "model, 8 heads, 4 x 4 tokens, halves",
    ),
    Control(
        "the second weight's tiles begin anew",
        "cores",
        "return tl.where(core < 0, core + tl.num_programs(0), core)",
        "return core",
        "uneven, 18 tokens",
    ),
    Control(
        "a latent behind a query latent that is not there",
        "rows",
        "    of_latent = x\n",
        "    of_latent = x + LATENT\n",
        "no query latent, uneven, 18 tokens, halves",
    ),
    Control(
        "an epsilon of queries that have no norm",
        "mla_prolog_pto",
        'x["rmsnorm_epsilon_ckv"],\n            rope',
        'x["rmsnorm_epsilon_cq"],\n            rope',
        "no query latent, two epsilons",
    ),
    Control(
        "a 3-D load, reshaped",
        "product",
        _TILE,
        _THREE_D,
        "row-major",
        stage="compile",
    ),
)
