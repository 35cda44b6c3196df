# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_recurrent_gated_delta_rule, against the reference token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..case import Arguments, Case, Inputs
from ..conditions import far_apart
from ..controls import Control

KERNEL = "fused_sigmoid_gating_delta_rule_update"
OP = "npu_recurrent_gated_delta_rule"
SLOTS = 7


def call(
    lengths: list[int] | None,
    slots: list[int],
    heads: tuple[int, int] = (2, 4),
    sizes: tuple[int, int] = (128, 128),
    state: torch.dtype = torch.bfloat16,
    accepted: list[int] | None = None,
    g: bool = True,
    gk: bool = False,
    beta: bool = True,
    **options: Any,
) -> Callable[[Inputs], Arguments]:
    def make(x: Inputs) -> Arguments:
        n, nv = heads
        dk, dv = sizes
        tokens = len(slots)
        pool = x.normal(SLOTS, nv, dv, dk, dtype=state)
        x.forbid(pool, [i for i in range(SLOTS) if i not in slots])
        key = x.normal(tokens, n, dk)
        key /= key.norm(dim=-1, keepdim=True)
        arguments: Arguments = dict(
            query=x.normal(tokens, n, dk),
            key=key,
            value=x.normal(tokens, nv, dv),
            state=pool,
            ssm_state_indices=x.ints(slots),
        )
        if lengths is not None:
            arguments["actual_seq_lengths"] = x.ints(lengths)
        if accepted:
            arguments["num_accepted_tokens"] = x.ints(accepted)
        if g:
            arguments["g"] = x.normal(tokens, nv, dtype=torch.float32).abs_().neg_()
        if gk:
            arguments["gk"] = x.normal(tokens, nv, dk, dtype=torch.float32).abs_().neg_()
        if beta:
            arguments["beta"] = x.normal(tokens, nv).sigmoid_()
        return arguments | options

    return make


CASES = (
    Case(OP, "decode", call([1, 1, 1], [3, -1, 0])),
    Case(OP, "drafts", call([3, 1, 2], [3, 0, 5, 4, 2, 1])),
    Case(OP, "accepted tokens", call([3, 1, 2], [3, 0, 5, 4, 2, 1], accepted=[3, 1, 2])),
    Case(
        OP, "accepted tokens out of range", call([3, 2], [3, 0, 5, 2, 1], accepted=[-5, 2**31 - 1])
    ),
    Case(
        OP,
        "the slot past the last, float32 states, scale given",
        call([2, 2], [SLOTS, 4, 6, SLOTS], accepted=[1, 2], state=torch.float32, scale=0.05),
    ),
    Case(OP, "by channel", call([2, 1], [3, 0, 5], g=False, gk=True)),
    Case(OP, "both decays, fp16", call([2, 1], [3, 0, 5], gk=True), torch.float16),
    Case(OP, "no decay, no beta, one sequence", call(None, [3, 0, 5], g=False, beta=False)),
    Case(
        OP,
        "a sequence without tokens, tokens of none",
        call([2, 0, 1], [3, 0, 5, 6], accepted=[2, 1, 1]),
    ),
    Case(OP, "lengths beyond the tokens", call([2, 2**31 - 1], [3, 0, 5, 4])),
    Case(OP, "small heads", call([2, 1], [3, 0, 5], (1, 3), (32, 48))),
    Case(OP, "drafts, slots far apart", far_apart(call([3, 1, 2], [3, 0, 5, 4, 2, 1]), "state")),
)
CONTROLS = (
    Control(
        "the slot of a draft in 32 bits",
        "fused_sigmoid_gating_delta_rule_update",
        "own = tl.load(slot_of + t).to(tl.int64)",
        "own = tl.load(slot_of + t)",
        "drafts, slots far apart",
    ),
    Control(
        "goes on from the first token's state",
        KERNEL,
        "last = start + tl.maximum(kept_tokens, 1).to(tl.int32) - 1",
        "last = start",
        "accepted tokens",
    ),
    Control(
        "accepted tokens out of range",
        KERNEL,
        "kept_tokens = tl.minimum(tl.maximum(tl.load(accepted + n), 1), end - start)",
        "kept_tokens = tl.load(accepted + n)",
        "accepted tokens out of range",
    ),
    Control(
        "an absent token's state is stored",
        KERNEL,
        "inside = (own >= 0) & (own < sizes.slots)",
        "inside = own < sizes.slots",
        "decode",
    ),
    Control(
        "the last token's slot gets all states",
        KERNEL,
        "own = tl.load(slot_of + t)",
        "own = tl.load(slot_of + end - 1)",
        "drafts",
    ),
    Control(
        "beta through a sigmoid",
        KERNEL,
        "    if not GIVEN:\n        beta = ",
        "    if True:\n        beta = ",
        "drafts",
    ),
    Control(
        "the decay is not exponentiated",
        KERNEL,
        "    if GIVEN:\n        decay = tl.exp(x)",
        "    if GIVEN:\n        decay = x",
        "drafts",
    ),
)
