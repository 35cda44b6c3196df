# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Train a lightning indexer on the attention it should predict, as DeepSeek-V3.2 was trained.

First over all keys (dense warm-up), then over the keys that the indexer itself selects, while the
layer learns through sparse attention.  Its recall of the attention's true top keys rises.  On a GPU
or an NPU the steps of a second are timed, beside those by plain PyTorch, which is the reference.
"""

from _options import plotted

if __name__ == "__main__":  # what is wrong is said before the imports, which take seconds
    plotted(__doc__)

import time

import torch
from _device import choose_device
from custom.dispatch.env import by_reference
from torch import nn

import custom

B, S, H, N, R, DR, Ni, Di, TOP = 2, 128, 64, 4, 64, 16, 4, 32, 16
STEPS, WARM_UP = 160, 100
SCALE = 4 * (R + DR) ** -0.5  # sharper than the usual one, so that a random layer has top keys


def rotated(x):
    """The last DR dimensions turned by their position; x is [B, S, heads, *]."""
    turns = torch.arange(S, device=x.device)[:, None] / 100 ** torch.linspace(0, 1, DR // 2).to(x)
    sin, cos = turns.sin()[:, None], turns.cos()[:, None]
    plain, left, right = x.split([x.shape[-1] - DR, DR // 2, DR // 2], -1)
    return torch.cat([plain, left * cos - right * sin, right * cos + left * sin], -1)


class Layer(nn.Module):
    """DeepSeek-V3.2's attention in its absorbed form, heads that share one latent key, and the
    indexer that selects for it.  Weights are float32, the ops' inputs have `dtype`."""

    def __init__(self, dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.query = nn.Linear(H, N * (R + DR), bias=False)
        self.key = nn.Linear(H, R + DR, bias=False)
        self.out = nn.Linear(N * R, H, bias=False)
        self.index_query = nn.Linear(H, Ni * Di, bias=False)
        self.index_key = nn.Linear(H, Di, bias=False)
        self.index_weights = nn.Linear(H, Ni, bias=False)

    def attention_inputs(self, x):
        """query, key, and their rotary parts."""
        query = rotated(self.query(x).unflatten(-1, (N, R + DR))).to(self.dtype)
        key = rotated(self.key(x).unsqueeze(2)).to(self.dtype)
        return query[..., :R], key[..., :R], query[..., R:], key[..., R:]

    def select(self, x, count):
        """Indices and differentiable scores of the keys that the indexer chooses."""
        x = x.detach()
        query = rotated(self.index_query(x).unflatten(-1, (Ni, Di))).to(self.dtype)
        key = rotated(self.index_key(x).unsqueeze(2)).to(self.dtype)
        weights = self.index_weights(x).to(self.dtype)
        return custom.npu_lightning_indexer(
            query, key, weights, sparse_count=count, return_value=True
        )

    def attend(self, query, key, query_rope, key_rope, indices):
        heads, _, _ = custom.npu_sparse_flash_attention(
            query, key, None, indices, SCALE, query_rope=query_rope, key_rope=key_rope
        )
        return self.out(heads.flatten(-2).float())


def true_top(query, key, query_rope, key_rope):
    """Bool [B, S, S]: the TOP keys with the largest attention, summed over heads."""
    query, key = torch.cat([query, query_rope], -1), torch.cat([key, key_rope], -1)
    causal = torch.ones(S, S, dtype=torch.bool, device=query.device).tril()
    logits = torch.einsum("bsnr,btr->bnst", query.float(), key[:, :, 0].float()) * SCALE
    share = logits.masked_fill(~causal, -torch.inf).softmax(-1).sum(1)
    top = share.topk(TOP, -1).indices
    return torch.zeros_like(share, dtype=torch.bool).scatter(-1, top, True) & causal


def recall(layer, x, inputs):
    """The share of the true top keys among those that the indexer chooses."""
    truth = true_top(*inputs)
    slots = layer.select(x, TOP)[0][:, :, 0].long()
    chosen = torch.zeros(B, S, S + 1, dtype=torch.bool, device=x.device)
    chosen = chosen.scatter(-1, slots.where(slots >= 0, S), True)[..., :S]
    return ((chosen & truth).sum() / truth.sum()).item()


def start(device, dtype):
    """The layer, its optimizer, its input and what it should answer."""
    torch.manual_seed(0)
    layer = Layer(dtype).to(device)
    slow = [*layer.query.parameters(), *layer.key.parameters()]
    fast = [p for p in layer.parameters() if all(p is not q for q in slow)]
    optimizer = torch.optim.Adam([{"params": slow, "lr": 1e-4}, {"params": fast, "lr": 3e-3}])
    return layer, optimizer, torch.randn(B, S, H).to(device), torch.randn(B, S, H).to(device) / 4


def advance(layer, optimizer, x, wanted, sparse):
    """One step; the loss of the indexer, and what attention is given."""
    inputs = layer.attention_inputs(x)
    query, key, query_rope, key_rope = (part.detach() for part in inputs)
    indices, score = layer.select(x, TOP if sparse else S)
    loss = custom.compute_index_loss_sparse(
        query.transpose(1, 2),
        key[:, :, 0],
        score[:, :, 0],
        indices[:, :, 0],
        SCALE,
        reduction="mean",
        query_rope=query_rope.transpose(1, 2),
        key_rope=key_rope[:, :, 0],
    )
    total = loss
    if sparse:  # the layer itself learns through the sparse attention
        total = loss + (layer.attend(*inputs, indices) - wanted).square().mean()
    optimizer.zero_grad()
    total.backward()
    optimizer.step()
    return loss, inputs


def train(device, dtype):
    """The loss and the recall of every step."""
    layer, optimizer, x, wanted = start(device, dtype)
    losses, recalls = [], []
    for step in range(STEPS):
        loss, inputs = advance(layer, optimizer, x, wanted, step >= WARM_UP)
        losses.append(loss.item())
        with torch.no_grad():
            recalls.append(recall(layer, x, inputs))
        if step % 20 == 0 or step == STEPS - 1:
            print(f"step {step:3d}  loss {losses[-1]:.4f}  recall {recalls[-1]:6.1%}", end="  ")
            print("#" * round(40 * recalls[-1]))
    return losses, recalls


def rate(device, dtype, sparse):
    """Steps in a second."""
    given = start(device, dtype)
    for _ in range(2):  # the first ones compile
        loss, _ = advance(*given, sparse)
    loss.item()  # waits for the device
    began = time.perf_counter()
    for _ in range(20):
        loss, _ = advance(*given, sparse)
    loss.item()
    return 20 / (time.perf_counter() - began)


def plot(path, losses, recalls, title):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    left.plot([100 * share for share in recalls])
    left.set_ylabel(f"recall of the attention's top {TOP} keys, %")
    left.set_ylim(0, 100)
    right.plot(losses)
    right.set_ylabel("KL loss of a row")
    right.set_yscale("log")
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.axvline(WARM_UP, color="grey", linestyle="dashed", label="sparse from here")
    left.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    options = plotted(__doc__)
    name = choose_device(options.device)
    dtype = torch.float32 if name == "cpu" else torch.bfloat16
    losses, recalls = train(name, dtype)
    for what, sparse in (("warm-up", False), ("sparse", True)) if name != "cpu" else ():
        ours = rate(name, dtype, sparse)
        with by_reference():
            plain = rate(name, dtype, sparse)
        print(f"{what}: {ours:.1f} steps a second, {plain:.1f} by plain PyTorch")
    if options.plot:
        plot(options.plot, losses, recalls, f"A lightning indexer learns its attention ({name})")
    assert recalls[-1] > recalls[0] + 0.2, "the indexer has not learned"


if __name__ == "__main__":
    main()
