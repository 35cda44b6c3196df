# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What the losses of the indexer and their gradients share: slots that count, softmaxes, tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from .log2 import LOG2E

LARGEST_D = 576


class Sizes(NamedTuple):
    """Of a call: row i sees key_length keys up to chunk_offset + i."""

    chunk_offset: Any
    S: Any
    key_length: Any
    K: Any


@triton.jit
def valid_slots(indices, slot, K, position, key_length):
    """(index, whether it counts) of the slots of a row; slots from K on do not."""
    index = tl.load(indices + slot, mask=slot < K, other=-1)
    return index, (index >= 0) & (index <= position) & (index < key_length)


@triton.jit
def slots_of_row(indices, steps, sizes, K_PAD: tl.constexpr):
    """(batch, row, slot, index, whether it counts) of a program's row; `steps` from batch to batch
    and from row to row."""
    row = tl.program_id(0) % sizes.S
    batch = (tl.program_id(0) // sizes.S).to(tl.int64)
    slot = tl.arange(0, K_PAD)
    from_row = indices + batch * steps[0] + row.to(tl.int64) * steps[1]
    index, counts = valid_slots(from_row, slot, sizes.K, sizes.chunk_offset + row, sizes.key_length)
    return batch, row, slot, index, counts


@triton.jit
def softmax_of_scores(score, counts):
    """Softmax over the slots that count, 0 elsewhere."""
    score = tl.where(counts, score.to(tl.float32), float("-inf"))
    peak = tl.max(score, 0)
    weight = tl.exp2((score - tl.where(peak == float("-inf"), 0.0, peak)) * LOG2E)
    total = tl.sum(weight, 0)
    return weight / tl.where(total == 0.0, 1.0, total)


@triton.jit
def normalised(mass):
    total = tl.sum(mass, 0)
    return mass / tl.where(total == 0.0, 1.0, total)


def parts(D: int) -> tuple[int, int]:
    """D as a power of two and the rest, so that 576 is not padded to 1024."""
    largest = 1 << (D.bit_length() - 1)
    return (D, 0) if D < 16 else (largest, D - largest)


def padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def pieces(D: int, DR: int) -> list[int]:
    """The padded widths of the columns' pieces: of the two parts of D, and of the rope."""
    return [padded(size) for size in (*parts(D), DR) if size]


@dataclass(frozen=True)
class Tiles:
    heads: int
    keys: int
    stages: int
    warps: int


def shared_bytes(tile: Tiles, columns: Sequence[int], wgmma: bool) -> int:
    """At most, for queries and keys whose columns come in these pieces: all of the queries, and of
    the keys what the stages hold, or one piece at a time."""
    held = max(columns) if tile.stages == 1 else (tile.stages - (not wgmma)) * sum(columns)
    return 2 * (tile.heads * sum(columns) + tile.keys * held) + 1024
