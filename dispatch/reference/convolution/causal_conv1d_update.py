# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A few tokens of a causal convolution, behind what a pool of states has of their sequences.

A row of the pool holds in its last W - 1 columns what came before, and the tokens push it on.  With
counts of accepted tokens it holds from its first column on the W - 2 tokens before the last call
and all tokens of that call: of these a are accepted, and the last W - 1 up to there come before.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...ops.convolution.causal_conv1d_update import Arguments
from ..common.convolution import Table, Tokens, activated, convolved, taps
from ..common.precision import accumulator


def forward(**a: Unpack[Arguments]) -> Tensor:
    x, conv_states = a["x"], a["conv_states"]
    intermediate_conv_window = a["intermediate_conv_window"]
    width, kind = a["weight"].shape[0], accumulator(x)
    slots, columns = conv_states.shape[:2]
    tokens = Tokens.of(x, a["query_start_loc"])
    slot = torch.arange(tokens.start.shape[0], device=x.device)
    if a["conv_state_indices"] is not None:
        slot = a["conv_state_indices"].long()
    live = (slot >= 0) & (slot < slots) & (slot != a["pad_slot_id"])
    # the columns that count, and where the first token goes
    reach = torch.full_like(slot, columns)
    first = columns - tokens.length
    if a["num_accepted_tokens"] is not None:
        accepted = a["num_accepted_tokens"].long().clamp(1, columns - width + 2)
        reach, first = accepted + width - 2, torch.full_like(slot, width - 2)
    # history [N, L, D], moved so that what counts stands at its end
    column = torch.arange(columns, device=x.device) + reach[:, None] - columns
    there = live[:, None] & (column >= 0)
    table_slots = torch.cat(
        [conv_states.reshape(-1, x.shape[-1]), x.new_zeros(1, x.shape[-1]).to(conv_states.dtype)]
    )
    at = torch.where(there, slot[:, None] * columns + column, slots * columns)
    table = Table.of(x, table_slots[at], kind)
    rows = taps(tokens, table, width, a["retrieve_parent_token"])
    out = activated(convolved(table, rows, a["weight"], a["bias"]), a["activation"])
    out = out.masked_fill(~tokens.there[:, None], 0).to(x.dtype).reshape(x.shape)

    if intermediate_conv_window is not None and a["intermediate_state_indices"] is not None:
        row = torch.cat([a["intermediate_state_indices"].long(), slot.new_full([1], -1)])
        row, steps = row[tokens.sequence], intermediate_conv_window.shape[1]
        kept = tokens.there & (row >= 0) & (row < intermediate_conv_window.shape[0])
        kept &= tokens.position < steps
        for back in range(width - 1):
            values = table.rows[rows[back][kept]].to(intermediate_conv_window.dtype)
            intermediate_conv_window[row[kept], tokens.position[kept], width - 2 - back] = values
    if not a["disable_state_update"]:
        # column c of the new row is position c - first
        position = torch.arange(columns, device=x.device) - first[:, None]
        kept = (live & (tokens.length > 0))[:, None]
        kept = kept & (position >= -reach[:, None]) & (position < tokens.length[:, None])
        sequence = torch.arange(slot.shape[0], device=x.device)[:, None]
        source = table.at(sequence, position, tokens.start[:, None])[kept]
        target = (
            slot[:, None].expand_as(kept)[kept],
            torch.arange(columns, device=x.device).expand_as(kept)[kept],
        )
        conv_states[target] = table.rows[source].to(conv_states.dtype)
    return out
