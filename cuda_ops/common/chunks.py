# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What the gated delta rules do with a chunk of 64 tokens, and their gates."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .lengths import within

CHUNK: tl.constexpr = tl.constexpr(64)
SUB: tl.constexpr = tl.constexpr(16)


class Constants(NamedTuple):
    """Of all kernels of the gated delta rule over whole sequences, and of its gradient's; SEQUENCES
    is a power of two not below their number."""

    N: int
    NV: int
    DK: int
    DV: int
    SEQUENCES: int
    VARLEN: bool
    BETA: int
    GATE: bool


def constants(
    key: Tensor,
    value: Tensor,
    lengths: Tensor | None,
    rate: int,
    g: Tensor | None,
    least: int = 16,
) -> Constants:
    """`least`: what SEQUENCES is at least."""
    sequences = 1 if lengths is None else lengths.shape[0]
    return Constants(
        N=key.shape[1],
        NV=value.shape[1],
        DK=key.shape[2],
        DV=value.shape[2],
        SEQUENCES=max(least, triton.next_power_of_2(sequences)),
        VARLEN=lengths is not None,
        BETA=rate,
        GATE=g is not None,
    )


@triton.jit
def unit_inverse(lower, PRECISION: tl.constexpr):
    """(I + lower)^-1 of a strictly lower [64, 64] matrix, in float32.

    Diagonal blocks of 16 by forward substitution, which stays right where keys are alike and a
    power series would cancel; M is their inverse.  What is below them, B, follows from
    (I + M B)^-1 M, a series that ends: (M B)^4 = 0.  PRECISION is that of its products: one tf32
    pass is four times as fine as the bfloat16 that the result is rounded to."""
    BLOCKS: tl.constexpr = CHUNK // SUB
    i = tl.arange(0, CHUNK)
    inside = (i[:, None] // SUB) == (i[None, :] // SUB)
    block = tl.arange(0, BLOCKS)
    same = (block[:, None] == block[None, :])[:, None, :, None]
    parts = tl.reshape(lower, [BLOCKS, SUB, BLOCKS, SUB])
    diagonal = tl.sum(tl.where(same, parts, 0.0), 2)  # [blocks, 16, 16]
    row = tl.arange(0, SUB)
    unit = (row[:, None] == row[None, :]).to(tl.float32)
    inverse = tl.broadcast_to(unit[None, :, :], [BLOCKS, SUB, SUB])
    for r in range(1, SUB):
        at = (row == r)[None, :, None]
        factors = tl.sum(tl.where(at, diagonal, 0.0), 1)  # [blocks, 16]
        new = tl.sum(factors[:, :, None] * inverse, 1)
        inverse = tl.where(at, inverse - new[:, None, :], inverse)
    whole = tl.where(same, inverse[:, :, None, :], 0.0)
    m = tl.reshape(whole, [CHUNK, CHUNK])
    n = tl.dot(m, tl.where(inside, 0.0, lower), input_precision=PRECISION)
    eye = (i[:, None] == i[None, :]).to(tl.float32)
    squared = eye + tl.dot(n, n, input_precision=PRECISION)
    series = tl.dot(eye - n, squared, input_precision=PRECISION)
    return tl.dot(series, m, input_precision=PRECISION)


@triton.jit
def from_head(base, by, batch, token, head):
    """Where a head's rows begin in a token; `by`: the strides of batches, tokens and heads."""
    return base + (batch * by[0] + token * by[1] + head * by[2])


@triton.jit
def chunk_rows(base, first, length, row, columns, SIZE: tl.constexpr, PAD: tl.constexpr):
    """[64, PAD] rows from `first` on; zeros behind `length` and SIZE."""
    i = first + tl.arange(0, CHUNK)
    mask = (i < length)[:, None]
    if SIZE != PAD:
        mask = mask & (columns < SIZE)[None, :]
    return tl.load(base + i.to(tl.int64)[:, None] * row + columns[None, :], mask=mask, other=0.0)


@triton.jit
def sequence_lengths(lengths, T, sequences, SEQUENCES: tl.constexpr):
    """By sequence [SEQUENCES]: its number and length, in 64 bits: what the lengths add up to may be
    far beyond the T tokens."""
    s = tl.arange(0, SEQUENCES)
    return s, within(lengths + s, s < sequences, T).to(tl.int64)


@triton.jit
def heads_of(head, GROUP: tl.constexpr):
    """(head of the keys, `head` of the values), in 64 bits, as what they are multiplied with may be
    any stride."""
    return (head // GROUP).to(tl.int64), head.to(tl.int64)


@triton.jit
def rate_of(beta, valid, BETA: tl.constexpr):
    """How much of its key's value a token changes, in float32; 0 where there is none."""
    rate = beta.to(tl.float32)
    if BETA > 1:
        rate = tl.where(valid, (BETA - 1.0) / (1.0 + tl.exp(-rate)), 0.0)
    return rate


@triton.jit
def of_beta(grad, rate, BETA: tl.constexpr):
    """The gradient of beta from that of the rate."""
    if BETA > 1:
        grad *= rate * (1.0 - rate / (BETA - 1.0))
    return grad


@triton.jit
def softplus(x, beta, threshold):
    bx = x * beta
    y = tl.exp(tl.minimum(bx, threshold))
    # log1p(y), right to the last bits where 1 + y rounds: log(w) y / (w - 1)
    w = 1.0 + y
    log1p = tl.where(w == 1.0, y, tl.log(w) * (y / tl.where(w == 1.0, 1.0, w - 1.0)))
    return tl.where(bx <= threshold, log1p / beta, x)
