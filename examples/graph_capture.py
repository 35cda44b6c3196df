# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A decode step captured into a CUDA graph or an NPU graph, replayed with other values."""

import torch
from _device import device_and_dtype
from torch import Tensor

import custom

device, dtype = device_and_dtype(__doc__)
B, H, D = 4, 8, 64
A_log, dt_bias = torch.randn(H, device=device), torch.randn(H, device=device)
pool = torch.zeros(B, H, D, D, device=device)
slots = torch.arange(B, device=device, dtype=torch.int32)


def step(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, pool: Tensor) -> Tensor:
    return custom.npu_fused_sigmoid_gating_delta_rule_update(
        A_log, a, dt_bias, 1.0, 20.0, q, k, v, b, pool, slots, use_qk_l2norm_in_kernel=True
    )


def token() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(B, 1, H, D, device=device, dtype=dtype) for _ in range(3))
    a, b = (torch.randn(B, 1, H, device=device, dtype=dtype) for _ in range(2))
    return q, k, v, a, b


eager_pool, tokens = pool.clone(), [token() for _ in range(5)]
wanted = [step(*x, eager_pool) for x in tokens]
try:
    captured = custom.graph_mode.capture(step, *tokens[0], pool)
except custom.NotSupported as error:
    print(error)  # a CPU has no graphs
else:
    for x, out in zip(tokens, wanted, strict=True):
        assert torch.equal(captured(*x, pool), out)
    print("5 replays: outputs and states equal to eager")
    assert torch.equal(pool, eager_pool)
