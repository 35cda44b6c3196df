# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""torch.compile of a decode step: CUDA graphs (reduce-overhead), or npugraph_ex on an NPU."""

from typing import Any

import torch
from _device import device_and_dtype
from _step import decode_step

device, dtype = device_and_dtype(__doc__)
step, token, pool = decode_step(device, dtype)
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
