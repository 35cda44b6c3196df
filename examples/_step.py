# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A decode step of the delta rule, which the examples of graphs capture and compile."""

from collections.abc import Callable

import torch
from torch import Tensor

import custom

B, H, D = 4, 8, 64
Token = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def decode_step(
    device: torch.device, dtype: torch.dtype
) -> tuple[Callable[..., Tensor], Callable[[], Token], Tensor]:
    """The step, what draws a token for it, and the pool of states that it updates in place."""
    A_log, dt_bias = torch.randn(H, device=device), torch.randn(H, device=device)
    slots = torch.arange(B, device=device, dtype=torch.int32)

    def step(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, pool: Tensor) -> Tensor:
        return custom.npu_fused_sigmoid_gating_delta_rule_update(
            A_log, a, dt_bias, 1.0, 20.0, q, k, v, b, pool, slots, use_qk_l2norm_in_kernel=True
        )

    def token() -> Token:
        q, k, v = (torch.randn(B, 1, H, D, device=device, dtype=dtype) for _ in range(3))
        a, b = (torch.randn(B, 1, H, device=device, dtype=dtype) for _ in range(2))
        return q, k, v, a, b

    return step, token, torch.zeros(B, H, D, D, device=device)
