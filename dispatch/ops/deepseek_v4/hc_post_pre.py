# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_hc_post_pre: hc_post, and hc_pre of what it gives.  Shapes as in
hc_post.py and hc_pre.py; it gives (residual, y, post, comb)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...check import Checker
from . import hc_post, hc_pre

SCHEMA = (
    "npu_hc_post_pre(Tensor x, Tensor residual, Tensor post, Tensor comb, Tensor hc_fn,"
    " Tensor hc_scale, Tensor hc_base, *, SymInt hc_mult=4, SymInt hc_sinkhorn_iters=20,"
    " float norm_eps=1e-6, float hc_eps=1e-6, Tensor? norm_weight=None)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)


class Arguments(hc_pre.Gates):
    x: Tensor
    residual: Tensor
    post: Tensor
    comb: Tensor


def check(c: Checker, a: Mapping[str, Any]) -> None:
    hc_post.check(c, a)
    hc_pre.inputs(c, a, "residual")


def fake(residual: Tensor, hc_fn: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return residual.new_empty(residual.shape), *hc_pre.fake(residual, hc_fn)
