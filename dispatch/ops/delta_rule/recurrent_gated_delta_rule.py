# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_recurrent_gated_delta_rule (torch_npu's schema).

    query, key [T, N, Dk]   value, out [T, Nv, Dv]   beta, g [T, Nv]   gk [T, Nv, Dk]
    state [slots, Nv, Dv, Dk]

T is the sum of `actual_seq_lengths` [B]; tokens behind it give 0.
"""

from __future__ import annotations

from typing import Any, TypedDict

from torch import Tensor

from ...check import Checker, tensors
from ...values import known
from ..common import delta_rules
from .fused_sigmoid_gating_delta_rule_update import pool_of_states

SCHEMA = (
    "npu_recurrent_gated_delta_rule(Tensor query, Tensor key, Tensor value, Tensor(a!) state, *,"
    " Tensor? beta=None, float? scale=None, Tensor? actual_seq_lengths=None,"
    " Tensor? ssm_state_indices=None, Tensor? num_accepted_tokens=None, Tensor? g=None,"
    " Tensor? gk=None) -> Tensor"
)
GE = "RecurrentGatedDeltaRule"
ONNX = "RecurrentGatedDeltaRule"


class Arguments(TypedDict):
    query: Tensor
    key: Tensor
    value: Tensor
    state: Tensor
    beta: Tensor | None
    scale: float | None
    actual_seq_lengths: Tensor | None
    ssm_state_indices: Tensor | None
    num_accepted_tokens: Tensor | None
    g: Tensor | None
    gk: Tensor | None


def check(c: Checker, x: Arguments) -> None:
    scale = x["scale"]
    actual_seq_lengths, ssm_state_indices = x["actual_seq_lengths"], x["ssm_state_indices"]
    num_accepted_tokens = x["num_accepted_tokens"]
    c.same_device(**tensors(x))
    c.require(scale is None or scale > 0, f"`scale` is {scale}, expected a positive number.")
    delta_rules.heads(c, "T N Dk", "T Nv Dv", **tensors(x, "query", "key", "value"))
    c.floats("beta", x["beta"], "T Nv")
    c.floats("g", x["g"], "T Nv")
    c.floats("gk", x["gk"], "T Nv Dk")
    pool_of_states(c, "state", x["state"], "slots Nv Dv Dk")
    c.sizes["B"] = 1
    if actual_seq_lengths is not None:
        c.integer("actual_seq_lengths", actual_seq_lengths)
        del c.sizes["B"]
        c.shape("actual_seq_lengths", actual_seq_lengths, "B")
    if ssm_state_indices is None:
        c.fail(
            "`ssm_state_indices` is None, expected [T]: the slot of `state` for each token. For "
            "slot t of token t pass torch.arange(T)."
        )
    else:
        c.integers("ssm_state_indices", ssm_state_indices, "T")
        _check_values(c, ssm_state_indices, actual_seq_lengths)
    if num_accepted_tokens is not None:
        c.integers("num_accepted_tokens", num_accepted_tokens, "B")
        _check_accepted(c, num_accepted_tokens, actual_seq_lengths)
    c.dense_rows(**tensors(x, "query", "key", "value", "beta", "g", "gk"))
    c.contiguous(**tensors(x, "actual_seq_lengths", "ssm_state_indices", "num_accepted_tokens"))


def _check_values(c: Checker, indices: Tensor, lengths: Tensor | None) -> None:
    """Where values are known: lengths that fit, and no slot of two sequences."""
    if not known(indices):
        return
    each = [c.sizes["T"]] if lengths is None else lengths.tolist()
    c.require(
        all(x >= 0 for x in each) and sum(each) <= c.sizes["T"],
        f"`actual_seq_lengths` adds up to {sum(each)}, expected lengths from 0 and at most "
        f"T={c.sizes['T']} tokens. Of prefix sums pass .diff().",
    )
    owners: dict[int, int] = {}
    for n, slots in enumerate(indices[: sum(each)].split(each)):
        for slot in slots.tolist():
            c.require(
                not 0 <= slot < c.sizes["slots"] or owners.setdefault(slot, n) == n,
                f"`ssm_state_indices` has slot {slot} in two sequences: which state remains is "
                "undefined.",
            )


def _check_accepted(c: Checker, accepted: Tensor, lengths: Tensor | None) -> None:
    """Where values are known: tokens of the sequence itself, if it has any."""
    if not known(accepted):
        return
    each = [c.sizes["T"]] if lengths is None else lengths.tolist()
    came = accepted.tolist()
    c.require(
        all(1 <= x <= length for x, length in zip(came, each, strict=True) if length),
        f"`num_accepted_tokens` is {came} and the sequences have {each} tokens, expected numbers "
        "from 1 to the length of each: the state goes on from the slot of that token. Pad a step "
        "that has fewer tokens than the last one accepted.",
    )


def fake(value: Tensor, **_: Any) -> Tensor:
    return value.new_empty(value.shape)
