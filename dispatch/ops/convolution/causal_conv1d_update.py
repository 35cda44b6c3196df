# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_causal_conv1d_update.

    x, out [B, S, D] or [T, D]   conv_states [slots, L, D], L from W - 1 on   weight [W, D]
    intermediate_conv_window [rows, steps, W - 1, D]

N sequences: B, or those of `query_start_loc`.
"""

from __future__ import annotations

from typing import Any, TypedDict

from torch import Tensor

from ...check import Checker
from ..common import convolutions

SCHEMA = (
    "npu_causal_conv1d_update(Tensor x, Tensor(a!) conv_states, Tensor weight,"
    " Tensor? bias=None, str? activation=None, *, Tensor? conv_state_indices=None,"
    " Tensor? query_start_loc=None, Tensor? num_accepted_tokens=None, int pad_slot_id=-1,"
    " bool disable_state_update=False, Tensor(b!)? intermediate_conv_window=None,"
    " Tensor? intermediate_state_indices=None, Tensor? retrieve_parent_token=None) -> Tensor"
)
ONNX = "CausalConv1dUpdate"


class Arguments(TypedDict):
    x: Tensor
    conv_states: Tensor
    weight: Tensor
    bias: Tensor | None
    activation: str | None
    conv_state_indices: Tensor | None
    query_start_loc: Tensor | None
    num_accepted_tokens: Tensor | None
    pad_slot_id: int
    disable_state_update: bool
    intermediate_conv_window: Tensor | None
    intermediate_state_indices: Tensor | None
    retrieve_parent_token: Tensor | None


def check(c: Checker, a: Arguments) -> None:
    conv_state_indices, query_start_loc = a["conv_state_indices"], a["query_start_loc"]
    num_accepted_tokens, disable_state_update = a["num_accepted_tokens"], a["disable_state_update"]
    c.same_device(
        x=a["x"],
        conv_states=a["conv_states"],
        weight=a["weight"],
        bias=a["bias"],
        conv_state_indices=conv_state_indices,
        query_start_loc=query_start_loc,
        num_accepted_tokens=num_accepted_tokens,
        intermediate_conv_window=a["intermediate_conv_window"],
        intermediate_state_indices=a["intermediate_state_indices"],
        retrieve_parent_token=a["retrieve_parent_token"],
    )
    convolutions.inputs(c, a["x"], a["weight"], a["bias"], query_start_loc, a["activation"])
    convolutions.pool(c, "conv_states", a["conv_states"], "slots L D")
    convolutions.enough(c, "conv_states", "columns", c.sizes["L"], c.sizes["W"] - 1)
    convolutions.indices(c, "conv_state_indices", conv_state_indices)
    if conv_state_indices is None:
        convolutions.enough(c, "conv_states", "slots", c.sizes["slots"], c.sizes["N"])
    elif not disable_state_update:
        convolutions.distinct(
            c, "conv_state_indices", conv_state_indices, c.sizes["slots"], query_start_loc
        )
    convolutions.accepted(c, num_accepted_tokens, conv_state_indices, -1, a["pad_slot_id"])
    if num_accepted_tokens is not None and query_start_loc is None and not disable_state_update:
        convolutions.enough(
            c, "conv_states", "columns", c.sizes["L"], c.sizes["W"] - 2 + c.sizes["S"]
        )
    _check_verification(
        c,
        query_start_loc,
        disable_state_update,
        a["intermediate_conv_window"],
        a["intermediate_state_indices"],
        a["retrieve_parent_token"],
    )


def _check_verification(
    c: Checker,
    query_start_loc: Tensor | None,
    disable_state_update: bool,
    intermediate_conv_window: Tensor | None,
    intermediate_state_indices: Tensor | None,
    retrieve_parent_token: Tensor | None,
) -> None:
    c.require(
        (intermediate_conv_window is None) == (intermediate_state_indices is None),
        "only one of `intermediate_conv_window` and `intermediate_state_indices` is given, "
        "expected both or none.",
    )
    if intermediate_conv_window is not None and intermediate_state_indices is not None:
        c.sizes["W-1"] = c.sizes["W"] - 1
        convolutions.pool(
            c, "intermediate_conv_window", intermediate_conv_window, "rows steps W-1 D"
        )
        convolutions.indices(c, "intermediate_state_indices", intermediate_state_indices)
        convolutions.distinct(
            c,
            "intermediate_state_indices",
            intermediate_state_indices,
            c.sizes["rows"],
            query_start_loc,
        )
        if query_start_loc is None:
            convolutions.enough(
                c, "intermediate_conv_window", "steps", c.sizes["steps"], c.sizes["S"]
            )
    if retrieve_parent_token is not None:
        c.integers("retrieve_parent_token", retrieve_parent_token, "N columns")
        c.contiguous(retrieve_parent_token=retrieve_parent_token)
        if query_start_loc is None:
            convolutions.enough(
                c, "retrieve_parent_token", "columns", c.sizes["columns"], c.sizes["S"]
            )
        c.require(
            disable_state_update,
            "`retrieve_parent_token` is given and the states are updated: a tree has no last "
            "token. Pass disable_state_update=True, and keep what `intermediate_conv_window` has "
            "of the accepted one.",
        )


def fake(x: Tensor, **_: Any) -> Tensor:
    return x.new_empty(x.shape)
