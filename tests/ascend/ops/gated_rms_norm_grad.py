# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_gated_rms_norm_grad, against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..case import Arguments, Case, Inputs
from ..conditions import with_
from ..controls import Control
from . import gated_rms_norm as forward

KERNEL = "gated_rms_norm_grad"
OP = f"npu_{KERNEL}"


def call(shape: tuple[int, ...], **options: Any) -> Callable[[Inputs], Arguments]:
    def make(x: Inputs) -> Arguments:
        return forward.call(shape, **options)(x) | dict(d_out=x.normal(*shape))

    return make


CASES = (
    Case(OP, "heads of 128", call((3, 2, 12, 128), strided=True)),
    Case(OP, "rows, no batch", call((70, 64))),
    Case(OP, "tiny rows", with_(call((20, 64)), x=forward.tiny)),
    Case(
        OP,
        "tiny rows, the gate first",
        with_(call((20, 64), norm_before_gate=False), x=forward.tiny),
    ),
    Case(OP, "the gate first, groups", call((5, 3, 256), norm_before_gate=False, group_size=64)),
    Case(OP, "sigmoid, fp16", call((5, 3, 128), activation="sigmoid"), torch.float16),
    Case(OP, "2 groups of 512", call((3, 1024), group_size=512)),
    Case(OP, "1024 channels, the gate first", call((3, 1024), norm_before_gate=False)),
)
CONTROLS = (
    Control(
        "the norm's own part forgotten",
        KERNEL,
        "x_grad = (dn - n * share_n[:, None])",
        "x_grad = (dn)",
        "heads of 128",
    ),
    Control(
        "the norm without the gate",
        KERNEL,
        "grad = grad * opened",
        "grad = grad * 1.0",
        "rows, no batch",
    ),
    Control(
        "the slope of sigmoid",
        KERNEL,
        "slope = share + z * slope",
        "slope = slope * 1.0",
        "heads of 128",
    ),
    Control(
        "the last rows only",
        KERNEL,
        "into.weight + tl.program_id(0) * D",
        "into.weight + 0 * D",
        "rows, no batch",
    ),
)
