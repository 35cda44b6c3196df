# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The causal convolution over whole sequences.

    out[t] = act(bias + sum_j weight[W - 1 - j] x[t - j])      x [B, S, D] or [T, D]   weight [W, D]

A program takes BLOCK_T tokens and BLOCK_D channels.  Where they are of one sequence, it loads them
row by row, and the W - 1 rows before them, which may be history: all loads are under way before the
first product, and a row is multiplied with every tap out of registers.  Else it goes token by
token.  The floor is x once and out once.  Some programs in front copy the final states.

    condition    kernels
    any          _convolve
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import memory
from ...dispatch.ops.convolution.causal_conv1d import Arguments
from ..common import gpu
from ..common.convolution import before, row_at, sigmoid, standing, taps_of, value_at
from ..common.lengths import span_of
from ..runtime import launches


@triton.jit
def _output(
    total, now, computed, n, position, W: tl.constexpr, SILU: tl.constexpr, RESIDUAL: tl.constexpr
):
    if SILU:
        total = total * sigmoid(total)
    if computed is not None:
        history_len = position + tl.load(computed + n)
        total = tl.where(history_len < W - 1, 0.0, total)
    if RESIDUAL:
        total += now
    return total


@triton.jit
def _final_states(
    x, history, starts, final, n, d, mask, sizes, strides, W: tl.constexpr, VARLEN: tl.constexpr
):
    """The last W - 1 tokens of a sequence, and of its history where it is shorter."""
    tokens, length, channels = sizes
    x_batch, x_row, _w_tap, _w_channel, h_sequence, h_column, h_channel = strides
    if VARLEN:
        start, size = span_of(starts, n, tokens)
    else:
        start = n * 0
        size = length
    of_x = x + row_at(n, n * 0, start, x_batch, x_row, VARLEN)
    row, live = before(x, history, n, n >= 0, h_sequence)
    for column in tl.static_range(W - 1):
        position = size.to(tl.int64) + (column - (W - 1))
        value = value_at(of_x, row, position, W - 1, d, mask, live, x_row, h_column, h_channel)
        to = final + (n.to(tl.int64) * (W - 1) + column) * channels + d
        tl.store(to, value.to(final.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens", "length", "sequences", "finishing"])
def _convolve(
    x,
    weight,
    bias,
    history,
    starts,
    computed,
    out,
    final,
    tokens,
    length,
    sequences,
    finishing,
    channels,
    strides,
    W: tl.constexpr,
    VARLEN: tl.constexpr,
    SILU: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WHOLE: tl.constexpr,
):
    x_batch, x_row, w_tap, w_channel, h_sequence, h_column, h_channel = strides
    tiles = tl.cdiv(channels, BLOCK_D)
    program = tl.program_id(0)
    d = program % tiles * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = d >= 0 if WHOLE else d < channels
    if program < finishing:
        if final is not None:
            sizes = (tokens, length, channels)
            n = program // tiles
            _final_states(x, history, starts, final, n, d, mask, sizes, strides, W, VARLEN)
    else:
        first = (program - finishing) // tiles * BLOCK_T
        taps = taps_of(weight, d, mask, w_tap, w_channel, W)
        start = tl.zeros([BLOCK_D], tl.float32)
        if bias is not None:
            start += tl.load(bias + d, mask=mask, other=0.0).to(tl.float32)
        n, position, size, valid = standing(starts, first, tokens, length, sequences, VARLEN)
        if valid & (position + BLOCK_T <= size):
            place = position.to(tl.int64)
            of_x = x + row_at(n, n * 0, first - position, x_batch, x_row, VARLEN)
            row, live = before(x, history, n, valid, h_sequence)
            rows = ()
            for back in tl.static_range(W - 1):
                at = place + (back - (W - 1))
                rows += (value_at(of_x, row, at, W - 1, d, mask, live, x_row, h_column, h_channel),)
            at = of_x + place * x_row + d
            for t in tl.static_range(BLOCK_T):
                rows += (tl.load(at + tl.cast(t, tl.int64) * x_row, mask=mask, other=0.0),)
            to = out + first.to(tl.int64) * channels + d
            for t in tl.static_range(BLOCK_T):
                total = start
                for back in tl.static_range(W):
                    total += rows[t + W - 1 - back].to(tl.float32) * taps[back]
                now = rows[t + W - 1].to(tl.float32)
                total = _output(total, now, computed, n, position + t, W, SILU, RESIDUAL)
                at = to + tl.cast(t, tl.int64) * channels
                tl.store(at, total.to(out.dtype.element_ty), mask=mask)
        else:
            for t in range(first, tl.minimum(first + BLOCK_T, tokens)):
                token = tl.cast(t, tl.int32)
                n, position, _, valid = standing(starts, token, tokens, length, sequences, VARLEN)
                total = tl.zeros([BLOCK_D], tl.float32)
                if valid:
                    place = position.to(tl.int64)
                    of_x = x + row_at(n, n * 0, token - position, x_batch, x_row, VARLEN)
                    row, live = before(x, history, n, valid, h_sequence)
                    total = start
                    now = total
                    for back in tl.static_range(W):
                        value = value_at(
                            of_x,
                            row,
                            place - back,
                            W - 1,
                            d,
                            mask,
                            live,
                            x_row,
                            h_column,
                            h_channel,
                        )
                        total += value * taps[back]
                        if back == 0:
                            now = value
                    total = _output(total, now, computed, n, position, W, SILU, RESIDUAL)
                to = out + tl.cast(t, tl.int64) * channels + d
                tl.store(to, total.to(out.dtype.element_ty), mask=mask)


def tile(tokens: int, channels: int, device: torch.device) -> tuple[int, int]:
    """(tokens, channels) of a program: four programs a multiprocessor, if there is as much to do.

    H200, 2026-11, 8192 channels of bfloat16, microseconds at 16384 / 65536 tokens: 16 x 512 134 /
    520, 16 x 256 (a warp) 138 / 534, 16 x 1024 141; a copy of x 127 / 776.
    """
    BLOCK_T, BLOCK_D = 16, min(512, max(16, triton.next_power_of_2(channels)))
    enough = 4 * gpu.num_sms(device)
    while BLOCK_T > 1 and triton.cdiv(tokens, BLOCK_T) * triton.cdiv(channels, BLOCK_D) < enough:
        BLOCK_T //= 4
    return BLOCK_T, BLOCK_D


def unsupported(x: Tensor, **_: Any) -> str | None:
    if x.dtype is torch.float64:
        return "x is float64, supported are float32, float16 and bfloat16"
    if x.shape[:-1].numel() >= 2**31 - 2**10:
        return f"{x.shape[:-1].numel()} tokens, supported are below 2**31 - 2**10"
    return None


def launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    history: Tensor | None,
    query_start_loc: Tensor | None,
    silu: bool,
    final: Tensor | None = None,
    computed: Tensor | None = None,
    residual: bool = False,
) -> Tensor:
    """`final` [N, W - 1, D] gets the final states.  `computed` [N]: tokens of a sequence that are
    not in the call; outputs of fewer than W tokens are 0.  `residual`: x is added."""
    channels, varlen = x.shape[-1], query_start_loc is not None
    sequences = query_start_loc.shape[0] - 1 if query_start_loc is not None else x.shape[0]
    tokens = x.shape[:-1].numel()
    out = memory.empty(x.shape, x.dtype, x.device)
    BLOCK_T, BLOCK_D = tile(tokens, channels, x.device)
    tiles = triton.cdiv(channels, BLOCK_D)
    finishing = 0 if final is None else sequences * tiles
    programs = finishing + triton.cdiv(tokens, BLOCK_T) * tiles
    if programs > 0:
        launches.kernel(_convolve, programs)(
            x,
            weight,
            bias,
            history,
            query_start_loc,
            computed,
            out,
            final,
            tokens,
            x.shape[-2],
            sequences,
            finishing,
            channels,
            (
                0 if varlen else x.stride(0),
                x.stride(-2),
                *weight.stride(),
                *((0, 0, 0) if history is None else history.stride()),
            ),
            W=weight.shape[0],
            VARLEN=varlen,
            SILU=silu,
            RESIDUAL=residual,
            BLOCK_T=BLOCK_T,
            BLOCK_D=BLOCK_D,
            WHOLE=channels % BLOCK_D == 0,
            num_warps=max(1, min(4, BLOCK_D // 128)),
        )
    return out


def forward(**a: Unpack[Arguments]) -> tuple[Tensor, Tensor]:
    x, query_start_loc = a["x"], a["query_start_loc"]
    channels, width, history = x.shape[-1], a["weight"].shape[0], a["initial_states"]
    sequences = query_start_loc.shape[0] - 1 if query_start_loc is not None else x.shape[0]
    kind = x.dtype if history is None else history.dtype
    final = memory.empty([sequences, width - 1, channels], kind, x.device)
    out = launch(
        x, a["weight"], a["bias"], history, query_start_loc, a["activation"] is not None, final
    )
    return out, final
