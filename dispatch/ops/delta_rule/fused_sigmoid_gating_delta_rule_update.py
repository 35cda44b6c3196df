# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_fused_sigmoid_gating_delta_rule_update.

    q, k [B, T, H, K]   v [B, T, HV, V]   a, b [B, T, HV]   A_log, dt_bias [HV]   o [B, T, HV, V]
    state [slots, HV, K, V] ("kv") or [slots, HV, V, K] ("vk")

With `is_kda` the decay has K channels: a [B, T, HV, K] or [B, T, HV * K], dt_bias [HV, K] or
[HV * K].  Where B is 1, a and b may leave B out.  N sequences: B, or those of `cu_seqlens`.
"""

from __future__ import annotations

from typing import Any, TypedDict

from torch import Tensor

from ...check import Checker
from ..common import convolutions, delta_rules

SCHEMA = (
    "npu_fused_sigmoid_gating_delta_rule_update(Tensor A_log, Tensor a, Tensor dt_bias,"
    " float softplus_beta, float softplus_threshold, Tensor q, Tensor k, Tensor v, Tensor b,"
    " Tensor(a!) initial_state_source, Tensor initial_state_indices, float? scale=None,"
    " bool use_qk_l2norm_in_kernel=False, Tensor? cu_seqlens=None, *,"
    ' str state_layout="kv", bool is_kda=False, bool disable_state_update=False,'
    " Tensor(b!)? intermediate_states=None, Tensor? intermediate_state_indices=None,"
    " Tensor? retrieve_parent_token=None, float? lower_bound=None,"
    " bool allow_neg_eigval=False) -> Tensor"
)
ONNX = "FusedSigmoidGatingDeltaRuleUpdate"


class Rule(TypedDict):
    """All but what makes a decay of `a`."""

    a: Tensor
    softplus_beta: float
    softplus_threshold: float
    q: Tensor
    k: Tensor
    v: Tensor
    b: Tensor
    initial_state_source: Tensor
    initial_state_indices: Tensor
    scale: float | None
    use_qk_l2norm_in_kernel: bool
    cu_seqlens: Tensor | None
    state_layout: str
    is_kda: bool
    disable_state_update: bool
    intermediate_states: Tensor | None
    intermediate_state_indices: Tensor | None
    retrieve_parent_token: Tensor | None
    lower_bound: float | None
    allow_neg_eigval: bool


class Arguments(Rule):
    A_log: Tensor
    dt_bias: Tensor


def check(c: Checker, x: Arguments) -> None:
    A_log, a, dt_bias, softplus_beta = x["A_log"], x["a"], x["dt_bias"], x["softplus_beta"]
    q, k, v, b, initial_state_indices = x["q"], x["k"], x["v"], x["b"], x["initial_state_indices"]
    scale, cu_seqlens = x["scale"], x["cu_seqlens"]
    intermediate_state_indices = x["intermediate_state_indices"]
    retrieve_parent_token = x["retrieve_parent_token"]
    c.same_device(
        q=q,
        k=k,
        v=v,
        a=a,
        b=b,
        A_log=A_log,
        dt_bias=dt_bias,
        initial_state_source=x["initial_state_source"],
        initial_state_indices=initial_state_indices,
        cu_seqlens=cu_seqlens,
        intermediate_states=x["intermediate_states"],
        intermediate_state_indices=intermediate_state_indices,
        retrieve_parent_token=retrieve_parent_token,
    )
    c.one_of("state_layout", x["state_layout"], "kv", "vk")
    c.require(softplus_beta > 0, f"`softplus_beta` is {softplus_beta}, expected a positive number.")
    c.require(scale is None or scale > 0, f"`scale` is {scale}, expected a positive number.")
    delta_rules.lower_bound(c, x["lower_bound"])
    delta_rules.heads(c, "B T H K", "B T HV V", q=q, k=k, v=v)
    for name, gate in (("A_log", A_log), ("a", a), ("dt_bias", dt_bias), ("b", b)):
        c.floating(name, gate)
    c.shape("A_log", A_log, "HV")
    _check_gates(c, a, dt_bias, b, x["is_kda"])
    _check_sequences(c, cu_seqlens, initial_state_indices)
    last = "K V" if x["state_layout"] == "kv" else "V K"
    pool_of_states(c, "initial_state_source", x["initial_state_source"], f"slots HV {last}")
    if not x["disable_state_update"]:
        convolutions.distinct(
            c, "initial_state_indices", initial_state_indices, c.sizes["slots"], cu_seqlens
        )
    _check_verification(
        c,
        last,
        cu_seqlens,
        x["intermediate_states"],
        intermediate_state_indices,
        retrieve_parent_token,
    )
    c.dense_rows(q=q, k=k, v=v, a=a, b=b)
    c.contiguous(
        A_log=A_log,
        dt_bias=dt_bias,
        cu_seqlens=cu_seqlens,
        initial_state_indices=initial_state_indices,
        intermediate_state_indices=intermediate_state_indices,
        retrieve_parent_token=retrieve_parent_token,
    )


def _check_gates(c: Checker, a: Tensor, dt_bias: Tensor, b: Tensor, is_kda: bool) -> None:
    whole = c.sizes["B"] == 1
    c.shape("b", b, "T HV" if b.ndim == 2 and whole else "B T HV")
    tokens = "T" if a.ndim == 2 and whole else "B T"
    delta_rules.gates(c, a, dt_bias, is_kda, tokens, "HV", "K")


def _check_sequences(c: Checker, cu_seqlens: Tensor | None, indices: Tensor) -> None:
    if cu_seqlens is None:
        c.sizes["N"] = c.sizes["B"]
    else:
        delta_rules.cut(c, cu_seqlens)
    c.integers("initial_state_indices", indices, "N")


def pool_of_states(c: Checker, name: str, pool: Tensor, wanted: str) -> None:
    """The leading dimensions have any stride, a state lies in one piece."""
    c.floats(name, pool, wanted)
    sizes = pool.shape[-3:]
    dense = (sizes[1] * sizes[2], sizes[2], 1)
    c.require(
        pool.numel() == 0
        or all(
            size == 1 or got == want
            for size, got, want in zip(sizes, pool.stride()[-3:], dense, strict=True)
        ),
        f"`{name}` has strides {list(pool.stride())}, expected {list(dense)} in its last three "
        "dimensions: only the slots may lie apart.",
    )
    c.apart(name, pool, "states", inner=3)


def _check_verification(
    c: Checker,
    last: str,
    cu_seqlens: Tensor | None,
    intermediate_states: Tensor | None,
    intermediate_state_indices: Tensor | None,
    retrieve_parent_token: Tensor | None,
) -> None:
    c.require(
        (intermediate_states is None) == (intermediate_state_indices is None),
        "only one of `intermediate_states` and `intermediate_state_indices` is given, expected "
        "both or none.",
    )
    if intermediate_states is not None and intermediate_state_indices is not None:
        pool_of_states(c, "intermediate_states", intermediate_states, f"rows steps HV {last}")
        c.integers("intermediate_state_indices", intermediate_state_indices, "N")
        convolutions.distinct(
            c,
            "intermediate_state_indices",
            intermediate_state_indices,
            c.sizes["rows"],
            cu_seqlens,
        )
        if cu_seqlens is None:
            c.at_least("steps of `intermediate_states`", c.sizes["steps"], c.sizes["T"])
    if retrieve_parent_token is not None:
        c.integers("retrieve_parent_token", retrieve_parent_token, "N columns")
        if cu_seqlens is None:
            c.at_least("columns of `retrieve_parent_token`", c.sizes["columns"], c.sizes["T"])


def fake(v: Tensor, **_: Any) -> Tensor:
    return v.new_empty(v.shape)
