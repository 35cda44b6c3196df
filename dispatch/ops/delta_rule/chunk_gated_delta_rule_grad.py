# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_chunk_gated_delta_rule_grad; shapes as in chunk_gated_delta_rule.py.

    d_out [T, Nv, Dv]   d_final_state [B, Nv, Dv, Dk]; None: zeros

The gradient of an argument that is None has shape [0].
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...check import Checker
from ..common import delta_rules, gradients
from . import chunk_gated_delta_rule

SCHEMA = (
    "npu_chunk_gated_delta_rule_grad(Tensor query, Tensor key, Tensor value, Tensor d_out, *,"
    " Tensor? d_final_state=None, Tensor? beta=None, Tensor? initial_state=None,"
    " Tensor? actual_seq_lengths=None, float? scale=None, Tensor? g=None,"
    " bool use_beta_sigmoid_in_kernel=False, bool allow_neg_eigval=False)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
FUNCTION = "backward"


class Arguments(chunk_gated_delta_rule.Arguments, delta_rules.OfOutputs):
    pass


def check(c: Checker, x: Arguments) -> None:
    chunk_gated_delta_rule.check(c, x)
    delta_rules.gradients(c, "query", "T Nv Dv", "B Nv Dv Dk", x)


def fake(**a: Any) -> tuple[Tensor, ...]:
    return gradients.empty(a, "query", "key", "value", "beta", "initial_state", "g")
