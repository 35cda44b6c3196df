# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The K highest of each row of fp32 scores: exact, ties to the lower position, in ascending order.

A row is cut into BLOCK interleaved groups.  The K-th largest of the groups' maxima is a sure lower
bound of the K-th score, so what reaches it (some 1.2 K of a random row) holds every winner: it is
collected in order, the exact K-th score is found among it, and the winners are stored in order.
Rows of many equal scores, whose candidates do not fit, are searched as a whole: slower, as exact.
A score of -inf is absent.  One program a row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..dispatch.common import memory

BLOCK = 8192  # scores a program handles at once: 8 a thread
MOST = BLOCK  # the largest K
LEAST = tl.constexpr(-2147483648)
MINUS_INF = tl.constexpr(-2139095041)  # ordered(-inf)


@triton.jit
def ordered(x):
    """int32 whose order is that of the floats, and their bits again when applied to the bits."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # + 0.0: one zero, not two
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _reach3(u, d1, d2, d3):
    """Which elements reach three thresholds, 21 bits apart: one sum counts all three."""
    first = (u >= d1.to(tl.uint32)).to(tl.int64)
    second = (u >= d2.to(tl.uint32)).to(tl.int64)
    return first + (second << 21) + ((u >= d3.to(tl.uint32)).to(tl.int64) << 42)


@triton.jit
def _cuts(lo, hi):
    """Three thresholds that quarter lo .. hi; those past hi stand at hi - 1."""
    step = (hi - lo + 3) // 4
    last = tl.maximum(hi - 1, lo)
    d1 = tl.minimum(lo + step, last)
    d2 = tl.minimum(d1 + step, last)
    return d1, d2, tl.minimum(d2 + step, last)


@triton.jit
def _narrow(lo, hi, d1, d2, d3, reached, k):
    """lo .. hi around the k-th largest, after counting: lo is reached by k or more, hi is not."""
    n1 = reached & 0x1FFFFF
    n2 = (reached >> 21) & 0x1FFFFF
    n3 = reached >> 42
    low = tl.where(n3 >= k, d3, tl.where(n2 >= k, d2, tl.where(n1 >= k, d1, lo)))
    high = tl.where(n3 >= k, hi, tl.where(n2 >= k, d3, tl.where(n1 >= k, d2, d1)))
    return low, high


@triton.jit
def _kth(u, k, lo, hi, TOLERANCE: tl.constexpr):
    """The k-th largest of u (or at most TOLERANCE - 1 below it); lo <= it < hi, int64 scalars."""
    while hi - lo > TOLERANCE:
        d1, d2, d3 = _cuts(lo, hi)
        reached = tl.sum(_reach3(u, d1, d2, d3), 0)
        lo, hi = _narrow(lo, hi, d1, d2, d3, reached, k)
    return lo


@triton.jit
def _unsigned(key):
    return (key ^ LEAST).to(tl.uint32, bitcast=True)


@triton.jit
def _kth_of_row(scores, length, k, lo, hi, SIZE: tl.constexpr):
    """_kth over a whole row in memory."""
    lane = tl.arange(0, SIZE)
    while hi - lo > 1:
        d1, d2, d3 = _cuts(lo, hi)
        reached = tl.zeros([SIZE], tl.int64)
        for i in tl.range(0, length, SIZE):
            x = tl.load(scores + i + lane, mask=i + lane < length, other=float("-inf"))
            reached += _reach3(_unsigned(ordered(x)), d1, d2, d3)
        lo, hi = _narrow(lo, hi, d1, d2, d3, tl.sum(reached, 0), k)
    return lo


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
def _select(key, pos, k, indices, values, SIZE: tl.constexpr, VALUES: tl.constexpr):
    """Store the k best of [SIZE] keys, which stand in the order of their positions; how many."""
    there = key > MINUS_INF
    u = _unsigned(key)
    k_here = tl.minimum(k, tl.sum(there.to(tl.int32), 0))
    if k_here > 0:
        lowest = tl.min(tl.where(there, u.to(tl.int64), 4294967295), 0)
        highest = tl.max(tl.where(there, u.to(tl.int64), 0), 0)
        least = _kth(u, k_here, lowest, highest + 1, 1).to(tl.uint32)
        above = there & (u > least)
        tie = there & (u == least)
        need = k_here - tl.sum(above.to(tl.int32), 0)
        # one scan for both counts: SIZE is at most 2**14
        both = tl.cumsum(above.to(tl.int32) + (tie.to(tl.int32) << 16), 0)
        ties = both >> 16
        take = above | (tie & (ties <= need))
        to = (both & 0xFFFF) + tl.minimum(ties, need) - 1
        _store(indices, values, to, pos, key, take, VALUES)
    return k_here


@triton.jit
def _select_row(scores, length, k, lo, indices, values, SIZE: tl.constexpr, VALUES: tl.constexpr):
    """_select over a whole row in memory, whose k-th score is not below `lo`."""
    lane = tl.arange(0, SIZE)
    hi = (tl.program_id(0) * 0).to(tl.int64) + 4294967296
    least = _kth_of_row(scores, length, k, lo, hi, SIZE).to(tl.uint32)
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
        tie_rank = tl.cumsum(tie, 0) + ties
        take = (u > least) | ((tie > 0) & (tie_rank <= need))
        rank = tl.cumsum(take.to(tl.int32), 0)
        _store(indices, values, taken + rank - 1, i + lane, key, take, VALUES)
        taken += tl.sum(take.to(tl.int32), 0)
        ties += tl.sum(tie, 0)


@triton.jit(do_not_specialize=["k"])
def _topk(
    scores, lengths, candidates, indices, values, k, stride,
    SIZE: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, SIZE)
    length = tl.load(lengths + row)
    scores += row * stride
    indices += row * k
    values += row * k
    candidates += row * SIZE
    if length <= SIZE:
        x = tl.load(scores + lane, mask=lane < length, other=float("-inf"))
        found = _select(ordered(x), lane, k, indices, values, SIZE, VALUES)
    else:
        best = tl.full([SIZE], LEAST, tl.int32)
        for i in tl.range(0, length, SIZE):
            x = tl.load(scores + i + lane, mask=i + lane < length, other=float("-inf"))
            best = tl.maximum(best, ordered(x))
        u = _unsigned(best)
        lowest = tl.min(u.to(tl.int64), 0)
        highest = tl.max(u.to(tl.int64), 0)
        # within 2**15 steps of a float: 0.4 % at most, a handful of candidates
        bound = _kth(u, k, lowest, highest + 1, 32768)
        bound = tl.maximum(bound, 8388608)  # above -inf, which is absent
        count = 0
        for i in tl.range(0, length, SIZE):
            x = tl.load(scores + i + lane, mask=i + lane < length, other=float("-inf"))
            take = (_unsigned(ordered(x)) >= bound.to(tl.uint32)).to(tl.int32)
            to = tl.cumsum(take, 0) + count - 1
            tl.store(candidates + to, i + lane, mask=(take > 0) & (to < SIZE))
            count += tl.sum(take, 0)
        tl.debug_barrier()  # the candidates are read by other threads than wrote them
        if count <= SIZE // 2:
            half = tl.arange(0, SIZE // 2)
            pos = tl.load(candidates + half, mask=half < count, other=0)
            x = tl.load(scores + pos, mask=half < count, other=float("-inf"))
            found = _select(ordered(x), pos, k, indices, values, SIZE // 2, VALUES)
        elif count <= SIZE:
            pos = tl.load(candidates + lane, mask=lane < count, other=0)
            x = tl.load(scores + pos, mask=lane < count, other=float("-inf"))
            found = _select(ordered(x), pos, k, indices, values, SIZE, VALUES)
        else:
            _select_row(scores, length, k, bound, indices, values, SIZE, VALUES)
            found = k
    _pad(indices, values, found, k, SIZE, VALUES)


def topk(scores: Tensor, lengths: Tensor, indices: Tensor, values: Tensor, k: int) -> None:
    """indices [rows, k], and values unless empty, of the first lengths[row] scores of each row."""
    rows = scores.shape[0]
    candidates = memory.empty((rows, BLOCK), lengths.dtype, scores.device)
    _topk[(rows,)](
        scores, lengths, candidates, indices, values, k, scores.stride(0), SIZE=BLOCK,
        VALUES=values.numel() > 0, num_warps=32,
    )  # fmt: skip
