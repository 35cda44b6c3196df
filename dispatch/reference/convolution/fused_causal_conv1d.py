# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A causal convolution that continues the sequences of a pool of states, and updates the pool.

The first `reach` columns of a row of the pool count: all, or W - 2 and one for every accepted
token, or W - 1 zeros where a sequence is new.  They and the tokens, moved to the row's end, are the
new row; what they do not fill stays.  With blocks the state at the end of every block that the
tokens complete goes to that block's row as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...ops.convolution.fused_causal_conv1d import Arguments
from ..common.convolution import Table, Tokens, activated, convolved, taps
from ..common.precision import accumulator


def forward(**a: Unpack[Arguments]) -> Tensor:
    x, conv_states, num_computed_tokens = a["x"], a["conv_states"], a["num_computed_tokens"]
    block_idx_last_scheduled_token = a["block_idx_last_scheduled_token"]
    width, kind = a["weight"].shape[0], accumulator(x)
    slots, columns = conv_states.shape[:2]
    tokens = Tokens.of(x, None if x.ndim == 3 else a["query_start_loc"])
    number = torch.arange(tokens.start.shape[0], device=x.device)
    lines = number[:, None] if a["cache_indices"] is None else a["cache_indices"].long()
    lines = lines[:, None] if lines.ndim == 1 else lines

    def by_sequence(x: Tensor, like: Tensor) -> Tensor:
        """[N] beside [N, ...]."""
        return x[(...,) + (None,) * (like.ndim - 1)]

    def line(block: Tensor | None) -> Tensor:
        """The row of the pool of a sequence's `block` [N, ...]; -1 where there is none."""
        at = torch.zeros_like(number) if block is None else block.long()
        inside = (at >= 0) & (at < lines.shape[1])
        padded = torch.nn.functional.pad(lines, (0, 1), value=-1)
        found = padded[by_sequence(number, at), at.where(inside, lines.shape[1])]
        return found.where((found != a["pad_slot_id"]) & (found < slots), -1)

    read = line(a["initial_state_idx"])
    reach = torch.full_like(number, columns)
    if a["num_accepted_tokens"] is not None:
        reach = a["num_accepted_tokens"].long().clamp(1, columns - width + 2) + width - 2
    live = read >= 0
    if num_computed_tokens is not None:
        new = num_computed_tokens == 0
        live, reach = live & ~new, reach.masked_fill(new, width - 1)

    # history [N, L, D], moved so that what counts stands at its end
    column = torch.arange(columns, device=x.device)
    shifted = column + reach[:, None] - columns
    padding = x.new_zeros(1, x.shape[-1]).to(conv_states.dtype)
    states = torch.cat([conv_states.reshape(-1, x.shape[-1]), padding])
    there = live[:, None] & (shifted >= 0)
    at = torch.where(there, read[:, None] * columns + shifted, slots * columns)
    table = Table.of(x, states[at], kind)
    silu = None if a["activation"] == "None" else a["activation"]
    out = activated(convolved(table, taps(tokens, table, width), a["weight"], a["bias"]), silu)
    if a["conv_mode"] == "pangu" and num_computed_tokens is not None:
        fewest = torch.cat([width - 1 - num_computed_tokens.long(), number.new_zeros(1)])
        out = out.masked_fill((tokens.position < fewest[tokens.sequence])[:, None], 0)
    if a["residual_connection"]:
        out = out + x.reshape(out.shape).to(kind)
    out = out.masked_fill(~tokens.there[:, None], 0).to(x.dtype).reshape(x.shape)

    def store(row: Tensor, position: Tensor, to: Tensor, stored: Tensor) -> None:
        """What stands at `position` [N, ...] of every sequence, into column `to` of `row`."""
        sequence, start = (by_sequence(y, position) for y in (number, tokens.start))
        source = table.at(sequence, position, start)[stored]
        target = row.expand_as(stored)[stored], to.expand_as(stored)[stored]
        conv_states[target] = table.rows[source].to(conv_states.dtype)

    some = tokens.length > 0
    write = line(block_idx_last_scheduled_token)
    position = column - (columns - tokens.length)[:, None]
    fits = (position >= -reach[:, None]) & ((write >= 0) & some)[:, None]
    store(write[:, None], position, column, fits)
    if (
        num_computed_tokens is not None
        and a["block_idx_first_scheduled_token"] is not None
        and block_idx_last_scheduled_token is not None
    ):
        size = 128 if a["block_size"] is None else a["block_size"]
        first, last = (
            a["block_idx_first_scheduled_token"].long(),
            block_idx_last_scheduled_token.long(),
        )
        count, chunk = (last - first)[:, None], torch.arange(lines.shape[1], device=x.device)
        # tokens behind the last end of a block, and what stands there
        rest = (tokens.length + num_computed_tokens.long()) % size
        end = tokens.length - torch.where(rest == 0, size, rest)
        boundary = end[:, None] - (count - chunk - 1) * size
        row = line(first[:, None] + chunk)
        fits = (chunk < count) & (boundary >= 0) & (row >= 0) & some[:, None]
        back = torch.arange(1 - width, 0, device=x.device)
        store(
            row[..., None],
            boundary[..., None] + back,
            columns + back,
            fits[..., None].expand(*fits.shape, width - 1),
        )
    return out


def in_place(x: Tensor, **others: Any) -> None:
    """npu_fused_causal_conv1d_v2"""
    x.copy_(forward(x=x, **others))
