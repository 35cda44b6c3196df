# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments, outputs and autograd of npu_gated_rms_norm.

x, gate, out [..., D]   weight [D]   D is a multiple of `group_size`
"""

from __future__ import annotations

from typing import Any, TypedDict

from torch import Tensor

from ...check import Checker, tensors
from ..common import gradients

SCHEMA = (
    "npu_gated_rms_norm(Tensor x, Tensor gate, Tensor weight, float epsilon=1e-6, *,"
    ' int? group_size=None, bool norm_before_gate=True, str activation="silu") -> Tensor'
)
ONNX = "GatedRmsNorm"


class Arguments(TypedDict):
    x: Tensor
    gate: Tensor
    weight: Tensor
    epsilon: float
    group_size: int | None
    norm_before_gate: bool
    activation: str


def check(c: Checker, a: Arguments) -> None:
    """What the op and its gradient ask of the arguments that they share."""
    x, gate, weight = a["x"], a["gate"], a["weight"]
    c.same_device(**tensors(a, *_SAVED))
    c.floating("x", x)
    c.same_dtype(x=x, gate=gate)
    c.floating("weight", weight)
    c.one_of("activation", a["activation"], "silu", "swish", "sigmoid")
    c.at_least("epsilon", a["epsilon"], 0)
    c.require(
        2 <= x.ndim <= 4, f"`x` has shape {list(x.shape)}, expected 2 to 4 dimensions, [..., D]."
    )
    like(c, "gate", gate, x)
    c.sizes["D"] = size = x.shape[-1]
    c.shape("weight", weight, "D")
    if (group_size := a["group_size"]) is not None:
        c.require(
            group_size > 0 and size % group_size == 0,
            f"`group_size` is {group_size}, expected a divisor of D={size} (from `x`).",
        )
    c.dense_rows(x=x, gate=gate)
    c.contiguous(weight=weight)


def like(c: Checker, name: str, tensor: Tensor, x: Tensor) -> None:
    c.require(
        tensor.shape == x.shape,
        f"`{name}` has shape {list(tensor.shape)}, expected {list(x.shape)}, that of `x`.",
    )


def fake(x: Tensor, **_: Any) -> Tensor:
    return x.new_empty(x.shape)


_SAVED = ("x", "gate", "weight")
_OPTIONS = ("epsilon", "group_size", "norm_before_gate", "activation")


def setup_context(ctx: Any, x: dict[str, Any], output: Tensor) -> None:
    gradients.keep(ctx, x, _SAVED, _OPTIONS)


def backward(ctx: Any, d_out: Tensor) -> dict[str, Any]:
    return gradients.backward("npu_gated_rms_norm_grad", ctx, _SAVED, d_out=d_out)
