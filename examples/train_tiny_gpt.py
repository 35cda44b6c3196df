# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Train a tiny GPT for a few steps with our fused attention and with torch's: equal losses."""

import torch
from _device import device_and_dtype
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import custom

TEXT = "the quick brown fox jumps over the lazy dog and the dog does not mind at all. " * 8


class Block(nn.Module):
    def __init__(self, width: int, heads: int, attend) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def losses(attend, device, dtype, steps=20, width=64):
    torch.manual_seed(0)
    embed, head = nn.Embedding(128, width), nn.Linear(width, 128)
    model = nn.Sequential(embed, *(Block(width, 4, attend) for _ in range(2)), head)
    model.to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor([ord(c) for c in TEXT], device=device)
    rows = text.unfold(0, 97, 32)
    history = []
    for _ in range(steps):
        loss = cross_entropy(model(rows[:, :-1]).flatten(0, 1).float(), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    return torch.tensor(history)


device, dtype = device_and_dtype(__doc__)
ours = losses(lambda q, k, v: custom.npu_fused_attention(q, k, v, causal=True), device, dtype)
theirs = losses(
    lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True), device, dtype
)
for step in range(0, 20, 5):
    print(f"step {step:2d}  ours {ours[step]:.5f}  torch {theirs[step]:.5f}")
difference = ((ours - theirs).abs() / theirs).max().item()
bound = 20 * torch.finfo(dtype).eps  # one rounding a step
print(f"largest relative difference {difference:.1e}, bound {bound:.1e}")
assert difference < bound
