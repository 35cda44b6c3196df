# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The gated delta rule over whole sequences, token by token: the recurrence that the chunked form
of the other backends must equal.

A decay by channel is one of the rule's as well: g [T, HV] or [T, HV, K]."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...ops.delta_rule.chunk_gated_delta_rule import Arguments
from ..common.delta_rules import by_channel, rate, sequences, some_sequences, step, turns
from ..common.precision import accumulator


def forward(**a: Unpack[Arguments]) -> tuple[Tensor, Tensor]:
    key, value, scale = a["key"], a["value"], a["scale"]
    sigmoid = a["use_beta_sigmoid_in_kernel"]
    tokens, heads, key_size = key.shape
    value_heads, value_size = value.shape[1:]
    kind = accumulator(a["query"])
    starts, lengths = sequences(a["actual_seq_lengths"], tokens, key.device)
    if a["initial_state"] is None:
        shape = [len(lengths), value_heads, value_size, key_size]
        final = torch.zeros(shape, dtype=kind, device=key.device)
    else:
        final = a["initial_state"].clone()
    out = torch.zeros_like(value, memory_format=torch.contiguous_format)
    scale = key_size**-0.5 if scale is None else scale

    for some in some_sequences(len(lengths), value_heads * key_size * value_size):
        some = some.to(key.device)
        state = final[some].to(kind).mT
        for on, token in turns(starts[some], lengths[some]):
            q, k = (
                x[token].to(kind).repeat_interleave(value_heads // heads, 1)
                for x in (a["query"], key)
            )
            decay = (
                torch.ones_like(q[..., :1])
                if a["g"] is None
                else by_channel(a["g"])[token].to(kind).exp()
            )
            beta = (
                torch.ones_like(q[..., 0])
                if a["beta"] is None
                else rate(a["beta"][token].to(kind), sigmoid, a["allow_neg_eigval"])
            )
            after, o = step(state[on], q * scale, k, value[token].to(kind), decay, beta)
            out[token] = o.to(out.dtype)
            state = state.index_copy(0, on.nonzero()[:, 0], after)
        final[some] = state.mT.to(final.dtype)
    return out, final
