# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A decode step captured into a CUDA graph or an NPU graph, replayed with other values."""

import torch
from _device import device_and_dtype
from _step import decode_step

import custom

device, dtype = device_and_dtype(__doc__)
step, token, pool = decode_step(device, dtype)
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
