# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A selection that ops are made of, none itself: the K highest of each row of fp32 scores.

Exact, ties to the lower position, in ascending order.

Two kernels.  The first takes a sample of the row (4096 scores, evenly spaced), of it a threshold
that some 1.4 K scores should reach, and collects those in order, a chunk of the row a program.
The second, a program a row, finds the exact K-th score among them and stores the winners in order.
Where the sample misled (fewer than K scores reach the threshold) or too many do (rows of many equal
scores), it searches the whole row: slower, as exact.  A score of -inf is absent.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..dispatch.common import memory
from .common import gpu, launches
from .hopper import topk as hopper
from .hopper.topk import EVERY, TILE

__all__ = ["EVERY", "MOST", "TILE", "topk"]

MOST = 2 * TILE  # the largest K, and the longest row that is selected from directly
LEAST = tl.constexpr(-2147483648)
MINUS_INF = tl.constexpr(-2139095041)  # ordered(-inf)
FINITE = tl.constexpr(8388608)  # the lowest key above -inf, unsigned


@triton.jit
def ordered(x):
    """int32 whose order is that of the floats, and their bits again when applied to the bits."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # + 0.0: one zero, not two
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _cuts(lo, hi):
    """Two thresholds that cut lo .. hi in three; none passes hi - 1."""
    step = (hi - lo + 2) // 3
    last = tl.maximum(hi - 1, lo)
    d1 = tl.minimum(lo + step, last)
    return d1, tl.minimum(d1 + step, last)


@triton.jit
def _narrow(lo, hi, above, d1, d2, n1, n2, k):
    """lo .. hi around the k-th largest, after counting: `above` >= k reach lo, fewer reach hi."""
    low = tl.where(n2 >= k, d2, tl.where(n1 >= k, d1, lo))
    high = tl.where(n2 >= k, hi, tl.where(n1 >= k, d2, d1))
    return low, high, tl.where(n2 >= k, n2, tl.where(n1 >= k, n1, above))


@triton.jit
def _threshold(u, k, slack, lo, hi, above):
    """(lo, how many of u reach it): k to k + slack, or more where they are equal.
    lo <= the k-th largest < hi, int64 scalars; u has fewer than 2**15 elements."""
    while (hi - lo > 1) & (above > k + slack):
        d1, d2 = _cuts(lo, hi)
        first = (u >= d1.to(tl.uint32)).to(tl.int32)
        both = tl.sum(first + ((u >= d2.to(tl.uint32)).to(tl.int32) << 16), 0)
        lo, hi, above = _narrow(lo, hi, above, d1, d2, both & 0xFFFF, both >> 16, k)
    return lo, above


@triton.jit
def _unsigned(key):
    return (key ^ LEAST).to(tl.uint32, bitcast=True)


@triton.jit
def _threshold_of_row(scores, length, k, SIZE: tl.constexpr):
    """_threshold without slack, over a whole row in memory."""
    lane = tl.arange(0, SIZE)
    lo = (length * 0).to(tl.int64) + FINITE
    hi = lo * 0 + 4294967296
    above = length
    while (hi - lo > 1) & (above > k):
        d1, d2 = _cuts(lo, hi)
        n1 = tl.zeros([SIZE], tl.int32)
        n2 = tl.zeros([SIZE], tl.int32)
        for i in tl.range(0, length, SIZE):
            x = tl.load(scores + i + lane, mask=i + lane < length, other=float("-inf"))
            u = _unsigned(ordered(x))
            n1 += (u >= d1.to(tl.uint32)).to(tl.int32)
            n2 += (u >= d2.to(tl.uint32)).to(tl.int32)
        lo, hi, above = _narrow(lo, hi, above, d1, d2, tl.sum(n1, 0), tl.sum(n2, 0), k)
    return lo


@triton.jit
def _ranks(x):
    """Inclusive sums of [SIZE], by rows of 16: a plain scan exchanges eight times as much between
    warps."""
    SIZE: tl.constexpr = x.shape[0]
    in_rows = tl.reshape(x, [SIZE // 16, 16])
    totals = tl.sum(in_rows, 1)
    before = tl.cumsum(totals, 0) - totals
    return tl.reshape(tl.cumsum(in_rows, 1) + before[:, None], [SIZE])


@triton.jit
def _store(indices, values, to, pos, key, take, VALUES: tl.constexpr):
    tl.store(indices + to, pos, mask=take)
    if VALUES:
        x = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        tl.store(values + to, x.to(values.dtype.element_ty), mask=take)


@triton.jit
def _pad(indices, values, found, k, SIZE: tl.constexpr, VALUES: tl.constexpr):
    """-1, and 0 for a value, past the entries found."""
    j = tl.arange(0, SIZE)
    if found < k:
        tl.store(indices + j, -1, mask=(j >= found) & (j < k))
        if VALUES:
            tl.store(values + j, tl.zeros([SIZE], tl.float32), mask=(j >= found) & (j < k))


@triton.jit
def _select(key, pos, k, indices, values, VALUES: tl.constexpr):
    """Store the k best of up to 2**13 keys, in the order of their positions; returns how many."""
    there = key > MINUS_INF
    u = _unsigned(key)
    all_ = tl.sum(there.to(tl.int32), 0)
    k_here = tl.minimum(k, all_)
    if k_here > 0:
        lowest = tl.min(tl.where(there, u, 0xFFFFFFFF), 0).to(tl.int64)
        highest = tl.max(u, 0).to(tl.int64)
        least, _ = _threshold(u, k_here, 0, lowest, highest + 1, all_)
        least = least.to(tl.uint32)
        above = there & (u > least)
        tie = there & (u == least)
        need = k_here - tl.sum(above.to(tl.int32), 0)
        # one scan for both counts
        both = _ranks(above.to(tl.int32) + (tie.to(tl.int32) << 16))
        ties = both >> 16
        take = above | (tie & (ties <= need))
        to = (both & 0xFFFF) + tl.minimum(ties, need) - 1
        _store(indices, values, to, pos, key, take, VALUES)
    return k_here


@triton.jit
def _select_row(scores, length, k, indices, values, SIZE: tl.constexpr, VALUES: tl.constexpr):
    """_select over a whole row in memory."""
    lane = tl.arange(0, SIZE)
    least = _threshold_of_row(scores, length, k, SIZE).to(tl.uint32)
    above = tl.zeros([SIZE], tl.int32)
    for i in tl.range(0, length, SIZE):
        x = tl.load(scores + i + lane, mask=i + lane < length, other=float("-inf"))
        above += (_unsigned(ordered(x)) > least).to(tl.int32)
    need = k - tl.sum(above, 0)
    taken = 0
    ties = 0
    for i in tl.range(0, length, SIZE):
        x = tl.load(scores + i + lane, mask=i + lane < length, other=float("-inf"))
        key = ordered(x)
        u = _unsigned(key)
        tie = (u == least).to(tl.int32)
        tie_rank = _ranks(tie) + ties
        take = (u > least) | ((tie > 0) & (tie_rank <= need))
        rank = _ranks(take.to(tl.int32))
        _store(indices, values, taken + rank - 1, i + lane, key, take, VALUES)
        taken += tl.sum(take.to(tl.int32), 0)
        ties += tl.sum(tie, 0)
    return taken


@triton.jit
def _tile(scores, i, lane, end, WHOLE: tl.constexpr):
    """Keys of scores i + lane below `end`, the lowest key past it.  WHOLE: the row's memory goes on
    to the tile's end, so that the load needs no mask, which would make it four times narrower."""
    if WHOLE:
        x = tl.where(i + lane < end, tl.load(scores + i + lane), float("-inf"))
    else:
        x = tl.load(scores + i + lane, mask=i + lane < end, other=float("-inf"))
    return ordered(x)


@triton.jit(do_not_specialize=["k"])
def _collect(
    scores, lengths, candidates, counts, k, stride,
    CHUNKS: tl.constexpr, ROOM: tl.constexpr, SAMPLE: tl.constexpr, SIZE: tl.constexpr,
    WHOLE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The positions of one chunk of a row that may win, ascending, and how many they are."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    length = tl.load(lengths + row)
    if length > 2 * SIZE:  # shorter rows are selected from directly
        scores += row * stride
        sample = tl.load(scores + tl.arange(0, SAMPLE) * (length // SAMPLE))
        u = _unsigned(ordered(sample))
        # of the sample, as many as of the row, and four standard deviations more
        wanted = k.to(tl.float32) * SAMPLE / length
        wanted = (wanted + 4.0 * tl.sqrt(wanted)).to(tl.int32) + 4
        bound = tl.min(u, 0).to(tl.int64)
        if wanted < SAMPLE:
            highest = tl.max(u, 0).to(tl.int64) + 1
            bound, _ = _threshold(u, wanted, wanted // 16, bound, highest, wanted * 0 + SAMPLE)
        else:
            bound = bound * 0
        least = tl.maximum(bound, FINITE).to(tl.uint32)
        part = (length + CHUNKS * SIZE - 1) // (CHUNKS * SIZE) * SIZE
        lo = chunk * part
        hi = tl.minimum(lo + part, length)
        lane = tl.arange(0, SIZE)
        candidates += (row * CHUNKS + chunk) * ROOM
        found = 0
        for i in tl.range(lo, hi, SIZE):
            take = (_unsigned(_tile(scores, i, lane, hi, WHOLE)) >= least).to(tl.int32)
            to = _ranks(take) + found - 1
            tl.store(candidates + to, i + lane, mask=(take > 0) & (to < ROOM))
            found += tl.sum(take, 0)
        tl.store(counts + row * CHUNKS + chunk, found)


@triton.jit
def _candidates(scores, candidates, counts, total, CHUNKS: tl.constexpr, ROOM: tl.constexpr,
                SIZE: tl.constexpr):  # fmt: skip
    """(keys, positions) of a row's candidates, chunk after chunk."""
    lane = tl.arange(0, SIZE)
    at = lane
    before = 0
    for chunk in tl.static_range(CHUNKS):
        at = tl.where(lane >= before, lane - before + chunk * ROOM, at)
        before += tl.load(counts + chunk)
    pos = tl.load(candidates + at, mask=lane < total, other=0)
    x = tl.load(scores + pos, mask=lane < total, other=float("-inf"))
    return ordered(x), pos


@triton.jit(do_not_specialize=["k"])
def _topk(
    scores, lengths, candidates, counts, indices, values, k, stride,
    CHUNKS: tl.constexpr, ROOM: tl.constexpr, SIZE: tl.constexpr, VALUES: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if CHAINED:
        gdc_wait()
    length = tl.load(lengths + row)
    scores += row * stride
    indices += row * k
    values += row * k
    candidates += row * CHUNKS * ROOM
    counts += row * CHUNKS
    if length <= SIZE:
        lane = tl.arange(0, SIZE)
        key = _tile(scores, 0, lane, length, False)
        found = _select(key, lane, k, indices, values, VALUES)
    elif length <= 2 * SIZE:
        lane = tl.arange(0, 2 * SIZE)
        key = _tile(scores, 0, lane, length, False)
        found = _select(key, lane, k, indices, values, VALUES)
    else:
        each = tl.load(counts + tl.arange(0, CHUNKS))
        total = tl.sum(each, 0)
        fits = (tl.max(each, 0) <= ROOM) & (total >= k)
        if fits & (total <= SIZE):
            key, pos = _candidates(scores, candidates, counts, total, CHUNKS, ROOM, SIZE)
            found = _select(key, pos, k, indices, values, VALUES)
        elif fits & (total <= 2 * SIZE):
            key, pos = _candidates(scores, candidates, counts, total, CHUNKS, ROOM, 2 * SIZE)
            found = _select(key, pos, k, indices, values, VALUES)
        else:
            found = _select_row(scores, length, k, indices, values, SIZE, VALUES)
    _pad(indices, values, found, k, 2 * SIZE, VALUES)


def topk(
    scores: Tensor,
    lengths: Tensor,
    indices: Tensor,
    values: Tensor,
    k: int,
    sample: Tensor | None = None,
) -> None:
    """indices [rows, k], and values unless empty, of the first lengths[row] scores of each row.
    `sample`: every EVERY-th of the scores, if they are at hand."""
    rows, device = scores.shape[0], scores.device
    if gpu.is_hopper(device):
        hopper.topk(scores, lengths, indices, values, k, sample)
        return
    # enough programs for every SM, and for their neighbours to hide each other's waits
    chunks = 16 if rows <= 16 else 8 if rows <= 64 else 4 if rows <= 512 else 1
    # one chunk may hold all that matters: high scores come together
    room = 2 * TILE if chunks == 1 else TILE
    candidates = memory.empty((rows, chunks, room), lengths.dtype, device)
    counts = memory.empty((rows, chunks), lengths.dtype, device)
    long = scores.shape[1] > 2 * TILE
    whole = scores.shape[1] % TILE == 0 and scores.stride(0) % TILE == 0
    chained = long and gpu.has_chained_launch(device)
    together = {"launch_pdl": True} if chained else {}
    if long:
        launches.kernel(_collect, rows, chunks)(
            scores, lengths, candidates, counts, k, scores.stride(0), CHUNKS=chunks, ROOM=room,
            SAMPLE=TILE if scores.shape[1] <= 2**18 else 4 * TILE, SIZE=TILE,
            WHOLE=whole, CHAINED=chained, num_warps=8, **together,
        )  # fmt: skip
    launches.kernel(_topk, rows)(
        scores, lengths, candidates, counts, indices, values, k, scores.stride(0), CHUNKS=chunks,
        ROOM=room, SIZE=TILE, VALUES=values.numel() > 0, CHAINED=chained, num_warps=8, **together,
    )  # fmt: skip
