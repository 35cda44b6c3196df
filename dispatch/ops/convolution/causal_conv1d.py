# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments, outputs and autograd of npu_causal_conv1d.

    x, out [B, S, D] or [T, D]   weight [W, D]   bias [D]   states [N, W - 1, D]

N is B, or the sequences of `query_start_loc` [N + 1]; tokens of none of them give 0.
"""

from __future__ import annotations

from typing import Any, TypedDict

from torch import Tensor

from ...check import Checker
from ..common import convolutions, gradients

SCHEMA = (
    "npu_causal_conv1d(Tensor x, Tensor weight, Tensor? bias=None, *,"
    " Tensor? initial_states=None, Tensor? query_start_loc=None, str? activation=None)"
    " -> (Tensor, Tensor)"
)
ONNX = "CausalConv1d"


class Arguments(TypedDict):
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    initial_states: Tensor | None
    query_start_loc: Tensor | None
    activation: str | None


def check(c: Checker, a: Arguments) -> None:
    """What the op and its gradient ask of the tensors that they share."""
    initial_states = a["initial_states"]
    c.same_device(
        x=a["x"],
        weight=a["weight"],
        bias=a["bias"],
        initial_states=initial_states,
        query_start_loc=a["query_start_loc"],
    )
    convolutions.inputs(c, a["x"], a["weight"], a["bias"], a["query_start_loc"], a["activation"])
    if initial_states is not None:
        convolutions.states(c, "initial_states", initial_states)


def fake(
    x: Tensor,
    weight: Tensor,
    initial_states: Tensor | None,
    query_start_loc: Tensor | None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    sequences = x.shape[0] if query_start_loc is None else query_start_loc.shape[0] - 1
    shape = [sequences, weight.shape[0] - 1, x.shape[-1]]
    return x.new_empty(x.shape), (x if initial_states is None else initial_states).new_empty(shape)


_SAVED = ("x", "weight", "bias", "initial_states", "query_start_loc")
_LEARNED = ("x", "weight", "bias", "initial_states")


def setup_context(ctx: Any, x: dict[str, Any], output: tuple[Tensor, Tensor]) -> None:
    gradients.keep(ctx, x, _SAVED, ["activation"])


def backward(ctx: Any, grad_out: Tensor | None, grad_state: Tensor | None) -> dict[str, Any]:
    return gradients.backward(
        "npu_causal_conv1d_grad", ctx, _LEARNED, ["x"], d_out=grad_out, d_final_states=grad_state
    )
