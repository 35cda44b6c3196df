# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""An ONNX file with one node for our op, run by plain onnxruntime at another batch and length."""

import tempfile

import custom.graph_mode.onnx
import onnx
import onnxruntime
import torch
from _device import device_and_dtype
from torch.export import Dim

torch.manual_seed(0)
device, dtype = device_and_dtype(__doc__)
dtype = torch.float32 if device.type == "cpu" else torch.float16  # numpy has no bfloat16


class Attention(torch.nn.Module):
    def forward(self, q, k, v):
        return custom.npu_fused_attention(q, k, v, causal=True)


def inputs(B, N, H=4, D=32):
    return tuple(torch.randn(B, H, N, D, device=device, dtype=dtype) for _ in range(3))


free = {0: Dim.DYNAMIC, 2: Dim.DYNAMIC}
with tempfile.TemporaryDirectory() as folder:
    path = f"{folder}/attention.onnx"
    custom.graph_mode.onnx.export(Attention(), inputs(2, 7), path, (free, free, free))
    for node in onnx.load(path).graph.node:
        print(f"node {node.domain}::{node.op_type}")
    given = inputs(3, 20)
    feed = dict(zip("qkv", (x.cpu().numpy() for x in given), strict=True))
    (out,) = onnxruntime.InferenceSession(path).run(None, feed)
off = (torch.from_numpy(out) - Attention()(*given).cpu()).abs().max()
print(f"onnxruntime differs from eager on {device.type} by {float(off):.1e} at most")
D = given[0].shape[-1]  # the terms of a score: each may round another way in onnxruntime
assert off < D * torch.finfo(dtype).eps
