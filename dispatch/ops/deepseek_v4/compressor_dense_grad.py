# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_compressor_dense_grad; shapes as in compressor_dense.py, d_out is
like its output."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...check import Checker
from ..common import gradients
from . import compressor_dense
from .compressor_dense import ARGUMENTS

SCHEMA = (
    f"npu_compressor_dense_grad(Tensor d_out, {ARGUMENTS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
FUNCTION = "backward"


class Arguments(compressor_dense.Arguments):
    d_out: Tensor


def check(c: Checker, a: Arguments) -> None:
    x, d_out = a["x"], a["d_out"]
    compressor_dense.check(c, a)
    c.same_device(x=x, d_out=d_out)
    c.same_dtype(x=x, d_out=d_out)
    c.shape("d_out", d_out, "B C D" if a["cu_seqlens"] is None else "E D")
    c.dense_rows(d_out=d_out)


def fake(**a: Any) -> tuple[Tensor, ...]:
    return gradients.empty(a, "x", "wkv", "wgate", "ape", "norm_weight")
