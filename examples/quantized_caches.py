# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What caches of 8 bits cost in quality: a small DeepSeek-V3.2 layer learns text, then reads its
index keys and latents from caches in bf16, fp8 and int8.

Recall is the share of the positions selected from bf16 keys that are selected from the quantized
ones too; drift is the difference of the logits, relative to them.
"""

from _options import plotted

if __name__ == "__main__":  # what is wrong is said before the imports, which take seconds
    plotted(__doc__)

from pathlib import Path
from typing import Any

import torch
from _device import choose_device
from torch import nn
from torch.nn import functional as F

import custom

B, S, H, N, R, DR, Ni, Di, P = 2, 256, 128, 4, 512, 64, 8, 128, 64
STEPS, TOP, BATCHES = 60, 48, 8
SCALE = (R + DR) ** -0.5
TEXT = Path(__file__).with_name("public_domain.txt").read_bytes()
# name: kind of the index keys, transformed or not, kind of the latents
CACHES = {
    "fp8 keys": ("fp8", False, None),
    "fp8 keys, Hadamard": ("fp8", True, None),
    "int8 keys": ("int8", False, None),
    "int8 keys, Hadamard": ("int8", True, None),
    "fp8 latents": (None, False, "fp8"),
    "int8 latents": (None, False, "int8"),
    "all fp8": ("fp8", False, "fp8"),
    "all int8": ("int8", False, "int8"),
}


def rotated(x):
    """The last DR dimensions turned by their position; x is [B, S, heads, *]."""
    turns = torch.arange(S, device=x.device)[:, None] / 1000 ** torch.linspace(0, 1, DR // 2).to(x)
    sin, cos = turns.sin()[:, None], turns.cos()[:, None]
    plain, left, right = x.split([x.shape[-1] - DR, DR // 2, DR // 2], -1)
    return torch.cat([plain, left * cos - right * sin, right * cos + left * sin], -1)


class Model(nn.Module):
    """One layer over bytes: DeepSeek-V3.2's attention in its absorbed form and its indexer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, H)
        self.before = nn.RMSNorm(H)
        self.query = nn.Linear(H, N * (R + DR), bias=False)
        self.latent = nn.Linear(H, R, bias=False)
        self.latent_norm = nn.RMSNorm(R)
        self.rope = nn.Linear(H, DR, bias=False)
        self.out = nn.Linear(N * R, H, bias=False)
        self.index_query = nn.Linear(H, Ni * Di, bias=False)
        self.index_key = nn.Linear(H, Di, bias=False)
        self.index_norm = nn.LayerNorm(Di)
        self.index_weights = nn.Linear(H, Ni, bias=False)
        self.mlp = nn.Sequential(nn.RMSNorm(H), nn.Linear(H, 4 * H), nn.SiLU(), nn.Linear(4 * H, H))
        self.head = nn.Sequential(nn.RMSNorm(H), nn.Linear(H, 256, bias=False))

    def attention_inputs(self, x):
        """query [B, S, N, R + DR], latent [B, S, R], its rotary part [B, S, DR]."""
        query = rotated(self.query(x).unflatten(-1, (N, R + DR)))
        rope = rotated(self.rope(x).unsqueeze(2)).squeeze(2)
        return query, self.latent_norm(self.latent(x)), rope

    def index_inputs(self, x):
        query = rotated(self.index_query(x).unflatten(-1, (Ni, Di)))
        key = rotated(self.index_norm(self.index_key(x)).unsqueeze(2)).squeeze(2)
        return query, key, self.index_weights(x) * (Ni * Di) ** -0.5

    def logits(self, hidden, attended):
        hidden = hidden + self.out(attended.flatten(-2).float())
        return self.head(hidden + self.mlp(hidden))

    def loss(self, tokens):
        """Of the next byte, with attention over all keys, and of the indexer, which learns where
        the attention looks."""
        hidden = self.embed(tokens[:, :-1])
        x = self.before(hidden)
        query, latent, rope = self.attention_inputs(x)
        causal = torch.ones(S, S, dtype=torch.bool, device=x.device).tril()
        z = torch.einsum("bsnr,btr->bnst", query, torch.cat([latent, rope], -1)) * SCALE
        p = z.masked_fill(~causal, -torch.inf).softmax(-1)
        logits = self.logits(hidden, torch.einsum("bnst,btr->bsnr", p, latent))
        iq, ik, weights = self.index_inputs(x.detach())
        score = torch.einsum(
            "bsh,bsht->bst", weights, torch.einsum("bshd,btd->bsht", iq, ik).relu()
        )
        guess = score.masked_fill(~causal, -1e9).log_softmax(-1)
        learned = -(p.mean(1).detach() * guess).sum(-1).mean()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), learned


def batch(device):
    """Pieces of the text, [B, S + 1]."""
    starts = torch.randint(len(TEXT) - S - 1, (B,)).tolist()
    pieces = [torch.frombuffer(bytearray(TEXT[i : i + S + 1]), dtype=torch.uint8) for i in starts]
    return torch.stack(pieces).long().to(device)


def trained(device):
    torch.manual_seed(0)
    model = Model().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        text, index = model.loss(batch(device))
        optimizer.zero_grad()
        (text + index).backward()
        optimizer.step()
        if step % 20 == 0 or step == STEPS - 1:
            print(f"step {step:3d}  loss {text.item():.2f}, of the indexer {index.item():.2f}")
    return model.eval()


def pages(x):
    """Request by request into pages of P: [B * S / P, P, 1, D]."""
    return x.reshape(B * S // P, P, 1, x.shape[-1]).contiguous()


def selection(query, key, weights, paged, kind, hadamard):
    """Positions [B, S, 1, TOP] from a cache of bf16, or of 8 bits as its writer leaves it."""
    if kind is None:
        return custom.npu_lightning_indexer(
            query,
            pages(key),
            weights.to(query.dtype),
            actual_seq_lengths_key=paged["lengths"],
            block_table=paged["table"],
            layout_key="PA_BSND",
            sparse_count=TOP,
        )[0]
    if kind == "fp8":
        packed = torch.zeros(B * S // P, P, 132, dtype=torch.uint8, device=key.device)
        values, scales = custom.index_cache_views(packed, "fp8")
    else:
        values = torch.zeros(B * S // P, P, 1, Di, dtype=torch.int8, device=key.device)
        scales = torch.zeros(B * S // P, P, 1, dtype=torch.float16, device=key.device)
    slots = torch.arange(B * S, device=key.device)
    custom.npu_index_cache_write(
        key.flatten(0, 1), values, scales, slots, kind=kind, index_hadamard=hadamard
    )
    query, weights, scale = custom.quantize_index_query(
        query, weights, kind=kind, index_hadamard=hadamard
    )
    return custom.npu_quant_lightning_indexer(
        query,
        values,
        weights,
        scale,
        scales,
        0,
        0,
        actual_seq_lengths_key=paged["lengths"],
        block_table=paged["table"],
        layout_key="PA_BSND",
        sparse_count=TOP,
    )


def attention(query, latent, rope, indices, paged, kind):
    common: dict[str, Any] = dict(
        block_table=paged["table"],
        actual_seq_lengths_kv=paged["lengths"],
        layout_kv="PA_BSND",
        attention_mode=2,
    )
    if kind is None:
        return custom.npu_sparse_flash_attention(
            query[..., :R],
            pages(latent),
            None,
            indices,
            SCALE,
            query_rope=query[..., R:],
            key_rope=pages(rope),
            **common,
        )[0]
    row_layout = "nope_scale_rope" if kind == "fp8" else "nope_rope_scale"
    dtype = torch.float8_e4m3fn if kind == "fp8" else torch.int8
    rows = torch.zeros(B * S // P, P, 1, 656, dtype=torch.uint8, device=latent.device)
    slots = torch.arange(B * S, device=latent.device)
    custom.npu_latent_cache_write(
        latent.flatten(0, 1), rope.flatten(0, 1), rows, slots, kind=kind, row_layout=row_layout
    )
    rows = rows.view(dtype)
    return custom.npu_kv_quant_sparse_flash_attention(
        query, rows, rows, indices, SCALE, 2, 2, row_layout=row_layout, **common
    )


@torch.no_grad()
def compared(model, device):
    """name -> (recall, drift) over one batch of text."""
    hidden = model.embed(batch(device)[:, :-1])
    x = model.before(hidden)
    query, latent, rope = (part.bfloat16() for part in model.attention_inputs(x))
    iq, ik, weights = (part.bfloat16() for part in model.index_inputs(x))
    count = torch.arange(B * S // P, dtype=torch.int32, device=device)
    lengths = torch.full((B,), S, dtype=torch.int32, device=device)
    paged = dict(table=count.view(B, -1), lengths=lengths)

    def run(index_kind, hadamard, kind):
        indices = selection(iq, ik, weights, paged, index_kind, hadamard)
        attended = attention(query, latent, rope, indices, paged, kind)
        chosen = torch.zeros(B, S, S + 1, dtype=torch.bool, device=device)
        slots = indices[:, :, 0].long()
        chosen = chosen.scatter(-1, slots.where(slots >= 0, S), True)[..., :S]
        return chosen[:, TOP:], model.logits(hidden, attended)[:, TOP:]  # behind: a real choice

    selected, logits = run(None, False, None)
    found = {}
    for name, cache in CACHES.items():
        chosen, other = run(*cache)
        recall = (chosen & selected).sum() / selected.sum()
        found[name] = recall.item(), ((other - logits).norm() / logits.norm()).item()
    return found


def plot(path, found, title):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained", sharey=True)
    names = list(found)[::-1]
    left.barh(names, [100 * (1 - found[name][0]) for name in names])
    left.set_xlabel("positions missed of those bf16 keys select, %")
    right.barh(names, [100 * found[name][1] for name in names])
    right.set_xlabel("drift of the logits, %")
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    options = plotted(__doc__)
    device = choose_device(options.device)
    model = trained(device)
    each = [compared(model, device) for _ in range(BATCHES)]
    found = {
        name: tuple(sum(one[name][i] for one in each) / BATCHES for i in range(2))
        for name in CACHES
    }
    print(f"\n{'cache':<22}{'recall':>8}{'drift':>8}")
    for name, (recall, drift) in found.items():
        print(f"{name:<22}{recall:8.1%}{drift:8.2%}")
    if options.plot:
        plot(options.plot, found, f"Caches of 8 bits against bf16 ones, top {TOP} of {S} keys")
    assert all(recall > 0.9 and drift < 0.1 for recall, drift in found.values())


if __name__ == "__main__":
    main()
