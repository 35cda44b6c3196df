# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""FlashAttention-2 with grouped queries and packed sequences, forward and backward."""

import torch
from _device import device_and_dtype

import custom

device, dtype = device_and_dtype(__doc__)
q = torch.randn(2, 8, 300, 64, device=device, dtype=dtype, requires_grad=True)
k = torch.randn(2, 2, 300, 64, device=device, dtype=dtype, requires_grad=True)
v = torch.randn(2, 2, 300, 64, device=device, dtype=dtype, requires_grad=True)
o, lse = custom.npu_fused_attention(q, k, v, causal=True, return_lse=True)
o.float().square().mean().backward()
assert k.grad is not None
print("o", list(o.shape), "lse", list(lse.shape), "grad of k", list(k.grad.shape))

# the same two sequences, packed: [T, N, D] with prefix sums of the lengths
q2, k2, v2 = (t.detach().transpose(1, 2).flatten(0, 1) for t in (q, k, v))
ends = torch.tensor([0, 300, 600], device=device, dtype=torch.int32)
flat = custom.npu_fused_attention(q2, k2, v2, causal=True, cu_seqlens_q=ends, cu_seqlens_k=ends)
difference = (flat.view(2, 300, 8, 64).transpose(1, 2) - o).abs().max()
print(f"largest difference of the packed call: {difference:.1e}")
