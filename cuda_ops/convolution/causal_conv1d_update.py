# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A few tokens of a causal convolution, on a pool of states updated in place.

    x [B, S, D] or [T, D]   conv_states [slots, L, D]   weight [W, D]

A program takes BLOCK_D channels of a sequence, all of its tokens.  Every number has a position:
that of a token from 0 on, or a negative one, which the row of the pool holds in column reach +
position.  All loads of the row precede its stores.  The floor is x, out, and the row twice.

    condition    kernels
    any          _update
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from ...dispatch.common import memory
from ..common import gpu
from ..common.convolution import sigmoid, taps_of, tile_of, value_at
from ..common.lengths import span_of
from ..runtime import launches


@triton.jit
def _before(parents, position, columns):
    """The position that one follows."""
    earlier = position - 1
    if parents is not None:
        inside = (position >= 0) & (position < columns)
        parent = tl.load(parents + position, mask=inside, other=-1)
        # cast last: what does not fit 32 bits wraps
        known = tl.where((parent >= 0) & (parent < position), parent, -1).to(tl.int64)
        earlier = tl.where(position >= 0, known, earlier)
    return earlier


@triton.jit(
    do_not_specialize=["length", "tokens", "sequences", "slots", "rows", "steps", "columns"]
)
def _update(
    x,
    pool,
    weight,
    bias,
    indices,
    starts,
    accepted,
    window,
    window_rows,
    parents,
    zeroed,
    out,
    length,
    tokens,
    sequences,
    slots,
    pad_slot,
    rows,
    steps,
    columns,
    channels,
    strides,
    W: tl.constexpr,
    L: tl.constexpr,
    VARLEN: tl.constexpr,
    SILU: tl.constexpr,
    STORE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ZEROS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    (
        x_batch,
        x_row,
        w_tap,
        w_channel,
        s_slot,
        s_column,
        s_channel,
        i_row,
        i_step,
        i_column,
        i_channel,
    ) = strides
    if CHAINED:
        gdc_launch_dependents()
    n, d, mask = tile_of(channels, BLOCK_D)
    n_wide = n.to(tl.int64)
    if zeroed is not None:
        i = tl.arange(0, triton.next_power_of_2(ZEROS))
        zero_mask = (i < ZEROS) & (tl.program_id(0) % tl.cdiv(channels, BLOCK_D) == 0)
        tl.store(zeroed + n_wide * ZEROS + i, tl.zeros_like(i), mask=zero_mask)
    if VARLEN:
        first, size = span_of(starts, n, tokens)
        x += first.to(tl.int64) * x_row
        out += first.to(tl.int64) * channels
    else:
        first = n * 0
        size = length
        x += n_wide * x_batch
        out += n_wide * length * channels
    slot = n_wide
    if indices is not None:
        slot = tl.load(indices + n).to(tl.int64)
    live = (slot >= 0) & (slot < slots) & (slot != pad_slot)
    row = pool + tl.where(live, slot, 0) * s_slot
    # columns that count, and the one of the first token
    reach = tl.full((), L, tl.int64)
    place = L - size.to(tl.int64)
    if accepted is not None:
        taken = tl.load(accepted + n).to(tl.int64)
        reach = tl.minimum(tl.maximum(taken, 1), L - W + 2) + (W - 2)
        place = tl.full((), W - 2, tl.int64)
    if window is not None:
        at_row = tl.load(window_rows + n).to(tl.int64)
        kept = (at_row >= 0) & (at_row < rows)
        window += at_row * i_row
    if parents is not None:
        parents += n_wide * columns

    taps = taps_of(weight, d, mask, w_tap, w_channel, W)
    start = tl.zeros([BLOCK_D], tl.float32)
    if bias is not None:
        start += tl.load(bias + d, mask=mask, other=0.0).to(tl.float32)
    for t in range(size):
        token = tl.cast(t, tl.int64)
        position = token
        total = start
        for back in tl.static_range(W):
            value = value_at(x, row, position, reach, d, mask, live, x_row, s_column, s_channel)
            total += value * taps[back]
            if window is not None and back < W - 1:
                to = window + token * i_step + tl.cast(W - 2 - back, tl.int64) * i_column
                to += d.to(tl.int64) * i_channel
                tl.store(to, value.to(window.dtype.element_ty), mask=mask & kept & (t < steps))
            position = _before(parents, position, columns)
        if SILU:
            total = total * sigmoid(total)
        to = out + token * channels + d
        tl.store(to, total.to(out.dtype.element_ty), mask=mask)
    if STORE:
        new = ()
        for column in tl.static_range(L):
            new += (
                value_at(x, row, column - place, reach, d, mask, live, x_row, s_column, s_channel),
            )
        # a thread may store what another one loads
        tl.debug_barrier()
        for column in tl.static_range(L):
            position = column - place
            stored = live & (size > 0) & (position >= -reach) & (position < size)
            to = row + tl.cast(column, tl.int64) * s_column + d.to(tl.int64) * s_channel
            tl.store(to, new[column].to(pool.dtype.element_ty), mask=mask & stored)
    if VARLEN:
        # tokens before the first sequence, and behind the last one
        nothing = tl.zeros([BLOCK_D], out.dtype.element_ty)
        before = tl.where(n == 0, -first, 0)
        for t in range(before, 0):
            tl.store(out + tl.cast(t, tl.int64) * channels + d, nothing, mask=mask)
        behind = tl.where(n == sequences - 1, tokens - first, size)
        for t in range(size, behind):
            tl.store(out + tl.cast(t, tl.int64) * channels + d, nothing, mask=mask)


def tile(sequences: int, channels: int, device: torch.device) -> int:
    """Channels a program: two programs a multiprocessor, if there is as much to do."""
    most = min(1024, max(16, triton.next_power_of_2(channels)))
    while most > 64 and sequences * triton.cdiv(channels, most) < 2 * gpu.num_sms(device):
        most //= 2
    return most


def unsupported(x: Tensor, conv_states: Tensor, **_: Any) -> str | None:
    if x.dtype is torch.float64:
        return "x is float64, supported are float32, float16 and bfloat16"
    if x.shape[:-1].numel() >= 2**31:
        return f"{x.shape[:-1].numel()} tokens, supported are below 2**31"
    if conv_states.shape[1] > 64:
        return f"conv_states has {conv_states.shape[1]} columns, supported are up to 64"
    return None


def launch(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    conv_state_indices: Tensor | None,
    query_start_loc: Tensor | None,
    num_accepted_tokens: Tensor | None,
    pad_slot_id: int,
    disable_state_update: bool,
    intermediate_conv_window: Tensor | None,
    intermediate_state_indices: Tensor | None,
    retrieve_parent_token: Tensor | None,
    zeroed: Tensor | None,
) -> Tensor:
    """`zeroed` [N, i]: of the kernel that follows, chained to this one, and set to zeros by it."""
    channels, width = x.shape[-1], weight.shape[0]
    varlen = query_start_loc is not None
    sequences = x.shape[0] if query_start_loc is None else query_start_loc.shape[0] - 1
    out = memory.empty(x.shape, x.dtype, x.device)
    if out.numel() == 0 or sequences == 0:
        return out.zero_()
    window, parents = intermediate_conv_window, retrieve_parent_token
    BLOCK_D = tile(sequences, channels, x.device)
    launches.kernel(_update, sequences * triton.cdiv(channels, BLOCK_D))(
        x,
        conv_states,
        weight,
        bias,
        conv_state_indices,
        query_start_loc,
        num_accepted_tokens,
        window,
        intermediate_state_indices,
        parents,
        zeroed,
        out,
        x.shape[-2],
        x.shape[:-1].numel(),
        sequences,
        conv_states.shape[0],
        pad_slot_id,
        0 if window is None else window.shape[0],
        0 if window is None else window.shape[1],
        0 if parents is None else parents.shape[1],
        channels,
        (
            0 if varlen else x.stride(0),
            x.stride(-2),
            *weight.stride(),
            *conv_states.stride(),
            *((0, 0, 0, 0) if window is None else window.stride()),
        ),
        W=width,
        L=conv_states.shape[1],
        VARLEN=varlen,
        SILU=activation is not None,
        STORE=not disable_state_update,
        BLOCK_D=BLOCK_D,
        ZEROS=0 if zeroed is None else zeroed.shape[1],
        CHAINED=zeroed is not None and gpu.has_chained_launch(x.device),
        num_warps=max(1, min(4, BLOCK_D // 64)),
    )
    return out


def forward(**x: Any) -> Tensor:
    """The op by itself."""
    return launch(**x, zeroed=None)
