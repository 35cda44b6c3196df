# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Train a lightning indexer on the attention it should predict, as DeepSeek-V3.2 was trained.

First over all keys (dense warm-up), then over the keys that the indexer itself selects, while the
layer learns through sparse attention.  Its recall of the attention's true top keys rises.
"""

import torch
from _device import device_and_dtype
from torch import nn

import custom

B, S, H, N, R, Ni, Di, TOP = 2, 128, 64, 4, 64, 4, 32, 16
STEPS, WARM_UP = 160, 100


class Layer(nn.Module):
    """Absorbed latent attention and its indexer, without the rotary parts."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(H, N * R, bias=False), nn.Linear(H, R, bias=False)
        self.index_query = nn.Linear(H, Ni * Di, bias=False)
        self.index_key = nn.Linear(H, Di, bias=False)
        self.index_weights = nn.Linear(H, Ni, bias=False)

    def attention_inputs(self, x):
        return self.query(x).unflatten(-1, (N, R)), self.key(x).unsqueeze(2)

    def select(self, x, count):
        """Indices and differentiable scores of the keys that the indexer chooses."""
        x = x.detach()
        query, key = self.index_query(x).unflatten(-1, (Ni, Di)), self.index_key(x).unsqueeze(2)
        return custom.npu_lightning_indexer(
            query, key, self.index_weights(x), sparse_count=count, return_value=True
        )


def true_top(query, key, scale):
    """Bool [B, S, S]: the TOP keys with the largest attention, summed over heads."""
    causal = torch.ones(S, S, dtype=torch.bool, device=query.device).tril()
    logits = torch.einsum("bsnr,btr->bnst", query.float(), key[:, :, 0].float()) * scale
    share = logits.masked_fill(~causal, -torch.inf).softmax(-1).sum(1)
    top = share.topk(TOP, -1).indices
    return torch.zeros_like(share, dtype=torch.bool).scatter(-1, top, True) & causal


def main() -> None:
    device, dtype = device_and_dtype(__doc__)
    torch.manual_seed(0)
    layer = Layer().to(device, dtype)
    x = torch.randn(B, S, H, device=device, dtype=dtype)
    wanted = torch.randn(B, S, N, R, device=device, dtype=dtype) / 4
    slow = [*layer.query.parameters(), *layer.key.parameters()]
    fast = [p for p in layer.parameters() if all(p is not q for q in slow)]
    optimizer = torch.optim.Adam([{"params": slow, "lr": 1e-4}, {"params": fast, "lr": 3e-3}])
    scale, recalls = 4 * R**-0.5, []
    for step in range(STEPS):
        query, key = layer.attention_inputs(x)
        indices, score = layer.select(x, S if step < WARM_UP else TOP)
        loss = custom.compute_index_loss_sparse(
            query.transpose(1, 2).detach(),
            key[:, :, 0].detach(),
            score[:, :, 0],
            indices[:, :, 0],
            scale,
            reduction="mean",
        )
        total = loss
        if step >= WARM_UP:  # the layer itself learns through the sparse attention
            out, _, _ = custom.npu_sparse_flash_attention(query, key, None, indices, scale)
            total = loss + (out - wanted).float().square().mean()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        with torch.no_grad():
            truth = true_top(query, key, scale)
            chosen, _ = layer.select(x, TOP)
            slots = chosen[:, :, 0].long()
            picked = torch.zeros(B, S, S + 1, dtype=torch.bool, device=device)
            picked = picked.scatter(-1, slots.where(slots >= 0, S), True)[..., :S]
            recalls.append(((picked & truth).sum() / truth.sum()).item())
        if step % 20 == 0 or step == STEPS - 1:
            print(f"step {step:3d}  loss {loss.item():.4f}  recall {recalls[-1]:6.1%}", end="  ")
            print("#" * round(40 * recalls[-1]))
    assert recalls[-1] > recalls[0] + 0.1, "the indexer has not learned"


if __name__ == "__main__":
    main()
