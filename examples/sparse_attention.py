# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The whole sparse-attention layer in one call: two requests, two tokens each, paged caches."""

import torch
from _device import device_and_dtype

import custom

device, dtype = device_and_dtype(__doc__)
B, S, H, Rq, N, Dn, R, Dr, Ni, Di, P = 2, 2, 256, 128, 16, 64, 512, 64, 16, 128, 128


def new(*shape):
    return torch.randn(*shape, device=device, dtype=dtype) / shape[0] ** 0.5


def ints(values):
    return torch.tensor(values, device=device, dtype=torch.int32)


weights = [new(H, Rq), new(Rq, N * (Dn + Dr)), new(N, Dn, R), new(H, R + Dr)]
weights = [custom.to_nz(w) if w.dim() == 2 else w for w in weights]  # w_uk stays row-major
norms = [torch.ones(n, device=device, dtype=dtype) for n in (Rq, R)]
index = [custom.to_nz(w) for w in (new(Rq, Ni * Di), new(H, Di), new(H, Ni))]
kv, kr, index_k = (new(8, P, 1, n) for n in (R, Dr, Di))
table, lengths = ints([[5, 2, -1], [0, 7, 3]]), ints([200, 300])  # the new tokens counted in
positions = lengths[:, None] - S + torch.arange(S, device=device)
slots = table.gather(1, (positions // P).long()) * P + positions % P

before = kv.clone()
out = custom.npu_sparse_attention_pto(
    new(B, S, H), *weights, *norms, new(B, S, Dr), new(B, S, Dr), slots.int(), kv, kr,
    table, lengths, *index, *(t(Di, device=device, dtype=dtype) for t in (torch.ones, torch.zeros)),
    index_k, sparse_count=64,
)  # fmt: skip
print("latent output", list(out.shape), "finite:", bool(out.isfinite().all()))
print("rows of the cache that changed:", (kv != before).flatten(0, 1).any(-1).sum().item())
