# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What the kernels of the causal convolution share: where a token stands, and its tile's numbers.

A position in a sequence is that of a token from 0 on; -1 is the last column of its history.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .approximate import inverse
from .lengths import sequence_of, span_of


@triton.jit
def tile_of(channels, BLOCK_D: tl.constexpr):
    """(sequence, channels [BLOCK_D], which of them exist) of a program."""
    tiles = tl.cdiv(channels, BLOCK_D)
    n = tl.program_id(0) // tiles
    d = tl.program_id(0) % tiles * BLOCK_D + tl.arange(0, BLOCK_D)
    return n, d, d < channels


@triton.jit
def standing(starts, token, tokens, length, sequences, VARLEN: tl.constexpr):
    """(sequence, position in it, length of it, whether there is one) of a token."""
    valid = token < tokens
    if VARLEN:
        sequence = sequence_of(starts, token, sequences, tokens)
        valid = valid & (sequence < sequences)
        start, size = span_of(starts, tl.minimum(sequence, sequences - 1), tokens)
        position = token - start
        valid = valid & (position >= 0)
    else:
        sequence = token // length
        position = token - sequence * length
        size = token * 0 + length
    return sequence, position, size, valid


@triton.jit
def row_at(sequence, position, token, batch_stride, row_stride, VARLEN: tl.constexpr):
    """The offset of a token's row: packed ones lie at their number."""
    if VARLEN:
        at = token.to(tl.int64) * row_stride
    else:
        at = sequence.to(tl.int64) * batch_stride + position.to(tl.int64) * row_stride
    return at


@triton.jit
def before(x, history, n, valid, h_sequence):
    """(the history of a sequence, whether there is any)."""
    if history is not None:
        row = history + n.to(tl.int64) * h_sequence
        live = valid
    else:
        row = x
        live = valid & (n < 0)
    return row, live


@triton.jit
def value_at(x, row, position, reach, d, mask, live, x_row, s_column, s_channel):
    """What stands at a position [BLOCK_D], as float32: a token's number, or that of a `live` row of
    a pool, of which the first `reach` columns count; zeros before everything."""
    now = tl.load(x + position * x_row + d, mask=mask & (position >= 0), other=0.0)
    past = mask & live & (position < 0) & (position >= -reach)
    before = tl.load(
        row + (reach + position) * s_column + d.to(tl.int64) * s_channel, mask=past, other=0.0
    )
    return now.to(tl.float32) + before.to(tl.float32)


@triton.jit
def taps_of(weight, d, mask, tap_stride, channel_stride, W: tl.constexpr):
    """The taps [BLOCK_D], float32: first the token's own, then that of the one before it."""
    found = ()
    weight += d.to(tl.int64) * channel_stride
    for back in tl.static_range(W):
        at = weight + tl.cast(W - 1 - back, tl.int64) * tap_stride
        found += (tl.load(at, mask=mask, other=0.0).to(tl.float32),)
    return found


@triton.jit
def sigmoid(x):
    """With one instruction for the division, whose last bit may be off."""
    return inverse(1.0 + tl.exp(-x))
