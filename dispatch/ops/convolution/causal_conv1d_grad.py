# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_causal_conv1d_grad; shapes as in causal_conv1d.py.

    d_out like x   d_final_states [N, W - 1, D]; None: zeros

The gradient of an argument that is None has shape [0].
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...check import Checker
from ..common import convolutions, gradients
from . import causal_conv1d

SCHEMA = (
    "npu_causal_conv1d_grad(Tensor x, Tensor weight, Tensor d_out, Tensor? bias=None, *,"
    " Tensor? initial_states=None, Tensor? query_start_loc=None, Tensor? d_final_states=None,"
    " str? activation=None) -> (Tensor, Tensor, Tensor, Tensor)"
)
FUNCTION = "backward"


class Arguments(causal_conv1d.Arguments):
    d_out: Tensor
    d_final_states: Tensor | None


def check(c: Checker, a: Arguments) -> None:
    x, d_out, d_final_states = a["x"], a["d_out"], a["d_final_states"]
    causal_conv1d.check(c, a)
    c.same_device(x=x, d_out=d_out, d_final_states=d_final_states)
    c.same_dtype(x=x, d_out=d_out)
    c.shape("d_out", d_out, "B S D" if a["query_start_loc"] is None else "T D")
    c.dense_rows(d_out=d_out)
    if d_final_states is not None:
        convolutions.states(c, "d_final_states", d_final_states)


def fake(**a: Any) -> tuple[Tensor, ...]:
    return gradients.empty(a, "x", "weight", "bias", "initial_states")
