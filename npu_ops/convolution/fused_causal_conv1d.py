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

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory
from ..common import cores, tune, tuples
from ..common.cores import tiled
from . import causal_conv1d
from .causal_conv1d import Rows, Sequences, States, at_sequence, piece_of
from .causal_conv1d_update import value_at


@triton.jit
def _slot(lines, n, block, slots, pad_slot, blocks, INDEXED: tl.constexpr):
    """(the slot of a block of a sequence, whether there is one)."""
    inside = (block >= 0) & (block < blocks)
    if INDEXED:
        at = n.to(tl.int64) * blocks + tl.where(inside, block, 0)
        slot = tl.load(lines + at).to(tl.int64)
    else:
        slot = n.to(tl.int64)
    there = inside & (slot >= 0) & (slot < slots) & (slot != pad_slot)
    return tl.where(there, slot, 0), there


class Slots(NamedTuple):
    """Of the pool, and of a sequence's blocks."""

    number: int
    none: int  # stands for no slot
    blocks: int


@tuples.jit()
def push(
    x,
    pool,
    lines,
    accepted,
    computed,
    last_block,
    read_block,
    history,
    slots: Slots,
    x_stride: Rows,
    s_stride: States,
    of: Sequences,
    W: tl.constexpr,
    L: tl.constexpr,
    INDEXED: tl.constexpr,
    BLOCKS: tl.constexpr,
    ACCEPTED: tl.constexpr,
    COMPUTED: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
):
    """The histories of the sequences, and the rows of the pool behind their tokens."""
    d, tiles = tiled(of.channels, CHANNEL_TILE)
    start = 0
    n = -1
    for work in range(tl.program_id(0), of.sequences * tiles, tl.num_programs(0)):
        n, _, start, size, first, count = piece_of(work, 1, n, start, *of, CHANNEL_TILE)
        of_x = x + at_sequence(n, start, *x_stride, of.VARLEN) + first
        zero = n.to(tl.int64) * 0
        read = zero
        write = zero
        if BLOCKS:
            read = tl.load(read_block + n).to(tl.int64)
            write = tl.load(last_block + n).to(tl.int64)
        slot, there = _slot(lines, n, read, *slots, INDEXED)
        of_row = pool + slot * s_stride.sequence + first
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
            value = value_at(of_x, of_row, position, reach, d, count, x_stride.row, s_stride.column)
            to = history + (n.to(tl.int64) * (W - 1) + before) * of.channels + first + d
            tl.store(to, value.to(history.dtype.element_ty), mask=d < count)
        to_slot, kept = _slot(lines, n, write, *slots, INDEXED)
        upwards = counted + size >= L
        for step in range(0, tl.where(kept & (size > 0), L, 0)):
            column = tl.where(upwards, step, L - 1 - step).to(tl.int64)
            position = size - L + column
            value = value_at(of_x, of_row, position, reach, d, count, x_stride.row, s_stride.column)
            to = pool + to_slot * s_stride.sequence + column * s_stride.column + first + d
            stored = d < tl.where(position >= -counted, count, 0)
            tl.store(to, value.to(pool.dtype.element_ty), mask=stored)


@tuples.jit(["block_size"])
def fill(
    x,
    pool,
    lines,
    computed,
    first_block,
    last_block,
    history,
    slots: Slots,
    block_size,
    x_stride: Rows,
    s_stride: States,
    of: Sequences,
    W: tl.constexpr,
    L: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
):
    """The states at the ends of blocks."""
    d, tiles = tiled(of.channels, CHANNEL_TILE)
    blocks = slots.blocks
    start = 0
    n = -1
    for work in range(tl.program_id(0), of.sequences * blocks * tiles, tl.num_programs(0)):
        n, chunk, start, size, first, count = piece_of(work, blocks, n, start, *of, CHANNEL_TILE)
        of_x = x + at_sequence(n, start, *x_stride, of.VARLEN) + first
        block = tl.load(first_block + n).to(tl.int64)
        ends = tl.load(last_block + n).to(tl.int64) - block
        # tokens behind the last end of a block
        rest = (size + tl.load(computed + n).to(tl.int64)) % block_size
        end = size - tl.where(rest == 0, block_size, rest)
        boundary = end - (ends - chunk - 1) * block_size
        slot, there = _slot(lines, n, block + chunk, *slots, True)
        kept = there & (chunk < ends) & (boundary >= 0) & (size > 0)
        of_history = history + n.to(tl.int64) * (W - 1) * of.channels + first
        for column in range(0, tl.where(kept, W - 1, 0)):
            position = boundary + column - (W - 1)
            value = value_at(of_x, of_history, position, W - 1, d, count, x_stride.row, of.channels)
            to = (
                pool
                + slot * s_stride.sequence
                + (L - (W - 1) + column).to(tl.int64) * s_stride.column
                + first
                + d
            )
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
    slots = (
        conv_states.shape[0],
        -1 if pad_slot_id is None else pad_slot_id,  # None: no slot stands for none
        blocks,
    )
    of = (given(starts), sequences, x.shape[-2], x.shape[:-1].numel(), channels)
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
            given(num_accepted_tokens),
            given(num_computed_tokens),
            given(block_idx_last_scheduled_token),
            given(initial_state_idx),
            history,
            *slots,
            *strides,
            *of,
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
            given(num_computed_tokens),
            given(block_idx_first_scheduled_token),
            given(block_idx_last_scheduled_token),
            history,
            *slots,
            128 if block_size is None else block_size,
            *strides,
            *of,
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
