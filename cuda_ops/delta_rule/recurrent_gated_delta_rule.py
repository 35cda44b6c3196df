# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A few tokens of the gated delta rule, with a slot for each token's state: the kernel stores after
every token.

The floor is the state once in, and once out for each token.

    condition    kernels
    any          fused_sigmoid_gating_delta_rule_update.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import gated_delta, memory
from ...dispatch.ops.delta_rule.recurrent_gated_delta_rule import Arguments
from . import fused_sigmoid_gating_delta_rule_update as rule


def unsupported(key: Tensor, value: Tensor, **_: Any) -> str | None:
    if key.dtype is torch.float64:
        return "query, key, value are float64, supported are float32, float16 and bfloat16"
    return rule.unsupported(key[None], value[None])


def forward(**x: Unpack[Arguments]) -> Tensor:
    value, beta, slots = x["value"], x["beta"], x["ssm_state_indices"]
    assert slots is not None  # the check said so
    heads = value.shape[:2]
    decay = gated_delta.log_decay(x["g"], x["gk"])
    if decay is None:
        decay = memory.empty(heads, torch.float32, value.device).zero_()
    if beta is None:
        beta = memory.empty(heads, torch.float32, value.device).fill_(1)
    out = rule.launch(
        A_log=None,
        a=decay[None],
        dt_bias=None,
        softplus_beta=1.0,
        softplus_threshold=20.0,
        q=x["query"][None],
        k=x["key"][None],
        v=value[None],
        b=beta[None],
        initial_state_source=x["state"],
        initial_state_indices=slots,
        scale=x["scale"],
        use_qk_l2norm_in_kernel=False,
        cu_seqlens=None,
        state_layout="vk",
        is_kda=x["gk"] is not None,
        disable_state_update=False,
        intermediate_states=None,
        intermediate_state_indices=None,
        retrieve_parent_token=None,
        lower_bound=None,
        allow_neg_eigval=False,
        epilogue=None,
        given=rule.Given(x["actual_seq_lengths"], x["num_accepted_tokens"]),
    )
    return out[0]
