# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_fused_attention_backward, on the cases of the forward op and their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import memory
from ..case import Arguments, Case, Inputs, reference
from ..conditions import with_
from ..controls import Control
from ..toolchain import BUILDS
from .fused_attention import FALLING, RISING, dense, packed, token_major
from .fused_attention import OP as FORWARD

KERNEL = "fused_attention_backward"
OP = f"npu_{KERNEL}"


def after(make: Callable[[Inputs], Arguments], grad_lse: bool = False) -> Any:
    """The arguments of the backward op after the forward one."""

    def made(x: Inputs) -> Arguments:
        arguments = make(x)
        o, lse = reference(FORWARD, arguments).values()
        arguments |= dict(o=memory.guarded(o), lse=memory.guarded(lse), grad_o=x.normal(*o.shape))
        if grad_lse:
            arguments["grad_lse"] = x.normal(*lse.shape, dtype=torch.float32)
        return arguments

    return made


def _by_rows(arguments: Arguments) -> torch.Tensor:
    return memory.guarded(arguments["grad_o"].transpose(1, 2)).transpose(1, 2)


def _finite_outside(arguments: Arguments) -> torch.Tensor:
    """Rows of no sequence as if they had seen keys."""
    lse = arguments["lse"]
    return lse.copy_(lse.clamp(min=-5.0))


CASES = (
    Case(OP, "tails", after(dense(150, 333))),
    Case(OP, "causal, 4 heads on 2", after(dense(150, 200, 64, (4, 2), causal=True), True)),
    Case(OP, "causal, fewer keys than rows", after(dense(270, 140, causal=True))),
    Case(
        OP, "causal, a diagonal before a tile's edge", after(dense(130, 192, batch=1, causal=True))
    ),
    Case(OP, "window 50", after(dense(270, 300, window=50, causal=True))),
    Case(OP, "window 50, both sides", after(dense(170, 150, window=50))),
    # one row more than a tile of 128, from 0
    Case(OP, "window 66, both sides, one row more than a tile", after(dense(200, 200, window=66))),
    Case(OP, "causal, one row more than a tile", after(dense(129, 130, causal=True))),
    Case(OP, "fp16, scale 0.5", after(dense(130, 130, sm_scale=0.5)), torch.float16),
    Case(OP, "grad_o by rows, then heads", with_(after(dense(70, 60)), grad_o=_by_rows)),
    *(
        Case(OP, f"head size {size}, causal", after(dense(150, 170, size, batch=1, causal=True)))
        for size in (16, 96, 128, 192, 256)
    ),
    Case(OP, "head size 128, window 50", after(dense(150, 170, 128, batch=1, window=50))),
    Case(OP, "head size 256", after(dense(70, 100, 256, batch=1))),
    Case(
        OP, "head size 256, window 50", after(dense(130, 140, 256, batch=1, causal=True, window=50))
    ),
    Case(
        OP,
        "head size 192, values 128",
        after(dense(140, 130, 192, value_size=128, batch=1, causal=True)),
    ),
    Case(OP, "packed", after(packed([0, 130, 131, 131, 180], [0, 150, 150, 160, 300], 200), True)),
    Case(
        OP,
        "packed, anything outside of the sequences",
        with_(after(packed([9, 30, 50], [7, 40, 60], 70)), lse=_finite_outside),
    ),
    Case(
        OP,
        "packed, causal, int64",
        after(packed([0, 130, 131, 180], [0, 150, 160, 200], 180, kind=torch.int64, causal=True)),
    ),
    Case(
        OP,
        "packed, causal, beyond the tensors",
        after(packed([0, 70, 150], [0, 70, 170], 150, beyond=2**31 - 171, causal=True)),
    ),
    Case(
        OP,
        "packed, beyond 32 bits",
        after(packed([0, 70, 150], [0, 70, 170], 150, kind=torch.int64, beyond=2**32 - 40)),
    ),
    Case(
        OP,
        "packed, tokens before the first sequence",
        after(packed([140, 270, 280], [9, 150, 170], 300, causal=True)),
    ),
    Case(OP, "packed, sums of rows that fall", after(packed(FALLING, RISING, 280, causal=True))),
    Case(OP, "packed, sums of keys that fall", after(packed(RISING, FALLING, 280, causal=True))),
    Case(
        OP,
        "packed, head size 128, window 40",
        after(packed([0, 70, 150], [0, 70, 170], 150, 128, (4, 2), causal=True, window=40)),
    ),
    Case(OP, "token-major strides, causal", after(token_major)),
)
CONTROLS = (
    Control(
        "the window's end one too early",
        KERNEL,
        "first + KEY_TILE - 1 + window - shift",
        "first + KEY_TILE - 2 + window - shift",
        "window 66, both sides, one row more than a tile",
    ),
    Control(
        "the last tile of rows forgotten where it has one",
        KERNEL,
        "end = count_q\n",
        "end = count_q - 1\n",
        "causal, one row more than a tile",
    ),
    Control(
        "the scale forgotten",
        KERNEL,
        " * scale\n                acc_k =",
        "\n                acc_k =",
        "tails",
    ),
    Control(
        "the queries' scale forgotten", KERNEL, " * scale\n    return", "\n    return", "tails"
    ),
    Control(
        "a tile that one row sees as a whole",
        "fused_attention",
        "shift + first + 1), 0)",
        "shift + first + 2), 0)",
        "causal, a diagonal before a tile's edge",
    ),
    Control(
        "one head of the group",
        KERNEL,
        "key_head * group + step // steps",
        "key_head * group",
        "causal, 4 heads on 2",
    ),
    Control(
        "causal limit off by one",
        KERNEL,
        "(1 if CAUSAL else window)",
        "(0 if CAUSAL else window)",
        "causal, 4 heads on 2",
    ),
    Control(
        "grad_lse with the other sign",
        KERNEL,
        "total - tl.load(grad_lse",
        "total + tl.load(grad_lse",
        "causal, 4 heads on 2",
    ),
    Control(
        "a vector of rows by way of a tile: the older builds repeat, and drop the mark of it",
        KERNEL,
        "* scale - lse[:, None])\n    if",
        "* scale - tl.max(lse[:, None] + tl.zeros((64, 8), tl.float32), 1)[:, None])\n    if",
        "tails",
        stage="compile",
        build=BUILDS[1],
    ),
    Control(
        "keys of no sequence seen by rows of none",
        KERNEL,
        "count_q = tl.where(live, count_q, 0)",
        "count_q = tl.maximum(count_q, 0)",
        "packed, anything outside of the sequences",
    ),
    Control(
        "keys behind the last sequence left alone",
        "fused_attention",
        "tl.where(n > sequences, tokens, bound)",
        "bound",
        "packed",
    ),
)
