# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A few tokens of the gated delta rule on a pool of states, with a slot for each token's.

A sequence goes on from the state after the last of its tokens that the call before kept, which is
in the slot of that token, counted in this call's; and leaves the state after token t in slot t.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...common import gated_delta
from ...ops.delta_rule.recurrent_gated_delta_rule import Arguments
from ..common.delta_rules import by_channel, sequences, some_sequences, step, turns
from ..common.precision import accumulator


def forward(**a: Unpack[Arguments]) -> Tensor:
    key, value, state, scale = a["key"], a["value"], a["state"], a["scale"]
    state_indices = a["ssm_state_indices"]
    assert state_indices is not None  # the check said so
    tokens, heads, key_size = key.shape
    value_heads, value_size = value.shape[1:]
    slots, kind = state.shape[0], accumulator(a["query"])
    starts, lengths = sequences(a["actual_seq_lengths"], tokens, key.device)
    kept = (
        torch.ones_like(lengths)
        if a["num_accepted_tokens"] is None
        else a["num_accepted_tokens"].long()
    )
    # a sequence without tokens may stand behind all of them: it has no slot
    last = starts + torch.minimum(kept, lengths).clamp(min=1) - 1
    indices = torch.cat([state_indices.long(), state_indices.new_full([1], -1).long()])
    out = torch.zeros_like(value, memory_format=torch.contiguous_format)
    scale = key_size**-0.5 if scale is None else scale
    logarithm = gated_delta.log_decay(a["g"], a["gk"])

    for some in some_sequences(len(lengths), value_heads * key_size * value_size):
        some = some.to(key.device)
        now = _at(state, indices[last[some]], kind)
        for on, token in turns(starts[some], lengths[some]):
            q, k = (
                x[token].to(kind).repeat_interleave(value_heads // heads, 1)
                for x in (a["query"], key)
            )
            decay = torch.ones_like(q[..., :1])
            if logarithm is not None:
                decay = by_channel(logarithm)[token].to(kind).exp()
            rate = torch.ones_like(q[..., 0]) if a["beta"] is None else a["beta"][token].to(kind)
            after, o = step(now[on].mT, q * scale, k, value[token].to(kind), decay, rate)
            out[token] = o.to(out.dtype)
            now = now.index_copy(0, on.nonzero()[:, 0], after.mT)
            slot = indices[token]
            there = (slot >= 0) & (slot < slots)
            state[slot[there]] = after.mT[there].to(state.dtype)
    return out


def _at(state: Tensor, slot: Tensor, kind: torch.dtype) -> Tensor:
    """The states in these slots; zeros where there is none."""
    found = torch.zeros([len(slot), *state.shape[1:]], dtype=kind, device=state.device)
    there = (slot >= 0) & (slot < state.shape[0])
    found[there] = state[slot[there]].to(kind)
    return found
