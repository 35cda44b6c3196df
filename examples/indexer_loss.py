# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Train an indexer's scores towards an attention: the KL loss falls."""

import torch
from _device import device_and_dtype

import custom

device, dtype = device_and_dtype(__doc__)
B, N, S, D, K = 1, 8, 64, 64, 32
query = torch.randn(B, N, S, D, device=device, dtype=dtype)
key = torch.randn(B, S, D, device=device, dtype=dtype)
indices = torch.arange(K, device=device).expand(B, S, K)  # row i uses positions up to i
score = torch.zeros(B, S, K, device=device, requires_grad=True)
optimizer = torch.optim.Adam([score], lr=0.1)
losses: list[float] = []
for step in range(50):
    loss = custom.compute_index_loss_sparse(query, key, score, indices, D**-0.5, reduction="mean")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(f"step {step:2d}  loss {losses[-1]:.4f}")
print(f"at the end  {losses[-1]:.4f}")
