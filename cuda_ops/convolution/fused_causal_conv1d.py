# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The causal convolution behind a pool of states, on histories that _push cuts out of it, which
pushes the pool's rows on as well.

A program of _push takes BLOCK_D channels of a sequence; all its loads of the pool precede its
stores.  A position is that of a token from 0 on, or a negative one, which a row of the pool holds
in column reach + position.  The floor is x, out, and the rows twice.

    condition    kernels
    any          _push then causal_conv1d.py
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import memory
from ...dispatch.ops.convolution.fused_causal_conv1d import Arguments
from ..common.convolution import tile_of, value_at
from ..common.lengths import span_of
from ..runtime import launches
from . import causal_conv1d


@triton.jit
def _slot(lines, n, block, blocks, slots, pad_slot, valid):
    """(the slot of a block of a sequence, whether there is one)."""
    slot = tl.cast(n, tl.int64)
    inside = valid
    if lines is not None:
        inside = valid & (block >= 0) & (block < blocks)
        slot = tl.load(lines + slot * blocks + block, mask=inside, other=-1).to(tl.int64)
    live = inside & (slot >= 0) & (slot < slots) & (slot != pad_slot)
    return slot, live


@triton.jit
def _columns(
    x,
    row,
    live,
    reach,
    size,
    d,
    mask,
    x_row,
    s_column,
    s_channel,
    FIRST: tl.constexpr,
    L: tl.constexpr,
):
    """What columns FIRST to L - 1 of a row hold after `size` tokens."""
    new = ()
    for column in tl.static_range(FIRST, L):
        position = tl.cast(size - L + column, tl.int64)
        new += (value_at(x, row, position, reach, d, mask, live, x_row, s_column, s_channel),)
    # a thread may store what another one loads
    tl.debug_barrier()
    return new


@triton.jit
def _store(
    new,
    pool,
    slot,
    valid,
    reach,
    size,
    d,
    mask,
    s_slot,
    s_column,
    s_channel,
    FIRST: tl.constexpr,
    L: tl.constexpr,
):
    for column in tl.static_range(FIRST, L):
        to = pool + slot * s_slot + tl.cast(column, tl.int64) * s_column
        to += d.to(tl.int64) * s_channel
        stored = mask & valid & (tl.cast(size - L + column, tl.int64) >= -reach)
        tl.store(to, new[column - FIRST].to(pool.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["length", "tokens", "slots", "blocks", "block_size"])
def _push(
    x,
    pool,
    lines,
    starts,
    accepted,
    computed,
    first_block,
    last_block,
    read_block,
    history,
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
    s_channel,
    W: tl.constexpr,
    L: tl.constexpr,
    VARLEN: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    n, d, mask = tile_of(channels, BLOCK_D)
    if VARLEN:
        first, size = span_of(starts, n, tokens)
        x += first.to(tl.int64) * x_row
    else:
        first = n * 0
        size = length
        x += n.to(tl.int64) * x_batch
    some = size > 0
    block = tl.cast(n * 0, tl.int64)
    read = block
    write = block
    if first_block is not None:
        block = tl.load(first_block + n).to(tl.int64)
        write = tl.load(last_block + n).to(tl.int64)
        read = tl.load(read_block + n).to(tl.int64)
    slot, valid = _slot(lines, n, read, blocks, slots, pad_slot, n >= 0)
    row = pool + tl.where(valid, slot, 0) * s_slot
    # columns that count
    reach = tl.full((), L, tl.int64)
    if accepted is not None:
        taken = tl.load(accepted + n).to(tl.int64)
        reach = tl.minimum(tl.maximum(taken, 1), L - W + 2) + (W - 2)
    live = valid
    done = tl.cast(n * 0, tl.int64)
    if computed is not None:
        done = tl.load(computed + n).to(tl.int64)
        live = valid & (done != 0)
        reach = tl.where(done == 0, W - 1, reach)
    for column in tl.static_range(W - 1):
        position = tl.full((), column - (W - 1), tl.int64)
        value = value_at(x, row, position, reach, d, mask, live, x_row, s_column, s_channel)
        to = history + (n.to(tl.int64) * (W - 1) + column) * channels + d
        tl.store(to, value.to(history.dtype.element_ty), mask=mask)
    # before the first block's row, which may be the one that is read, has another state
    last = _columns(x, row, live, reach, size, d, mask, x_row, s_column, s_channel, 0, L)
    if first_block is not None:
        KEPT: tl.constexpr = L - (W - 1)
        # tokens behind the last end of a block
        rest = (size + done) % block_size
        end = size - tl.where(rest == 0, block_size, rest)
        for at in range(tl.minimum(blocks, write - block)):
            boundary = end - (write - block - at - 1) * block_size
            ends = some & (boundary >= 0)
            slot, valid = _slot(lines, n, block + at, blocks, slots, pad_slot, ends)
            new = _columns(
                x, row, live, reach, boundary, d, mask, x_row, s_column, s_channel, KEPT, L
            )
            _store(
                new,
                pool,
                slot,
                valid,
                reach,
                boundary,
                d,
                mask,
                s_slot,
                s_column,
                s_channel,
                KEPT,
                L,
            )
    slot, valid = _slot(lines, n, write, blocks, slots, pad_slot, some)
    _store(last, pool, slot, valid, reach, size, d, mask, s_slot, s_column, s_channel, 0, L)


def unsupported(x: Tensor, conv_states: Tensor, **_: Any) -> str | None:
    if conv_states.shape[1] > 64:
        return f"conv_states has {conv_states.shape[1]} columns, supported are up to 64"
    return causal_conv1d.unsupported(x)


def forward(**a: Unpack[Arguments]) -> Tensor:
    x, conv_states, cache_indices = a["x"], a["conv_states"], a["cache_indices"]
    starts = None if x.ndim == 3 else a["query_start_loc"]
    channels, width = x.shape[-1], a["weight"].shape[0]
    sequences = x.shape[0] if starts is None else starts.shape[0] - 1
    history = memory.empty([sequences, width - 1, channels], conv_states.dtype, x.device)
    if history.numel() > 0:
        BLOCK_D = min(256, max(16, triton.next_power_of_2(channels)))
        launches.kernel(_push, sequences * triton.cdiv(channels, BLOCK_D))(
            x,
            conv_states,
            cache_indices,
            starts,
            a["num_accepted_tokens"],
            a["num_computed_tokens"],
            a["block_idx_first_scheduled_token"],
            a["block_idx_last_scheduled_token"],
            a["initial_state_idx"],
            history,
            x.shape[-2],
            x.shape[:-1].numel(),
            conv_states.shape[0],
            # None: no slot stands for none
            -1 if a["pad_slot_id"] is None else a["pad_slot_id"],
            1 if cache_indices is None or cache_indices.ndim == 1 else cache_indices.shape[1],
            128 if a["block_size"] is None else a["block_size"],
            channels,
            0 if starts is not None else x.stride(0),
            x.stride(-2),
            *conv_states.stride(),
            W=width,
            L=conv_states.shape[1],
            VARLEN=starts is not None,
            BLOCK_D=BLOCK_D,
            num_warps=max(1, min(4, BLOCK_D // 64)),
        )
    return causal_conv1d.launch(
        x,
        a["weight"],
        a["bias"],
        history,
        starts,
        a["activation"] in ("silu", "swish"),
        None,
        a["num_computed_tokens"] if a["conv_mode"] == "pangu" else None,
        bool(a["residual_connection"]),
    )


def in_place(x: Tensor, **others: Any) -> None:
    """npu_fused_causal_conv1d_v2: blocks of tokens are made at once, and read the tokens before
    them, so that none is written where it is read."""
    x.copy_(forward(x=x, **others))
