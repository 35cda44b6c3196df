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


shapes = (H, Rq), (Rq, N * (Dn + Dr)), (H, R + Dr), (Rq, Ni * Di), (H, Di), (H, Ni)
w_dq, w_uq_qr, w_dkv_kr, w_idx_qb, w_idx_k, w_idx_proj = (custom.to_nz(new(*x)) for x in shapes)
w_uk = new(N, Dn, R)  # row-major
gamma_cq, gamma_ckv, in_gamma_k = (torch.ones(n, device=device, dtype=dtype) for n in (Rq, R, Di))
in_beta_k = torch.zeros(Di, device=device, dtype=dtype)
kv, kr, index_k = (new(8, P, 1, n) for n in (R, Dr, Di))
table, lengths = ints([[5, 2, -1], [0, 7, 3]]), ints([200, 300])  # the new tokens counted in
positions = lengths[:, None] - S + torch.arange(S, device=device)
slots = table.gather(1, (positions // P).long()) * P + positions % P

before = kv.clone()
out = custom.npu_sparse_attention_pto(
    new(B, S, H),
    w_dq,
    w_uq_qr,
    w_uk,
    w_dkv_kr,
    gamma_cq,
    gamma_ckv,
    new(B, S, Dr),
    new(B, S, Dr),
    slots.int(),
    kv,
    kr,
    table,
    lengths,
    w_idx_qb,
    w_idx_k,
    w_idx_proj,
    in_gamma_k,
    in_beta_k,
    index_k,
    sparse_count=64,
)
print("latent output", list(out.shape), "finite:", bool(out.isfinite().all()))
print("rows of the cache that changed:", (kv != before).flatten(0, 1).any(-1).sum().item())
