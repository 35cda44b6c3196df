# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_chunk_gated_delta_rule, against the recurrence token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import memory
from ..alike import RATES_TO_2
from ..case import Arguments, Case, Finding, Inputs, in_rounds, judge_floats
from ..controls import Control

KERNEL = "chunk_gated_delta_rule"
OP = f"npu_{KERNEL}"
TO_1 = dict(use_beta_sigmoid_in_kernel=True)
TO_2 = dict(use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)


def judge(case: Case, got: Arguments, exact: Arguments, rounded: Arguments) -> list[Finding]:
    """The state is a sum of products of rounded factors: judged as if it had their dtype."""
    found = []
    for name, value in got.items():
        kind = case.dtype if value.dtype is torch.float32 else value.dtype
        found.append(judge_floats(name, value.to(kind), exact[name], rounded[name].to(kind)))
    return found


def call(
    lengths: list[int],
    heads: tuple[int, int] = (1, 2),
    sizes: tuple[int, int] = (64, 64),
    behind: int = 0,
    state: torch.dtype | None = torch.float32,
    gates: bool = True,
    fading: float = 0.25,
    alike: bool = False,
    kind: torch.dtype = torch.int32,
    strided: bool = False,
    **options: Any,
) -> Callable[[Inputs], Arguments]:
    """`lengths` of the sequences and `behind` tokens of none; one length: not packed."""

    def make(x: Inputs) -> Arguments:
        h, hv = heads
        k, v = sizes
        t = sum(lengths) + behind
        drawn = x.normal(t, 2, h, k, dtype=torch.float32)
        if alike:
            drawn = drawn[:1] + drawn / 50
        both = x.normal(t, 2, h, k)
        both.copy_(torch.nn.functional.normalize(drawn, dim=-1))
        query, key = (both[:, i] if strided else memory.guarded(both[:, i]) for i in (0, 1))
        arguments = dict(query=query, key=key, value=x.normal(t, hv, v))
        if gates:
            arguments["beta"] = x.normal(t, hv)
            if not options.get("use_beta_sigmoid_in_kernel"):
                arguments["beta"].sigmoid_()
            arguments["g"] = x.normal(t, hv, dtype=torch.float32)
            arguments["g"].abs_().mul_(-fading)
        if state is not None:
            arguments["initial_state"] = x.normal(len(lengths), hv, v, k, dtype=state)
        if len(lengths) > 1 or behind:
            arguments["actual_seq_lengths"] = x.ints(lengths, kind)
        return arguments | options

    return make


def beyond(x: Inputs) -> Arguments:
    """A length below 0, and one that ends behind the tokens and does not fit 32 bits."""
    arguments = call([66, 9, 30], (1, 1))(x)
    return arguments | dict(actual_seq_lengths=x.ints([66, -200, 2**32 + 5], torch.int64))


CASES = (
    Case(OP, "two chunks and a part", call([150]), judge=judge),
    Case(OP, "two of four heads share a key", call([70], (2, 4)), judge=judge),
    Case(OP, "packed, tokens behind", call([70, 0, 1, 64], behind=3), judge=judge),
    Case(
        OP,
        "128 x 128, no state",
        call([65], (1, 1), (128, 128), state=None),
        judge=judge,
    ),
    Case(OP, "no gates, keys alike", call([80], (1, 1), gates=False, alike=True), judge=judge),
    Case(
        OP,
        "fp16, value size 96, int64, bf16 state",
        call([20, 66], (1, 3), (32, 96), state=torch.bfloat16, kind=torch.int64, strided=True),
        torch.float16,
        judge=judge,
    ),
    Case(OP, "lengths beyond the tokens", beyond, judge=judge),
    Case(OP, "rates to 1, packed", call([66, 3], (1, 2), (16, 32), 2, **TO_1), judge=judge),
    Case(OP, "rates to 2", call([66], (1, 1), (16, 16), **TO_2), judge=judge),
    Case(OP, "256 x 48, scale given", call([66], (1, 1), (256, 48), scale=0.5), judge=judge),
    Case(
        OP,
        "128 x 128, packed, bf16 state",
        call([40, 66], (1, 1), (128, 128), state=torch.bfloat16),
        judge=judge,
    ),
    Case(OP, "256 x 256", call([70], (1, 1), (256, 256)), judge=judge),
    Case(OP, "64 tokens a round", in_rounds(1, call([70, 3], (2, 4), (16, 32))), judge=judge),
    Case(OP, "one chunk, and no second", call([64]), judge=judge),
)
CONTROLS = (
    RATES_TO_2,
    Control(
        "a length that wraps",
        "lengths",
        "tl.load(length)",
        "tl.load(length).to(tl.int32)",
        "lengths beyond the tokens",
    ),
    Control(
        "a length below 0",
        "lengths",
        "tl.maximum(tl.load(length), 0)",
        "tl.load(length)",
        "lengths beyond the tokens",
    ),
    Control(
        "a token sees itself in the triangle",
        KERNEL,
        "f[:, None] > f[None], lower",
        "f[:, None] >= f[None], lower",
        "two chunks and a part",
    ),
    Control(
        "the decay between chunks forgotten",
        KERNEL,
        "state = state * growth + ",
        "state = state + ",
        "two chunks and a part",
    ),
    Control(
        "keys of W without the decay from the chunk's start",
        KERNEL,
        "x = x * -tl.exp(across + fore)[None]",
        "x = -x",
        "two chunks and a part",
    ),
    Control(
        "keys of the state without the decay to the chunk's end",
        KERNEL,
        "tl.exp(tl.sum(gate[None], 1) - total + (whole - fore))",
        "tl.exp(0.0 * total + (whole - fore))",
        "two chunks and a part",
    ),
    Control(
        "values behind a sequence's end",
        KERNEL,
        "column[None], mask=there, other=0.0)",
        "column[None])",
        "two chunks and a part",
    ),
    Control(
        "queries without the decay from the chunk's start",
        KERNEL,
        "s_tile) * growth[:, None]",
        "s_tile)",
        "two chunks and a part",
    ),
    Control(
        "keys of a pair's first chunk do not decay through its second",
        KERNEL,
        "- total + (whole - fore))",
        "- total + 0.0 * whole)",
        "two chunks and a part",
    ),
    Control(
        "a pair's second chunk starts from the state before the first",
        KERNEL,
        "x = tl.dot(x_tile, tl.load(taken + to), x)",
        "pass",
        "no gates, keys alike",
    ),
    Control(
        "queries of a pair's second chunk do not see its first",
        KERNEL,
        "x = tl.dot(p_tile, tl.load(of_n + CHUNK * VALUE), x)",
        "x = tl.dot(p_tile, tl.load(of_n + CHUNK * VALUE))",
        "two chunks and a part",
    ),
    Control(
        "a second chunk behind a sequence's end",
        KERNEL,
        "made = (i < ends)[:, None]",
        "made = (i < PAIR)[:, None]",
        "two chunks and a part",
    ),
    Control(
        "a sequence begins anew in every round",
        KERNEL,
        ".cumsum(0).clamp(first, first + count)",
        ".cumsum(0).clamp(0, count)",
        "64 tokens a round",
    ),
    Control(
        "the last part of the triangle left alone",
        KERNEL,
        "static_range(0, CHUNK, PART)",
        "static_range(0, CHUNK - PART, PART)",
        "two chunks and a part",
    ),
    Control(
        "the tail of a packed row left alone",
        KERNEL,
        "if varlen or state.numel() == 0:",
        "if state.numel() == 0:",
        "packed, tokens behind",
    ),
)
