# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The two prologs apart: queries out, the new tokens' keys into paged caches."""

import torch
from _device import device_and_dtype

import custom

device, dtype = device_and_dtype(__doc__)
B, S, H, Rq, N, Dn, R, Dr, Ni, Di, P = 2, 1, 256, 128, 8, 64, 128, 32, 16, 64, 16


def new(*shape):
    return torch.randn(*shape, device=device, dtype=dtype) / shape[0] ** 0.5


def nz(*shape):
    return custom.to_nz(new(*shape))


x, sin, cos = new(B, S, H), new(B, S, Dr), new(B, S, Dr)
kv, kr, index_k = (torch.zeros(8, P, 1, n, device=device, dtype=dtype) for n in (R, Dr, Di))
slots = torch.tensor([[5], [-1]], device=device)  # the second request is padding: nothing written
ones, zeros = (
    torch.ones(Di, device=device, dtype=dtype),
    torch.zeros(Di, device=device, dtype=dtype),
)

query, query_rope, query_norm = custom.npu_mla_prolog_pto(
    x,
    nz(H, Rq),
    nz(Rq, N * (Dn + Dr)),
    new(N, Dn, R),
    nz(H, R + Dr),
    new(Rq),
    new(R),
    sin,
    cos,
    kv,
    kr,
    slots,
)
query_index, weights = custom.npu_indexer_prolog_pto(
    x, query_norm, nz(Rq, Ni * Di), nz(H, Di), nz(H, Ni), ones, zeros, sin, cos, index_k, slots
)
print("query", list(query.shape), "index query", list(query_index.shape))
print("rows written to the latent cache:", kv.flatten(0, 1).any(-1).nonzero()[:, 0].tolist())
