# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What the forward and the backward of fused attention share: which rows a tile holds, which keys
a row sees.

Sequences of equal length are [B, H, N, D]; packed ones are [T, H, D] with prefix sums on the
device.  For the packed ones a small kernel lists the tiles, so that no length is read by the host:
`T // tile + B + 2` tiles are enough for any prefix sums, and those left over say "no rows".  The
tokens before the first sequence and behind the last one are pieces that have nothing on the other
side.  Sums end with the tokens, and a sequence begins where all before it have ended: of sums that
fall, too, a token is of one piece, the same in every list.

    row of the list    first row, rows (of the tiled side), first, rows (of the other side), tile,
                       piece; in the last row, which is no tile: 0, and the number of tiles

Query i stands at position i + N_k - N_q; key j is visible when j < N_k, and j <= position if
causal, and |position - j| < window if there is a window.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ...dispatch.common import memory
from ..runtime import launches
from .lengths import pieces, within

MOST_ROWS = 128  # of a block of a plain kernel
PLAN_ROW = 8  # int32 a listed tile: 32 bytes, one memory sector


@triton.jit(do_not_specialize=["batch", "rows", "other_rows", "listed"])
def _plan_kernel(
    lengths,
    other_lengths,
    plan,
    batch,
    rows,
    other_rows,
    listed,
    BLOCK_M: tl.constexpr,
    PACK: tl.constexpr,
    DOWN: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program p lists the tiles of piece p; the last one blanks the rest of the list."""
    piece = tl.program_id(0)
    each, first, end = pieces(lengths, rows, batch, PIECES)
    tiles = ((end - first) * PACK + BLOCK_M - 1) // BLOCK_M
    base = tl.sum(tl.where(each < piece, tiles, 0), 0)
    begin = tl.sum(tl.where(each == piece, first, 0), 0)
    length = tl.sum(tl.where(each == piece, end - first, 0), 0)
    count = (length * PACK + BLOCK_M - 1) // BLOCK_M
    bound = within(other_lengths + each, each <= batch, other_rows)
    other = tl.max(tl.where(each < piece, bound, 0), 0)
    other_end = tl.max(tl.where(each <= piece, bound, 0), 0)
    valid = (piece > 0) & (piece <= batch)
    other_length = tl.where(valid, other_end - other, 0)
    row = tl.arange(0, BLOCK)
    zero = tl.zeros([BLOCK], tl.int32)
    for at in range(0, count, BLOCK):
        keep = at + row < count
        tile = at + row
        if DOWN:
            tile = count - 1 - tile
        out = plan + (base + at + row).to(tl.int64) * 8
        tl.store(out, zero + begin, keep)
        tl.store(out + 1, zero + length, keep)
        tl.store(out + 2, zero + other, keep)
        tl.store(out + 3, zero + other_length, keep)
        tl.store(out + 4, tile, keep)
        tl.store(out + 5, zero + piece, keep)
    if piece == batch + 1:
        for at in range(base + count, listed, BLOCK):
            out = plan + (at + row).to(tl.int64) * 8
            keep = at + row < listed
            tl.store(out + 6, zero, at + row == listed - 1)
            tl.store(out + 7, zero + base + count, at + row == listed - 1)
            tl.store(out, zero, keep)
            tl.store(out + 1, zero, keep)
            tl.store(out + 2, zero, keep)
            tl.store(out + 3, zero, keep)
            tl.store(out + 4, zero, keep)
            tl.store(out + 5, zero, keep)


def plan(
    lengths: torch.Tensor | None,
    other_lengths: torch.Tensor | None,
    rows: int,
    other_rows: int,
    tile: int,
    pack: int = 1,
    down: bool = True,
) -> tuple[torch.Tensor | None, int]:
    """How many tiles of `tile` rows there are, and with lengths a list of them [tiles, 8]; a row
    counts `pack` times (grouped heads).  The longest of a causal sequence come first: its last
    queries (down), or its first keys.  The list's last row is no tile: 6 is a counter at zero, and
    7 the number of tiles."""
    if lengths is None or other_lengths is None:
        return None, triton.cdiv(rows * pack, tile)
    batch = lengths.shape[0] - 1
    listed = rows * pack // tile + batch + 3
    found = memory.empty((listed, PLAN_ROW), torch.int32, lengths.device)
    launches.kernel(_plan_kernel, batch + 2)(
        lengths,
        other_lengths,
        found,
        batch,
        rows,
        other_rows,
        listed,
        BLOCK_M=tile,
        PACK=pack,
        DOWN=down,
        PIECES=triton.next_power_of_2(batch + 2),
        BLOCK=128,
    )
    return found, listed


@triton.jit
def locate(plan, tile, tiles, outer, rows, other_rows, VARLEN: tl.constexpr):
    """(batch, first row, rows, first other row, other rows, tile, piece) of tile `tile` of batch
    `outer`; `piece` counts only packed ones."""
    if VARLEN:
        row = plan + tile.to(tl.int64) * 8
        batch = outer * 0
        first = tl.load(row)
        count = tl.load(row + 1)
        other = tl.load(row + 2)
        other_count = tl.load(row + 3)
        at = tl.load(row + 4)
        piece = tl.load(row + 5)
    else:
        batch = outer
        first = outer * 0
        count = rows
        other = outer * 0
        other_count = other_rows
        at = tiles - 1 - tile  # longest first, as in the list
        piece = outer * 0
    first = first.to(tl.int64)
    return batch.to(tl.int64), first, count, other.to(tl.int64), other_count, at, piece


@triton.jit
def padded_first(first, piece):
    """Where a piece begins in what holds whole blocks of 128 queries of each."""
    return (first + piece * 128) // 128 * 128


def padded_rows(n_q: int, cu_seqlens_q: torch.Tensor | None) -> int:
    """Rows that `padded_first` needs."""
    extra = 0 if cu_seqlens_q is None else cu_seqlens_q.shape[0] * 128
    return triton.cdiv(n_q + extra, 128) * 128


@triton.jit
def visible(position, column, columns, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Which keys `column` the queries at `position` see; the two broadcast."""
    keep = column < columns
    if CAUSAL:
        keep = keep & (column <= position)
    if WINDOW:
        keep = keep & (column > position - window)
        if not CAUSAL:
            keep = keep & (column < position + window)
    return keep


@triton.jit
def keys_of(first, last, columns, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """[low, high) of the keys that some, and [full_low, full_high) of those that all of the
    queries at positions first..last see."""
    low = 0
    high = columns
    full_low = 0
    full_high = columns
    if CAUSAL:
        high = tl.minimum(high, last + 1)
        full_high = tl.minimum(full_high, first + 1)
    if WINDOW:
        low = tl.maximum(low, first - window + 1)
        full_low = tl.maximum(full_low, last - window + 1)
        if not CAUSAL:
            high = tl.minimum(high, last + window)
            full_high = tl.minimum(full_high, first + window)
    return low, high, full_low, full_high


@triton.jit
def queries_of(first, last, rows, shift, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """The same for the queries that see keys first..last; query i stands at i + shift."""
    low = 0
    high = rows
    full_low = 0
    full_high = rows
    if CAUSAL:
        low = tl.maximum(low, first - shift)
        full_low = tl.maximum(full_low, last - shift)
    if WINDOW:
        high = tl.minimum(high, last + window - shift)
        full_high = tl.minimum(full_high, first + window - shift)
        if not CAUSAL:
            low = tl.maximum(low, first - window + 1 - shift)
            full_low = tl.maximum(full_low, last - window + 1 - shift)
    return low, high, full_low, full_high


@triton.jit
def steps(COUNT: tl.constexpr, FAR: tl.constexpr):
    """Numbers of the rows of a block, wide enough for their offsets."""
    row = tl.arange(0, COUNT)
    return row.to(tl.int64) if FAR else row


def strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    """(batch, head, row) strides of [B, H, N, D], or of [T, H, D]."""
    if tensor.dim() == 4:
        return tensor.stride(0), tensor.stride(1), tensor.stride(2)
    return 0, tensor.stride(1), tensor.stride(0)


def is_far(*tensors: torch.Tensor) -> bool:
    """Whether the rows of one block of a plain kernel lie beyond the reach of 32 bits."""
    return any(MOST_ROWS * strides(each)[2] >= 2**31 for each in tensors)


def row_strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    """The same of what holds one number a row, [B, H, N] or [T, H]."""
    if tensor.dim() == 3:
        return tensor.stride(0), tensor.stride(1), tensor.stride(2)
    return 0, tensor.stride(1), tensor.stride(0)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call that its shapes tell."""

    varlen: bool
    batch: int  # sequences
    heads: int
    key_heads: int
    n_q: int  # queries of a sequence; of all of them when packed
    n_k: int

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, cu_seqlens_q: torch.Tensor | None) -> Sizes:
        if cu_seqlens_q is None:
            return cls(False, q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
        batch = cu_seqlens_q.shape[0] - 1
        return cls(True, batch, q.shape[1], k.shape[1], q.shape[0], k.shape[0])

    @property
    def group(self) -> int:
        return self.heads // self.key_heads

    @property
    def outer(self) -> int:
        """Sequences that the grid counts beside the tiles: the list of tiles knows packed ones."""
        return 1 if self.varlen else self.batch

    @property
    def rows(self) -> int:
        """Queries of a sequence, their mean when packed."""
        return triton.cdiv(self.n_q, max(self.batch, 1)) if self.varlen else self.n_q

    @property
    def keys(self) -> int:
        return triton.cdiv(self.n_k, max(self.batch, 1)) if self.varlen else self.n_k

    def is_narrow(self, num_sms: int) -> bool:
        """Whether tiles of 128 queries leave half of the chip idle, so that splitting keys pays."""
        return 2 * self.batch * self.heads * triton.cdiv(self.rows, 128) <= num_sms


def width_of(size: int) -> int:
    """A head size as the kernels for Hopper see it."""
    return max(64, triton.next_power_of_2(size))


def padded_size(size: int) -> int:
    """A head size as the plain kernels see it."""
    return max(16, triton.next_power_of_2(size))


@triton.jit
def rows_of(at, there, columns, SIZE: tl.constexpr, PAD: tl.constexpr, MASKED: tl.constexpr):
    """[rows, PAD] at `at`; without MASKED all rows are `there`."""
    if MASKED:
        tile = tl.load(at, there[:, None] & (columns < SIZE)[None, :], 0.0)
    elif PAD == SIZE:
        tile = tl.load(at)
    else:
        tile = tl.load(at, (columns < SIZE)[None, :], 0.0)
    return tile
