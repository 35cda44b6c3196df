# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_hc_post_grad; shapes as in hc_post.py; d_out is like residual."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...check import Checker
from ..common import gradients
from . import hc_post

SCHEMA = (
    "npu_hc_post_grad(Tensor x, Tensor residual, Tensor post, Tensor comb, Tensor d_out)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
FUNCTION = "backward"


def check(c: Checker, a: Mapping[str, Tensor]) -> None:
    x, d_out = a["x"], a["d_out"]
    letters = hc_post.check(c, a)
    c.same_device(x=x, d_out=d_out)
    c.same_dtype(x=x, d_out=d_out)
    c.shape("d_out", d_out, f"{letters} hc h")
    c.contiguous(d_out=d_out)


def fake(**a: Any) -> tuple[Tensor, ...]:
    return gradients.empty(a, "x", "residual", "post", "comb")
