# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The decode step of a gated-delta layer out of its three stages, for every backend: what each
takes of the layer's arguments, and which calls are one launch; and decays that are given twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

# what kernels hold at once that take a token of KDA in one launch
KDA_CHANNELS = 128  # of a head
KDA_COLUMNS = 8  # of the convolution's pool


def _states_kept(x: dict[str, Any]) -> dict[str, Any]:
    """What the convolution and the rule are told alike of the states behind a step's tokens."""
    names = ("disable_state_update", "intermediate_state_indices", "retrieve_parent_token")
    return {name: x[name] for name in names}


def convolution(x: dict[str, Any]) -> dict[str, Any]:
    """The arguments of npu_causal_conv1d_update."""
    return dict(
        x=x["mixed_qkv"],
        conv_states=x["conv_states"],
        weight=x["conv_weight"],
        bias=x["conv_bias"],
        activation="silu",
        conv_state_indices=x["state_indices"],
        query_start_loc=None,
        num_accepted_tokens=None,
        pad_slot_id=-1,
        intermediate_conv_window=x["intermediate_conv_window"],
        **_states_kept(x),
    )


def delta_rule(x: dict[str, Any], mixed: Tensor) -> dict[str, Any]:
    """Those of npu_fused_sigmoid_gating_delta_rule_update, of what is convolved."""
    values, size = x["z"].shape[2:]
    key_size = x["states"].shape[2 if x["state_layout"] == "kv" else 3]
    q, k, v = mixed.tensor_split(
        [(mixed.shape[-1] - values * size) // 2, mixed.shape[-1] - values * size], -1
    )
    return dict(
        A_log=x["A_log"],
        a=x["a"],
        dt_bias=x["dt_bias"],
        softplus_beta=x["softplus_beta"],
        softplus_threshold=x["softplus_threshold"],
        q=q.unflatten(-1, (-1, key_size)),
        k=k.unflatten(-1, (-1, key_size)),
        v=v.unflatten(-1, (values, size)),
        b=x["b"],
        initial_state_source=x["states"],
        initial_state_indices=x["state_indices"],
        scale=x["scale"],
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=None,
        state_layout=x["state_layout"],
        is_kda=x["is_kda"],
        intermediate_states=x["intermediate_states"],
        **_states_kept(x),
        lower_bound=x["lower_bound"],
        allow_neg_eigval=x["allow_neg_eigval"],
    )


def norm(x: dict[str, Any], out: Tensor) -> dict[str, Any]:
    """Those of npu_gated_rms_norm, of what the rule gives."""
    return dict(
        x=out,
        gate=x["z"],
        weight=x["norm_weight"],
        epsilon=x["epsilon"],
        group_size=None,
        norm_before_gate=True,
        activation=x["gate_activation"],
    )


def in_one_launch(
    mixed_qkv: Tensor,
    z: Tensor,
    conv_states: Tensor,
    states: Tensor,
    intermediate_states: Tensor | None,
    retrieve_parent_token: Tensor | None,
    is_kda: bool,
    **_: Any,
) -> bool:
    """Whether a layer's call is a token of KDA, which a kernel of its own takes whole."""
    heads, size = z.shape[2:]
    return (
        is_kda
        and mixed_qkv.shape[1] == 1
        and mixed_qkv.shape[2] == 3 * heads * size
        and states.shape[2] == states.shape[3] <= KDA_CHANNELS
        and conv_states.shape[1] <= KDA_COLUMNS
        and intermediate_states is None
        and retrieve_parent_token is None
    )


def unsupported(x: dict[str, Any], *stages: Callable[..., str | None]) -> str | None:
    """Why a backend's convolution, rule or norm refuses its part of the layer's arguments."""
    # of the shapes alone: what is convolved is like what comes
    conv, rule, normed = stages
    return (
        conv(**convolution(x)) or rule(**delta_rule(x, x["mixed_qkv"])) or normed(**norm(x, x["z"]))
    )


def kind_of_rate(beta: Tensor | None, sigmoid: bool, twice: bool) -> int:
    """What kernels are compiled for: without `beta` 0, of the rate itself 1, of what its sigmoid
    makes 2, and of twice that 3."""
    return 0 if beta is None else 1 + sigmoid + twice


def log_decay(g: Tensor | None, gk: Tensor | None) -> Tensor | None:
    """The logarithm of both decays, [T, HV] or [T, HV, K]."""
    if g is None or gk is None:
        return gk if g is None else g
    return gk + g[..., None]
