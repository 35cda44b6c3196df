# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Pick the positions that matter: the top 64 of 1000 cached keys, for each of 3 requests."""

import torch
from _device import device_and_dtype

import custom

device, dtype = device_and_dtype(__doc__)
B, S, N, D, P = 3, 1, 16, 128, 128
pages = 8
query = torch.randn(B, S, N, D, device=device, dtype=dtype)
weights = torch.rand(B, S, N, device=device, dtype=dtype)
cache = torch.randn(B * pages, P, 1, D, device=device, dtype=dtype)
block_table = torch.randperm(B * pages, device=device).view(B, pages).int()
lengths = torch.tensor([1000, 37, 0], device=device, dtype=torch.int32)

indices, values = custom.npu_lightning_indexer(
    query,
    cache,
    weights,
    actual_seq_lengths_key=lengths,
    block_table=block_table,
    layout_key="PA_BSND",
    sparse_count=64,
    return_value=True,
)
for request in range(B):
    found = int((indices[request] >= 0).sum())
    print(f"request of {int(lengths[request])} keys: {found} positions, ascending, then -1")
