# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What KDA and its gradient do with a chunk: where it lies, gates, pairs of tokens, norms."""

from __future__ import annotations

import triton
import triton.language as tl

from .approximate import inverse, logarithm, power
from .chunks import CHUNK, SUB, chunk_rows
from .lengths import pieces
from .log2 import LOG2E

# to base 2: exp() of it is 0 in float32, and 64 of them add up without losing what is small
LEAST: tl.constexpr = tl.constexpr(-100.0 * LOG2E.value)
BLOCKS: tl.constexpr = tl.constexpr(CHUNK.value // SUB.value)
# what `g` is
GIVEN, SOFTPLUS, BOUNDED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def in_piece(chunk, s, begin, end, ends, sequences):
    """(first token of the piece, first token of the chunk in it, the piece's length, whether it is
    a sequence) of a chunk; `ends`: the chunks up to the end of each of the pieces `s`."""
    before = ends <= chunk
    first = (chunk - tl.max(tl.where(before, ends, 0), 0)) * CHUNK
    piece = tl.sum(before.to(tl.int32), 0)
    start = tl.sum(tl.where(s == piece, begin, 0), 0)
    length = tl.sum(tl.where(s == piece, end - begin, 0), 0)
    return start, first, length, (piece > 0) & (piece <= sequences)


@triton.jit
def place(bounds, chunk, T, sequences, PIECES: tl.constexpr, VARLEN: tl.constexpr):
    """(batch, first token of the piece, first token of the chunk in it, the piece's length,
    whether it is a sequence) of a chunk."""
    if VARLEN:
        s, begin, end = pieces(bounds, T, sequences, PIECES)
        ends = tl.cumsum((end - begin + CHUNK - 1) // CHUNK, 0)
        start, first, length, live = in_piece(chunk, s, begin, end, ends, sequences)
        batch = chunk * 0
    else:
        each = (T + CHUNK - 1) // CHUNK
        batch = chunk // each
        first = chunk % each * CHUNK
        start = chunk * 0
        length = T
        live = T > 0
    return batch.to(tl.int64), start.to(tl.int64), first, length, live


@triton.jit
def walked(bounds, n, T, sequences, PIECES: tl.constexpr, VARLEN: tl.constexpr):
    """(batch, first token, length, first chunk) of a sequence."""
    if VARLEN:
        s, begin, end = pieces(bounds, T, sequences, PIECES)
        mine = s == n + 1
        start = tl.sum(tl.where(mine, begin, 0), 0)
        length = tl.sum(tl.where(mine, end - begin, 0), 0)
        chunks = (end - begin + CHUNK - 1) // CHUNK
        chunk = tl.sum(tl.where(s <= n, chunks, 0), 0)
        batch = n * 0
    else:
        start = n * 0
        length = T
        chunk = n * ((T + CHUNK - 1) // CHUNK)
        batch = n
    return batch.to(tl.int64), start.to(tl.int64), length, chunk


@triton.jit
def _softplus(x):
    """log2(1 + exp(x)), of which 17 bits are right."""
    exponent = x * LOG2E
    y = power(-tl.abs(exponent))
    # where 1 + y rounds, the first terms of a series
    small = y * (1.4426950 - y * (0.72134752 - y * (0.48089835 - y * 0.36067376)))
    log1p = tl.where(y < 0.03125, small, logarithm(1.0 + y))
    return log1p + tl.maximum(exponent, 0.0)


@triton.jit
def log_decay(x, rate, lower_bound, GATE: tl.constexpr):
    """The decay's logarithm to base 2."""
    if GATE == SOFTPLUS:
        return -rate * _softplus(x)
    elif GATE == BOUNDED:
        return inverse(1.0 + power(x * (-rate * LOG2E))) * (lower_bound * LOG2E)
    else:
        return x * LOG2E


@triton.jit
def gate_input(
    g,
    dt_bias,
    hv,
    first,
    length,
    g_row,
    columns,
    K: tl.constexpr,
    EDGE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
):
    """What the gate takes [64, BLOCK_K]."""
    x = chunk_rows(g, first, length, g_row, columns, EDGE, BLOCK_K).to(tl.float32)
    if BIAS:
        bias = tl.load(dt_bias + hv * K + columns, mask=columns < K, other=0.0)
        x += bias.to(tl.float32)[None, :]
    return x


@triton.jit
def limited(x, valid):
    """Not below the logarithm of what is 0 in float32; 0 where there is no token.  A NaN remains
    one."""
    return tl.where(valid[:, None], tl.where(x < LEAST, LEAST, x), 0.0)


@triton.jit
def from_middle(total, level):
    """G - R [64, K], R the G in the middle of a token's block of 2^level."""
    i = tl.arange(0, CHUNK)
    size = 1 << level
    middle = i // size * size + (size + 1) // 2 - 1
    at = tl.broadcast_to(middle[:, None], total.shape)
    return total - tl.gather(total, at, 0)


@triton.jit
def split(x):
    """x of float32, below 2**15, as a sum of two float16: 22 bits of it."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def until_between(b, SIZE: tl.constexpr):
    """[SIZE, SIZE]: the tokens between every one and the last before the later half of its 2 b."""
    i = tl.arange(0, SIZE)
    own, other = i[:, None], i[None, :]
    later = (own & b) != 0
    first = own // b * b  # of its half
    after = (other >= first) & (other <= own)
    before = (other > own) & (other < first + b)
    return tl.where(later, after, before)


@triton.jit
def pairs_of_bit(b, SIZE: tl.constexpr):
    """[SIZE, SIZE]: which those pairs are."""
    i = tl.arange(0, SIZE)
    own, other = i[:, None], i[None, :]
    return (own // (2 * b) == other // (2 * b)) & ((own & b) != 0) & ((other & b) == 0)


@triton.jit
def sums(ones, high, low):
    """[4, 16, K]: for every token of a block the sum over those that its row of `ones` [16, 16]
    has."""
    tile = tl.broadcast_to(ones.to(tl.float16)[None, :, :], [BLOCKS, SUB, SUB])
    return tl.dot(tile, high, tl.dot(tile, low))


@triton.jit
def power_of_blocks(total, which):
    """[4, K]: for every block 2^(the sum over those blocks that its row of `which` [4, 4] has)."""
    return power(tl.sum(tl.where(which[:, :, None], total[None, :, :], 0.0), 1))


@triton.jit
def on_diagonal(block):
    """[64, 64] with the four [4, 16, 16] on its diagonal."""
    return tl.reshape(tl.where(_same_block(), block[:, :, None, :], 0.0), [CHUNK, CHUNK])


@triton.jit
def from_diagonal(x):
    """[4, 16, 16] of [64, 64]."""
    parts = tl.reshape(x, [BLOCKS, SUB, BLOCKS, SUB])
    return tl.sum(tl.where(_same_block(), parts, 0.0), 2)


@triton.jit
def _same_block():
    block = tl.arange(0, BLOCKS)
    return (block[:, None] == block[None, :])[:, None, :, None]


@triton.jit
def unit_norm(x, first, length, row, K: tl.constexpr, K_PAD: tl.constexpr, NORM: tl.constexpr):
    """What every row is multiplied with."""
    if NORM:
        wide = chunk_rows(x, first, length, row, tl.arange(0, K_PAD), K, K_PAD).to(tl.float32)
        return 1.0 / tl.sqrt(tl.sum(wide * wide, 1) + 1e-6)
    else:
        return tl.full([CHUNK], 1.0, tl.float32)


@triton.jit
def rows_at(base, at, columns, SIZE: tl.constexpr, PAD: tl.constexpr):
    """[64, PAD] of the rows that begin `at` [64]; zeros behind SIZE."""
    to = base + at[:, None] + columns[None, :]
    if SIZE != PAD:
        tile = tl.load(to, mask=(columns < SIZE)[None, :], other=0.0)
    else:
        tile = tl.load(to)
    return tile


@triton.jit
def norms(q, k, q_at, k_at, K: tl.constexpr, K_PAD: tl.constexpr, NORM: tl.constexpr):
    """What the rows of q and k are multiplied with, and their products."""
    c = tl.arange(0, K_PAD)
    q_wide = rows_at(q, q_at, c, K, K_PAD).to(tl.float32)
    k_wide = rows_at(k, k_at, c, K, K_PAD).to(tl.float32)
    own = tl.sum(q_wide * k_wide, 1)
    if NORM:
        q_unit = tl.rsqrt(tl.sum(q_wide * q_wide, 1) + 1e-6)
        k_unit = tl.rsqrt(tl.sum(k_wide * k_wide, 1) + 1e-6)
    else:
        q_unit = tl.full([CHUNK], 1.0, tl.float32)
        k_unit = q_unit
    return q_unit, k_unit, own


def gate(gated: bool, lower_bound: float | None) -> int:
    if not gated:
        return GIVEN.value
    return SOFTPLUS.value if lower_bound is None else BOUNDED.value


def steps(layout: str, K: int, V: int) -> tuple[int, int]:
    """How far the next key and the next value channel of a state are."""
    return (V, 1) if layout == "kv" else (1, K)
