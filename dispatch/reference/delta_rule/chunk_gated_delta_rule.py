# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The gated delta rule over whole sequences, token by token: the recurrence that the chunked form
of the other backends must equal.

A decay by channel is one of the rule's as well: g [T, HV] or [T, HV, K]."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.delta_rules import by_channel, sequences, some_sequences, step
from ..common.precision import accumulator


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor | None,
    initial_state: Tensor | None,
    actual_seq_lengths: Tensor | None,
    scale: float | None,
    g: Tensor | None,
) -> tuple[Tensor, Tensor]:
    tokens, heads, key_size = key.shape
    value_heads, value_size = value.shape[1:]
    kind = accumulator(query)
    starts, lengths = sequences(actual_seq_lengths, tokens, key.device)
    if initial_state is None:
        shape = [len(lengths), value_heads, value_size, key_size]
        final = torch.zeros(shape, dtype=kind, device=key.device)
    else:
        final = initial_state.clone()
    out = torch.zeros_like(value, memory_format=torch.contiguous_format)
    scale = key_size**-0.5 if scale is None else scale

    for some in some_sequences(len(lengths), value_heads * key_size * value_size):
        some = some.to(key.device)
        state = final[some].to(kind).mT
        for t in range(int(lengths[some].max())):
            on = t < lengths[some]
            token = (starts[some] + t)[on]
            q, k = (
                x[token].to(kind).repeat_interleave(value_heads // heads, 1) for x in (query, key)
            )
            decay = (
                torch.ones_like(q[..., :1]) if g is None else by_channel(g)[token].to(kind).exp()
            )
            rate = torch.ones_like(q[..., 0]) if beta is None else beta[token].to(kind)
            after, o = step(state[on], q * scale, k, value[token].to(kind), decay, rate)
            out[token] = o.to(out.dtype)
            state = state.index_copy(0, on.nonzero()[:, 0], after)
        final[some] = state.mT.to(final.dtype)
    return out, final
