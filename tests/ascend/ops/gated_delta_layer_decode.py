# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_gated_delta_layer_decode, against the reference: its stages have their own cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..case import Arguments, Case, Finding, Inputs, judge_floats
from ..conditions import far_apart
from ..controls import Control

KERNEL = "gated_delta_layer_decode"
OP = f"npu_{KERNEL}"
HEADS, VALUES, SLOTS = 2, 4, 5


def call(
    slots: list[int],
    tokens: int = 1,
    size: int = 128,
    layout: str = "kv",
    keep: bool = False,
    kda: bool = False,
    tree: list[list[int]] | None = None,
    **options: Any,
) -> Callable[[Inputs], Arguments]:
    """The projections are parts of one."""

    def make(x: Inputs) -> Arguments:
        heads = VALUES if kda else HEADS
        n, channels = len(slots), (2 * heads + VALUES) * size
        decays = VALUES * size if kda else VALUES
        whole = x.normal(n, tokens, channels + VALUES * size + decays + VALUES)
        mixed, z, a, b = whole.split([channels, VALUES * size, decays, VALUES], -1)
        absent = [i for i in range(SLOTS) if i not in slots]
        columns = x.normal(SLOTS, 3, channels)
        states = x.normal(SLOTS, VALUES, size, size, dtype=torch.float32)
        for pool in (columns, states):
            x.forbid(pool, absent)
        arguments: Arguments = dict(
            mixed_qkv=mixed,
            z=z.unflatten(-1, (VALUES, size)),
            a=a,
            b=b,
            conv_states=columns,
            states=states,
            conv_weight=x.normal(4, channels, scale=0.5),
            A_log=x.normal(VALUES, scale=0.5, dtype=torch.float32),
            dt_bias=x.normal(decays, dtype=torch.float32),
            norm_weight=x.normal(size),
            state_indices=x.ints(slots),
            state_layout=layout,
            is_kda=kda,
        )
        if keep:
            arguments |= dict(
                intermediate_states=x.normal(n, tokens, *states.shape[1:], dtype=torch.float32),
                intermediate_conv_window=x.normal(n, tokens, 3, channels),
                intermediate_state_indices=x.ints(list(range(n))),
            )
        if tree:
            arguments["retrieve_parent_token"] = x.ints(tree)
        return arguments | options

    return make


def judge(case: Case, got: Arguments, exact: Arguments, rounded: Arguments) -> list[Finding]:
    """States in float32 are made of what a stage before has rounded."""
    kind = case.dtype
    return [judge_floats(n, x.to(kind), exact[n], rounded[n].to(kind)) for n, x in got.items()]


CASES = (
    Case(OP, "decode", call([3, -1, 0]), judge=judge),
    Case(
        OP,
        "3 tokens kept, vk, sigmoid",
        call([3, 2], 3, 64, "vk", True, gate_activation="sigmoid", disable_state_update=True),
        judge=judge,
    ),
    Case(
        OP,
        "KDA, bounded, beta to 2",
        call(
            [3, -1],
            kda=True,
            gate_activation="sigmoid",
            lower_bound=-5.0,
            allow_neg_eigval=True,
        ),
        judge=judge,
    ),
    Case(
        OP,
        "KDA, a tree of 3 kept",
        call(
            [3, 2],
            3,
            64,
            "vk",
            True,
            True,
            disable_state_update=True,
            tree=[[-1, 0, 0], [-1, 0, 1]],
        ),
        judge=judge,
    ),
    Case(
        OP,
        "decode, slots far apart",
        far_apart(call([3, -1, 0]), "conv_states", "states"),
        judge=judge,
    ),
)
CONTROLS = (
    Control(
        "KDA's decay without its bound",
        "fused_sigmoid_gating_delta_rule_update",
        "tl.exp(lower_bound / (1.0 + tl.exp(rate * (x + bias))))",
        "tl.exp(rate * _softplus(x + bias, softplus_beta, softplus_threshold))",
        "KDA, bounded, beta to 2",
    ),
    Control(
        "KDA's beta to 1",
        "fused_sigmoid_gating_delta_rule_update",
        "(2.0 if NEG else 1.0) / (1.0 + tl.exp(-beta))",
        "1.0 / (1.0 + tl.exp(-beta))",
        "KDA, bounded, beta to 2",
    ),
    Control(
        "the convolution's states are not pushed on",
        "causal_conv1d_update",
        "place = L - size.to(tl.int64)",
        "place = L - size.to(tl.int64) * 0",
        "decode",
    ),
    Control(
        "the gate after the wrong activation",
        "gated_rms_norm",
        "opened = opened * z",
        "opened = opened * 1.0",
        "decode",
    ),
)
