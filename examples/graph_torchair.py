# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""torchair's GE mode: our op as CANN's own operator, compiled and exported to an .air file."""

import importlib.util
import sys
import tempfile
from pathlib import Path

import torch
from _device import device_and_dtype

import custom

device, dtype = device_and_dtype(__doc__)
if importlib.util.find_spec("torch_npu") is None:
    print("torch_npu is not installed: this mode is Ascend's (pip install torch_npu)")
    sys.exit()

import custom.graph_mode.torchair  # noqa: E402

torchair = importlib.import_module("torchair")  # of torch_npu, which `import torch` loads by itself

custom.graph_mode.torchair.register()


class Attention(torch.nn.Module):
    def forward(self, q, k, v):
        return custom.npu_fused_attention(q, k, v, causal=True, return_lse=True)


def config():
    made = torchair.CompilerConfig()
    made.debug.run_eagerly = device.type == "cpu"  # converts all the same, then calls our op
    return made


x = tuple(torch.randn(2, 4, 128, 64, device=device, dtype=torch.float16) for _ in range(3))
model = Attention()
with torch.no_grad():
    backend = torchair.get_npu_backend(compiler_config=config())
    got, wanted = torch.compile(model, backend=backend, fullgraph=True)(*x), model(*x)
torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2)
print("converted to CANN's FlashAttentionScore" + (", and run" if device.type == "npu" else ""))
if device.type == "npu":
    with tempfile.TemporaryDirectory() as folder:
        torchair.dynamo_export(*x, model=model, export_path=folder, export_name="attention")
        print("exported", *(path.name for path in Path(folder).iterdir()))
