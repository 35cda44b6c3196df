# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_hc_pre, against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..case import Arguments, Case, Inputs
from ..controls import Control

KERNEL = "hc_pre"
OP = f"npu_{KERNEL}"


def gates(x: Inputs, hidden: int, rows: int = 24, norm: bool = False) -> Arguments:
    """hc_fn and what belongs to it; `rows` 4: the head of a model."""
    wide = torch.float32
    return dict(
        hc_fn=x.normal(rows, 4 * hidden, scale=hidden**-0.5, dtype=wide),
        hc_scale=x.normal(1 if rows == 4 else 3, dtype=wide),
        hc_base=x.normal(rows, dtype=wide),
        norm_weight=x.normal(hidden, dtype=wide) if norm else None,
    )


def call(
    *shape: int, rows: int = 24, norm: bool = False, scale: float = 1.0, **options: Any
) -> Callable[[Inputs], Arguments]:
    """`shape`: of y."""

    def make(x: Inputs) -> Arguments:
        streams = x.normal(*shape[:-1], 4, shape[-1], scale=scale)
        return dict(x=streams) | gates(x, shape[-1], rows, norm) | options

    return make


CASES = (
    Case(OP, "whole tiles", call(2, 32, 512)),
    Case(OP, "tails, normed", call(7, 200, norm=True)),
    Case(OP, "blocks and tails, fp16", call(70, 136), torch.float16),
    Case(OP, "many tokens", call(400, 16, norm=True, hc_sinkhorn_iters=2), cores=(24, 2)),
    Case(OP, "the head", call(5, 264, rows=4, norm=True)),
    Case(OP, "one channel, one sweep", call(3, 1, hc_sinkhorn_iters=1, norm_eps=0.1, hc_eps=0.01)),
    Case(OP, "float32", call(5, 40), torch.float32),
    Case(OP, "tiny, a block of one run", call(16, 240, norm=True, scale=1e-3)),
    Case(OP, "Pro", call(3, 7168, norm=True)),
)
CONTROLS = (
    Control(
        "no squares of the last stream",
        KERNEL,
        "squares += tl.sum(tile * tile, 1)",
        "squares += tl.sum(tile * tile, 1) * (j < 3)",
        "whole tiles",
    ),
    Control(
        "a run is left out",
        KERNEL,
        "for run in range(1, of.runs)",
        "for run in range(2, of.runs)",
        "whole tiles",
    ),
    Control(
        "comb not transposed",
        KERNEL,
        "q[None, :, None] * 4 + q[None, None]",
        "q[None, :, None] + q[None, None] * 4",
        "whole tiles",
    ),
    Control(
        "no epsilon behind the shares",
        KERNEL,
        "tl.sum(comb, 1)[:, None, :] + eps",
        "tl.sum(comb, 1)[:, None, :]",
        "one channel, one sweep",
    ),
    Control(
        "a sweep more",
        KERNEL,
        "for _ in range(1, iters)",
        "for _ in range(0, iters)",
        "many tokens",
    ),
    Control(
        "the scale of pre for post",
        KERNEL,
        "by, tl.load(scale + 1)",
        "by, tl.load(scale)",
        "whole tiles",
    ),
    Control(
        "the gates of a program's first token",
        KERNEL,
        "p1 = get_element(pre, (1, i))",
        "p1 = get_element(pre, (1, 0))",
        "many tokens",
    ),
    Control(
        "the tail of a norm is stored whole",
        KERNEL,
        "mask=d < of.hidden - k)\n\n\ndef",
        "mask=d < C.WIDTH)\n\n\ndef",
        "tails, normed",
    ),
)
# of a call by the case's name
LAUNCHES = {"many tokens": 2, "the head": 2, "Pro": 2}
