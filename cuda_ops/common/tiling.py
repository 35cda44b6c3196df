# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""How a product is cut into programs: pure arithmetic on its sizes and the number of SMs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

MOST_RUNS = 16  # that the kernel behind a product adds up
TURNED = 64  # dims of a head that a kernel ahead of a product has turned


@dataclass(frozen=True)
class Tiling:
    """One program: `tokens` x `columns` of the product, over one of `runs` parts of K, `k` at a
    time.  `swap` computes the transposed product, so that few tokens are the short side of a
    wgmma; `group` token blocks share each block of weights in L2."""

    tokens: int
    columns: int
    k: int
    runs: int
    stages: int
    warps: int
    swap: bool = True
    group: int = 8


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest one not below n."""
    return 1 << max(n - 1, 0).bit_length()


def _runs(blocks: int, programs: int, chunks: int) -> int:
    """Parts of K such that one wave of programs does it all; one if there are programs enough."""
    return max(1, min(programs // blocks, MOST_RUNS, chunks // 4))


def _blocks(tokens: int, sizes: Sequence[int], tile: int, columns: int) -> int:
    return sum(cdiv(size, columns) for size in sizes) * cdiv(tokens, tile)


def plain(tokens: int, sizes: Sequence[int], depth: int, num_sms: int) -> Tiling:
    """For nz_matmul."""
    if tokens <= 64:
        tile, columns, k, warps, swap = max(8, power_of_two(tokens)), 64, 128, 4, True
        stages = 4 if tokens <= 32 else 3
    elif tokens <= 256:
        tile, columns, k, stages, warps, swap = 128, 128, 64, 3, 4, False
    else:
        tile, columns, k, stages, warps, swap = 128, 128, 64, 4, 8, False
    runs = _runs(_blocks(tokens, sizes, tile, columns), 2 * num_sms, depth // k)
    return Tiling(tile, columns, k, runs, stages, warps, swap)


def hopper(tokens: int, sizes: Sequence[int], depth: int, num_sms: int) -> Tiling:
    """For hopper/nz_matmul.py.  The memory is kept busy by what all programs of a multiprocessor
    have asked for, so shared memory is filled; the best on one H200, 2026-11, for the sizes of
    DeepSeek-V3.2."""
    tile, warps, columns = max(8, power_of_two(tokens)), 4, 64
    # a step costs much the same whatever its depth
    k = 128 if tokens <= 64 and depth % 128 == 0 else 64
    narrow = sum(cdiv(size, columns) for size in sizes)
    if tokens > 128:
        tile, columns, warps, room, together = 256, 128, 8, 192, 1
    elif tokens > 64 and narrow > 2 * num_sms:
        columns, warps, room, together = 128, 8, 192, 1
    elif tokens > 64 or (tokens > 32 and num_sms // 2 < narrow <= 2 * num_sms):
        room, together = 192, 1
    elif depth > 4096:
        room, together = 200, 1  # fewer runs for the kernel behind to add up
    elif 16 < tokens <= 32 and narrow > num_sms // 2:
        columns, room, together = 128, 200, 0  # K stays whole
    elif narrow > num_sms // 2:
        room, together = 64, 3
    else:
        room, together = 96, 2
    group = 8
    if tokens > 128:
        # narrower programs where wide ones would leave processors idle at the end: x at 4096 tokens
        # of DeepSeek's sizes has 528, four for each processor, instead of 272
        halves, wholes = (cdiv(_blocks(tokens, sizes, tile, n), num_sms) for n in (64, 128))
        if wholes > 1 and 10 * halves < 18 * wholes:
            columns, warps, group = 64, 4, 4
    stages = room * 1024 // ((tile + columns) * k * 2)
    blocks = _blocks(tokens, sizes, tile, columns)
    runs = _runs(blocks, together * num_sms, depth // k)
    return Tiling(tile, columns, k, runs, stages, warps, group=group)


def grouped(tokens: int, sizes: Sequence[int], depth: int, num_sms: int) -> Tiling:
    """As hopper, of a product of groups: runs that divide K, and few of them to add up."""
    if tokens > 128:
        return replace(hopper(tokens, sizes, depth, num_sms), runs=1)
    tile, columns = max(8, power_of_two(tokens)), 64
    k = 128 if tokens <= 64 and depth % 128 == 0 else 64
    blocks = _blocks(tokens, sizes, tile, columns)
    runs = 1
    while 2 * runs * blocks <= num_sms and depth % (2 * runs * k) == 0 and runs < MOST_RUNS:
        runs *= 2
    room = 192 if blocks <= num_sms else 96
    stages = room * 1024 // ((tile + columns) * k * 2)
    return Tiling(tile, columns, k, runs, stages, 4)


def whole_depth(tokens: int, sizes: Sequence[int], depth: int, num_sms: int) -> Tiling | None:
    """For hopper/nz_matmul.py when what follows a product is done at its end: K in one run; 64
    columns a program or, of more than 128 tokens, 128.  None where multiprocessors would have
    none."""
    if _blocks(1, sizes, 1, 64) <= num_sms // 2:
        return None
    if tokens > 128:
        if any(size % 128 for size in sizes):
            return None
        # of two blocks of tokens 128 x 128 reads least through L2, and leaves no processor idle
        tile, stages = (128, 6) if tokens <= 256 else (256, 4)
        return Tiling(tile, 128, 64, 1, stages, 8)
    tile = max(8, power_of_two(tokens))
    k = 128 if tokens <= 64 and depth % 128 == 0 else 64
    stages = min(1024 // k, 192 * 1024 // ((tile + 64) * k * 2))
    return Tiling(tile, 64, k, 1, stages, 4)


def quantized(tokens: int, sizes: Sequence[int], depth: int, num_sms: int) -> Tiling:
    """For quantized_matmul.py, whose steps are blocks of 128 numbers of 8 bits."""
    if tokens <= 64:
        tile, columns, stages, warps, swap = max(16, power_of_two(tokens)), 64, 4, 4, True
    else:
        tile, columns, stages, warps, swap = 128, 128, 3, 8, False
    runs = _runs(_blocks(tokens, sizes, tile, columns), 2 * num_sms, depth // 128)
    return Tiling(tile, columns, 128, runs, stages, warps, swap)


def hopper_quantized(tokens: int, sizes: Sequence[int], depth: int, num_sms: int) -> Tiling:
    """For hopper/quantized_matmul.py: as in hopper, what programs ask for first fills shared
    memory."""
    swap = tokens <= 32
    tile, columns = (max(8, power_of_two(tokens)), 64) if swap else (64, 64)
    together, room = 2, 104
    blocks = _blocks(tokens, sizes, tile, columns)
    halved = _blocks(tokens, sizes, tile, 2 * columns)
    if 64 < tokens <= 128 and depth >= 4096 and 9 * num_sms <= 10 * halved <= 10 * num_sms:
        return Tiling(tile, 2 * columns, 128, 1, 8, 4, swap)  # x is read half as often
    runs = _runs(blocks, together * num_sms, depth // 128)
    filled = 9 * together * num_sms <= 10 * blocks * runs <= 10 * together * num_sms
    if tokens > 128 or (tokens > 64 and not filled):
        tile, columns, room = 128, 128, 208
        blocks = _blocks(tokens, sizes, tile, columns)
        runs = _runs(blocks, num_sms, depth // 128)
        filled = runs <= 2 and 8 * num_sms <= 10 * blocks * runs <= 10 * num_sms
        if tokens <= 128 and not filled:
            columns, room = 64, 104
            runs = _runs(_blocks(tokens, sizes, tile, columns), num_sms, depth // 128)
    stages = room * 1024 // ((tile + columns) * 128)
    return Tiling(tile, columns, 128, runs, stages, 8 if tile == 128 else 4, swap)
