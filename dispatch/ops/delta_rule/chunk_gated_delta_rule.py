# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments, outputs and autograd of npu_chunk_gated_delta_rule (torch_npu's schema).

    query, key [T, N, Dk]   value [T, Nv, Dv]   beta, g [T, Nv]   states [B, Nv, Dv, Dk]
    out [T, Nv, Dv]

T is the sum of `actual_seq_lengths` [B]; tokens behind it give 0.
"""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from torch import Tensor

from ...check import Checker, tensors
from ...values import known
from ..common import delta_rules, gradients
from .growth import note_growth

SCHEMA = (
    "npu_chunk_gated_delta_rule(Tensor query, Tensor key, Tensor value, *,"
    " Tensor? beta=None, Tensor? initial_state=None, Tensor? actual_seq_lengths=None,"
    " float? scale=None, Tensor? g=None, bool use_beta_sigmoid_in_kernel=False,"
    " bool allow_neg_eigval=False) -> (Tensor, Tensor)"
)
GE = "ChunkGatedDeltaRule"
ONNX = "ChunkGatedDeltaRule"


class Arguments(TypedDict):
    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor | None
    initial_state: Tensor | None
    actual_seq_lengths: Tensor | None
    scale: float | None
    g: Tensor | None
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool


def check(c: Checker, x: Arguments) -> None:
    """What the op and its gradient ask of the tensors that they share."""
    query, key, value, beta = x["query"], x["key"], x["value"], x["beta"]
    initial_state, actual_seq_lengths, g = x["initial_state"], x["actual_seq_lengths"], x["g"]
    c.same_device(**tensors(x, *_SAVED))
    delta_rules.heads(c, "T N Dk", "T Nv Dv", query=query, key=key, value=value)
    for name, gate in (("beta", beta), ("g", g)):
        c.floats(name, gate, "T Nv")
    sigmoid = x["use_beta_sigmoid_in_kernel"]
    c.require(
        beta is not None or not sigmoid,
        "`use_beta_sigmoid_in_kernel` is True and `beta` None, expected [T, Nv].",
    )
    delta_rules.rate(c, sigmoid, x["allow_neg_eigval"])
    c.sizes["B"] = 1
    if actual_seq_lengths is not None:
        c.integer("actual_seq_lengths", actual_seq_lengths)
        del c.sizes["B"]
        c.shape("actual_seq_lengths", actual_seq_lengths, "B")
        if known(actual_seq_lengths):
            total = int(actual_seq_lengths.sum())
            c.require(
                total <= c.sizes["T"] and bool((actual_seq_lengths >= 0).all()),
                f"`actual_seq_lengths` adds up to {total}, expected lengths from 0 and at most "
                f"T={c.sizes['T']} tokens. Of prefix sums pass .diff().",
            )
    c.floats("initial_state", initial_state, "B Nv Dv Dk")
    note_growth(c, key, beta, x, g)
    c.dense_rows(query=query, key=key, value=value, beta=beta, g=g)
    c.contiguous(initial_state=initial_state, actual_seq_lengths=actual_seq_lengths)


def fake(
    query: Tensor,
    value: Tensor,
    initial_state: Tensor | None,
    actual_seq_lengths: Tensor | None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    sequences = 1 if actual_seq_lengths is None else actual_seq_lengths.shape[0]
    state = torch.float64 if query.dtype is torch.float64 else torch.float32
    shape = [sequences, value.shape[1], value.shape[2], query.shape[2]]
    dtype = state if initial_state is None else initial_state.dtype
    return value.new_empty(value.shape), value.new_empty(shape, dtype=dtype)


_SAVED = ("query", "key", "value", "beta", "initial_state", "actual_seq_lengths", "g")
_LEARNED = ("query", "key", "value", "beta", "initial_state", "g")
_KEPT = ("scale", "use_beta_sigmoid_in_kernel", "allow_neg_eigval")


def setup_context(ctx: Any, x: dict[str, Any], output: tuple[Tensor, Tensor]) -> None:
    gradients.keep(ctx, x, _SAVED, _KEPT)


def backward(ctx: Any, grad_out: Tensor | None, grad_state: Tensor | None) -> dict[str, Any]:
    return gradients.backward(
        "npu_chunk_gated_delta_rule_grad",
        ctx,
        _LEARNED,
        ["value"],
        d_out=grad_out,
        d_final_state=grad_state,
    )
