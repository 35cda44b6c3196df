# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The gradient of the causal convolution over whole sequences.

    total[t] = bias + sum_j w_j x[t - j]     e[t] = d_out[t] act'(total[t])
    dx[t] = sum_j w_j e[t + j]     dw_j = sum_t e[t] x[t - j]     db = sum_t e[t]

A program takes some blocks of BLOCK_T tokens x BLOCK_D channels.  Where a block is of one
sequence, its rows, and the W - 1 before and behind them, are loaded ahead of the first product, and
e is made once for every token of theirs; else it goes token by token.  It keeps its own sums for
the weights and the bias; torch adds up those of all programs, in the same order every time.
_to_history has the gradient of the history.

    condition            kernels
    no initial_states    _backward
    else                 _backward then _to_history
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import memory
from ...dispatch.ops.convolution.causal_conv1d_grad import Arguments
from ..common import gpu
from ..common.convolution import before, row_at, sigmoid, standing, taps_of, tile_of, value_at
from ..common.lengths import span_of
from ..runtime import launches
from .causal_conv1d import unsupported as unsupported


@triton.jit
def _through(grad, total, SILU: tl.constexpr):
    """The gradient in front of the activation."""
    if SILU:
        share = sigmoid(total)
        grad = grad * share * (1.0 + total * (1.0 - share))
    return grad


@triton.jit
def _number(
    x,
    history,
    sequence,
    position,
    size,
    token,
    valid,
    d,
    on_d,
    of_x,
    of_history,
    W: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """The tile [BLOCK_T, BLOCK_D] at positions [BLOCK_T], float32: tokens, what came before them,
    or zeros; `of_x` and `of_history` are strides."""
    x_batch, x_row = of_x
    now = valid & (position >= 0) & (position < size)
    at = row_at(sequence, position, token, x_batch, x_row, VARLEN)
    tile = tl.load(x + at[:, None] + d[None], mask=now[:, None] & on_d[None], other=0.0)
    tile = tile.to(tl.float32)
    if history is not None:
        past = valid & (position < 0) & (position > -W)
        h_sequence, h_column, h_channel = of_history
        column = (W - 1 + position).to(tl.int64)
        at = sequence.to(tl.int64) * h_sequence + column * h_column
        before = tl.load(
            history + at[:, None] + d[None] * h_channel, mask=past[:, None] & on_d[None], other=0.0
        )
        tile += before.to(tl.float32)
    return tile


@triton.jit
def _of_final(d_final, back, n, column, d, mask, f_sequence, f_column, f_channel):
    """With the gradient of the final states, of which a token may be a column."""
    if d_final is not None:
        at = d_final + n.to(tl.int64) * f_sequence + column.to(tl.int64) * f_column
        back += tl.load(at + d.to(tl.int64) * f_channel, mask=mask & (column >= 0), other=0.0).to(
            tl.float32
        )
    return back


@triton.jit(do_not_specialize=["tokens", "length", "sequences"])
def _backward(
    x,
    weight,
    bias,
    history,
    starts,
    d_out,
    d_final,
    dx,
    sums,
    tokens,
    length,
    sequences,
    channels,
    strides,
    W: tl.constexpr,
    VARLEN: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCKS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    (
        x_batch,
        x_row,
        g_batch,
        g_row,
        w_tap,
        w_channel,
        h_sequence,
        h_column,
        h_channel,
        f_sequence,
        f_column,
        f_channel,
    ) = strides
    program = tl.program_id(0)
    tiles = tl.cdiv(channels, BLOCK_D)
    d = program % tiles * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = d >= 0 if WHOLE else d < channels
    first = program // tiles * (BLOCK_T * BLOCKS)
    taps = taps_of(weight, d, mask, w_tap, w_channel, W)
    start = tl.zeros([BLOCK_D], tl.float32)
    if bias is not None:
        start += tl.load(bias + d, mask=mask, other=0.0).to(tl.float32)
    # the sums of W taps, of the bias
    total_1 = tl.zeros([BLOCK_D], tl.float32)
    total_2 = tl.zeros([BLOCK_D], tl.float32)
    total_3 = tl.zeros([BLOCK_D], tl.float32)
    total_4 = tl.zeros([BLOCK_D], tl.float32)
    total_b = tl.zeros([BLOCK_D], tl.float32)
    for block in range(BLOCKS):
        begin = first + block * BLOCK_T
        n, position, size, valid = standing(starts, begin, tokens, length, sequences, VARLEN)
        place = position.to(tl.int64)
        of_x = x + row_at(n, n * 0, begin - position, x_batch, x_row, VARLEN)
        of_g = d_out + row_at(n, n * 0, begin - position, g_batch, g_row, VARLEN)
        row, live = before(x, history, n, valid, h_sequence)
        if valid & (position + BLOCK_T <= size):
            # the W - 1 tokens before, BLOCK_T, W - 1 behind, of which there may be fewer
            xs = ()
            for back in tl.static_range(W - 1):
                at = place + (back - (W - 1))
                xs += (value_at(of_x, row, at, W - 1, d, mask, live, x_row, h_column, h_channel),)
            gs = ()
            for t in tl.static_range(BLOCK_T + W - 1):
                at = place + t
                own = mask if t < BLOCK_T else mask & (at < size)
                if SILU or t < BLOCK_T:
                    xs += (tl.load(of_x + at * x_row + d, mask=own, other=0.0),)
                gs += (tl.load(of_g + at * g_row + d, mask=own, other=0.0),)
            to = dx + begin.to(tl.int64) * channels + d
            es = ()
            for t in tl.static_range(BLOCK_T + W - 1):
                e = gs[t].to(tl.float32)
                if SILU:
                    total = start
                    for j in tl.static_range(W):
                        total += xs[t + W - 1 - j].to(tl.float32) * taps[j]
                    e = _through(e, total, SILU)
                es += (e,)
                if t < BLOCK_T:
                    total_b += e
                    total_1 += e * xs[t + W - 1].to(tl.float32)
                    total_2 += e * xs[t + W - 2].to(tl.float32)
                    if W > 2:
                        total_3 += e * xs[t + W - 3].to(tl.float32)
                    if W > 3:
                        total_4 += e * xs[t + W - 4].to(tl.float32)
                if t >= W - 1:
                    back = es[t - W + 1] * taps[0]
                    for j in tl.static_range(1, W):
                        back += es[t - W + 1 + j] * taps[j]
                    column = W - 1 - size + position + (t - W + 1)
                    back = _of_final(
                        d_final, back, n, column, d, mask, f_sequence, f_column, f_channel
                    )
                    at = to + tl.cast(t - W + 1, tl.int64) * channels
                    tl.store(at, back.to(dx.dtype.element_ty), mask=mask)
        else:
            for t in range(begin, tl.minimum(begin + BLOCK_T, tokens)):
                token = tl.cast(t, tl.int32)
                n, position, size, valid = standing(
                    starts, token, tokens, length, sequences, VARLEN
                )
                sum_x = tl.zeros([BLOCK_D], tl.float32)
                if valid:
                    place = position.to(tl.int64)
                    of_x = x + row_at(n, n * 0, token - position, x_batch, x_row, VARLEN)
                    of_g = d_out + row_at(n, n * 0, token - position, g_batch, g_row, VARLEN)
                    row, live = before(x, history, n, valid, h_sequence)
                    xs = ()
                    for ahead in tl.static_range(1 - W, W if SILU else 1):
                        at = place + ahead
                        own = mask & (at < size)
                        xs += (
                            value_at(
                                of_x, row, at, W - 1, d, own, live, x_row, h_column, h_channel
                            ),
                        )
                    for ahead in tl.static_range(W):
                        at = place + ahead
                        e = tl.load(of_g + at * g_row + d, mask=mask & (at < size), other=0.0)
                        e = e.to(tl.float32)
                        if SILU:
                            total = start
                            for j in tl.static_range(W):
                                total += xs[W - 1 + ahead - j] * taps[j]
                            e = _through(e, total, SILU)
                        sum_x += e * taps[ahead]
                        if ahead == 0:
                            total_b += e
                            total_1 += e * xs[W - 1]
                            total_2 += e * xs[W - 2]
                            if W > 2:
                                total_3 += e * xs[W - 3]
                            if W > 3:
                                total_4 += e * xs[W - 4]
                    column = W - 1 - size + position
                    sum_x = _of_final(
                        d_final, sum_x, n, column, d, mask, f_sequence, f_column, f_channel
                    )
                to = dx + tl.cast(t, tl.int64) * channels + d
                tl.store(to, sum_x.to(dx.dtype.element_ty), mask=mask)
    to = sums + (program // tiles).to(tl.int64) * (W + 1) * channels + d
    tl.store(to + (W - 1) * channels, total_1, mask=mask)
    tl.store(to + (W - 2) * channels, total_2, mask=mask)
    if W > 2:
        tl.store(to + (W - 3) * channels, total_3, mask=mask)
    if W > 3:
        tl.store(to, total_4, mask=mask)
    tl.store(to + W * channels, total_b, mask=mask)


@triton.jit(do_not_specialize=["tokens", "length"])
def _to_history(
    x,
    weight,
    bias,
    history,
    starts,
    d_out,
    d_final,
    d_history,
    tokens,
    length,
    channels,
    strides,
    W: tl.constexpr,
    VARLEN: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The gradient of a sequence's history, by its first W - 1 tokens."""
    of_x, of_g, of_history = strides[0:2], strides[2:4], strides[6:9]
    w_tap, w_channel = strides[4:6]
    f_sequence, f_column, f_channel = strides[9:12]
    n, d, on_d = tile_of(channels, BLOCK_D)
    if VARLEN:
        first, size = span_of(starts, n, tokens)
    else:
        first = n * length
        size = length
    taps = taps_of(weight, d, on_d, w_tap, w_channel, W)
    start = tl.zeros([BLOCK_D], tl.float32)
    if bias is not None:
        start += tl.load(bias + d, mask=on_d, other=0.0).to(tl.float32)
    sequence = n + tl.zeros([1], tl.int32)
    xs = ()
    for position in tl.static_range(1 - W, W - 1):
        at = position + tl.zeros([1], tl.int32)
        xs += (
            _number(
                x,
                history,
                sequence,
                at,
                size,
                first + at,
                at > -W,
                d,
                on_d,
                of_x,
                of_history,
                W,
                VARLEN,
            ),
        )
    es = ()
    for position in tl.static_range(W - 1):
        at = position + tl.zeros([1], tl.int32)
        grad = _number(
            d_out,
            None,
            sequence,
            at,
            size,
            first + at,
            at >= 0,
            d,
            on_d,
            of_g,
            None,
            W,
            VARLEN,
        )
        total = start[None]
        for j in tl.static_range(W):
            total += xs[W - 1 + position - j] * taps[j][None]
        es += (_through(grad, total, SILU),)
    for column in tl.static_range(W - 1):
        back = tl.zeros([1, BLOCK_D], tl.float32)
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
    as much to do.

    H200, 2026-11, 8192 channels of bfloat16, microseconds with the sums at 4096 / 16384 tokens:
    8 x 512 88 / 305, 16 x 512 92 / 315, 16 x 256 89 / 321.
    """
    BLOCK_T, BLOCK_D = 8, min(512, max(16, triton.next_power_of_2(channels)))
    blocks = triton.cdiv(tokens, BLOCK_T) * triton.cdiv(channels, BLOCK_D)
    most = blocks // (4 * gpu.num_sms(device))
    return BLOCK_T, BLOCK_D, 1 << min(6, max(0, most.bit_length() - 1))


def backward(**a: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, weight, d_out, bias = a["x"], a["weight"], a["d_out"], a["bias"]
    initial_states, query_start_loc = a["initial_states"], a["query_start_loc"]
    d_final_states = a["d_final_states"]
    channels, width = x.shape[-1], weight.shape[0]
    varlen = query_start_loc is not None
    sequences = x.shape[0] if query_start_loc is None else query_start_loc.shape[0] - 1
    tokens, length = x.shape[:-1].numel(), x.shape[-2]
    dx = memory.empty(x.shape, x.dtype, x.device)
    BLOCK_T, BLOCK_D, blocks = tile(tokens, channels, x.device)
    chunks = triton.cdiv(tokens, BLOCK_T * blocks)
    sums = memory.empty([chunks, width + 1, channels], torch.float32, x.device)
    strides = (
        0 if varlen else x.stride(0),
        x.stride(-2),
        0 if varlen else d_out.stride(0),
        d_out.stride(-2),
        *weight.stride(),
        *((0, 0, 0) if initial_states is None else initial_states.stride()),
        *((0, 0, 0) if d_final_states is None else d_final_states.stride()),
    )
    flags = dict(W=width, VARLEN=varlen, SILU=a["activation"] is not None)
    given = (x, weight, bias, initial_states, query_start_loc, d_out, d_final_states)
    if dx.numel() > 0:
        launches.kernel(_backward, chunks * triton.cdiv(channels, BLOCK_D))(
            *given,
            dx,
            sums,
            tokens,
            length,
            sequences,
            channels,
            strides,
            **flags,
            BLOCK_T=BLOCK_T,
            BLOCK_D=BLOCK_D,
            BLOCKS=blocks,
            WHOLE=channels % BLOCK_D == 0,
            num_warps=max(1, min(4, BLOCK_D // 128)),
        )
    whole = sums.sum(0)
    d_bias = memory.empty([0], x.dtype, x.device)
    if bias is not None:
        d_bias = whole[width].to(bias.dtype)
    d_states = memory.empty([0], x.dtype, x.device)
    if initial_states is not None:
        d_states = memory.empty(initial_states.shape, initial_states.dtype, x.device)
        if d_states.numel() > 0:
            BLOCK_D = min(512, max(16, triton.next_power_of_2(channels)))
            launches.kernel(_to_history, sequences * triton.cdiv(channels, BLOCK_D))(
                *given, d_states, tokens, length, channels, strides, **flags, BLOCK_D=BLOCK_D
            )
    return dx, whole[:width].to(weight.dtype), d_bias, d_states
