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
from .chunk_gated_delta_rule import inputs

SCHEMA = (
    "npu_chunk_gated_delta_rule_grad(Tensor query, Tensor key, Tensor value, Tensor d_out, *,"
    " Tensor? d_final_state=None, Tensor? beta=None, Tensor? initial_state=None,"
    " Tensor? actual_seq_lengths=None, float? scale=None, Tensor? g=None)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
FUNCTION = "backward"

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    d_out: Tensor,
    d_final_state: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    actual_seq_lengths: Tensor | None,
    scale: float | None,
    g: Tensor | None,
) -> None:
    c = Checker("npu_chunk_gated_delta_rule_grad")
    inputs(c, query, key, value, beta, initial_state, actual_seq_lengths, g)
    c.same_device(query=query, d_out=d_out, d_final_state=d_final_state)
    c.same_dtype(query=query, d_out=d_out)
    c.shape("d_out", d_out, "T Nv Dv")
    c.dense_rows(d_out=d_out)
    if d_final_state is not None:
        c.floating("d_final_state", d_final_state)
        c.shape("d_final_state", d_final_state, "B Nv Dv Dk")
        c.contiguous(d_final_state=d_final_state)


def fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor | None,
    initial_state: Tensor | None,
    g: Tensor | None,
    **_: Any,
) -> Gradients:
    def like(tensor: Tensor | None) -> Tensor:
        return query.new_empty([0]) if tensor is None else tensor.new_empty(tensor.shape)

    return like(query), like(key), like(value), like(beta), like(initial_state), like(g)
