# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments, output and autograd of npu_hc_post.

x [T, h] or [B, S, h]   residual [.., hc, h]   post [.., hc]   comb [.., hc, hc]   out like residual
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...check import Checker
from ..common import gradients
from .hc_pre import parameter_dtype, rows

SCHEMA = "npu_hc_post(Tensor x, Tensor residual, Tensor post, Tensor comb) -> Tensor"
GE = "HcPost"


def check(c: Checker, a: Mapping[str, Tensor]) -> str:
    """What every op asks of these; the letters in front of a token's own sizes."""
    x, residual, post, comb = (a[name] for name in _SAVED)
    c.same_device(x=x, residual=residual, post=post, comb=comb)
    c.floating("residual", residual)
    c.same_dtype(residual=residual, x=x)
    c.dtype("post", post, parameter_dtype(residual))
    c.dtype("comb", comb, parameter_dtype(residual))
    letters = rows(c, "residual", residual)
    c.shape("x", x, f"{letters} h")
    c.shape("post", post, f"{letters} hc")
    c.shape("comb", comb, f"{letters} hc hc")
    c.contiguous(x=x, residual=residual, post=post, comb=comb)
    return letters


def fake(residual: Tensor, **_: Any) -> Tensor:
    return residual.new_empty(residual.shape)


_SAVED = ("x", "residual", "post", "comb")


def setup_context(ctx: Any, x: dict[str, Any], output: Tensor) -> None:
    gradients.keep(ctx, x, _SAVED)


def backward(ctx: Any, d_out: Tensor) -> dict[str, Any]:
    return gradients.backward("npu_hc_post_grad", ctx, _SAVED, d_out=d_out)
