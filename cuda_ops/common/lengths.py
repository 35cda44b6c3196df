# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Lengths and prefix sums that the caller gave, int32 or int64."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def within(lengths, valid, most):
    """What `lengths` point to, from 0 to `most`, as int32; 0 where not `valid`."""
    # before it is cast: what does not fit 32 bits wraps
    return tl.minimum(tl.maximum(tl.load(lengths, mask=valid, other=0), 0), most).to(tl.int32)


@triton.jit
def span_of(bounds, n, T, LANES: tl.constexpr = 256):
    """(first token, tokens) of sequence n, which begins where all before it have ended."""
    i = tl.arange(0, LANES)
    first = tl.zeros([LANES], tl.int32)
    for at in range(0, n + 1, LANES):
        first = tl.maximum(first, within(bounds + at + i, at + i <= n, T))
    first = tl.max(first, 0)
    return first, tl.maximum(within(bounds + n + 1, True, T) - first, 0)


@triton.jit
def sequence_of(bounds, token, sequences, T, LANES: tl.constexpr = 256):
    """The first sequence that ends behind a token, or `sequences` behind the last."""
    i = tl.arange(0, LANES)
    found = sequences + tl.zeros([LANES], tl.int32)
    for at in range(0, sequences, LANES):
        n = at + i
        end = within(bounds + 1 + n, n < sequences, T)
        found = tl.minimum(found, tl.where((n < sequences) & (end > token), n, sequences))
    return tl.min(found, 0)


@triton.jit
def later(a, b):
    return tl.maximum(a, b)


@triton.jit
def pieces(bounds, T, sequences, PIECES: tl.constexpr):
    """By piece [PIECES]: its number, first token and end.  Piece n + 1 is sequence n; the first and
    the last are the tokens of none, before and behind.  A sequence begins where all before it
    have ended."""
    s = tl.arange(0, PIECES)
    begin = within(bounds + s - 1, (s > 0) & (s <= sequences + 1), T)
    end = within(bounds + s, s <= sequences, T)
    begin = tl.associative_scan(begin, 0, later)
    end = tl.associative_scan(end, 0, later)
    return s, tl.where(s > sequences + 1, T, begin), tl.where(s > sequences, T, end)
