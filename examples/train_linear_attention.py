# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Train a tiny model with a KDA and a gated-delta layer on text, then let it write token by token
from their states: what it writes is what the whole sequence says."""

from pathlib import Path

import torch
from _device import device_and_dtype, print_backends
from torch import nn
from torch.nn.functional import cross_entropy, normalize, softplus

import custom

TEXT = Path(__file__).with_name("public_domain.txt").read_bytes()[:4096]
WIDTH, HEADS, D, TAPS = 64, 2, 32, 4


class LinearAttention(nn.Module):
    """Convolution, delta rule, gated norm; `kda`: a decay for each channel, else one a head."""

    def __init__(self, kda: bool) -> None:
        super().__init__()
        self.kda, gates = kda, HEADS * D if kda else HEADS
        self.before, self.norm = nn.RMSNorm(WIDTH), nn.Parameter(torch.ones(D))
        self.qkv, self.z = (nn.Linear(WIDTH, n * HEADS * D, bias=False) for n in (3, 1))
        self.taps = nn.Parameter(torch.randn(TAPS, 3 * HEADS * D) / TAPS)
        self.a, self.b = (nn.Linear(WIDTH, n, bias=False) for n in (gates, HEADS))
        self.A_log = nn.Parameter(torch.zeros(HEADS))
        self.dt_bias = nn.Parameter(torch.zeros(gates))
        self.out = nn.Linear(HEADS * D, WIDTH, bias=False)

    def forward(self, x, states=None):
        """[B, S, WIDTH] of whole sequences, or of one token more behind `states` (in place)."""
        y = self.before(x)
        mix = self.whole if states is None else self.step
        o, states = mix(self.qkv(y), self.a(y), self.b(y), states)
        o = custom.npu_gated_rms_norm(o, self.z(y).unflatten(-1, (HEADS, D)), self.norm)
        return x + self.out(o.flatten(2)), states

    def whole(self, qkv, a, b, _):
        qkv, columns = custom.npu_causal_conv1d(qkv, self.taps, activation="silu")
        q, k, v = qkv.unflatten(-1, (3, HEADS, D)).unbind(2)
        if self.kda:
            g = a.unflatten(-1, (HEADS, D))
            o, state = custom.npu_chunk_kda(
                *(q, k, v, g, b.sigmoid()),
                use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True,
                A_log=self.A_log.float(),
                dt_bias=self.dt_bias.float(),
            )
            return o, (columns, state)
        # packed: B sequences of S tokens
        q, k = (normalize(t.float(), dim=-1).to(v.dtype).flatten(0, 1) for t in (q, k))
        g = -self.A_log.float().exp() * softplus(a.float() + self.dt_bias.float())
        o, state = custom.npu_chunk_gated_delta_rule(
            q,
            k,
            v.flatten(0, 1),
            beta=b.sigmoid().flatten(0, 1),
            g=g.flatten(0, 1),
            actual_seq_lengths=torch.full((len(v),), v.shape[1], device=v.device),
        )
        return o.view_as(v), (columns, state)

    def step(self, qkv, a, b, states):
        columns, state = states
        qkv = custom.npu_causal_conv1d_update(qkv, columns, self.taps, activation="silu")
        q, k, v = qkv.unflatten(-1, (3, HEADS, D)).unbind(2)
        gates = self.A_log.float(), a, self.dt_bias.float(), 1.0, 20.0
        slots = torch.arange(len(state), device=state.device)
        o = custom.npu_fused_sigmoid_gating_delta_rule_update(
            *(*gates, q, k, v, b, state, slots),
            use_qk_l2norm_in_kernel=True,
            is_kda=self.kda,
            state_layout="kv" if self.kda else "vk",
        )
        return o, states


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256)
        self.layers = nn.ModuleList(LinearAttention(kda) for kda in (True, False))

    def forward(self, tokens, states=None):
        x, after = self.embed(tokens), []
        for layer, before in zip(self.layers, states or [None, None], strict=True):
            x, state = layer(x, before)
            after.append(state)
        return self.head(x).float(), after


device, dtype = device_and_dtype(__doc__)
torch.manual_seed(0)
model = Model().to(device, dtype)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
rows = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long().to(device).unfold(0, 129, 128)
history = []
for step in range(60):
    part = rows[step % 4 :: 4]
    loss = cross_entropy(model(part[:, :-1])[0].flatten(0, 1), part[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
    if step % 10 == 0:
        print(f"step {step:2d}  loss {loss:.3f}")
assert history[-1] < history[0] / 2

with torch.no_grad():
    text = rows[:3, :40]
    logits, states = model(text)
    for _ in range(40):
        text = torch.cat([text, logits[:, -1:].argmax(-1)], 1)
        logits, states = model(text[:, -1:], states)
    print(bytes(text[0].tolist()).decode(errors="replace"))
    # the same tokens by the whole sequence: each is the best one, but for rounding
    whole = model(text[:, :-1])[0][:, 39:]
    best, written = whole.amax(-1), whole.gather(-1, text[:, 40:, None])[..., 0]
    behind = ((best - written) / (torch.finfo(dtype).eps * whole.abs().amax(-1))).max().item()
    print(f"a token that was written lies at most {behind:.1f} roundings behind the best")
    assert behind <= 16  # two layers of some two dozen roundings each, whose variances add up
print_backends()
