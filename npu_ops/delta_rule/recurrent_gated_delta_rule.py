# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A few tokens of the gated delta rule, with a slot for each token's state: the kernel of
npu_fused_sigmoid_gating_delta_rule_update, which stores after every token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...dispatch.common import gated_delta, memory
from . import fused_sigmoid_gating_delta_rule_update as rule


def unsupported(key: Tensor, value: Tensor, **_: Any) -> str | None:
    return rule.unsupported(key, value, retrieve_parent_token=None)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor,
    beta: Tensor | None,
    scale: float | None,
    actual_seq_lengths: Tensor | None,
    ssm_state_indices: Tensor,
    num_accepted_tokens: Tensor | None,
    g: Tensor | None,
    gk: Tensor | None,
) -> Tensor:
    heads, sums = value.shape[:2], None
    if actual_seq_lengths is not None:
        sums = torch.nn.functional.pad(actual_seq_lengths.clamp(min=0).cumsum(0), (1, 0))
    decay = gated_delta.log_decay(g, gk)
    if decay is None:
        decay = memory.empty(heads, torch.float32, value.device).zero_()
    if beta is None:
        beta = memory.empty(heads, torch.float32, value.device).fill_(1)
    out = rule.launch(
        A_log=decay,  # of the gates that are given, and not read
        a=decay[None],
        dt_bias=decay,
        softplus_beta=1.0,
        softplus_threshold=20.0,
        q=query[None],
        k=key[None],
        v=value[None],
        b=beta[None],
        initial_state_source=state,
        initial_state_indices=ssm_state_indices,
        scale=scale,
        use_qk_l2norm_in_kernel=False,
        cu_seqlens=sums,
        state_layout="vk",
        is_kda=gk is not None,
        disable_state_update=False,
        intermediate_states=None,
        intermediate_state_indices=None,
        retrieve_parent_token=None,
        lower_bound=None,
        allow_neg_eigval=False,
        given=rule.Given(num_accepted_tokens),
    )
    return out[0]
