# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Attend to selected positions only, and merge two halves of them by their softmax statistics."""

import torch
from _device import device_and_dtype

import custom

device, dtype = device_and_dtype(__doc__)
B, S, N, R, Dr, S2, K = 2, 4, 16, 512, 64, 600, 256
query = torch.randn(B, S, N, R, device=device, dtype=dtype)
query_rope = torch.randn(B, S, N, Dr, device=device, dtype=dtype)
key = torch.randn(B, S2, 1, R, device=device, dtype=dtype)
key_rope = torch.randn(B, S2, 1, Dr, device=device, dtype=dtype)
indices = torch.stack([torch.randperm(S2 - S, device=device)[:K] for _ in range(B * S)])
indices = indices.view(B, S, 1, K).int()


def attend(chosen):
    return custom.npu_sparse_flash_attention(
        query,
        key,
        None,
        chosen,
        (R + Dr) ** -0.5,
        query_rope=query_rope,
        key_rope=key_rope,
        return_softmax_lse=True,
    )


whole, _, _ = attend(indices)
(o1, m1, s1), (o2, m2, s2) = (attend(half.contiguous()) for half in indices.chunk(2, -1))
m = torch.maximum(m1, m2)
w1, w2 = (s * (part - m).exp() for part, s in ((m1, s1), (m2, s2)))
share = (w1 / (w1 + w2))[:, 0, :, :, None]
merged = share * o1.float() + (1 - share) * o2.float()
print(f"largest difference: {(merged - whole.float()).abs().max():.1e}")
