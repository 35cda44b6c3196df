# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_causal_conv1d_grad, against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..case import Arguments, Case, Inputs
from ..controls import Control
from . import causal_conv1d as forward

KERNEL = "causal_conv1d_grad"
OP = f"npu_{KERNEL}"


def call(
    lengths: list[int], channels: int = 96, width: int = 4, final: bool = True, **options: Any
) -> Callable[[Inputs], Arguments]:
    """The forward op's arguments, and the gradients of its outputs."""

    def make(x: Inputs) -> Arguments:
        arguments = forward.call(lengths, channels, width, **options)(x)
        arguments["d_out"] = x.normal(*arguments["x"].shape)
        if final:
            arguments["d_final_states"] = x.normal(len(lengths), width - 1, channels)
        return arguments

    return make


CASES = (
    Case(OP, "packed", call([5, 1, 0, 40, 2], before=2, behind=3)),
    Case(OP, "no history, no bias", call([7, 1, 2], history=False, bias=False, final=False)),
    Case(OP, "three taps, no activation", call([9, 1], width=3, activation=None)),
    Case(OP, "three taps", call([9, 1], width=3)),
    Case(
        OP,
        "two taps, fp16, float32 weights",
        call([9, 1], width=2, weights=torch.float32),
        torch.float16,
    ),
    Case(OP, "a batch of wider rows", call([20, 20], packed=False)),
    Case(OP, "one long sequence in parts", call([300], 1040), cores=(24,)),
    Case(OP, "520 channels, tokens before and behind", call([3], 520, before=1, behind=1)),
    Case(OP, "a model's channels", call([3, 2], 8192), cores=(24,)),
    Case(OP, "wider rows in parts", call([300], packed=False), cores=(24,)),
    Case(OP, "parts of a sequence with few tokens", call([1, 2, 90, 0], 300, behind=1)),
    Case(OP, "sums that fall", call([7, -3, 6, -2, 5], behind=2)),
)
CONTROLS = (
    Control(
        "no tokens behind a part",
        KERNEL,
        "end = tl.minimum(stop + W - 1, size)",
        "end = tl.minimum(stop, size)",
        "one long sequence in parts",
    ),
    Control(
        "the tokens behind a part are in its sums",
        KERNEL,
        "(t < stop).to(tl.float32)",
        "(t >= 0).to(tl.float32)",
        "one long sequence in parts",
    ),
    Control(
        "the activation's gradient without its second half",
        KERNEL,
        "e * share * (1.0 + total * (1.0 - share))",
        "e * share",
        "packed",
    ),
    Control(
        "the gradient of the final states a column late",
        KERNEL,
        "p_2 += _left(of_final, W - 3",
        "p_2 += _left(of_final, W - 2",
        "packed",
    ),
    Control(
        "every part has the history",
        KERNEL,
        "low = tl.where(part == 0, 1 - W, begin)",
        "low = begin",
        "packed",
    ),
    Control("the bias without its last tokens", KERNEL, "s_b += mine", "s_b = mine", "packed"),
    Control(
        "the tail left alone",
        KERNEL,
        "tl.where(alone, start + size, of.tokens)",
        "tl.where(alone, of.tokens, of.tokens)",
        "packed",
    ),
)
