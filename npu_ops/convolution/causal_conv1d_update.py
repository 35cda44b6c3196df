# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A few tokens of a causal convolution on a pool of states, on the vector cores.

A core takes CHANNEL_TILE channels of a sequence, all of its tokens.  Every number has a position:
that of a token from 0 on, or a negative one, which the row of the pool holds in column reach +
position.  The row is pushed on column by column from the first, each from one behind it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import memory
from ...dispatch.ops.convolution.causal_conv1d_update import Arguments
from ..common import cores, entry, tune
from ..common.lengths import latest, left
from .causal_conv1d import sigmoid, tap

_KERNEL = "causal_conv1d_update.update"


@triton.jit
def value_at(of_x, of_row, position, reach, d, count, x_row, s_column):
    """What stands at a position, float32; zeros before everything.  `reach` is 0 for no row."""
    now = d < tl.where(position >= 0, count, 0)
    at = tl.maximum(position, 0) * x_row
    x = tl.load(of_x + at + d, mask=now, other=0.0).to(tl.float32)
    past = d < tl.where((position < 0) & (position >= -reach), count, 0)
    at = tl.maximum(reach + position, 0)
    at = tl.where(position < 0, at, 0) * s_column
    return x + tl.load(of_row + at + d, mask=past, other=0.0).to(tl.float32)


@entry.jit(
    do_not_specialize=[
        "sequences", "tokens", "slots", "pad_slot", "rows", "steps", "columns", "channels", "x_row",
        "s_slot", "s_column", "i_row", "i_step", "i_column",
    ]
)  # fmt: skip
def update(
    x,
    pool,
    weight,
    bias,
    slot_of,
    starts,
    accepted,
    window,
    row_of,
    parents,
    out,
    sequences,
    tokens,
    slots,
    pad_slot,
    rows,
    steps,
    columns,
    channels,
    x_row,
    s_slot,
    s_column,
    i_row,
    i_step,
    i_column,
    W: tl.constexpr,
    L: tl.constexpr,
    SILU: tl.constexpr,
    STORE: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
):
    """Sequences lie one behind the other; without `starts` they are equally long."""
    d = tl.arange(0, CHANNEL_TILE)
    tiles = (channels + CHANNEL_TILE - 1) // CHANNEL_TILE
    start = 0
    seen = 0
    for work in range(tl.program_id(0), sequences * tiles, tl.num_programs(0)):
        n = work // tiles
        first = work % tiles * CHANNEL_TILE
        count = tl.minimum(channels - first, CHANNEL_TILE)
        on = d < count
        if starts is not None:
            start = latest(starts, n, seen, start, tokens)
            seen = n + 1
            size = left(starts, n, start, tokens)
        else:
            size = tokens // sequences
            start = n * size
        of_x = x + start.to(tl.int64) * x_row + first
        of_out = out + start.to(tl.int64) * channels + first
        if slot_of is not None:
            slot = tl.load(slot_of + n).to(tl.int64)
        else:
            slot = n.to(tl.int64)
        there = (slot >= 0) & (slot < slots) & (slot != pad_slot)
        of_row = pool + tl.where(there, slot, 0) * s_slot + first
        if accepted is not None:
            # before it is cast: what does not fit 32 bits wraps
            taken = tl.minimum(tl.maximum(tl.load(accepted + n), 1), L - W + 2).to(tl.int64)
            counted = taken + (W - 2)
            place = taken * 0 + (W - 2)
        else:
            counted = n.to(tl.int64) * 0 + L
            place = L - size.to(tl.int64)
        reach = tl.where(there, counted, 0)
        if window is not None:
            kept_row = tl.load(row_of + n).to(tl.int64)
            kept = (kept_row >= 0) & (kept_row < rows)
            of_window = window + tl.where(kept, kept_row, 0) * i_row + first
        for t in range(0, size):
            position = t.to(tl.int64)
            total = tl.zeros((CHANNEL_TILE,), tl.float32)
            if bias is not None:
                total += tl.load(bias + first + d, mask=on, other=0.0).to(tl.float32)
            for back in tl.static_range(0, W):
                value = value_at(of_x, of_row, position, reach, d, count, x_row, s_column)
                total += value * tap(weight + first, back, d, count, channels, W)
                if window is not None and back < W - 1:
                    to = of_window + t.to(tl.int64) * i_step + (W - 2 - back) * i_column + d
                    stored = d < tl.where(kept & (t < steps), count, 0)
                    tl.store(to, value.to(window.dtype.element_ty), mask=stored)
                earlier = position - 1
                if parents is not None:
                    inside = (position >= 0) & (position < columns)
                    at = parents + n.to(tl.int64) * columns + tl.where(inside, position, 0)
                    parent = tl.load(at).to(tl.int64)
                    known = inside & (parent >= 0) & (parent < position)
                    root = tl.where(known, parent, -1)
                    earlier = tl.where(position >= 0, root, earlier)
                position = earlier
            if SILU:
                total = total * sigmoid(total)
            to = of_out + t.to(tl.int64) * channels + d
            tl.store(to, total.to(out.dtype.element_ty), mask=on)
        if STORE:
            for column in range(0, tl.where(size > 0, L, 0)):
                position = column - place
                value = value_at(of_x, of_row, position, reach, d, count, x_row, s_column)
                moved = there & (position >= -reach) & (position < size)
                to = of_row + column.to(tl.int64) * s_column + d
                stored = d < tl.where(moved, count, 0)
                tl.store(to, value.to(pool.dtype.element_ty), mask=stored)
        if starts is not None:
            # tokens before the first sequence, and behind the last one
            zero = tl.zeros((CHANNEL_TILE,), out.dtype.element_ty)
            for t in range(0, tl.where(n == 0, start, 0)):
                tl.store(out + t.to(tl.int64) * channels + first + d, zero, mask=on)
            for t in range(tl.where(n == sequences - 1, start + size, tokens), tokens):
                tl.store(out + t.to(tl.int64) * channels + first + d, zero, mask=on)


def _tile(sequences: int, channels: int) -> tune.Config:
    """The widest that leaves no core idle, or the narrowest."""
    table = tune.TABLE[_KERNEL]

    def work(config: tune.Config) -> int:
        return sequences * triton.cdiv(channels, config.tiles["CHANNEL_TILE"])

    busy = [config for config in table if work(config) >= cores.vector()]
    return tune.choose(_KERNEL, [*busy, *reversed(table)])


def unsupported(
    x: Tensor, conv_states: Tensor, intermediate_conv_window: Tensor | None, **_: Any
) -> str | None:
    if x.dtype is torch.float64:
        return "`x` is float64, the vector units take float32, float16 and bfloat16"
    if x.shape[:-1].numel() >= 2**31:
        return f"{x.shape[:-1].numel()} tokens, the kernel counts below 2**31"
    for name, pool in (
        ("conv_states", conv_states),
        ("intermediate_conv_window", intermediate_conv_window),
    ):
        if pool is not None and pool.shape[-1] > 1 and pool.stride(-1) != 1:
            return f"`{name}` has channels {pool.stride(-1)} apart, the kernel takes dense ones"
    return None


def forward(**a: Unpack[Arguments]) -> Tensor:
    x, conv_states, weight = a["x"], a["conv_states"], a["weight"]
    query_start_loc, window = a["query_start_loc"], a["intermediate_conv_window"]
    channels, width = x.shape[-1], weight.shape[0]
    sequences = x.shape[0] if query_start_loc is None else query_start_loc.shape[0] - 1
    out = memory.empty(x.shape, x.dtype, x.device)
    if out.numel() == 0 or sequences == 0:
        return out.zero_()
    parents = a["retrieve_parent_token"]
    if parents is not None and parents.shape[1] == 0:
        parents = parents.new_full((sequences, 1), -1)  # no kernel reads an empty tensor
    rows, steps = (0, 0) if window is None else window.shape[:2]
    in_row = x.flatten(0, -2)  # a copy only where the strides of sequences and tokens do not chain
    config = _tile(sequences, channels)
    tiles = triton.cdiv(channels, config.tiles["CHANNEL_TILE"])
    update[(min(sequences * tiles, cores.vector()),)](
        in_row,
        conv_states,
        weight.contiguous(),
        a["bias"],
        a["conv_state_indices"],
        query_start_loc,
        a["num_accepted_tokens"],
        window,
        a["intermediate_state_indices"],
        parents,
        out,
        sequences,
        in_row.shape[0],
        conv_states.shape[0],
        a["pad_slot_id"],
        rows,
        steps,
        0 if parents is None else parents.shape[1],
        channels,
        in_row.stride(0),
        *conv_states.stride()[:2],
        *((0, 0, 0) if window is None else window.stride()[:3]),
        W=width,
        L=conv_states.shape[1],
        SILU=a["activation"] is not None,
        STORE=not a["disable_state_update"],
        **config.keywords,
    )
    return out
