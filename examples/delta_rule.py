# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Gated delta rule: a prompt by chunks, then token by token from the state that it left."""

import torch
from _device import device_and_dtype

import custom

device, dtype = device_and_dtype(__doc__)
T, N, Nv, D = 100, 2, 4, 64
q, k = (torch.randn(1, T, N, D, device=device, dtype=dtype) for _ in range(2))
v = torch.randn(1, T, Nv, D, device=device, dtype=dtype)
a, b = (torch.randn(1, T, Nv, device=device, dtype=dtype) for _ in range(2))
A_log, dt_bias = torch.zeros(Nv, device=device), torch.zeros(Nv, device=device)

# all of it token by token, on slot 1 of a pool of states
pool = torch.zeros(4, Nv, D, D, device=device)
slot = torch.tensor([1], device=device)
gates = (A_log, a, dt_bias, 1.0, 20.0)
stepped = custom.npu_fused_sigmoid_gating_delta_rule_update(
    *gates, q, k, v, b, pool, slot, use_qk_l2norm_in_kernel=True, state_layout="vk"
)

# the same by chunks: the gates are computed outside, q and k normalised by the caller
q1, k1 = (torch.nn.functional.normalize(t[0].float(), dim=-1).to(dtype) for t in (q, k))
decay = -A_log.exp() * torch.nn.functional.softplus(a[0].float() + dt_bias)
chunked, state = custom.npu_chunk_gated_delta_rule(q1, k1, v[0], beta=b[0].sigmoid(), g=decay)
print(f"outputs differ by at most {(chunked - stepped[0]).abs().max():.1e}")
print(f"states differ by at most {(state[0] - pool[1]).abs().max():.1e}")
