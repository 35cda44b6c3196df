# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_hc_pre_grad; shapes as in hc_pre.py.  Without norm_weight its
gradient is [0]."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...check import Checker, tensors
from . import hc_pre
from .hc_pre import is_head, parameter_dtype

SCHEMA = (
    "npu_hc_pre_grad(Tensor x, Tensor hc_fn, Tensor hc_scale, Tensor hc_base, Tensor d_y,"
    " Tensor d_post, Tensor d_comb, *, SymInt hc_mult=4, SymInt hc_sinkhorn_iters=20,"
    " float norm_eps=1e-6, float hc_eps=1e-6, Tensor? norm_weight=None)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
FUNCTION = "backward"


class Arguments(hc_pre.Arguments):
    d_y: Tensor
    d_post: Tensor
    d_comb: Tensor


def check(c: Checker, a: Arguments) -> None:
    x = a["x"]
    grads = tensors(a, "d_y", "d_post", "d_comb")
    c.same_device(x=x, **grads)
    hc_pre.check(c, a)
    letters, head = "B S" if x.ndim == 4 else "T", is_head(a["hc_fn"])
    c.same_dtype(x=x, d_y=a["d_y"])
    c.dtype("d_post", a["d_post"], parameter_dtype(x))
    c.dtype("d_comb", a["d_comb"], parameter_dtype(x))
    c.shape("d_y", a["d_y"], f"{letters} h")
    c.shape("d_post", a["d_post"], "0" if head else f"{letters} hc")
    c.shape("d_comb", a["d_comb"], "0" if head else f"{letters} hc hc")
    c.contiguous(**grads)


def fake(
    x: Tensor,
    hc_fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    norm_weight: Tensor | None,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    of_norm = hc_base.new_empty([0]) if norm_weight is None else norm_weight
    same = (each.new_empty(each.shape) for each in (x, hc_fn, hc_scale, hc_base, of_norm))
    d_x, d_fn, d_scale, d_base, d_norm = same
    return d_x, d_fn, d_scale, d_base, d_norm
