# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The causal convolution over whole sequences, on the vector cores.

    out[t] = act(bias + sum_j weight[W - 1 - j] x[t - j])

A core takes a part of a sequence and CHANNEL_TILE channels, and walks over its tokens with the
last W - 1 of them in UB: every token is loaded once.  A sequence is cut on the device, where its
length is.  A row that is not there makes an empty copy: the mask is a bound on its channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import memory
from ...dispatch.ops.convolution.causal_conv1d import Arguments
from ..common import cores, tune, tuples
from ..common.cores import tiled
from ..common.lengths import latest, left


class Rows(NamedTuple):
    """How far apart sequences of equal length, and tokens, are."""

    batch: int
    row: int


class States(NamedTuple):
    """How far apart the states of sequences, and their columns, are."""

    sequence: int
    column: int


class Sequences(NamedTuple):
    """Where they begin, or how long all are."""

    starts: Tensor
    sequences: int
    length: int
    tokens: int  # of all
    channels: int
    VARLEN: tl.constexpr  # by `starts`


@triton.jit
def piece_of(
    work,
    parts,
    n,
    start,
    starts,
    sequences,
    length,
    tokens,
    channels,
    VARLEN: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
):
    """(sequence, which of its parts, its first token, its tokens, first channel, channels) of a
    piece of work, after one of sequence n, which begins at `start`.  Without `starts`, tokens are
    counted from their own sequence's first."""
    seen = n + 1
    tiles = (channels + CHANNEL_TILE - 1) // CHANNEL_TILE
    n = work // (parts * tiles)
    first = work % tiles * CHANNEL_TILE
    size = length
    if VARLEN:
        start = latest(starts, n, seen, start, tokens)
        size = left(starts, n, start, tokens)
    return n, work // tiles % parts, start, size, first, tl.minimum(channels - first, CHANNEL_TILE)


@triton.jit
def part_of(size, part, parts):
    """(begin, stop) of a part of a sequence."""
    step = (size + parts - 1) // parts
    begin = tl.minimum(part * step, size)
    return begin, tl.minimum(begin + step, size)


@triton.jit
def at_sequence(n, start, batch, row, VARLEN: tl.constexpr):
    """Where a sequence's tokens lie."""
    if VARLEN:
        at = start.to(tl.int64) * row
    else:
        at = n.to(tl.int64) * batch
    return at


@triton.jit
def side_by_side(n, start, length, channels, VARLEN: tl.constexpr):
    """The same, of tokens without gaps."""
    return at_sequence(n, start, length.to(tl.int64) * channels, channels, VARLEN)


@triton.jit
def row(
    of_x, of_history, position, d, count, x_row, h_column, W: tl.constexpr, HISTORY: tl.constexpr
):
    """What stands at a position of a sequence, float32; zeros before its history."""
    now = d < tl.where(position >= 0, count, 0)
    at = tl.maximum(position, 0).to(tl.int64) * x_row
    x = tl.load(of_x + at + d, mask=now, other=0.0).to(tl.float32)
    if HISTORY:
        past = d < tl.where(position < 0, count, 0)
        at = tl.maximum(W - 1 + position, 0).to(tl.int64) * h_column
        x += tl.load(of_history + tl.where(position < 0, at, 0) + d, mask=past, other=0.0).to(
            tl.float32
        )
    return x


@triton.jit
def tap(weight, back, d, count, channels, W: tl.constexpr):
    """What is multiplied with the token `back` before, float32."""
    at = weight + (W - 1 - back) * channels + d
    return tl.load(at, mask=d < count, other=0.0).to(tl.float32)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@tuples.jit(["parts"])
def convolve(
    x,
    weight,
    bias,
    history,
    computed,
    out,
    parts,
    x_stride: Rows,
    h_stride: States,
    of: Sequences,
    W: tl.constexpr,
    HISTORY: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    COMPUTED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
):
    """The outputs of parts of sequences."""
    d, tiles = tiled(of.channels, CHANNEL_TILE)
    start = 0
    n = -1
    for work in range(tl.program_id(0), of.sequences * parts * tiles, tl.num_programs(0)):
        n, part, start, size, first, count = piece_of(work, parts, n, start, *of, CHANNEL_TILE)
        of_x = x + at_sequence(n, start, *x_stride, of.VARLEN) + first
        of_out = out + side_by_side(n, start, of.length, of.channels, of.VARLEN) + first
        of_history = history + n.to(tl.int64) * h_stride.sequence + first
        of_weight = weight + first
        w_0 = tap(of_weight, 0, d, count, of.channels, W)
        w_1 = tap(of_weight, 1, d, count, of.channels, W)
        begin, stop = part_of(size, part, parts)
        x_1 = row(of_x, of_history, begin - 1, d, count, x_stride.row, h_stride.column, W, HISTORY)
        if W > 2:
            w_2 = tap(of_weight, 2, d, count, of.channels, W)
            x_2 = row(
                of_x, of_history, begin - 2, d, count, x_stride.row, h_stride.column, W, HISTORY
            )
        if W > 3:
            w_3 = tap(of_weight, 3, d, count, of.channels, W)
            x_3 = row(
                of_x, of_history, begin - 3, d, count, x_stride.row, h_stride.column, W, HISTORY
            )
        on = d < count
        if BIAS:
            b = tl.load(bias + first + d, mask=on, other=0.0).to(tl.float32)
        if COMPUTED:
            done = tl.load(computed + n)
        for t in range(begin, stop):
            now = tl.load(of_x + t.to(tl.int64) * x_stride.row + d, mask=on, other=0.0).to(
                tl.float32
            )
            total = now * w_0 + x_1 * w_1
            if W > 2:
                total += x_2 * w_2
            if W > 3:
                total += x_3 * w_3
                x_3 = x_2
            if W > 2:
                x_2 = x_1
            x_1 = now
            if BIAS:
                total += b
            if SILU:
                total = total * sigmoid(total)
            if COMPUTED:
                total = tl.where(d < tl.where(t + done < W - 1, 0, count), total, 0.0)
            if RESIDUAL:
                total += now
            to = of_out + t.to(tl.int64) * of.channels + d
            tl.store(to, total.to(out.dtype.element_ty), mask=on)
        if of.VARLEN:
            # tokens before the first sequence, and behind the last one
            zero = tl.zeros((CHANNEL_TILE,), out.dtype.element_ty)
            before = tl.where((n == 0) & (part == 0), start, 0)
            for t in range(0, before):
                tl.store(out + t.to(tl.int64) * of.channels + first + d, zero, mask=on)
            alone = (n == of.sequences - 1) & (part == 0)
            for t in range(tl.where(alone, start + size, of.tokens), of.tokens):
                tl.store(out + t.to(tl.int64) * of.channels + first + d, zero, mask=on)


@tuples.jit()
def finish(
    x,
    history,
    out,
    x_stride: Rows,
    h_stride: States,
    of: Sequences,
    W: tl.constexpr,
    HISTORY: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
):
    """The last W - 1 tokens of a sequence, and of its history where it is shorter."""
    d, tiles = tiled(of.channels, CHANNEL_TILE)
    start = 0
    n = -1
    for work in range(tl.program_id(0), of.sequences * tiles, tl.num_programs(0)):
        n, _, start, size, first, count = piece_of(work, 1, n, start, *of, CHANNEL_TILE)
        of_x = x + at_sequence(n, start, *x_stride, of.VARLEN) + first
        of_history = history + n.to(tl.int64) * h_stride.sequence + first
        to = out + n.to(tl.int64) * (W - 1) * of.channels + first + d
        for column in range(0, W - 1):
            position = size - (W - 1) + column
            value = row(
                of_x, of_history, position, d, count, x_stride.row, h_stride.column, W, HISTORY
            )
            tl.store(to + column * of.channels, value.to(out.dtype.element_ty), mask=d < count)


def parts_of(sequences: int, tiles: int, tokens: int) -> int:
    """Into how many parts each sequence is cut: work enough for every core, but no part of few
    tokens, if they are alike."""
    wanted = triton.cdiv(2 * cores.vector(), sequences * tiles)
    return max(1, min(wanted, tokens // sequences // 16))


def dense(states: Tensor) -> Tensor:
    """States [N, W - 1, D] whose channels lie side by side; a copy where they do not."""
    return states if states.stride(-1) == 1 else states.contiguous()


def unsupported(x: Tensor, **_: Any) -> str | None:
    if x.dtype is torch.float64:
        return "`x` is float64, the vector units take float32, float16 and bfloat16"
    if x.shape[:-1].numel() >= 2**31:
        return f"{x.shape[:-1].numel()} tokens, the kernel counts below 2**31"
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
    if out.numel() == 0 or sequences == 0:
        return out.zero_()

    def given(tensor: Tensor | None) -> Tensor:
        """A tensor stands for one that is not there, and is not touched."""
        return x if tensor is None else tensor

    config = tune.at_least("causal_conv1d.convolve", "CHANNEL_TILE", channels)
    tiles = triton.cdiv(channels, config.tiles["CHANNEL_TILE"])
    parts = parts_of(sequences, tiles, tokens)
    convolve[(min(sequences * parts * tiles, cores.vector()),)](
        x,
        weight.contiguous(),
        given(bias),
        given(history),
        given(computed),
        out,
        parts,
        0 if varlen else x.stride(0),
        x.stride(-2),
        *((0, 0) if history is None else history.stride()[:2]),
        given(query_start_loc),
        sequences,
        x.shape[-2],
        tokens,
        channels,
        W=weight.shape[0],
        VARLEN=varlen,
        HISTORY=history is not None,
        BIAS=bias is not None,
        SILU=silu,
        COMPUTED=computed is not None,
        RESIDUAL=residual,
        **config.keywords,
    )
    return out


def forward(**a: Unpack[Arguments]) -> tuple[Tensor, Tensor]:
    x, weight, initial_states = a["x"], a["weight"], a["initial_states"]
    query_start_loc = a["query_start_loc"]
    channels, width = x.shape[-1], weight.shape[0]
    varlen = query_start_loc is not None
    sequences = query_start_loc.shape[0] - 1 if query_start_loc is not None else x.shape[0]
    history = None if initial_states is None else dense(initial_states)
    out = outputs(x, weight, a["bias"], history, query_start_loc, a["activation"] is not None)
    kind = x.dtype if history is None else history.dtype
    final = memory.empty([sequences, width - 1, channels], kind, x.device)
    if final.numel() == 0:
        return out, final
    config = tune.at_least("causal_conv1d.finish", "CHANNEL_TILE", channels)
    tiles = triton.cdiv(channels, config.tiles["CHANNEL_TILE"])
    finish[(min(sequences * tiles, cores.vector()),)](
        x,
        x if history is None else history,
        final,
        0 if varlen else x.stride(0),
        x.stride(-2),
        *((0, 0) if history is None else history.stride()[:2]),
        x if query_start_loc is None else query_start_loc,
        sequences,
        x.shape[-2],
        x.shape[:-1].numel(),
        channels,
        W=width,
        VARLEN=varlen,
        HISTORY=history is not None,
        **config.keywords,
    )
    return out, final
