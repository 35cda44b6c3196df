# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_causal_conv1d, against the reference."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch

from ..alike import tail_left_alone
from ..case import Arguments, Case, Inputs
from ..controls import Control

KERNEL = "causal_conv1d"
OP = f"npu_{KERNEL}"


def call(
    lengths: list[int],
    channels: int = 96,
    width: int = 4,
    before: int = 0,
    behind: int = 0,
    history: bool = True,
    bias: bool = True,
    activation: str | None = "silu",
    weights: torch.dtype = torch.bfloat16,
    packed: bool = True,
) -> Callable[[Inputs], Arguments]:
    """Packed sequences, with tokens of none before and behind them; or a batch of equal ones, cut
    out of wider rows."""

    def make(x: Inputs) -> Arguments:
        n = len(lengths)
        arguments: Arguments = dict(
            weight=x.normal(width, channels, dtype=weights), activation=activation
        )
        if packed:
            arguments["x"] = x.normal(before + sum(lengths) + behind, channels)
            arguments["query_start_loc"] = x.ints([*accumulate(lengths, initial=before)])
        else:
            arguments["x"] = x.normal(n, lengths[0], 2, channels)[:, :, 1]
        if bias:
            arguments["bias"] = x.normal(channels, dtype=weights)
        if history:
            arguments["initial_states"] = x.normal(n, width - 1, channels)
        return arguments

    return make


def beyond(x: Inputs) -> Arguments:
    """Sums below 0, and behind all tokens, in 64 bits."""
    arguments = call([4, 3, 9])(x)
    sums = [-(2**40), 4, 7, 2**32 + 3]
    return arguments | dict(query_start_loc=x.ints(sums, torch.int64))


def two_taps(op: str, call: Callable[..., Callable[[Inputs], Arguments]]) -> Case:
    make = call([9, 1], width=2, weights=torch.float32)
    return Case(op, "two taps, fp16, float32 weights", make, torch.float16)


CASES = (
    Case(OP, "packed", call([5, 1, 0, 40, 2], before=2, behind=3)),
    Case(OP, "packed, 24 sequences of 3 and 2", call([3] * 12 + [2] * 12), cores=(5,)),
    Case(OP, "no history, no bias", call([7, 1, 2], history=False, bias=False)),
    Case(OP, "three taps, no activation", call([9, 1], width=3, activation=None)),
    two_taps(OP, call),
    Case(OP, "a batch of wider rows", call([20, 20], packed=False)),
    Case(OP, "a batch, no history, two taps", call([3, 3], packed=False, history=False, width=2)),
    Case(OP, "one long sequence in parts", call([600], 1040), cores=(24,)),
    Case(OP, "wider rows in parts", call([300], packed=False), cores=(24,)),
    Case(OP, "short sequences, wide", call([1, 2, 3], 1100, behind=1), cores=(24,)),
    Case(OP, "tokens of none, wide", call([1, 2], 1100, before=2, behind=1), cores=(24,)),
    Case(OP, "a model's channels", call([3, 6], 8192), cores=(24,)),
    Case(OP, "sums beyond the tokens", beyond),
    Case(OP, "sums that fall", call([7, -3, 6, -2, 5], behind=2)),
)
CONTROLS = (
    Control(
        "a part that begins with nothing before it",
        KERNEL,
        "begin - 1, d, count",
        "begin - 1 - begin, d, count",
        "one long sequence in parts",
    ),
    Control(
        "the last tap as wide as the one before",
        KERNEL,
        "x_3 = x_2",
        "x_3 = x_1",
        "packed",
    ),
    Control(
        "the history a column late",
        KERNEL,
        "tl.maximum(W - 1 + position, 0)",
        "tl.maximum(W - 2 + position, 0)",
        "packed",
    ),
    Control(
        "channels of the next row",
        KERNEL,
        "of_history = history + n.to(tl.int64) * h_stride.sequence + first\n        of_weight",
        "of_history = history + first\n        of_weight",
        "packed",
    ),
    Control(
        "a sequence begins at its own sum",
        "lengths",
        "tl.maximum(start, within(bounds + i, most))",
        "within(bounds + i, most)",
        "sums that fall",
    ),
    tail_left_alone(KERNEL),
    Control(
        "tokens before the first sequence left alone",
        KERNEL,
        "before = tl.where((n == 0) & (part == 0), start, 0)",
        "before = start * 0",
        "packed",
    ),
    Control(
        "final states of the first tokens",
        KERNEL,
        "position = size - (W - 1) + column",
        "position = column",
        "a batch of wider rows",
    ),
    Control(
        "a batch in one row",
        KERNEL,
        "*x_stride, of.VARLEN) + first\n        of_out",
        "x_stride.row, x_stride.row, of.VARLEN) + first\n        of_out",
        "a batch of wider rows",
    ),
)
