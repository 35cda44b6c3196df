# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_chunk_kda_grad, against the gradient token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..alike import NO_SLOPE, first_chunks
from ..case import Arguments, Case, Finding, Inputs, in_rounds, judge_floats
from ..controls import Control
from . import chunk_kda as forward

KERNEL = "chunk_kda_grad"
OP = f"npu_{KERNEL}"


def graded(
    make: Callable[[Inputs], Arguments], final: torch.dtype | None = torch.float32
) -> Callable[[Inputs], Arguments]:
    """The forward op's arguments, and the gradients of its outputs."""

    def both(x: Inputs) -> Arguments:
        arguments = make(x)
        arguments["d_out"] = x.normal(*arguments["v"].shape)
        if final is not None:
            v, layout = arguments["v"], arguments["state_layout"]
            sizes = (arguments["q"].shape[-1], v.shape[-1])
            bounds = arguments.get("cu_seqlens")
            count = len(v) if bounds is None else len(bounds) - 1
            last = sizes if layout == "kv" else sizes[::-1]
            arguments["d_final_state"] = x.normal(count, v.shape[2], *last, scale=0.25, dtype=final)
        return arguments

    return both


def call(lengths: list[int], *shape: Any, final: Any = torch.float32, **options: Any) -> Any:
    return graded(forward.call(lengths, *shape, **options), final)


def judge(case: Case, got: Arguments, exact: Arguments, rounded: Arguments) -> list[Finding]:
    """What A_log gets is one number a head, whose parts of either sign cancel, as do the errors of
    the reference: one rounding of each part may come on top, as they add up at random."""
    of_A = "output 6"
    others = [{n: x for n, x in each.items() if n != of_A} for each in (got, exact, rounded)]
    found = forward.judge(case, *others)
    beyond, kind = 0.0, case.dtype
    if got[of_A].numel():
        given = case.make(Inputs(case.dtype, case.seed))
        x = given["g"].double()
        if "dt_bias" in given:
            # of the decay's logarithm: what A_log gets of it over what g does
            x = x + given["dt_bias"].double()
            share = torch.nn.functional.softplus(x) / x.sigmoid()
        else:
            share = x
        parts = exact["output 3"].double() * share
        beyond = torch.finfo(kind).eps * parts.square().sum((0, 1, 3)).sqrt().max().item()
    number = [each[of_A] for each in (got, exact, rounded)]
    values = (number[0].to(kind), number[1], number[2].to(kind))
    return [*found, judge_floats(of_A, *values, beyond=beyond)]


CASES = tuple(
    Case(OP, name, make, dtype, judge=judge)
    for name, make, dtype in (
        ("two chunks and a part", call([150], packed=False), torch.bfloat16),
        (
            "packed, tokens before and behind",
            call([70, 0, 1, 64], before=2, behind=3, layout="vk"),
            torch.bfloat16,
        ),
        (
            "128 x 128, bounded, no states",
            call([65], (1, 1), (128, 128), state=None, gate=forward.BOUNDED, final=None),
            torch.bfloat16,
        ),
        ("keys alike, given", call([80], (1, 1), gate=forward.GIVEN, alike=True), torch.bfloat16),
        (
            "rates to 1, packed",
            call([66, 3], (1, 2), (16, 32), behind=2, **forward.TO_1),
            torch.bfloat16,
        ),
        (
            "rates to 2",
            call([66], (1, 1), (16, 16), packed=False, **forward.TO_2),
            torch.float16,
        ),
        ("extremes", graded(forward.extremes), torch.bfloat16),
        ("beyond the tokens", graded(forward.beyond), torch.bfloat16),
        ("fp16, no norm", call([70], norm=False, packed=False), torch.float16),
        ("values of 32, a batch", call([20] * 4, (1, 1), (64, 32), packed=False), torch.bfloat16),
        # 0.155 MB a value head and chunk
        (
            "four of six heads a round, no norm",
            in_rounds(
                1_300_000, call([70], (3, 6), (16, 16), layout="vk", norm=False, packed=False)
            ),
            torch.bfloat16,
        ),
        (
            "a chunk a round, no norm",
            in_rounds(1, call([70, 0, 130], (1, 2), (16, 16), layout="vk", norm=False, behind=3)),
            torch.bfloat16,
        ),
        (
            "two chunks a round, a batch",
            in_rounds(650_000, call([150, 150], (1, 2), (16, 16), state=None, packed=False)),
            torch.bfloat16,
        ),
        ("values of 48, none behind", call([65, 0], (1, 1), (16, 48)), torch.bfloat16),
        ("tiny keys, and one of zeros", graded(forward.tiny), torch.bfloat16),
        # places goes over 64 chunks at a time
        ("65 chunks", call([4100], (1, 1), (16, 16), packed=False), torch.bfloat16),
        (
            "four of six heads a round, rates to 1",
            in_rounds(
                1_300_000, call([70], (3, 6), (16, 16), layout="vk", packed=False, **forward.TO_1)
            ),
            torch.bfloat16,
        ),
        ("the first one empty", call([0, 65], (1, 1), (16, 16)), torch.bfloat16),
        # as many rates as memory ends behind
        (
            "72 tokens, rates to 2",
            call([72], (1, 1), (16, 16), packed=False, **forward.TO_2),
            torch.bfloat16,
        ),
        (
            "more sequences than tokens",
            call([1] * 3, (1, 1), (16, 16), packed=False),
            torch.bfloat16,
        ),
    )
)
CONTROLS = (
    NO_SLOPE,
    Control(
        "the decay between chunks forgotten",
        KERNEL,
        "grad = grad * fade[None] + gain",
        "grad = grad + gain",
        "two chunks and a part",
    ),
    Control(
        "beta forgotten",
        KERNEL,
        "dv = r * rate[:, None]",
        "dv = r",
        "two chunks and a part",
    ),
    Control(
        "the norm's gradient forgotten",
        KERNEL,
        "x * tl.sum(x * grad, 1)[:, None]",
        "x * 0.0",
        "two chunks and a part",
    ),
    Control(
        "a pair counted twice",
        KERNEL,
        "alike = tl.where(i > j,",
        "alike = tl.where(i >= j,",
        "two chunks and a part",
    ),
    Control(
        "what the last of a chunk gets",
        KERNEL,
        "running = tl.sum(whole, 0)[None]",
        "running = tl.sum(whole, 0)[None] * 0.0",
        "two chunks and a part",
    ),
    Control(
        "the rest of a token twice",
        KERNEL,
        "gained - k_tile * rest",
        "gained",
        "two chunks and a part",
    ),
    Control(
        "the norm's epsilon outside the root",
        KERNEL,
        "1.0 / tl.sqrt(tl.sum(x * x, 1) + 1e-6)",
        "1.0 / (tl.sqrt(tl.sum(x * x, 1)) + 1e-6)",
        "tiny keys, and one of zeros",
    ),
    Control(
        "the first heads in every round",
        KERNEL,
        "at = slice(head, head + at_once)",
        "at = slice(0, at_once)",
        "four of six heads a round, no norm",
    ),
    Control(
        "a round begins with no state",
        KERNEL,
        "of_first = tl.where(low == 0, n, here.came)",
        "of_first = n",
        "two chunks a round, a batch",
    ),
    Control(
        "a round ends with no gradient",
        KERNEL,
        "of_first = tl.where(low + count == chunks, n, here.came)",
        "of_first = n",
        "two chunks a round, a batch",
    ),
    Control(
        "the last round's gates alone",
        KERNEL,
        "of_A += parts[0]",
        "of_A = parts[0]",
        "two chunks a round, a batch",
    ),
    first_chunks(KERNEL),
    Control(
        "dt_bias gets padded tokens",
        KERNEL,
        "gained = tl.where(there, tl.load(of_log + at), 0.0)",
        "gained = tl.load(of_log + at)",
        "two chunks and a part",
    ),
    Control(
        "the state of an empty sequence left alone",
        KERNEL,
        "return (count > 0) | empty",
        "return (count > 0) | (empty & (count > 0))",
        "packed, tokens before and behind",
    ),
    Control(
        "the state of an empty sequence behind all chunks",
        KERNEL,
        "before <= since + most",
        "before < since + most",
        "values of 48, none behind",
    ),
)
