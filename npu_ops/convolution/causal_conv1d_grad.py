# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The gradient of the causal convolution over whole sequences, on the vector cores.

    total[t] = bias + sum_j w_j x[t - j]     e[t] = d_out[t] act'(total[t])
    dx[t] = sum_j w_j e[t + j]     dw_j = sum_t e[t] x[t - j]     db = sum_t e[t]

A core walks over a part of a sequence and the W - 1 tokens behind it, with the last tokens and the
unfinished gradients of as many in UB.  A gradient whose token lies before the sequence is that of
the history.  Every part has its own sums for the weights and the bias; torch adds them up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import memory
from ...dispatch.ops.convolution.causal_conv1d_grad import Arguments
from ..common import cores, tune, tuples
from ..common.cores import tiled
from .causal_conv1d import (
    Rows,
    Sequences,
    States,
    at_sequence,
    dense,
    part_of,
    parts_of,
    piece_of,
    row,
    side_by_side,
    sigmoid,
    tap,
)
from .causal_conv1d import unsupported as unsupported

_KERNEL = "causal_conv1d_grad.walk"


@triton.jit
def _put(
    of_dx,
    of_history,
    value,
    position,
    low,
    stop,
    d,
    count,
    channels,
    W: tl.constexpr,
    HISTORY: tl.constexpr,
):
    """The gradient of a token of the part, from `low` to `stop`, or of the history."""
    mine = (position >= low) & (position < stop)
    of_token = d < tl.where(mine & (position >= 0), count, 0)
    at = tl.maximum(position, 0).to(tl.int64) * channels
    tl.store(of_dx + at + d, value.to(of_dx.dtype.element_ty), mask=of_token)
    if HISTORY:
        of_past = d < tl.where(mine & (position < 0), count, 0)
        at = tl.maximum(W - 1 + tl.minimum(position, 0), 0).to(tl.int64) * channels
        tl.store(of_history + at + d, value.to(of_history.dtype.element_ty), mask=of_past)


@triton.jit
def _left(of_final, column, ended, d, count, f_column):
    """The gradient of a final state, where the sequence ends here."""
    at = d < tl.where(ended, count, 0)
    return tl.load(of_final + column * f_column + d, mask=at, other=0.0).to(tl.float32)


@tuples.jit(["parts"])
def walk(
    x,
    weight,
    bias,
    history,
    d_out,
    d_final,
    dx,
    d_history,
    sums,
    parts,
    x_stride: Rows,
    h_stride: States,
    g_stride: Rows,
    f_stride: States,
    of: Sequences,
    W: tl.constexpr,
    HISTORY: tl.constexpr,
    FINAL: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
):
    """dx, d_history and a part's sums [W + 1, channels]."""
    d, tiles = tiled(of.channels, CHANNEL_TILE)
    start = 0
    n = -1
    for work in range(tl.program_id(0), of.sequences * parts * tiles, tl.num_programs(0)):
        n, part, start, size, first, count = piece_of(work, parts, n, start, *of, CHANNEL_TILE)
        of_x = x + at_sequence(n, start, *x_stride, of.VARLEN) + first
        of_g = d_out + at_sequence(n, start, *g_stride, of.VARLEN) + first
        of_dx = dx + side_by_side(n, start, of.length, of.channels, of.VARLEN) + first
        of_history = history + n.to(tl.int64) * h_stride.sequence + first
        of_final = d_final + n.to(tl.int64) * f_stride.sequence + first
        of_past = d_history + n.to(tl.int64) * (W - 1) * of.channels + first
        of_weight = weight + first
        zero = tl.zeros((CHANNEL_TILE,), tl.float32)
        w_0 = tap(of_weight, 0, d, count, of.channels, W)
        w_1 = tap(of_weight, 1, d, count, of.channels, W)
        begin, stop = part_of(size, part, parts)
        x_1 = row(of_x, of_history, begin - 1, d, count, x_stride.row, h_stride.column, W, HISTORY)
        # unfinished gradients of the tokens before, sums for the weights and the bias
        p_1 = zero
        s_0 = zero
        s_1 = zero
        s_b = zero
        if W > 2:
            w_2 = tap(of_weight, 2, d, count, of.channels, W)
            x_2 = row(
                of_x, of_history, begin - 2, d, count, x_stride.row, h_stride.column, W, HISTORY
            )
            p_2 = zero
            s_2 = zero
        if W > 3:
            w_3 = tap(of_weight, 3, d, count, of.channels, W)
            x_3 = row(
                of_x, of_history, begin - 3, d, count, x_stride.row, h_stride.column, W, HISTORY
            )
            p_3 = zero
            s_3 = zero
        on = d < count
        if BIAS:
            b = tl.load(bias + first + d, mask=on, other=0.0).to(tl.float32)
        # the part that begins the sequence has its history
        low = tl.where(part == 0, 1 - W, begin)
        end = tl.minimum(stop + W - 1, size)
        end = tl.where(begin < stop, end, stop)
        for t in range(begin, end):
            at = t.to(tl.int64)
            now = tl.load(of_x + at * x_stride.row + d, mask=on, other=0.0).to(tl.float32)
            e = tl.load(of_g + at * g_stride.row + d, mask=on, other=0.0).to(tl.float32)
            if SILU:
                total = now * w_0 + x_1 * w_1
                if W > 2:
                    total += x_2 * w_2
                if W > 3:
                    total += x_3 * w_3
                if BIAS:
                    total += b
                share = sigmoid(total)
                e = e * share * (1.0 + total * (1.0 - share))
            # those behind the part are in the sums of the next one
            mine = e * (t < stop).to(tl.float32)
            s_0 += mine * now
            s_1 += mine * x_1
            s_b += mine
            if W > 2:
                s_2 += mine * x_2
            if W > 3:
                s_3 += mine * x_3
            if W == 2:
                done = p_1 + e * w_1
            if W == 3:
                done = p_2 + e * w_2
                p_2 = p_1 + e * w_1
            if W == 4:
                done = p_3 + e * w_3
                p_3 = p_2 + e * w_2
                p_2 = p_1 + e * w_1
            p_1 = e * w_0
            _put(of_dx, of_past, done, t - (W - 1), low, stop, d, count, of.channels, W, HISTORY)
            if W > 3:
                x_3 = x_2
            if W > 2:
                x_2 = x_1
            x_1 = now
        # the last tokens of the sequence are its final states as well
        ended = (end == size) & ((begin < stop) | (part == 0))
        if FINAL:
            p_1 += _left(of_final, W - 2, ended, d, count, f_stride.column)
        _put(of_dx, of_past, p_1, end - 1, low, stop, d, count, of.channels, W, HISTORY)
        if W > 2:
            if FINAL:
                p_2 += _left(of_final, W - 3, ended, d, count, f_stride.column)
            _put(of_dx, of_past, p_2, end - 2, low, stop, d, count, of.channels, W, HISTORY)
        if W > 3:
            if FINAL:
                p_3 += _left(of_final, W - 4, ended, d, count, f_stride.column)
            _put(of_dx, of_past, p_3, end - 3, low, stop, d, count, of.channels, W, HISTORY)
        to = sums + (n * parts + part).to(tl.int64) * (W + 1) * of.channels + first + d
        tl.store(to + (W - 1) * of.channels, s_0, mask=on)
        tl.store(to + (W - 2) * of.channels, s_1, mask=on)
        if W > 2:
            tl.store(to + (W - 3) * of.channels, s_2, mask=on)
        if W > 3:
            tl.store(to, s_3, mask=on)
        tl.store(to + W * of.channels, s_b, mask=on)
        if of.VARLEN:
            # tokens before the first sequence, and behind the last one
            nothing = tl.zeros((CHANNEL_TILE,), dx.dtype.element_ty)
            for t in range(0, tl.where((n == 0) & (part == 0), start, 0)):
                tl.store(dx + t.to(tl.int64) * of.channels + first + d, nothing, mask=on)
            alone = (n == of.sequences - 1) & (part == 0)
            for t in range(tl.where(alone, start + size, of.tokens), of.tokens):
                tl.store(dx + t.to(tl.int64) * of.channels + first + d, nothing, mask=on)


def backward(**a: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, weight, bias, d_out = a["x"], a["weight"], a["bias"], a["d_out"]
    query_start_loc = a["query_start_loc"]
    history, final = (
        None if states is None else dense(states)
        for states in (a["initial_states"], a["d_final_states"])
    )
    channels, width = x.shape[-1], weight.shape[0]
    varlen = query_start_loc is not None
    sequences = x.shape[0] if query_start_loc is None else query_start_loc.shape[0] - 1
    tokens, length = x.shape[:-1].numel(), x.shape[-2]
    dx = memory.empty(x.shape, x.dtype, x.device)
    d_states = memory.empty([0], x.dtype, x.device)
    if history is not None:
        d_states = memory.empty(history.shape, history.dtype, x.device)
    config = tune.at_least(_KERNEL, "CHANNEL_TILE", channels)
    tiles = triton.cdiv(channels, config.tiles["CHANNEL_TILE"])
    parts = parts_of(max(1, sequences), max(1, tiles), tokens)
    sums = memory.empty([sequences * parts, width + 1, channels], torch.float32, x.device)
    if sequences == 0 or channels == 0:
        dx.zero_()
    else:
        # a tensor stands for one that is not there, and is not touched
        walk[(min(sequences * parts * tiles, cores.vector()),)](
            x,
            weight.contiguous(),
            x if bias is None else bias,
            x if history is None else history,
            d_out,
            x if final is None else final,
            dx,
            dx if history is None else d_states,
            sums,
            parts,
            0 if varlen else x.stride(0),
            x.stride(-2),
            *((0, 0) if history is None else history.stride()[:2]),
            0 if varlen else d_out.stride(0),
            d_out.stride(-2),
            *((0, 0) if final is None else final.stride()[:2]),
            x if query_start_loc is None else query_start_loc,
            sequences,
            length,
            tokens,
            channels,
            W=width,
            VARLEN=varlen,
            HISTORY=history is not None,
            FINAL=final is not None,
            BIAS=bias is not None,
            SILU=a["activation"] is not None,
            **config.keywords,
        )
    whole = sums.sum(0)
    d_bias = memory.empty([0], x.dtype, x.device)
    if bias is not None:
        d_bias = whole[width].to(bias.dtype)
    return dx, whole[:width].to(weight.dtype), d_bias, d_states
