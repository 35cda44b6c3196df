# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_causal_conv1d_update, against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..alike import padding_is_a_slot
from ..case import Arguments, Case, Inputs
from ..conditions import far_apart
from ..controls import Control

KERNEL = "causal_conv1d_update"
OP = f"npu_{KERNEL}"
SLOTS = 6
TREE = [[-1, 0, 0, 1, 2, 1], [-1, -1, 1, 2**32, 3, 9]]


def call(
    slots: list[int] | None,
    tokens: int = 1,
    channels: int = 96,
    width: int = 4,
    columns: int = 3,
    sequences: int = 3,
    accepted: list[int] | None = None,
    starts: list[int] | None = None,
    keep: list[int] | None = None,
    steps: int = 4,
    parents: list[list[int]] | None = None,
    bias: bool = True,
    activation: str | None = "silu",
    state: torch.dtype | None = None,
    turned: bool = False,
    **options: Any,
) -> Callable[[Inputs], Arguments]:
    """`starts` are prefix sums (then `tokens` are those of all); `turned`: a token of each sequence
    lies before the next of any."""

    def make(x: Inputs) -> Arguments:
        n = len(slots) if slots is not None else sequences
        pool = x.normal(SLOTS, columns, channels, dtype=state)
        used = range(n) if slots is None else slots
        x.forbid(pool, [i for i in range(SLOTS) if i not in used])
        arguments: Arguments = dict(
            x=x.normal(tokens, channels) if starts else x.normal(n, tokens, channels),
            conv_states=pool,
            weight=x.normal(width, channels),
            activation=activation,
        )
        if turned:
            arguments["x"] = x.normal(tokens, n, channels).transpose(0, 1)
        if bias:
            arguments["bias"] = x.normal(channels)
        named = dict(conv_state_indices=slots, query_start_loc=starts, num_accepted_tokens=accepted)
        arguments |= {name: x.ints(each) for name, each in named.items() if each is not None}
        if keep:
            arguments["intermediate_conv_window"] = x.normal(4, steps, width - 1, channels)
            arguments["intermediate_state_indices"] = x.ints(keep)
        if parents:
            arguments["retrieve_parent_token"] = x.ints(parents, torch.int64)
        return arguments | options

    return make


CASES = (
    Case(OP, "decode", call([3, -1, 0])),
    Case(OP, "decode, the slot past the last", call([3, SLOTS, 0])),
    Case(OP, "no indices, no bias, no activation", call(None, bias=False, activation=None)),
    Case(OP, "more columns than taps, 2 tokens", call([4, 1], 2, columns=5)),
    Case(OP, "2 tokens, before the sequences", call([4, 1, 0], 2, turned=True)),
    Case(OP, "more tokens than columns", call([4, 1], 5, width=3, columns=2)),
    Case(
        OP,
        "two taps, fp16, float32 states",
        call([4, 1], width=2, columns=1, state=torch.float32),
        torch.float16,
    ),
    Case(OP, "a slot that stands for none", call([4, 0], pad_slot_id=0)),
    Case(OP, "accepted tokens", call([3, 0, -1], 3, columns=5, accepted=[1, 3, 2])),
    Case(OP, "accepted tokens out of range", call([3, 0], 2, columns=4, accepted=[-7, 99])),
    Case(OP, "packed", call([3, -1, 0, 1], 9, starts=[1, 3, 4, 4, 7])),
    Case(
        OP,
        "packed, 24 sequences of 3",
        call([-1] * 21 + [3, 0, 1], 72, starts=[*range(0, 73, 3)]),
        cores=(5,),
    ),
    Case(OP, "packed, 200 channels", call([3], 5, 200, starts=[1, 3])),
    Case(OP, "packed, sums that fall", call([3, 0, 1], 9, starts=[2, 7, 4, 8])),
    Case(
        OP,
        "packed, accepted tokens, windows kept",
        call([3, 2, 0], 7, columns=5, starts=[0, 3, 4, 6], accepted=[2, 1, 1], keep=[3, -1, 0]),
    ),
    Case(
        OP,
        "packed, beyond the tokens",
        call([3, 2, 0], 5, starts=[-2, 1, 4, 2**31 - 1], keep=[0, 7, 1], steps=2),
    ),
    Case(
        OP,
        "tree",
        call([3, 2], 6, columns=3, keep=[1, 7], steps=6, disable_state_update=True, parents=TREE),
    ),
    Case(
        OP,
        "tree, packed, accepted tokens, three taps",
        call(
            [3, -1],
            7,
            width=3,
            columns=4,
            starts=[0, 4, 7],
            accepted=[2, 1],
            keep=[2, 0],
            disable_state_update=True,
            parents=[[-1, 0, 0], [0, 0, 1]],
        ),
    ),
    Case(
        OP,
        "a tree without a column",
        call([3, 1], 5, starts=[0, 3, 5], parents=[[], []], disable_state_update=True),
    ),
    Case(
        OP,
        "packed, windows kept, of fewer steps than tokens",
        call([3, 0, 1], 6, starts=[0, 3, 5, 6], keep=[3, 4, 0], steps=2),
    ),
    Case(OP, "wide", call([3, 1, 5, 2, 0, 4], channels=8192 + 128), cores=(24,)),
    Case(OP, "middling", call([3, 1, 5], channels=8192), cores=(24,)),
    Case(OP, "decode, slots far apart", far_apart(call([3, -1, 0]), "conv_states")),
)
CONTROLS = (
    Control(
        "a slot in 32 bits",
        "causal_conv1d_update",
        "slot = tl.load(slot_of + n).to(tl.int64)",
        "slot = tl.load(slot_of + n)",
        "decode, slots far apart",
    ),
    Control(
        "a batch's sequences lie on one another",
        KERNEL,
        "start = n * size",
        "start = n * 0",
        "2 tokens, before the sequences",
    ),
    Control(
        "the slot past the last is there",
        KERNEL,
        "(slot >= 0) & (slot < slots)",
        "(slot >= 0) & (slot <= slots)",
        "decode, the slot past the last",
    ),
    padding_is_a_slot(KERNEL),
    Control(
        "an absent slot is written",
        KERNEL,
        "moved = there & (position >= -reach)",
        "moved = (position >= -reach)",
        "decode",
    ),
    Control(
        "the row is not pushed on",
        KERNEL,
        "place = L - size.to(tl.int64)",
        "place = L - size.to(tl.int64) * 0",
        "decode",
    ),
    Control(
        "one accepted token more",
        KERNEL,
        "counted = taken + (W - 2)",
        "counted = taken + (W - 1)",
        "accepted tokens",
    ),
    Control(
        "accepted tokens out of range",
        KERNEL,
        "tl.minimum(tl.maximum(tl.load(accepted + n), 1), L - W + 2)",
        "tl.load(accepted + n)",
        "accepted tokens out of range",
    ),
    Control(
        "a branch that goes on from the token before it",
        KERNEL,
        "earlier = tl.where(position >= 0, root, earlier)",
        "earlier = tl.where(position >= 0, earlier, earlier)",
        "tree",
    ),
    Control(
        "a parent that wraps",
        KERNEL,
        "parent = tl.load(at).to(tl.int64)",
        "parent = tl.load(at).to(tl.int32).to(tl.int64)",
        "tree",
    ),
    Control(
        "a window kept one late",
        KERNEL,
        "(W - 2 - back) * i_column",
        "back * i_column",
        "tree",
    ),
    Control(
        "the tail of a packed row left alone",
        KERNEL,
        "tl.where(n == sequences - 1, start + size, tokens)",
        "tl.where(n == sequences - 1, tokens, tokens)",
        "packed",
    ),
)
