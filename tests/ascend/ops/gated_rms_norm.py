# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_gated_rms_norm, against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import memory
from ..case import Arguments, Case, Inputs
from ..conditions import with_
from ..controls import Control

KERNEL = "gated_rms_norm"
OP = f"npu_{KERNEL}"


def call(
    shape: tuple[int, ...], strided: bool = False, **options: Any
) -> Callable[[Inputs], Arguments]:
    """x, and the gate as heads of a wider projection."""

    def make(x: Inputs) -> Arguments:
        wide = x.normal(*shape[:-2], 2 * shape[-2], shape[-1])
        half = wide[..., : shape[-2], :]
        gate = half if strided else memory.guarded(half)
        return dict(x=x.normal(*shape), gate=gate, weight=x.normal(shape[-1])) | options

    return make


def tiny(arguments: Arguments) -> torch.Tensor:
    """Rows whose mean square is about epsilon, and one of zeros."""
    x = arguments["x"].mul_(1e-3)
    x[0, 0] = 0
    return x


CASES = (
    Case(OP, "heads of 128", call((3, 2, 12, 128), strided=True)),
    Case(OP, "rows, no batch, tiny", with_(call((70, 64)), x=tiny)),
    Case(OP, "the gate first, groups", call((5, 3, 256), norm_before_gate=False, group_size=64)),
    Case(OP, "sigmoid, fp16", call((5, 3, 128), activation="sigmoid"), torch.float16),
    Case(
        OP,
        "2 groups of 512, float32 weight",
        with_(
            call((3, 1024), group_size=512), weight=lambda x: memory.guarded(x["weight"].float())
        ),
    ),
    Case(OP, "2048 channels", call((3, 2048), epsilon=1e-5)),
)
CONTROLS = (
    Control(
        "no epsilon",
        KERNEL,
        "/ GROUP + of.epsilon",
        "/ GROUP + 0.0 * of.epsilon",
        "rows, no batch, tiny",
    ),
    Control(
        "the sum for the mean",
        KERNEL,
        "tl.sum(x_tile * x_tile, 1) / GROUP",
        "tl.sum(x_tile * x_tile, 1) / D",
        "the gate first, groups",
    ),
    Control(
        "the weights of the first group",
        KERNEL,
        "tl.load(weight + first + d)",
        "tl.load(weight + d)",
        "2 groups of 512, float32 weight",
    ),
    Control(
        "the gate's rows as far apart as those of x",
        KERNEL,
        "a * g_stride.outer",
        "a * x_stride.outer",
        "heads of 128",
    ),
    Control(
        "sigmoid for silu", KERNEL, "opened = opened * z", "opened = opened * 1.0", "heads of 128"
    ),
)
