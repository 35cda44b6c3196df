# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""torch.compile of a decode step: CUDA graphs (reduce-overhead), or npugraph_ex on an NPU."""

from typing import Any

import torch
from _device import device_and_dtype
from torch import Tensor

import custom

device, dtype = device_and_dtype(__doc__)
B, H, D = 4, 8, 64
A_log, dt_bias = torch.randn(H, device=device), torch.randn(H, device=device)
slots = torch.arange(B, device=device, dtype=torch.int32)


def step(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, pool: Tensor) -> Tensor:
    return custom.npu_fused_sigmoid_gating_delta_rule_update(
        A_log, a, dt_bias, 1.0, 20.0, q, k, v, b, pool, slots, use_qk_l2norm_in_kernel=True
    )


def token() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(B, 1, H, D, device=device, dtype=dtype) for _ in range(3))
    a, b = (torch.randn(B, 1, H, device=device, dtype=dtype) for _ in range(2))
    return q, k, v, a, b


pool = torch.zeros(B, H, D, D, device=device)
torch._dynamo.mark_static_address(pool)  # a graph may write it in place
options: dict[str, Any] = {
    "cpu": dict(backend="aot_eager"),  # a CPU has no graphs, and nothing here to be fused
    "cuda": dict(mode="reduce-overhead"),
    "npu": dict(backend="npugraph_ex"),
}[device.type]
compiled = torch.compile(step, fullgraph=True, **options)
eager_pool = pool.clone()
with torch.no_grad():
    for x in (token() for _ in range(5)):
        assert torch.equal(compiled(*x, pool), step(*x, eager_pool))
assert torch.equal(pool, eager_pool)
print(f"5 steps, compiled with {options}: outputs and states equal to eager")
