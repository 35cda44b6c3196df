# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The gradient of the causal convolution over whole sequences.

    total[t] = bias + sum_j w_j x[t - j]     e[t] = d_out[t] act'(total[t])
    dx[t] = sum_j w_j e[t + j]     dw_j = sum_t e[t] x[t - j]     db = sum_t e[t]

A program takes some blocks of BT tokens x BD channels, and makes e anew for the W - 1 tokens behind
each.  It keeps its own sums for the weights and the bias; torch adds up those of all programs, in
the same order every time.  A second kernel has the gradient of the history.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch.common import memory
from .causal_conv1d import unsupported as unsupported
from .common import gpu, launches
from .common.convolution import row_at, sigmoid, standing, taps_of
from .common.lengths import within


@triton.jit
def _through(grad, total, SILU: tl.constexpr):
    """The gradient in front of the activation."""
    if SILU:
        share = sigmoid(total)
        grad = grad * share * (1.0 + total * (1.0 - share))
    return grad


@triton.jit
def _number(
    x, history, sequence, position, size, token, there, d, on_d,
    x_batch, x_row, h_sequence, h_column, h_channel, W: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """The tile [BT, BD] at positions [BT], float32: tokens, what came before them, or zeros."""
    now = there & (position >= 0) & (position < size)
    at = row_at(sequence, position, token, x_batch, x_row, VARLEN)
    tile = tl.load(x + at[:, None] + d[None], mask=now[:, None] & on_d[None], other=0.0)
    tile = tile.to(tl.float32)
    if history is not None:
        past = there & (position < 0) & (position > -W)
        column = (W - 1 + position).to(tl.int64)
        at = sequence.to(tl.int64) * h_sequence + column * h_column
        before = tl.load(
            history + at[:, None] + d[None] * h_channel, mask=past[:, None] & on_d[None], other=0.0
        )
        tile += before.to(tl.float32)
    return tile


@triton.jit(do_not_specialize=["tokens", "length", "sequences"])
def _backward(
    x, weight, bias, history, starts, d_out, d_final, dx, sums,
    tokens, length, sequences, channels, strides,
    W: tl.constexpr, VARLEN: tl.constexpr, SILU: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    (
        x_batch, x_row, g_batch, g_row, w_tap, w_channel, h_sequence, h_column, h_channel,
        f_sequence, f_column, f_channel,
    ) = strides  # fmt: skip
    program = tl.program_id(0)
    tiles = tl.cdiv(channels, BD)
    d = program % tiles * BD + tl.arange(0, BD)
    on_d = d < channels
    first = program // tiles * (BT * BLOCKS)
    taps = taps_of(weight, d, on_d, w_tap, w_channel, W)
    start = tl.zeros([BD], tl.float32)
    if bias is not None:
        start += tl.load(bias + d, mask=on_d, other=0.0).to(tl.float32)
    # the sums of W taps, of the bias
    total_1 = tl.zeros([BT, BD], tl.float32)
    total_2 = tl.zeros([BT, BD], tl.float32)
    total_3 = tl.zeros([BT, BD], tl.float32)
    total_4 = tl.zeros([BT, BD], tl.float32)
    total_b = tl.zeros([BT, BD], tl.float32)
    for block in range(BLOCKS):
        token = first + block * BT + tl.arange(0, BT)
        sequence, position, size, there = standing(starts, token, tokens, length, sequences, VARLEN)
        # tokens from W - 1 before to, where there is an activation to make anew, W - 1 behind
        xs = ()
        for ahead in tl.static_range(1 - W, W if SILU else 1):
            xs += (
                _number(
                    x, history, sequence, position + ahead, size, token + ahead, there, d, on_d,
                    x_batch, x_row, h_sequence, h_column, h_channel, W, VARLEN,
                ),
            )  # fmt: skip
        back = tl.zeros([BT, BD], tl.float32)
        for ahead in tl.static_range(W):
            now = there & (position + ahead < size)
            at = row_at(sequence, position + ahead, token + ahead, g_batch, g_row, VARLEN)
            e = tl.load(d_out + at[:, None] + d[None], mask=now[:, None] & on_d[None], other=0.0)
            e = e.to(tl.float32)
            if SILU:
                total = start[None]
                for j in tl.static_range(W):
                    total += xs[W - 1 + ahead - j] * taps[j][None]
                e = _through(e, total, SILU)
            back += e * taps[ahead][None]
            if ahead == 0:
                total_b += e
                total_1 += e * xs[W - 1]
                total_2 += e * xs[W - 2]
                if W > 2:
                    total_3 += e * xs[W - 3]
                if W > 3:
                    total_4 += e * xs[W - 4]
        if d_final is not None:
            # the last tokens are final states as well
            column = W - 1 - size + position
            if tl.max(tl.where(there, column, -1)) >= 0:
                at = sequence.to(tl.int64) * f_sequence + column.to(tl.int64) * f_column
                kept = there & (column >= 0)
                grad = tl.load(
                    d_final + at[:, None] + d[None] * f_channel,
                    mask=kept[:, None] & on_d[None], other=0.0,
                )  # fmt: skip
                back += grad.to(tl.float32)
        at = token.to(tl.int64) * channels
        tl.store(
            dx + at[:, None] + d[None], back.to(dx.dtype.element_ty),
            mask=(token < tokens)[:, None] & on_d[None],
        )  # fmt: skip
    to = sums + (program // tiles).to(tl.int64) * (W + 1) * channels + d
    tl.store(to + (W - 1) * channels, tl.sum(total_1, 0), mask=on_d)
    tl.store(to + (W - 2) * channels, tl.sum(total_2, 0), mask=on_d)
    if W > 2:
        tl.store(to + (W - 3) * channels, tl.sum(total_3, 0), mask=on_d)
    if W > 3:
        tl.store(to, tl.sum(total_4, 0), mask=on_d)
    tl.store(to + W * channels, tl.sum(total_b, 0), mask=on_d)


@triton.jit(do_not_specialize=["tokens", "length"])
def _to_history(
    x, weight, bias, history, starts, d_out, d_final, d_history,
    tokens, length, channels, strides,
    W: tl.constexpr, VARLEN: tl.constexpr, SILU: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The gradient of a sequence's history, by its first W - 1 tokens."""
    (
        x_batch, x_row, g_batch, g_row, w_tap, w_channel, h_sequence, h_column, h_channel,
        f_sequence, f_column, f_channel,
    ) = strides  # fmt: skip
    tiles = tl.cdiv(channels, BD)
    n = tl.program_id(0) // tiles
    d = tl.program_id(0) % tiles * BD + tl.arange(0, BD)
    on_d = d < channels
    if VARLEN:
        first = within(starts + n, True, tokens)
        size = tl.maximum(within(starts + n + 1, True, tokens) - first, 0)
    else:
        first = n * length
        size = length
    taps = taps_of(weight, d, on_d, w_tap, w_channel, W)
    start = tl.zeros([BD], tl.float32)
    if bias is not None:
        start += tl.load(bias + d, mask=on_d, other=0.0).to(tl.float32)
    sequence = n + tl.zeros([1], tl.int32)
    xs = ()
    for position in tl.static_range(1 - W, W - 1):
        at = position + tl.zeros([1], tl.int32)
        xs += (
            _number(
                x, history, sequence, at, size, first + at, at > -W, d, on_d,
                x_batch, x_row, h_sequence, h_column, h_channel, W, VARLEN,
            ),
        )  # fmt: skip
    es = ()
    for position in tl.static_range(W - 1):
        at = position + tl.zeros([1], tl.int32)
        grad = _number(
            d_out, None, sequence, at, size, first + at, at >= 0, d, on_d,
            g_batch, g_row, 0, 0, 0, W, VARLEN,
        )  # fmt: skip
        total = start[None]
        for j in tl.static_range(W):
            total += xs[W - 1 + position - j] * taps[j][None]
        es += (_through(grad, total, SILU),)
    for column in tl.static_range(W - 1):
        back = tl.zeros([1, BD], tl.float32)
        for position in tl.static_range(column + 1):
            back += es[position] * taps[position + W - 1 - column][None]
        if d_final is not None:
            # of a short sequence a part of the history is still there at its end
            left = column - size
            at = n.to(tl.int64) * f_sequence + left.to(tl.int64) * f_column
            kept = on_d & (left >= 0)
            grad = tl.load(d_final + at + d.to(tl.int64) * f_channel, mask=kept, other=0.0)
            back += grad.to(tl.float32)[None]
        to = d_history + (n.to(tl.int64) * (W - 1) + column) * channels + d[None]
        tl.store(to, back.to(d_history.dtype.element_ty), mask=on_d[None])


def tile(tokens: int, channels: int, device: torch.device) -> tuple[int, int, int]:
    """(tokens of a block, channels, blocks a program): four programs a multiprocessor, if there is
    as much to do."""
    BT, BD = 16, min(64, max(16, triton.next_power_of_2(channels)))
    blocks = triton.cdiv(tokens, BT) * triton.cdiv(channels, BD)
    most = blocks // (4 * gpu.processors(device))
    return BT, BD, 1 << min(5, max(0, most.bit_length() - 1))


def backward(
    x: Tensor,
    weight: Tensor,
    d_out: Tensor,
    bias: Tensor | None,
    initial_states: Tensor | None,
    query_start_loc: Tensor | None,
    d_final_states: Tensor | None,
    activation: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    channels, width = x.shape[-1], weight.shape[0]
    varlen = query_start_loc is not None
    sequences = query_start_loc.shape[0] - 1 if varlen else x.shape[0]
    tokens, length = x.shape[:-1].numel(), x.shape[-2]
    dx = memory.empty(x.shape, x.dtype, x.device)
    BT, BD, blocks = tile(tokens, channels, x.device)
    chunks = triton.cdiv(tokens, BT * blocks)
    sums = memory.empty([chunks, width + 1, channels], torch.float32, x.device)
    strides = (
        0 if varlen else x.stride(0), x.stride(-2), 0 if varlen else d_out.stride(0),
        d_out.stride(-2), *weight.stride(),
        *((0, 0, 0) if initial_states is None else initial_states.stride()),
        *((0, 0, 0) if d_final_states is None else d_final_states.stride()),
    )  # fmt: skip
    flags = dict(W=width, VARLEN=varlen, SILU=activation is not None)
    given = (x, weight, bias, initial_states, query_start_loc, d_out, d_final_states)
    if dx.numel() > 0:
        launches.kernel(_backward, chunks * triton.cdiv(channels, BD))(
            *given, dx, sums, tokens, length, sequences, channels, strides,
            **flags, BT=BT, BD=BD, BLOCKS=blocks, num_warps=4,
        )  # fmt: skip
    whole = sums.sum(0)
    d_bias = memory.empty([0], x.dtype, x.device)
    if bias is not None:
        d_bias = whole[width].to(bias.dtype)
    d_states = memory.empty([0], x.dtype, x.device)
    if initial_states is not None:
        d_states = memory.empty(initial_states.shape, initial_states.dtype, x.device)
        if d_states.numel() > 0:
            BD = min(512, max(16, triton.next_power_of_2(channels)))
            launches.kernel(_to_history, sequences * triton.cdiv(channels, BD))(
                *given, d_states, tokens, length, channels, strides, **flags, BD=BD
            )
    return dx, whole[:width].to(weight.dtype), d_bias, d_states
