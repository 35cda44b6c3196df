# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_fused_sigmoid_gating_delta_rule_update, against the reference token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import memory
from ..case import Arguments, Case, Inputs
from ..conditions import far_apart, with_
from ..controls import Control

KERNEL = "fused_sigmoid_gating_delta_rule_update"
OP = f"npu_{KERNEL}"
SLOTS = 5


def call(
    slots: list[int],
    tokens: int = 1,
    heads: tuple[int, int] = (2, 4),
    sizes: tuple[int, int] = (128, 128),
    state: torch.dtype = torch.float32,
    layout: str = "kv",
    kda: bool = False,
    gates: torch.dtype = torch.bfloat16,
    starts: list[int] | None = None,
    keep: list[int] | None = None,
    steps: int = 4,
    strided: bool = False,
    parents: list[list[int]] | None = None,
    **options: Any,
) -> Callable[[Inputs], Arguments]:
    """`slots` of the sequences, `starts` their prefix sums (then `tokens` are those of all)."""

    def make(x: Inputs) -> Arguments:
        h, hv = heads
        k, v = sizes
        b = 1 if starts else len(slots)
        states = (hv, k, v) if layout == "kv" else (hv, v, k)
        pool = x.normal(SLOTS, *states, dtype=state)
        x.forbid(pool, [i for i in range(SLOTS) if i not in slots])
        gate = x.normal(b, tokens, hv * k if kda else hv, dtype=gates)
        gate[0, 0, 0] = -25.0  # e^x is below the rounding of 1
        gate[-1, -1, -1] = 30.0  # above the threshold
        both = x.normal(b, tokens, 2, h, k)  # q and k of one projection: strided views
        q, key = (both[:, :, i] if strided else memory.guarded(both[:, :, i]) for i in (0, 1))
        arguments = dict(
            A_log=x.normal(hv, scale=0.5, dtype=torch.float32),
            a=gate,
            dt_bias=x.normal(hv * k if kda else hv, dtype=torch.float32),
            softplus_beta=1.0,
            softplus_threshold=20.0,
            q=q,
            k=key,
            v=x.normal(b, tokens, hv, v),
            b=x.normal(b, tokens, hv, dtype=gates),
            initial_state_source=pool,
            initial_state_indices=x.ints(slots),
            use_qk_l2norm_in_kernel=True,
            state_layout=layout,
            is_kda=kda,
        )
        if starts:
            arguments["cu_seqlens"] = x.ints(starts)
        if keep:
            cache = x.normal(3, steps, *states, dtype=state)
            arguments["intermediate_states"] = cache
            arguments["intermediate_state_indices"] = x.ints(keep)
        if parents:
            arguments["retrieve_parent_token"] = x.ints(parents, torch.int64)
        return arguments | options

    return make


def heads_apart(x: Inputs) -> Arguments:
    """The offset of the last value head needs 64 bits; nothing between them is touched."""
    arguments = call([3, -1], 2)(x)
    v = arguments["v"]
    wide = memory.vast((3 * 2**30 + v.numel(),), v.dtype)
    tokens = v.shape[1] * v.shape[3]
    strides = (tokens, v.shape[3], 2**30, 1)
    return arguments | dict(v=wide.as_strided(v.shape, strides).copy_(v))


def tiny(arguments: Arguments) -> torch.Tensor:
    """Keys whose squares add up to about 1e-6, and one of zeros."""
    k = arguments["k"].mul_(1e-4)
    k[0, 0] = 0
    return k


CASES = (
    Case(OP, "decode", call([3, -1, 0, 7])),
    Case(OP, "decode, the slot past the last", call([3, SLOTS, 0])),
    Case(OP, "verification, the row past the last", call([3, 2, 0], 2, keep=[2, 3, 0])),
    Case(
        OP,
        "tiny keys, and one of zeros",
        with_(call([3, 0, 1], 2), k=tiny, q=lambda x: x["q"].mul_(1e-3)),
    ),
    Case(
        OP,
        "gates at the threshold",
        with_(
            call([3, 1], 2),
            softplus_threshold=0.0,
            a=lambda x: x["a"].zero_(),
            dt_bias=lambda x: x["dt_bias"].zero_(),
        ),
    ),
    Case(OP, "decode, vk", call([3, -1, 0, 7], layout="vk")),
    Case(OP, "3 tokens", call([3, -1, 0], 3)),
    Case(OP, "3 tokens, vk, bf16 state", call([3, -1, 0], 3, state=torch.bfloat16, layout="vk")),
    Case(OP, "bf16 state", call([3, 1], 2, state=torch.bfloat16)),
    Case(
        OP,
        "fp16, scale given, no norm",
        call([4, 2], 2, scale=0.05, gates=torch.float16, use_qk_l2norm_in_kernel=False),
        torch.float16,
    ),
    Case(
        OP,
        "softplus beta 2, threshold 1",
        call([4, 2], 2, softplus_beta=2.0, softplus_threshold=1.0),
    ),
    Case(OP, "varlen", call([3, -1, 0, 1], 9, starts=[0, 3, 4, 4, 7])),
    Case(
        OP,
        "varlen, beyond the tokens and the pool",
        call([-(2**31), 0, 2**31 - 1], 5, starts=[-2, 1, 4, 2**31 - 1]),
    ),
    Case(OP, "varlen, tokens before the first sequence", call([3, 1], 6, starts=[2, 3, 5])),
    Case(OP, "varlen, the last sum falls", call([3, 1], 6, starts=[0, 5, 3])),
    Case(OP, "varlen, sums fall and rise", call([3, 1, 0], 9, starts=[0, 7, 3, 3])),
    Case(OP, "varlen, the first sum falls", call([3, 1], 7, starts=[5, 2, 4], layout="vk")),
    Case(
        OP,
        "varlen, vk, int64, beyond 32 bits",
        lambda x: (
            call([3, 1, 0], 5, starts=[0, 1, 2, 4], layout="vk")(x)
            | dict(
                cu_seqlens=x.ints([0, 1, 2, 2**32 + 3], torch.int64),
                initial_state_indices=x.ints([3, 2**32 + 1, 0], torch.int64),
            )
        ),
    ),
    Case(OP, "KDA", call([3, -1], 2, kda=True)),
    Case(OP, "KDA, bounded", call([3, -1], 2, kda=True, lower_bound=-5.0)),
    Case(OP, "KDA, beta to 2", call([3, -1], 2, kda=True, allow_neg_eigval=True)),
    Case(OP, "KDA, vk, bf16 state", call([3, -1], 2, kda=True, layout="vk", state=torch.bfloat16)),
    Case(OP, "verification", call([3, 2, -1], 3, keep=[2, -1, 0], disable_state_update=True)),
    Case(OP, "verification, vk, KDA", call([3, 2, -1], 3, keep=[2, 7, 0], layout="vk", kda=True)),
    Case(
        OP,
        "verification, varlen, fewer steps kept",
        call([3, 2], 6, starts=[0, 4, 6], keep=[1, 0], steps=2, state=torch.bfloat16),
    ),
    Case(
        OP,
        "tree, KDA, bounded",
        call([3], 3, keep=[1], steps=3, parents=[[-1, 0, 0]], kda=True, lower_bound=-5.0),
    ),
    Case(
        OP,
        "tree, KDA, beta to 2",
        call([3], 3, keep=[1], steps=3, parents=[[-1, 0, 0]], kda=True, allow_neg_eigval=True),
    ),
    Case(
        OP,
        "tree",
        call(
            [3, 2],
            6,
            keep=[1, 7],
            steps=6,
            parents=[[-1, 0, 0, 1, 2, 1], [-1, -1, 1, 2**32, 3, 9]],
            disable_state_update=True,
        ),
    ),
    Case(
        OP,
        "tree, vk, KDA, varlen, fewer parents than tokens",
        call(
            [3, -1],
            7,
            layout="vk",
            kda=True,
            starts=[0, 4, 7],
            keep=[2, 0],
            parents=[[-1, 0, 0], [0, 0, 1]],
        ),
    ),
    Case(
        OP,
        "tree, varlen, the second one branches",
        call([3, -1], 6, starts=[0, 2, 6], parents=[[-1, 0, -1, -1], [-1, 0, 0, 1]]),
    ),
    Case(
        OP,
        "a tree without a column",
        call([3, 1], 5, starts=[0, 3, 5], parents=[[], []]),
    ),
    Case(OP, "value heads 2**30 numbers apart", heads_apart),
    Case(OP, "q and k strided", call([3, 2], 2, strided=True)),
    Case(OP, "value size 96", call([3, 2], 2, sizes=(64, 96))),
    Case(OP, "value size 48, 1 head", call([3, 2], 2, (1, 1), (128, 48), layout="vk")),
    Case(OP, "key size 256", call([3, 2], 2, sizes=(256, 64))),
    Case(OP, "key size 512, vk", call([3, 2], 1, sizes=(512, 32), layout="vk")),
    Case(
        OP,
        "verification, slots and kept rows far apart",
        far_apart(
            call([3, 2, 0], 2, keep=[2, 3, 0]), "initial_state_source", "intermediate_states"
        ),
    ),
)
CONTROLS = (
    Control(
        "a slot in 32 bits",
        "fused_sigmoid_gating_delta_rule_update",
        "slot = tl.load(slot_of + n).to(tl.int64)",
        "slot = tl.load(slot_of + n)",
        "verification, slots and kept rows far apart",
    ),
    Control(
        "a kept row in 32 bits",
        "fused_sigmoid_gating_delta_rule_update",
        "row = tl.load(row_of + n).to(tl.int64)",
        "row = tl.load(row_of + n)",
        "verification, slots and kept rows far apart",
    ),
    Control(
        "the slot past the last is there",
        KERNEL,
        "(slot >= 0) & (slot < sizes.slots)",
        "(slot >= 0) & (slot <= sizes.slots)",
        "decode, the slot past the last",
    ),
    Control(
        "the row past the last is kept",
        KERNEL,
        "(row >= 0) & (row < sizes.rows)",
        "(row >= 0) & (row <= sizes.rows)",
        "verification, the row past the last",
    ),
    Control(
        "no epsilon under the norm",
        KERNEL,
        "tl.sum(x * x, 0) + 1e-6",
        "tl.sum(x * x, 0) + 1e-30",
        "tiny keys, and one of zeros",
    ),
    Control(
        "prefix sums beyond the tokens",
        "lengths",
        "tl.minimum(tl.maximum(tl.load(length), 0), most)",
        "tl.load(length)",
        "varlen, beyond the tokens and the pool",
    ),
    Control(
        "prefix sums that wrap",
        "lengths",
        "tl.maximum(tl.load(length), 0)",
        "tl.maximum(tl.load(length).to(tl.int32), 0)",
        "varlen, vk, int64, beyond 32 bits",
    ),
    Control(
        "a parent that wraps",
        KERNEL,
        "tl.load(parents + tl.minimum(t, columns - 1))",
        "tl.load(parents + tl.minimum(t, columns - 1)).to(tl.int32)",
        "tree",
    ),
    Control(
        "a head's offset that wraps",
        KERNEL,
        "head.to(tl.int64) * v_stride.head",
        "head * v_stride.head",
        "value heads 2**30 numbers apart",
    ),
    Control(
        "beta to 1",
        KERNEL,
        "(2.0 if NEG else 1.0) / (1.0 + tl.exp(-beta))",
        "1.0 / (1.0 + tl.exp(-beta))",
        "KDA, beta to 2",
    ),
    Control(
        "an absent slot is written",
        KERNEL,
        "tl.where(there & (end > start), count, 0)",
        "tl.where(end > start, count, 0)",
        "decode",
    ),
    Control(
        "the decay forgotten",
        KERNEL,
        "state = state * decay[:, None]",
        "state = state * 1.0",
        "3 tokens",
    ),
    Control(
        "log(1 + e^x) by its name",
        KERNEL,
        "tl.where(d == 0, e, tl.log(u) * (e / tl.where(d == 0, 1.0, d)))",
        "e",
        "decode",
    ),
    Control(
        "a branch that goes on from the step before it",
        KERNEL,
        "again = target != step - 1",
        "again = target != target",
        "tree",
    ),
    Control(
        "a branch with the steps of another",
        KERNEL,
        "beta * on",
        "beta",
        "tree",
    ),
    Control(
        "a step kept one late", KERNEL, "step = t - start", "step = t - start + 1", "verification"
    ),
    Control(
        "the tail of a packed row left alone",
        KERNEL,
        "tl.where(n == sizes.sequences - 1, end, sizes.tokens)",
        "tl.where(n == sizes.sequences - 1, sizes.tokens, sizes.tokens)",
        "varlen",
    ),
    Control(
        "the tokens before the first sequence left alone",
        KERNEL,
        "tl.where(n == 0, start, 0)",
        "0 * start",
        "varlen, tokens before the first sequence",
    ),
    Control(
        "a sequence begins at its own sum",
        "lengths",
        "tl.maximum(start, within(bounds + i, most))",
        "within(bounds + i, most)",
        "varlen, sums fall and rise",
    ),
    Control(
        "a part of the state that does not fit",
        KERNEL,
        "_STATE = 8192",
        "_STATE = 16384",
        "key size 256",
        stage="compile",
    ),
)
