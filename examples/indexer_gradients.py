# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The indexer's KL loss and its gradients in one call, from the attention's own statistics."""

import torch
from _device import device_and_dtype

import custom

device, dtype = device_and_dtype(__doc__)
B, S, N, R, Ni, Di, K = 1, 64, 16, 128, 8, 64, 32
query, key = (torch.randn(B, S, n, R, device=device, dtype=dtype) for n in (N, 1))
query_index = torch.randn(B, S, Ni, Di, device=device, dtype=dtype)
key_index = torch.randn(B, S, 1, Di, device=device, dtype=dtype)
weights = torch.randn(B, S, Ni, device=device, dtype=dtype)

indices, _ = custom.npu_lightning_indexer(query_index, key_index, weights, sparse_count=K)
_, softmax_max, softmax_sum = custom.npu_sparse_flash_attention(
    query, key, None, indices, R**-0.5, return_softmax_lse=True
)
d_query, d_key, d_weights, loss = custom.npu_sparse_lightning_indexer_grad_kl_loss(
    query, key, query_index, key_index, weights, indices, softmax_max, softmax_sum, R**-0.5
)
print(f"loss {loss.item():.3f}, gradients {[list(g.shape) for g in (d_query, d_key, d_weights)]}")

# a small step against them lowers the loss (on the same selection)
query_index, key_index = query_index - 1e-2 * d_query, key_index - 1e-2 * d_key
weights = weights - 1e-2 * d_weights
after = custom.npu_sparse_lightning_indexer_grad_kl_loss(
    query, key, query_index, key_index, weights, indices, softmax_max, softmax_sum, R**-0.5
)[-1]
print(f"loss after a step {after.item():.3f}")
assert after < loss
