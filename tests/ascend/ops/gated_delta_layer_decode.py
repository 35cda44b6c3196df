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
    shared: bool = False,
    columns: int = 3,
    taps: int = 4,
    states: torch.dtype = torch.float32,
    bias: bool = False,
    **options: Any,
) -> Callable[[Inputs], Arguments]:
    """The projections are parts of one."""

    def make(x: Inputs) -> Arguments:
        heads = VALUES if kda and not shared else HEADS
        n, channels = len(slots), (2 * heads + VALUES) * size
        decays = VALUES * size if kda else VALUES
        whole = x.normal(n, tokens, channels + VALUES * size + decays + VALUES)
        mixed, z, a, b = whole.split([channels, VALUES * size, decays, VALUES], -1)
        absent = [i for i in range(SLOTS) if i not in slots]
        history = x.normal(SLOTS, columns, channels)
        pool = x.normal(SLOTS, VALUES, size, size, dtype=states)
        x.forbid(history, absent)
        x.forbid(pool, absent)
        arguments: Arguments = dict(
            mixed_qkv=mixed,
            z=z.unflatten(-1, (VALUES, size)),
            a=a,
            b=b,
            conv_states=history,
            states=pool,
            conv_weight=x.normal(taps, channels, scale=0.5),
            conv_bias=x.normal(channels) if bias else None,
            A_log=x.normal(VALUES, scale=0.5, dtype=torch.float32),
            dt_bias=x.normal(decays, dtype=torch.float32),
            norm_weight=x.normal(size),
            state_indices=x.ints(slots),
            state_layout=layout,
            is_kda=kda,
        )
        if keep:
            arguments |= dict(
                intermediate_states=x.normal(n, tokens, *pool.shape[1:], dtype=states),
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
        "KDA, vk, states in bf16, 5 columns",
        call(
            [3, SLOTS, 0],
            layout="vk",
            kda=True,
            columns=5,
            states=torch.bfloat16,
            bias=True,
            scale=0.2,
            epsilon=1e-3,
        ),
        judge=judge,
    ),
    Case(
        OP,
        "KDA, states in bf16, 2 taps",
        call([-7, 1], kda=True, columns=1, taps=2, states=torch.bfloat16),
        judge=judge,
    ),
    Case(
        OP,
        "KDA, float32, 8 columns",
        call([3, -1, 0], kda=True, columns=8, bias=True),
        dtype=torch.float32,
        judge=judge,
    ),
    Case(
        OP,
        "KDA, states as they were",
        call([3, -1], kda=True, columns=4, disable_state_update=True),
        judge=judge,
    ),
    Case(
        OP,
        "KDA, heads of 48 in fp16",
        call([3, -1], size=48, kda=True, states=torch.float16),
        dtype=torch.float16,
        judge=judge,
    ),
    Case(OP, "KDA, heads of 64", call([3, -1, 0], size=64, kda=True, taps=3), judge=judge),
    Case(
        OP,
        "KDA, vk, heads of 16",
        call([3, -1], size=16, layout="vk", kda=True, lower_bound=-5.0),
        judge=judge,
    ),
    Case(
        OP,
        "KDA, slots far apart",
        far_apart(call([3, -1, 0], kda=True), "conv_states", "states"),
        judge=judge,
    ),
    Case(OP, "KDA, 9 columns", call([3, -1], size=32, kda=True, columns=9), judge=judge),
    Case(OP, "KDA, heads of 144", call([3, -1], size=144, kda=True), judge=judge),
    Case(OP, "KDA, shared queries", call([3, -1], size=32, kda=True, shared=True), judge=judge),
    Case(OP, "KDA, 2 tokens", call([3, -1], 2, 32, kda=True), judge=judge),
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
# of KDA one, where a kernel takes a head whole
LAUNCHES = {
    "decode": 3,
    "KDA, bounded, beta to 2": 1,
    "KDA, float32, 8 columns": 1,
    "KDA, 9 columns": 3,
    "KDA, heads of 144": 3,
    "KDA, shared queries": 3,
    "KDA, 2 tokens": 3,
    "KDA, a tree of 3 kept": 3,
}
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
    Control(
        "what a slot outside the pool has is read",
        "kda_layer_decode",
        "on = (column < tl.where(there, L, 0))[:, None]",
        "on = (column < L)[:, None]",
        "KDA, bounded, beta to 2",
    ),
    Control(
        "a slot behind the pool",
        "kda_layer_decode",
        "slot < sizes.slots",
        "slot <= sizes.slots",
        "KDA, vk, states in bf16, 5 columns",
    ),
    Control(
        "the token's row is not pushed on",
        "kda_layer_decode",
        "moved = extract_slice(row, (1, 0)",
        "moved = extract_slice(row, (0, 0)",
        "KDA, bounded, beta to 2",
    ),
    Control(
        "taps of the oldest columns",
        "kda_layer_decode",
        "extract_slice(row, (L - W + 1, 0)",
        "extract_slice(row, (0, 0)",
        "KDA, vk, states in bf16, 5 columns",
    ),
    Control(
        "no bias of the convolution",
        "kda_layer_decode",
        "total += tl.load(bias + d)",
        "total += 0.0 * tl.load(bias + d)",
        "KDA, float32, 8 columns",
    ),
    Control(
        "queries that are no unit vectors",
        "kda_layer_decode",
        "q = unit(q) * scale",
        "q = q * scale",
        "KDA, bounded, beta to 2",
    ),
    Control(
        "a tile's value channels in the first one's place",
        "kda_layer_decode",
        "v_tile = extract_slice(v, (first,)",
        "v_tile = extract_slice(v, (first * 0,)",
        "KDA, bounded, beta to 2",
    ),
    Control(
        "the norm's mean is a tile's",
        "kda_layer_decode",
        "tl.sum(tl.sum(o * o, 1), 0) / C.KEY",
        "tl.sum(tl.sum(o * o, 1), 0) / VALUE_TILE",
        "KDA, bounded, beta to 2",
    ),
    Control(
        "KDA's norm after the wrong activation",
        "kda_layer_decode",
        "opened * sigmoid(opened) if C.SILU else sigmoid(opened)",
        "sigmoid(opened) if C.SILU else sigmoid(opened)",
        "KDA, states as they were",
    ),
    Control(
        "the states of a step that keeps them",
        "kda_layer_decode",
        'STORE=not x["disable_state_update"]',
        "STORE=True",
        "KDA, states as they were",
    ),
    Control(
        "outputs put into a vector that a loop carries",
        "kda_layer_decode",
        "            mixed = insert_slice(mixed, conv[None], (part, 0), (1, C.KEY), (1, 1))",
        "            mixed = insert_slice(\n"
        "                mixed.reshape(3 * C.KEY), conv, (part * C.KEY,), (C.KEY,), (1,)\n"
        "            ).reshape(3, C.KEY)",
        "KDA, bounded, beta to 2",
        stage="compile",
    ),
)
