# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_chunk_kda, against the recurrence token by token."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..alike import RATES_TO_2
from ..case import Arguments, Case, Inputs, in_rounds
from ..controls import Control
from .chunk_gated_delta_rule import judge

KERNEL = "chunk_kda"
OP = f"npu_{KERNEL}"
GIVEN, SOFTPLUS, BOUNDED = "given", "softplus", "bounded"
TO_1 = dict(use_beta_sigmoid_in_kernel=True)
TO_2 = dict(use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)


def call(
    lengths: list[int],
    heads: tuple[int, int] = (1, 2),
    sizes: tuple[int, int] = (64, 64),
    before: int = 0,
    behind: int = 0,
    state: torch.dtype | None = torch.float32,
    layout: str = "kv",
    gate: str = SOFTPLUS,
    norm: bool = True,
    fading: float = 0.25,
    alike: bool = False,
    kind: torch.dtype = torch.int32,
    packed: bool = True,
    **options: Any,
) -> Callable[[Inputs], Arguments]:
    """`lengths` of the sequences, tokens of none before and behind; not packed: a batch."""

    def make(x: Inputs) -> Arguments:
        h, hv = heads
        k, v = sizes
        b, t = (1, before + sum(lengths) + behind) if packed else (len(lengths), lengths[0])
        q = x.normal(b, t, h, k)
        drawn = x.normal(b, t, h, k, dtype=torch.float32)
        if alike:
            drawn = drawn[:, :1] + drawn / 50
        key = x.normal(b, t, h, k)
        key.copy_(drawn if norm else torch.nn.functional.normalize(drawn, dim=-1))
        if not norm:
            q.copy_(torch.nn.functional.normalize(q.float(), dim=-1))
        arguments = dict(q=q, k=key, v=x.normal(b, t, hv, v), beta=x.normal(b, t, hv))
        if not options.get("use_beta_sigmoid_in_kernel"):
            arguments["beta"].sigmoid_()
        arguments |= dict(use_qk_l2norm_in_kernel=norm, state_layout=layout)
        if gate == GIVEN:
            arguments["g"] = x.normal(b, t, hv, k, dtype=torch.float32)
            arguments["g"].abs_().mul_(-fading)
        else:
            arguments |= dict(
                g=x.normal(b, t, hv, k),
                use_gate_in_kernel=True,
                A_log=x.normal(hv, dtype=torch.float32),
            )
            if gate == SOFTPLUS:
                arguments["dt_bias"] = x.normal(hv, k, dtype=torch.float32)
            else:
                arguments["lower_bound"] = -5.0
        if state is not None:
            last = (k, v) if layout == "kv" else (v, k)
            arguments["initial_state"] = x.normal(len(lengths), hv, *last, dtype=state)
        if packed:
            ends = [before + sum(lengths[:n]) for n in range(len(lengths) + 1)]
            arguments["cu_seqlens"] = x.ints(ends, kind)
        return arguments | options

    return make


def extremes(x: Inputs) -> Arguments:
    """Decays to nothing at some tokens, none at others, channels on their own."""
    arguments = call([130], gate=GIVEN, packed=False)(x)
    decay = arguments["g"]
    decay[:, 1::3] = -1e4
    decay[:, 2::9] = -torch.inf
    decay[:, ::3] = 0.0
    decay[..., ::4] = -0.01
    return arguments


def beyond(x: Inputs) -> Arguments:
    """Bounds that fall, are below 0, end behind the tokens, and do not fit 32 bits; from the one
    that falls to the next is a chunk more than there is."""
    arguments = call([66, 9, 30, 80], (1, 1))(x)
    return arguments | dict(cu_seqlens=x.ints([-3, 66, 40, 110, 2**32 + 5], torch.int64))


def tiny(x: Inputs) -> Arguments:
    """Queries and keys whose squares add up to about the norm's epsilon, and one of zeros."""
    arguments = call([70], packed=False)(x)
    for name in ("q", "k"):
        arguments[name].mul_(1e-4)
    arguments["k"][0, 0] = 0
    return arguments


def lasting(x: Inputs) -> Arguments:
    """What a chunk adds to the state is below a half's rounding of it."""
    arguments = call([1200], (1, 1), (16, 16), gate=GIVEN, fading=1e-5, packed=False)(x)
    arguments["initial_state"].abs_().add_(4)
    arguments["beta"].mul_(2e-4)
    return arguments


def gates_near(gate: float, rate: float, tokens: int, x: Inputs) -> Arguments:
    """`rate`: the logarithm of its factor."""
    arguments = call([tokens], (1, 1), (16, 16), packed=False)(x)
    arguments["g"].mul_(0.1).add_(gate)
    arguments["dt_bias"].zero_()
    arguments["A_log"].fill_(rate)
    return arguments


def below(x: Inputs) -> Arguments:
    """Where softplus is near its argument, and the state is a product of many such decays."""
    arguments = gates_near(4.5, math.log(8 / (150 * 4.5)), 150, x)
    arguments["v"].mul_(1e-3)
    arguments["beta"].mul_(1e-3)
    return arguments


def faint(x: Inputs) -> Arguments:
    """Where 1 + exp(x) is 1, and the rate makes a decay of it."""
    return gates_near(-17, 12, 100, x)


def at_bound(x: Inputs) -> Arguments:
    """As far from a part's middle as bounded gates go."""
    arguments = call([70], (1, 1), (16, 16), gate=BOUNDED, packed=False)(x)
    arguments["g"][:, :, :, ::2] += 40
    return arguments


def halved(x: Inputs) -> Arguments:
    """Channels that go far, of whose pairs the cube has as much as it can have."""
    arguments = call([90], (1, 1), (32, 32), gate=GIVEN, norm=False, packed=False)(x)
    arguments["g"].fill_(-0.51)
    for first in range(8, 90, 16):
        arguments["g"][:, first : first + 8] = 0
    return arguments


CASES = (
    Case(OP, "two of four heads share a key", call([30], (2, 4), (32, 32)), judge=judge),
    Case(OP, "two chunks and a part", call([150], packed=False), judge=judge),
    Case(
        OP,
        "packed, tokens before and behind",
        call([0, 70, 0, 1, 64], before=2, behind=3, layout="vk"),
        judge=judge,
    ),
    Case(
        OP,
        "128 x 128, bounded, no state",
        call([65], (1, 1), (128, 128), state=None, gate=BOUNDED),
        judge=judge,
    ),
    Case(OP, "keys alike, given", call([80], (1, 1), gate=GIVEN, alike=True), judge=judge),
    Case(OP, "extremes", extremes, judge=judge),
    Case(OP, "rates to 1, packed", call([66, 3], (1, 2), (16, 32), behind=2, **TO_1), judge=judge),
    Case(OP, "rates to 2", call([66], (1, 1), (16, 16), packed=False, **TO_2), judge=judge),
    Case(
        OP,
        "a batch, fp16, value size 96, bf16 state",
        call([40, 40], (1, 3), (32, 96), state=torch.bfloat16, packed=False, norm=False),
        torch.float16,
        judge=judge,
    ),
    Case(OP, "bounds beyond the tokens", beyond, judge=judge),
    Case(
        OP,
        "a chunk a round, packed",
        in_rounds(1, call([70, 0, 130], before=2, behind=3, state=torch.bfloat16)),
        judge=judge,
    ),
    # 0.21 MB a chunk
    Case(
        OP,
        "two chunks a round, a batch",
        in_rounds(450_000, call([150, 150], state=None, layout="vk", packed=False)),
        judge=judge,
    ),
    Case(OP, "tiny keys, and one of zeros", tiny, judge=judge),
    Case(OP, "19 chunks, little decay", lasting, judge=judge),
    Case(OP, "gates below the threshold", below, judge=judge),
    Case(OP, "gates far below 0", faint, judge=judge),
    Case(OP, "gates at their bound", at_bound, judge=judge),
    # some channels leave the range of products within 16 tokens, others do not
    Case(OP, "strong gates", call([90], (1, 1), gate=GIVEN, fading=8.0), judge=judge),
    Case(OP, "half of a part decays, fp16", halved, torch.float16, judge=judge),
    Case(
        OP,
        "48 x 16, scale given, int64, none behind",
        call([65, 0], (1, 1), (48, 16), scale=0.5, kind=torch.int64),
        judge=judge,
    ),
    Case(OP, "a batch of three chunks each", call([130, 130], (1, 1), packed=False), judge=judge),
    Case(OP, "a batch of one token each", call([1] * 3, (1, 1), packed=False), judge=judge),
)
CONTROLS = (
    RATES_TO_2,
    Control(
        "an exponent above 0",
        KERNEL,
        "tl.exp(g_here - g_row)",
        "tl.exp(g_here) * tl.exp(-g_row)",
        "extremes",
    ),
    Control(
        "earlier parts do not decay on",
        KERNEL,
        "known * tl.exp(older + upper)",
        "known * tl.exp(upper)",
        "two chunks and a part",
    ),
    Control(
        "a token sees itself in the triangle",
        KERNEL,
        "tl.where(f[:, None] < f[None], upper, 0.0)",
        "tl.where(f[:, None] <= f[None], upper, 0.0)",
        "two chunks and a part",
    ),
    Control(
        "what the state foretells is added to the values",
        KERNEL,
        "(k_up * -grown)",
        "(k_up * grown)",
        "two chunks and a part",
    ),
    Control(
        "a pair of two parts takes the part before",
        KERNEL,
        "+ (2 * part * ROWS + row)",
        "+ (2 * tl.maximum(part - 1, 0) * ROWS + row)",
        "two chunks and a part",
    ),
    Control(
        "the decay between chunks forgotten",
        KERNEL,
        "state = state * fade[None] + ",
        "state = state + ",
        "two chunks and a part",
    ),
    Control(
        "a sequence that begins before another ends",
        KERNEL,
        "start = tl.maximum(within(bounds + n, tokens), end)",
        "start = within(bounds + n, tokens)",
        "bounds beyond the tokens",
    ),
    Control(
        "minus infinity times 0",
        KERNEL,
        "return tl.maximum(x, _LEAST, propagate_nan=ALL)",
        "return x",
        "extremes",
    ),
    Control(
        "the norm's epsilon outside the root",
        KERNEL,
        "tl.sqrt(tl.sum(x * x, 1) + 1e-6)",
        "(tl.sqrt(tl.sum(x * x, 1)) + 1e-6)",
        "tiny keys, and one of zeros",
    ),
    Control(
        "the state in halves between chunks",
        KERNEL,
        "state = state * fade[None] + tl.dot(",
        "state = half.to(tl.float32) * fade[None] + tl.dot(",
        "19 chunks, little decay",
    ),
    Control(
        "softplus is its argument from 4 on",
        KERNEL,
        "x = (tl.maximum(x, 0.0, propagate_nan=ALL) + rest) * -rate",
        "x = tl.where(x > 4.0, x, tl.maximum(x, 0.0) + rest) * -rate",
        "gates below the threshold",
    ),
    Control(
        "1 + exp(x) is rounded",
        KERNEL,
        "tl.log(u) + (e - (u - 1.0))",
        "tl.log(u)",
        "gates far below 0",
    ),
    Control(
        "no channel goes far from a part's middle",
        KERNEL,
        "upper = middle - middle * far",
        "upper = middle",
        "extremes",
    ),
    Control(
        "pairs of channels that go far are left out",
        KERNEL,
        "> 0, ROWS, 0)",
        "> 0, 0, 0)",
        "strong gates",
    ),
    Control(
        "the cube's share of such pairs counted twice",
        KERNEL,
        "weight = far * (1.0 - tl.exp(gained))",
        "weight = far",
        "half of a part decays, fp16",
    ),
    Control(
        "a part decays on from its begin, not from its end",
        KERNEL,
        "known * tl.exp(newer + upper)",
        "known * tl.exp(older + upper)",
        "strong gates",
    ),
    Control(
        "queries of a pair's second chunk see its first as its keys do",
        KERNEL,
        "tl.dot(k_first, tl.trans(q_tile))",
        "tl.dot(k_first, tl.trans(k_tile))",
        "two chunks and a part",
    ),
    Control(
        "T of a pair's first chunk in place of its second's",
        KERNEL,
        "tl.load(solved + first + (2 * CHUNK + 1) * CHUNK)",
        "tl.load(solved + first)",
        "two chunks and a part",
    ),
    Control(
        "keys and queries of a pair's second chunk do not decay through its first",
        KERNEL,
        "grown = grown * tl.exp(fore)",
        "grown = grown * 1.0",
        "two chunks and a part",
    ),
    Control(
        "keys of a pair's first chunk do not decay through its second",
        KERNEL,
        "known = (known * tl.exp(running)).to(half)",
        "known = (known * 1.0).to(half)",
        "two chunks and a part",
    ),
    Control(
        "a pair fades as its second chunk does",
        KERNEL,
        "fore += running",
        "fore = running",
        "two chunks and a part",
    ),
    Control(
        "a pair's first chunk sees what lies where it does not see",
        KERNEL,
        "tl.store(seen + square - CHUNK, nothing)",
        "pass",
        "two chunks and a part",
    ),
    Control(
        "a second chunk behind a sequence's end",
        KERNEL,
        "v_tile = tl.load(of_v + token * v_token + column[None], mask=there, other=0.0)",
        "v_tile = tl.load(of_v + token * v_token + column[None], mask=there, other=0.0)\n"
        "                made = i < PAIR",
        "two chunks and a part",
    ),
    Control(
        "a sequence begins anew in every round",
        KERNEL,
        "tl.where(low == 0, n, came)",
        "n",
        "two chunks a round, a batch",
    ),
    Control(
        "each round goes on from the first",
        KERNEL,
        "came, goes = goes, came",
        "pass",
        "two chunks a round, a batch",
    ),
)
