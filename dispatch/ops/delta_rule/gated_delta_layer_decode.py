# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_gated_delta_layer_decode.

mixed_qkv [B, S, C], C = 2 N Dk + Nv Dv: queries, keys, values   z, out [B, S, Nv, Dv]
a, b [B, S, Nv]   conv_states [slots, L, C]   states [slots, Nv, Dk, Dv] or [slots, Nv, Dv, Dk]

With `is_kda` the decay has Dk channels: a [B, S, Nv, Dk] or [B, S, Nv * Dk], dt_bias [Nv, Dk] or
[Nv * Dk].
"""

from __future__ import annotations

from typing import Any, TypedDict

from torch import Tensor

from ...check import Checker
from ..common import convolutions, delta_rules
from .fused_sigmoid_gating_delta_rule_update import pool_of_states

SCHEMA = (
    "npu_gated_delta_layer_decode(Tensor mixed_qkv, Tensor z, Tensor a, Tensor b,"
    " Tensor(a!) conv_states, Tensor(b!) states, Tensor conv_weight, Tensor A_log, Tensor dt_bias,"
    " Tensor norm_weight, Tensor state_indices, *, Tensor? conv_bias=None, float? scale=None,"
    ' float epsilon=1e-6, str state_layout="kv", str gate_activation="silu",'
    " float softplus_beta=1.0, float softplus_threshold=20.0, bool disable_state_update=False,"
    " Tensor(c!)? intermediate_states=None, Tensor(d!)? intermediate_conv_window=None,"
    " Tensor? intermediate_state_indices=None, Tensor? retrieve_parent_token=None,"
    " bool is_kda=False, float? lower_bound=None, bool allow_neg_eigval=False) -> Tensor"
)
ONNX = "GatedDeltaLayerDecode"


class Arguments(TypedDict):
    mixed_qkv: Tensor
    z: Tensor
    a: Tensor
    b: Tensor
    conv_states: Tensor
    states: Tensor
    conv_weight: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm_weight: Tensor
    state_indices: Tensor
    conv_bias: Tensor | None
    scale: float | None
    epsilon: float
    state_layout: str
    gate_activation: str
    softplus_beta: float
    softplus_threshold: float
    disable_state_update: bool
    intermediate_states: Tensor | None
    intermediate_conv_window: Tensor | None
    intermediate_state_indices: Tensor | None
    retrieve_parent_token: Tensor | None
    is_kda: bool
    lower_bound: float | None
    allow_neg_eigval: bool


def check(c: Checker, x: Arguments) -> None:
    mixed_qkv, z, a, b, A_log = x["mixed_qkv"], x["z"], x["a"], x["b"], x["A_log"]
    dt_bias, norm_weight, state_indices = x["dt_bias"], x["norm_weight"], x["state_indices"]
    conv_bias, scale, softplus_beta = x["conv_bias"], x["scale"], x["softplus_beta"]
    intermediate_state_indices = x["intermediate_state_indices"]
    retrieve_parent_token = x["retrieve_parent_token"]
    c.same_device(
        mixed_qkv=mixed_qkv,
        z=z,
        a=a,
        b=b,
        conv_states=x["conv_states"],
        states=x["states"],
        conv_weight=x["conv_weight"],
        conv_bias=conv_bias,
        A_log=A_log,
        dt_bias=dt_bias,
        norm_weight=norm_weight,
        state_indices=state_indices,
        intermediate_states=x["intermediate_states"],
        intermediate_conv_window=x["intermediate_conv_window"],
        intermediate_state_indices=intermediate_state_indices,
        retrieve_parent_token=retrieve_parent_token,
    )
    c.one_of("state_layout", x["state_layout"], "kv", "vk")
    c.one_of("gate_activation", x["gate_activation"], "silu", "swish", "sigmoid")
    c.require(softplus_beta > 0, f"`softplus_beta` is {softplus_beta}, expected a positive number.")
    c.require(scale is None or scale > 0, f"`scale` is {scale}, expected a positive number.")
    c.at_least("epsilon", x["epsilon"], 0)
    c.require(
        x["is_kda"] or x["lower_bound"] is None,
        f"`lower_bound` is {x['lower_bound']}, expected None without `is_kda`: KDA's decay alone "
        "has one. Pass is_kda=True, or leave it out.",
    )
    delta_rules.lower_bound(c, x["lower_bound"])
    c.floating("mixed_qkv", mixed_qkv)
    c.same_dtype(mixed_qkv=mixed_qkv, z=z)
    c.shape("mixed_qkv", mixed_qkv, "B S C")
    c.shape("z", z, "B S Nv Dv")
    for name, tensor, wanted in (
        ("b", b, "B S Nv"),
        ("A_log", A_log, "Nv"),
        ("norm_weight", norm_weight, "Dv"),
        ("conv_weight", x["conv_weight"], "W C"),
    ):
        c.floats(name, tensor, wanted)
    c.require(
        2 <= c.sizes["W"] <= 4,
        f"`conv_weight` has {c.sizes['W']} taps, expected 2 to 4 (shape [W, C]).",
    )
    c.floats("conv_bias", conv_bias, "C")
    c.sizes["N"] = c.sizes["B"]
    c.integers("state_indices", state_indices, "B")
    last = "Dk Dv" if x["state_layout"] == "kv" else "Dv Dk"
    convolutions.pool(c, "conv_states", x["conv_states"], "slots L C")
    convolutions.enough(c, "conv_states", "columns", c.sizes["L"], c.sizes["W"] - 1)
    pool_of_states(c, "states", x["states"], f"slots Nv {last}")
    _heads(c)
    c.floating("a", a)
    c.floating("dt_bias", dt_bias)
    delta_rules.gates(c, a, dt_bias, x["is_kda"], "B S", "Nv", "Dk")
    if not x["disable_state_update"]:
        convolutions.distinct(c, "state_indices", state_indices, c.sizes["slots"])
    _check_verification(
        c,
        last,
        x["disable_state_update"],
        x["intermediate_states"],
        x["intermediate_conv_window"],
        intermediate_state_indices,
        retrieve_parent_token,
    )
    c.dense_rows(mixed_qkv=mixed_qkv, z=z, a=a, b=b)
    c.contiguous(
        A_log=A_log,
        dt_bias=dt_bias,
        norm_weight=norm_weight,
        conv_bias=conv_bias,
        state_indices=state_indices,
        intermediate_state_indices=intermediate_state_indices,
        retrieve_parent_token=retrieve_parent_token,
    )


def _heads(c: Checker) -> None:
    """The channels in front of the values are those of N query and N key heads."""
    values, key = c.sizes["Nv"] * c.sizes["Dv"], 2 * c.sizes["Dk"]
    left = c.sizes["C"] - values
    c.require(
        key > 0 and left > 0 and left % key == 0 and c.sizes["Nv"] % (left // key) == 0,
        f"`mixed_qkv` has {c.sizes['C']} channels, expected 2 N Dk + Nv Dv with Nv="
        f"{c.sizes['Nv']}, Dv={c.sizes['Dv']} (from `z`), Dk={c.sizes['Dk']} (from `states`), and "
        "N a divisor of Nv.",
    )


def _check_verification(
    c: Checker,
    last: str,
    disable_state_update: bool,
    intermediate_states: Tensor | None,
    intermediate_conv_window: Tensor | None,
    intermediate_state_indices: Tensor | None,
    retrieve_parent_token: Tensor | None,
) -> None:
    together = (intermediate_states, intermediate_conv_window, intermediate_state_indices)
    c.require(
        len({tensor is None for tensor in together}) == 1,
        "only some of `intermediate_states`, `intermediate_conv_window` and "
        "`intermediate_state_indices` are given, expected all or none.",
    )
    if intermediate_states is not None and intermediate_conv_window is not None:
        c.sizes["W-1"] = c.sizes["W"] - 1
        pool_of_states(c, "intermediate_states", intermediate_states, f"rows steps Nv {last}")
        convolutions.pool(
            c, "intermediate_conv_window", intermediate_conv_window, "rows steps W-1 C"
        )
        convolutions.indices(c, "intermediate_state_indices", intermediate_state_indices)
        if intermediate_state_indices is not None:
            convolutions.distinct(
                c, "intermediate_state_indices", intermediate_state_indices, c.sizes["rows"]
            )
        convolutions.enough(c, "intermediate_states", "steps", c.sizes["steps"], c.sizes["S"])
    if retrieve_parent_token is not None:
        c.integers("retrieve_parent_token", retrieve_parent_token, "B columns")
        convolutions.enough(c, "retrieve_parent_token", "columns", c.sizes["columns"], c.sizes["S"])
        c.require(
            disable_state_update,
            "`retrieve_parent_token` is given and the states are updated: a tree has no last "
            "token. Pass disable_state_update=True, and keep what `intermediate_states` and "
            "`intermediate_conv_window` have of the accepted one.",
        )


def fake(z: Tensor, **_: Any) -> Tensor:
    return z.new_empty(z.shape)
