# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_gated_rms_norm_grad; shapes as in gated_rms_norm.py; d_out is
like x."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...check import Checker
from ..common import gradients
from . import gated_rms_norm
from .gated_rms_norm import like

SCHEMA = (
    "npu_gated_rms_norm_grad(Tensor x, Tensor gate, Tensor weight, Tensor d_out,"
    " float epsilon=1e-6, *, int? group_size=None, bool norm_before_gate=True,"
    ' str activation="silu") -> (Tensor, Tensor, Tensor)'
)
FUNCTION = "backward"


class Arguments(gated_rms_norm.Arguments):
    d_out: Tensor


def check(c: Checker, a: Arguments) -> None:
    x, d_out = a["x"], a["d_out"]
    gated_rms_norm.check(c, a)
    c.same_device(x=x, d_out=d_out)
    c.same_dtype(x=x, d_out=d_out)
    like(c, "d_out", d_out, x)
    c.dense_rows(d_out=d_out)


def fake(**a: Any) -> tuple[Tensor, ...]:
    return gradients.empty(a, "x", "gate", "weight")
