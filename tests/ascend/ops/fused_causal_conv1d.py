# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_fused_causal_conv1d and its form in place, against the reference."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

from .. import memory
from ..alike import padding_is_a_slot
from ..case import Arguments, Case, Inputs
from ..conditions import far_apart, with_
from ..controls import Control

KERNEL = "fused_causal_conv1d"
OP = f"npu_{KERNEL}"
SLOTS = 12
TABLE = [[4, 8, 2, 9], [1, 6, 11, 3], [0, 5, 7, 10]]


def call(
    lengths: list[int],
    slots: list[int] | list[list[int]] | None = None,
    channels: int = 96,
    width: int = 3,
    columns: int = 4,
    packed: bool = True,
    starts: list[int] | None = None,
    accepted: list[int] | None = None,
    computed: list[int] | None = None,
    blocks: tuple[list[int], list[int], list[int]] | None = None,
    bias: bool = False,
    state: torch.dtype | None = None,
    **options: Any,
) -> Callable[[Inputs], Arguments]:
    """`blocks`: the first, the last and the initial one of each sequence."""

    def make(x: Inputs) -> Arguments:
        pool = x.normal(SLOTS, columns, channels, dtype=state)
        named = torch.tensor(range(len(lengths)) if slots is None else slots).flatten().tolist()
        x.forbid(pool, [i for i in range(SLOTS) if i not in named])
        arguments: Arguments = dict(
            x=x.normal(sum(lengths), channels)
            if packed
            else x.normal(len(lengths), lengths[0], channels),
            weight=x.normal(width, channels),
            conv_states=pool,
        )
        if packed:
            arguments["query_start_loc"] = x.ints(starts or [*accumulate(lengths, initial=0)])
        if slots is not None:
            arguments["cache_indices"] = x.ints(slots)
        if bias:
            arguments["bias"] = x.normal(channels)
        if accepted:
            arguments["num_accepted_tokens"] = x.ints(accepted)
        if computed:
            arguments["num_computed_tokens"] = x.ints(computed)
        if blocks:
            names = ("block_idx_first_scheduled_token", "block_idx_last_scheduled_token")
            for name, values in zip((*names, "initial_state_idx"), blocks, strict=True):
                arguments[name] = x.ints(values)
        return arguments | options

    return make


def in_blocks(
    lengths: list[int],
    computed: list[int],
    blocks: tuple[list[int], list[int], list[int]],
    **options: Any,
) -> Callable[[Inputs], Arguments]:
    """Blocks of 4 tokens, in a table of slots."""
    return call(lengths, TABLE, computed=computed, blocks=blocks, block_size=4, **options)


def wider(arguments: Arguments) -> torch.Tensor:
    """x as one of two parts of its rows."""
    x = arguments["x"]
    return memory.guarded(torch.stack([x, x], -2))[..., 0, :]


CASES = (
    Case(OP, "packed", call([5, 1, 3], [3, 7, 0])),
    Case(OP, "no slots, bias, silu", call([5, 1, 3], columns=2, bias=True, activation="silu")),
    Case(
        OP,
        "four taps, slots that are not there",
        call([5, 1, 3], [3, -1, SLOTS], width=4, columns=3, computed=[0, 0, 9]),
    ),
    Case(
        OP,
        "two taps, fp16, float32 states",
        call([5, 2], [3, 1], width=2, columns=1, state=torch.float32),
        torch.float16,
    ),
    Case(
        OP,
        "batched, accepted tokens",
        call([3, 3, 3], [5, 0, 2], packed=False, accepted=[2, 99, -4]),
    ),
    Case(
        OP,
        "a slot that stands for none",
        call([2, 2], [5, 0], packed=False, columns=3, pad_slot_id=0),
    ),
    Case(
        OP,
        "fewer tokens than columns, accepted tokens",
        call([2, 1, 5], [3, 7, 0], columns=6, accepted=[1, 3, 2]),
    ),
    Case(
        OP,
        "new sequences, accepted tokens, four taps",
        call([2, 1, 5], [3, 7, 0], width=4, columns=6, accepted=[2, 3, 2], computed=[0, 8, 0]),
    ),
    Case(OP, "beyond the tokens", call([4, 0, 2], [3, 7, 0], starts=[-1, 3, 3, 2**31 - 1])),
    Case(
        OP,
        "packed, 24 sequences of 3",
        call([3] * 24, [-1] * 21 + [3, 7, 0]),
        cores=(5,),
    ),
    Case(OP, "tokens of no sequence", call([4, 2], [3, 1], starts=[1, 3, 4])),
    Case(OP, "sums that fall", call([4, 2, 3], [3, 1, 0], starts=[1, 6, 4, 8])),
    Case(
        OP,
        "pangu, x added",
        call(
            [1, 4, 3],
            [3, 7, 0],
            width=4,
            computed=[0, 1, 2],
            conv_mode="pangu",
            residual_connection=1,
        ),
    ),
    Case(
        OP,
        "x added behind the activation",
        call([5, 1], [3, 7], activation="silu", residual_connection=1),
    ),
    Case(
        OP,
        "blocks",
        in_blocks([9, 3, 6], [3, 0, 5], ([0, 0, 1], [2, 0, 2], [0, 0, 1]), columns=3),
        cores=(24, 2),
    ),
    Case(
        OP,
        "blocks, a batch of wider rows",
        with_(
            in_blocks(
                [4, 4, 4],
                [3, 0, 5],
                ([0, 0, 1], [1, 0, 2], [0, 0, 1]),
                channels=1200,
                packed=False,
                columns=3,
            ),
            x=wider,
        ),
    ),
    Case(
        OP,
        "blocks, accepted tokens",
        in_blocks(
            [12, 3, 1],
            [4, 5, 11],
            ([1, 1, 2], [3, 1, 2], [0, 1, 2]),
            columns=5,
            accepted=[1, 2, 3],
        ),
    ),
    Case(
        OP,
        "the first block has the state",
        in_blocks([2, 3, 1], [7, 7, 3], ([1, 1, 0], [2, 2, 0], [1, 1, 0]), columns=5),
    ),
    Case(
        OP,
        "a block that is not there, and one beyond",
        call(
            [9, 4],
            [[4, -1, 2], [1, 6, 11]],
            computed=[3, 10],
            block_size=4,
            blocks=([0, 2], [2, 3], [0, -1]),
        ),
    ),
    Case(
        OP, "no token, accepted tokens", call([3, 0, 2], [3, 7, 0], columns=6, accepted=[2, 1, 2])
    ),
    Case(OP, "no token, nothing computed", call([3, 0, 2], [3, 7, 0], computed=[2, 0, 1])),
    Case(
        OP,
        "rows of no blocks",
        call([3, 2], [[], []], computed=[0, 1], blocks=([0, 0], [0, 0], [0, 0])),
    ),
    Case(OP, "no sequence", call([], [])),
    Case(OP, "wide", call([40, 25], [3, 1], channels=2048 + 128, columns=2), cores=(24,)),
    Case(f"{OP}_v2", "in place", call([40, 25], [3, 1], accepted=[2, 1], columns=5)),
    Case(OP, "packed, slots far apart", far_apart(call([5, 1, 3], [3, 7, 0]), "conv_states")),
)
CONTROLS = (
    Control(
        "a slot in 32 bits",
        "fused_causal_conv1d",
        "slot = tl.load(lines + at).to(tl.int64)",
        "slot = tl.load(lines + at)",
        "packed, slots far apart",
    ),
    Control(
        "the slot past the last is there",
        KERNEL,
        "(slot >= 0) & (slot < slots)",
        "(slot >= 0) & (slot <= slots)",
        "four taps, slots that are not there",
    ),
    padding_is_a_slot(KERNEL),
    Control(
        "one accepted token more",
        KERNEL,
        "taken.to(tl.int64) + (W - 2)",
        "taken.to(tl.int64) + (W - 1)",
        "fewer tokens than columns, accepted tokens",
    ),
    Control(
        "accepted tokens out of range",
        KERNEL,
        "tl.minimum(tl.maximum(tl.load(accepted + n), 1), L - W + 2)",
        "tl.load(accepted + n)",
        "batched, accepted tokens",
    ),
    Control(
        "a row is always walked from its first column",
        KERNEL,
        "tl.where(upwards, step, L - 1 - step)",
        "tl.where(upwards, step, step)",
        "fewer tokens than columns, accepted tokens",
    ),
    Control(
        "a new sequence goes on from the pool",
        KERNEL,
        "there = there & (new == 0)",
        "there = there & (new >= 0)",
        "new sequences, accepted tokens, four taps",
    ),
    Control(
        "the zeros before a new sequence are not stored",
        KERNEL,
        "tl.where(new, W - 1, counted)",
        "tl.where(new, 0, counted)",
        "new sequences, accepted tokens, four taps",
    ),
    Control(
        "what is before everything is stored",
        KERNEL,
        "tl.where(position >= -counted, count, 0)",
        "tl.where(position >= -counted - 9, count, 0)",
        "fewer tokens than columns, accepted tokens",
    ),
    Control(
        "a block that the tokens end is one behind",
        KERNEL,
        "tl.where(rest == 0, block_size, rest)",
        "rest",
        "blocks",
    ),
    Control(
        "the blocks in front of the last one get its state",
        KERNEL,
        "(ends - chunk - 1) * block_size",
        "(ends - chunk - 1) * 0",
        "blocks",
    ),
    Control(
        "the last block is filled as well",
        KERNEL,
        "(chunk < ends)",
        "(chunk <= ends)",
        "the first block has the state",
    ),
    Control(
        "the pool is pushed on anew",
        KERNEL,
        "    tune.stage(pushed)\n    if by_block:\n        tune.stage(filled)\n"
        "    out: Tensor = tune.stage(convolved)",
        "    pushed()\n    if by_block:\n        filled()\n    out = convolved()",
        "blocks",
        stage="refuse",
    ),
    Control(
        "pangu's zeros end one early",
        "causal_conv1d",
        "t + done < W - 1",
        "t + done < W - 2",
        "pangu, x added",
    ),
    Control(
        "x is added before the zeros",
        "causal_conv1d",
        "            if RESIDUAL:\n                total += now\n",
        "",
        "x added behind the activation",
    ),
)
