# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The causal convolution over whole sequences.

    out[t] = act(bias + sum_j weight[W - 1 - j] x[t - j])      x [B, S, D] or [T, D]   weight [W, D]

A program takes some blocks of BT tokens x BD channels.  Of a block it loads the tile of tokens and
those 1 to W - 1 tokens before it, which the L1 has; only a block near the start of a sequence looks
at the history.  The floor is x once and out once.  A second kernel copies the final states.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch.common import memory
from .common import gpu, launches
from .common.convolution import row_at, sigmoid, standing, taps_of
from .common.lengths import within


@triton.jit(do_not_specialize=["tokens", "length", "sequences"])
def _convolve(
    x, weight, bias, history, starts, computed, out, tokens, length, sequences, channels,
    x_batch, x_row, w_tap, w_channel, h_sequence, h_column, h_channel,
    W: tl.constexpr, VARLEN: tl.constexpr, SILU: tl.constexpr, RESIDUAL: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tiles = tl.cdiv(channels, BD)
    d = program % tiles * BD + tl.arange(0, BD)
    on_d = d < channels
    first = program // tiles * (BT * BLOCKS)
    taps = taps_of(weight, d, on_d, w_tap, w_channel, W)
    start = tl.zeros([BD], tl.float32)
    if bias is not None:
        start += tl.load(bias + d, mask=on_d, other=0.0).to(tl.float32)
    for block in range(BLOCKS):
        token = first + block * BT + tl.arange(0, BT)
        sequence, position, _, there = standing(starts, token, tokens, length, sequences, VARLEN)
        total = tl.zeros([BT, BD], tl.float32) + start[None]
        for back in tl.static_range(W):
            at = row_at(sequence, position - back, token - back, x_batch, x_row, VARLEN)
            now = there & (position >= back)
            tile = tl.load(x + at[:, None] + d[None], mask=now[:, None] & on_d[None], other=0.0)
            total += tile.to(tl.float32) * taps[back][None]
        if history is not None:  # noqa: SIM102 (a constexpr, decided before the rest is compiled)
            if tl.min(tl.where(there, position, W)) < W - 1:
                for back in tl.static_range(1, W):
                    past = there & (position < back)
                    column = (W - 1 - back + position).to(tl.int64)
                    at = sequence.to(tl.int64) * h_sequence + column * h_column
                    tile = tl.load(
                        history + at[:, None] + d[None] * h_channel,
                        mask=past[:, None] & on_d[None], other=0.0,
                    )  # fmt: skip
                    total += tile.to(tl.float32) * taps[back][None]
        if SILU:
            total = total * sigmoid(total)
        if computed is not None:
            seen = position + tl.load(computed + sequence, mask=there, other=0)
            total = tl.where((seen < W - 1)[:, None], 0.0, total)
        if RESIDUAL:
            at = row_at(sequence, position, token, x_batch, x_row, VARLEN)
            now = there[:, None] & on_d[None]
            total += tl.load(x + at[:, None] + d[None], mask=now, other=0.0).to(tl.float32)
        total = tl.where(there[:, None], total, 0.0)
        at = token.to(tl.int64) * channels
        tl.store(
            out + at[:, None] + d[None], total.to(out.dtype.element_ty),
            mask=(token < tokens)[:, None] & on_d[None],
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "length"])
def _finish(
    x, history, starts, out, tokens, length, channels, x_batch, x_row,
    h_sequence, h_column, h_channel, W: tl.constexpr, VARLEN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The last W - 1 tokens of a sequence, and of its history where it is shorter."""
    tiles = tl.cdiv(channels, BD)
    n = tl.program_id(0) // tiles
    d = tl.program_id(0) % tiles * BD + tl.arange(0, BD)
    on_d = d < channels
    if VARLEN:
        start = within(starts + n, True, tokens)
        size = tl.maximum(within(starts + n + 1, True, tokens) - start, 0)
    else:
        start = n * 0
        size = length
    for column in tl.static_range(W - 1):
        position = size - (W - 1) + column
        at = row_at(n, position, start + position, x_batch, x_row, VARLEN)
        value = tl.load(x + at + d, mask=on_d & (position >= 0), other=0.0).to(tl.float32)
        if history is not None:
            at = n.to(tl.int64) * h_sequence + (size + column).to(tl.int64) * h_column
            past = on_d & (position < 0)
            value += tl.load(history + at + d.to(tl.int64) * h_channel, mask=past, other=0.0).to(
                tl.float32
            )
        to = out + (n.to(tl.int64) * (W - 1) + column) * channels + d
        tl.store(to, value.to(out.dtype.element_ty), mask=on_d)


def tile(tokens: int, channels: int, device: torch.device) -> tuple[int, int, int]:
    """(tokens of a block, channels, blocks a program): four programs a multiprocessor, if there is
    as much to do."""
    BT, BD = 16, min(128, max(16, triton.next_power_of_2(channels)))
    blocks = triton.cdiv(tokens, BT) * triton.cdiv(channels, BD)
    most = blocks // (4 * gpu.processors(device))
    return BT, BD, 1 << min(3, max(0, most.bit_length() - 1))


def unsupported(x: Tensor, **_: Any) -> str | None:
    if x.dtype is torch.float64:
        return "x is float64, supported are float32, float16 and bfloat16"
    if x.shape[:-1].numel() >= 2**31 - 2**10:
        return f"{x.shape[:-1].numel()} tokens, supported are below 2**31 - 2**10"
    return None


def outputs(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    history: Tensor | None,
    query_start_loc: Tensor | None,
    silu: bool,
    computed: Tensor | None = None,
    residual: bool = False,
) -> Tensor:
    """`computed` [N]: tokens of a sequence that are not in the call; outputs of fewer than W tokens
    are 0.  `residual`: x is added."""
    channels, varlen = x.shape[-1], query_start_loc is not None
    sequences = query_start_loc.shape[0] - 1 if query_start_loc is not None else x.shape[0]
    tokens = x.shape[:-1].numel()
    out = memory.empty(x.shape, x.dtype, x.device)
    if out.numel() == 0:
        return out
    BT, BD, blocks = tile(tokens, channels, x.device)
    programs = triton.cdiv(tokens, BT * blocks) * triton.cdiv(channels, BD)
    launches.kernel(_convolve, programs)(
        x, weight, bias, history, query_start_loc, computed, out, tokens, x.shape[-2], sequences,
        channels, 0 if varlen else x.stride(0), x.stride(-2), *weight.stride(),
        *((0, 0, 0) if history is None else history.stride()),
        W=weight.shape[0], VARLEN=varlen, SILU=silu, RESIDUAL=residual,
        BT=BT, BD=BD, BLOCKS=blocks, num_warps=4,
    )  # fmt: skip
    return out


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_states: Tensor | None,
    query_start_loc: Tensor | None,
    activation: str | None,
) -> tuple[Tensor, Tensor]:
    channels, width = x.shape[-1], weight.shape[0]
    varlen, history = query_start_loc is not None, initial_states
    sequences = query_start_loc.shape[0] - 1 if query_start_loc is not None else x.shape[0]
    out = outputs(x, weight, bias, history, query_start_loc, activation is not None)
    kind = x.dtype if history is None else history.dtype
    final = memory.empty([sequences, width - 1, channels], kind, x.device)
    if final.numel() > 0:
        BD = min(1024, max(16, triton.next_power_of_2(channels)))
        launches.kernel(_finish, sequences * triton.cdiv(channels, BD))(
            x, history, query_start_loc, final, x.shape[:-1].numel(), x.shape[-2], channels,
            0 if varlen else x.stride(0), x.stride(-2),
            *((0, 0, 0) if history is None else history.stride()),
            W=width, VARLEN=varlen, BD=BD,
        )  # fmt: skip
    return out, final
