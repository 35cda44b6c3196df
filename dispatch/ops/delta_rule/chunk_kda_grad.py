# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_chunk_kda_grad; shapes as in chunk_kda.py.

    d_out [B, T, HV, V]   d_final_state like the final state; None: zeros

The gradient of an argument that is None has shape [0].
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...check import Checker
from ..common import delta_rules, gradients
from . import chunk_kda
from .chunk_kda import LEARNED, OPTIONS, STATES

SCHEMA = (
    "npu_chunk_kda_grad(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor d_out, *,"
    f" Tensor? d_final_state=None,{OPTIONS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
FUNCTION = "backward"


class Arguments(chunk_kda.Arguments, delta_rules.OfOutputs):
    pass


def check(c: Checker, x: Arguments) -> None:
    chunk_kda.check(c, x)
    delta_rules.gradients(c, "q", "B T HV V", STATES[x["state_layout"]], x)


def fake(**a: Any) -> tuple[Tensor, ...]:
    return gradients.empty(a, *LEARNED)
