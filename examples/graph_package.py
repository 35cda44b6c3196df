# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""An AOTInductor package: compiled once, loaded and run at other sizes with nothing traced."""

import os
import tempfile

import torch
from _device import device_and_dtype
from torch._dynamo.utils import counters
from torch.export import Dim

import custom  # the process that runs the package must import it too

device, dtype = device_and_dtype(__doc__)


class Attention(torch.nn.Module):
    def forward(self, q, k, v):
        return custom.npu_fused_attention(q, k, v, causal=True)


def inputs(B, N, H=4, D=64):
    return tuple(torch.randn(B, H, N, D, device=device, dtype=dtype) for _ in range(3))


model, free = Attention(), {0: Dim.DYNAMIC, 2: Dim.DYNAMIC}
with tempfile.TemporaryDirectory() as folder:
    program = torch.export.export(model, inputs(2, 7), dynamic_shapes=(free, free, free))
    path = os.path.join(folder, "attention.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=path)
    packaged = torch._inductor.aoti_load_package(path)
    counters.clear()
    for x in (inputs(2, 7), inputs(3, 50)):
        assert torch.equal(packaged(*x), model(*x))
assert not counters
print("compiled, packaged, loaded: equal to eager at other sizes, nothing traced")
