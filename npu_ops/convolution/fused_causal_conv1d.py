# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The causal convolution behind a pool of states, on the vector cores: the kernel of
npu_causal_conv1d on histories that another one cuts out of the pool.

That one, `push`, pushes the pool's rows on as well.  A position is that of a token from 0 on, or a
negative one, which a row holds in column reach + position.  A column of the new row comes from one
behind it where reach + size is L at least, else from one before it: the row is walked from that
end.  `fill` writes the states at the ends of blocks, of tokens and histories, when no row is read
any more.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory
from ..common import cores, entry, tune
from ..common.lengths import latest, left
from . import causal_conv1d
from .causal_conv1d_update import value_at


@triton.jit
def _slot(lines, n, block, blocks, slots, pad_slot, INDEXED: tl.constexpr):
    """(the slot of a block of a sequence, whether there is one)."""
    inside = (block >= 0) & (block < blocks)
    if INDEXED:
        at = n.to(tl.int64) * blocks + tl.where(inside, block, 0)
        slot = tl.load(lines + at).to(tl.int64)
    else:
        slot = n.to(tl.int64)
    there = inside & (slot >= 0) & (slot < slots) & (slot != pad_slot)
    return tl.where(there, slot, 0), there


@entry.jit(
    do_not_specialize=[
        "sequences", "length", "tokens", "slots", "pad_slot", "blocks", "channels", "x_batch",
        "x_row", "s_slot", "s_column",
    ]
)  # fmt: skip
def push(
    x,
    pool,
    lines,
    starts,
    accepted,
    computed,
    last_block,
    read_block,
    history,
    sequences,
    length,
    tokens,
    slots,
    pad_slot,
    blocks,
    channels,
    x_batch,
    x_row,
    s_slot,
    s_column,
    W: tl.constexpr,
    L: tl.constexpr,
    VARLEN: tl.constexpr,
    INDEXED: tl.constexpr,
    BLOCKS: tl.constexpr,
    ACCEPTED: tl.constexpr,
    COMPUTED: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
):
    d = tl.arange(0, CHANNEL_TILE)
    tiles = (channels + CHANNEL_TILE - 1) // CHANNEL_TILE
    start = 0
    seen = 0
    for work in range(tl.program_id(0), sequences * tiles, tl.num_programs(0)):
        n = work // tiles
        first = work % tiles * CHANNEL_TILE
        count = tl.minimum(channels - first, CHANNEL_TILE)
        size = length
        if VARLEN:
            start = latest(starts, n, seen, start, tokens)
            seen = n + 1
            size = left(starts, n, start, tokens)
        of_x = x + start.to(tl.int64) * x_row + first
        if not VARLEN:
            of_x += n.to(tl.int64) * x_batch
        zero = n.to(tl.int64) * 0
        read = zero
        write = zero
        if BLOCKS:
            read = tl.load(read_block + n).to(tl.int64)
            write = tl.load(last_block + n).to(tl.int64)
        slot, there = _slot(lines, n, read, blocks, slots, pad_slot, INDEXED)
        of_row = pool + slot * s_slot + first
        # columns that count, and those that are read
        counted = zero + L
        if ACCEPTED:
            # before it is cast: what does not fit 32 bits wraps
            taken = tl.minimum(tl.maximum(tl.load(accepted + n), 1), L - W + 2)
            counted = taken.to(tl.int64) + (W - 2)
        if COMPUTED:
            new = tl.load(computed + n) == 0
            counted = tl.where(new, W - 1, counted)
            there = there & (new == 0)
        reach = tl.where(there, counted, 0)
        for before in range(0, W - 1):
            position = zero + before - (W - 1)
            value = value_at(of_x, of_row, position, reach, d, count, x_row, s_column)
            to = history + (n.to(tl.int64) * (W - 1) + before) * channels + first + d
            tl.store(to, value.to(history.dtype.element_ty), mask=d < count)
        to_slot, kept = _slot(lines, n, write, blocks, slots, pad_slot, INDEXED)
        upwards = counted + size >= L
        for step in range(0, tl.where(kept & (size > 0), L, 0)):
            column = tl.where(upwards, step, L - 1 - step).to(tl.int64)
            position = size - L + column
            value = value_at(of_x, of_row, position, reach, d, count, x_row, s_column)
            to = pool + to_slot * s_slot + column * s_column + first + d
            stored = d < tl.where(position >= -counted, count, 0)
            tl.store(to, value.to(pool.dtype.element_ty), mask=stored)


@entry.jit(
    do_not_specialize=[
        "sequences", "length", "tokens", "slots", "pad_slot", "blocks", "block_size", "channels",
        "x_batch", "x_row", "s_slot", "s_column",
    ]
)  # fmt: skip
def fill(
    x,
    pool,
    lines,
    starts,
    computed,
    first_block,
    last_block,
    history,
    sequences,
    length,
    tokens,
    slots,
    pad_slot,
    blocks,
    block_size,
    channels,
    x_batch,
    x_row,
    s_slot,
    s_column,
    W: tl.constexpr,
    L: tl.constexpr,
    VARLEN: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
):
    d = tl.arange(0, CHANNEL_TILE)
    tiles = (channels + CHANNEL_TILE - 1) // CHANNEL_TILE
    start = 0
    seen = 0
    for work in range(tl.program_id(0), sequences * blocks * tiles, tl.num_programs(0)):
        n = work // (blocks * tiles)
        chunk = work // tiles % blocks
        first = work % tiles * CHANNEL_TILE
        count = tl.minimum(channels - first, CHANNEL_TILE)
        size = length
        if VARLEN:
            start = latest(starts, n, seen, start, tokens)
            seen = n + 1
            size = left(starts, n, start, tokens)
        of_x = x + start.to(tl.int64) * x_row + first
        if not VARLEN:
            of_x += n.to(tl.int64) * x_batch
        block = tl.load(first_block + n).to(tl.int64)
        ends = tl.load(last_block + n).to(tl.int64) - block
        # tokens behind the last end of a block
        rest = (size + tl.load(computed + n).to(tl.int64)) % block_size
        end = size - tl.where(rest == 0, block_size, rest)
        boundary = end - (ends - chunk - 1) * block_size
        slot, there = _slot(lines, n, block + chunk, blocks, slots, pad_slot, True)
        kept = there & (chunk < ends) & (boundary >= 0) & (size > 0)
        of_history = history + n.to(tl.int64) * (W - 1) * channels + first
        for column in range(0, tl.where(kept, W - 1, 0)):
            position = boundary + column - (W - 1)
            value = value_at(of_x, of_history, position, W - 1, d, count, x_row, channels)
            to = pool + slot * s_slot + (L - (W - 1) + column).to(tl.int64) * s_column + first + d
            tl.store(to, value.to(pool.dtype.element_ty), mask=d < count)


def unsupported(x: Tensor, conv_states: Tensor, **_: Any) -> str | None:
    if conv_states.shape[-1] > 1 and conv_states.stride(-1) != 1:
        apart = conv_states.stride(-1)
        return f"`conv_states` has channels {apart} apart, the kernel takes dense ones"
    return causal_conv1d.unsupported(x)


def forward(
    x: Tensor,
    weight: Tensor,
    conv_states: Tensor,
    query_start_loc: Tensor | None,
    cache_indices: Tensor | None,
    bias: Tensor | None,
    num_accepted_tokens: Tensor | None,
    activation: str | None,
    pad_slot_id: int | None,
    residual_connection: int | None,
    num_computed_tokens: Tensor | None,
    block_idx_first_scheduled_token: Tensor | None,
    block_idx_last_scheduled_token: Tensor | None,
    initial_state_idx: Tensor | None,
    block_size: int | None,
    conv_mode: str | None,
    **_: Any,
) -> Tensor:
    starts = None if x.ndim == 3 else query_start_loc
    channels, width = x.shape[-1], weight.shape[0]
    sequences = x.shape[0] if starts is None else starts.shape[0] - 1
    history = memory.empty([sequences, width - 1, channels], conv_states.dtype, x.device)
    if history.numel() == 0:
        return causal_conv1d.outputs(x, weight, bias, None, starts, False)

    def given(tensor: Tensor | None) -> Tensor:
        """A tensor stands for one that is not there, and is not touched."""
        return x if tensor is None else tensor

    blocks = 1
    if cache_indices is not None and cache_indices.ndim == 2:
        if cache_indices.numel() == 0:  # no block: one that names no slot, which can be read
            cache_indices = memory.empty([sequences, 1], torch.int32, x.device).fill_(-1)
        blocks = cache_indices.shape[1]
    sizes = (
        sequences,
        x.shape[-2],
        x.shape[:-1].numel(),
        conv_states.shape[0],
        -1 if pad_slot_id is None else pad_slot_id,  # None: no slot stands for none
        blocks,
    )
    strides = (0 if starts is not None else x.stride(0), x.stride(-2), *conv_states.stride()[:2])
    flags = dict(W=width, L=conv_states.shape[1], VARLEN=starts is not None)
    by_block = block_idx_first_scheduled_token is not None

    def pushed() -> None:
        config = tune.at_least("fused_causal_conv1d.push", "CHANNEL_TILE", channels)
        tiles = triton.cdiv(channels, config.tiles["CHANNEL_TILE"])
        push[(min(sequences * tiles, cores.vector()),)](
            x,
            conv_states,
            given(cache_indices),
            given(starts),
            given(num_accepted_tokens),
            given(num_computed_tokens),
            given(block_idx_last_scheduled_token),
            given(initial_state_idx),
            history,
            *sizes,
            channels,
            *strides,
            **flags,
            INDEXED=cache_indices is not None,
            BLOCKS=by_block,
            ACCEPTED=num_accepted_tokens is not None,
            COMPUTED=num_computed_tokens is not None,
            **config.keywords,
        )

    def filled() -> None:
        config = tune.at_least("fused_causal_conv1d.fill", "CHANNEL_TILE", channels)
        tiles = triton.cdiv(channels, config.tiles["CHANNEL_TILE"])
        fill[(min(sequences * blocks * tiles, cores.vector()),)](
            x,
            conv_states,
            given(cache_indices),
            given(starts),
            given(num_computed_tokens),
            given(block_idx_first_scheduled_token),
            given(block_idx_last_scheduled_token),
            history,
            *sizes,
            128 if block_size is None else block_size,
            channels,
            *strides,
            **flags,
            **config.keywords,
        )

    def convolved() -> Tensor:
        return causal_conv1d.outputs(
            x,
            weight,
            bias,
            history,
            starts,
            activation in ("silu", "swish"),
            num_computed_tokens if conv_mode == "pangu" else None,
            bool(residual_connection),
        )

    tune.stage(pushed)
    if by_block:
        tune.stage(filled)
    out: Tensor = tune.stage(convolved)
    return out


def in_place(x: Tensor, **others: Any) -> None:
    """npu_fused_causal_conv1d_v2: parts of a sequence are made at once, and read the tokens before
    them, so that none is written where it is read."""
    x.copy_(forward(x, **others))
