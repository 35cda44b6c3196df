# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A selection that ops are made of, none itself: the K highest of each row of fp32 scores.

Exact, ties to the lower position, in ascending order.

Two kernels, in hopper/topk.py as here.  The first takes a sample of the row (every EVERY-th score,
or 4096 of them), of it a threshold that some 1.4 K scores should reach, and collects those in
order, a chunk of the row a program.  The second, a program a row, finds the exact K-th score among
them and stores the winners in order.  Where the sample misled (fewer than K scores reach the
threshold) or too many do (rows of many equal scores), it searches the whole row: slower, as exact.
A score of -inf is absent.

    condition                  kernels
    rows up to 1024, K to 64   _few
    Hopper, rows up to 32K     hopper/topk_of_short_rows.py
    Hopper                     hopper/topk.py
    rows of up to two tiles    _topk
    else                       _collect then _topk
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...dispatch.common import memory
from ..common import gpu
from ..common.ordered import MINUS_INF, apart, cuts, float_of, inside, ordered, put, span
from ..common.topk import BLOCK, EVERY
from ..runtime import launches
from .hopper import topk as hopper
from .hopper import topk_of_short_rows as hopper_short

__all__ = ["BLOCK", "EVERY", "MOST", "topk"]

MOST = 2 * BLOCK  # the largest K, and the longest row that is selected from directly
NARROW, MAXIMA = 1024, 64  # a row that one warp holds, and a K of as many maxima
FEW = tl.constexpr(MAXIMA)
STEP = tl.constexpr(BLOCK)  # scores that a program reads at once


@triton.jit
def _first_cuts(lo, hi, k, above, TAIL: tl.constexpr):
    """Of the range of values: thirds; of a TAIL, whose density falls as an exponential, a guess."""
    low = float_of(lo)
    high = float_of(hi - 1)
    if TAIL:
        total = tl.log(above.to(tl.float32))
        guess = (high - low) * (total - tl.log(k.to(tl.float32))) / total
        one = low + 0.75 * guess
        two = low + 1.6 * guess
    else:
        step = high * 0.33333334 - low * 0.33333334
        one = low + step
        two = high - step
    return inside(lo, hi, ordered(one), ordered(two))


@triton.jit
def _narrow(lo, hi, above, below, d1, d2, n1, n2, k, hit):
    """lo .. hi around the k-th largest, after counting: `above` >= k reach lo, `below` < k reach
    hi.  Also whether the k-th lay between the cuts, or next to the thirds."""
    over = n2 >= k
    under = n1 < k
    low = tl.where(over, d2, tl.where(under, lo, d1))
    high = tl.where(over, hi, tl.where(under, d1, d2))
    above = tl.where(over, n2, tl.where(under, above, n1))
    below = tl.where(over, below, tl.where(under, n1, n2))
    return low, high, above, below, ((n2 < k) & (n1 >= k)) | (hit == 0)


@triton.jit
def _count_both(key, d1, d2):
    both = tl.sum((key >= d1).to(tl.int32) + ((key >= d2).to(tl.int32) << 16), 0)
    return both & 0xFFFF, both >> 16


@triton.jit
def threshold(key, k, slack, lowest, highest, above, TAIL: tl.constexpr):
    """(lo, how many keys reach it): k to k + slack, or more where they are equal.  `above` >= k of
    them, fewer than 2**15, are there.

    A round whose guess holds at least halves the range of keys, as two or more are in it; one that
    fails is followed by one of thirds: of 2**32 keys one is left after 42 rounds at most, whatever
    the distribution.  Of 3000 normal scores the 2048th takes 6, where thirds alone take 9."""
    lo = lowest
    hi = highest + 1
    below = above * 0
    hit = above >= 0
    if (span(lo, hi) > 1) & (above > k + slack):
        d1, d2 = _first_cuts(lo, hi, k, above, TAIL)
        n1, n2 = _count_both(key, d1, d2)
        lo, hi, above, below, hit = _narrow(lo, hi, above, below, d1, d2, n1, n2, k, hit)
    while (span(lo, hi) > 1) & (above > k + slack):
        d1, d2 = cuts(lo, hi, k, above, below, slack, hit)
        n1, n2 = _count_both(key, d1, d2)
        lo, hi, above, below, hit = _narrow(lo, hi, above, below, d1, d2, n1, n2, k, hit)
    return lo, above


@triton.jit
def survey(key):
    """(lowest that is there, highest, how many are there)."""
    valid = key > MINUS_INF
    low = tl.min(tl.where(valid, key, 0x7FFFFFFF), 0)
    return low, tl.max(key, 0), tl.sum(valid.to(tl.int32), 0)


@triton.jit
def _raw(scores, i, lane, end, WHOLE: tl.constexpr):
    """Scores i + lane below `end`, -inf past it.  WHOLE: the row's memory goes on to the tile's
    end, and what lies there does not matter: a mask would make the load four times narrower."""
    if WHOLE:
        x = tl.load(scores + i + lane)
    else:
        x = tl.load(scores + i + lane, mask=i + lane < end, other=float("-inf"))
    return x


@triton.jit
def _threshold_of_row(scores, length, k, BLOCK: tl.constexpr):
    """threshold without slack, over a whole row in memory."""
    lane = tl.arange(0, BLOCK)
    lo = length * 0 + (MINUS_INF + 1)
    hi = length * 0 + 2147483647
    above = length
    below = length * 0
    thirds = below < 0
    while (span(lo, hi) > 1) & (above > k):
        d1, d2 = cuts(lo, hi, k, above, below, below * 0, thirds)
        n1 = tl.zeros([BLOCK], tl.int32)
        n2 = tl.zeros([BLOCK], tl.int32)
        for i in tl.range(0, length, BLOCK):
            key = ordered(_raw(scores, i, lane, length, False))
            n1 += (key >= d1).to(tl.int32)
            n2 += (key >= d2).to(tl.int32)
        lo, hi, above, below, _ = _narrow(
            lo, hi, above, below, d1, d2, tl.sum(n1, 0), tl.sum(n2, 0), k, thirds
        )
    return lo


@triton.jit
def ranks(x):
    """Inclusive sums of [BLOCK], by rows of 16: a plain scan exchanges eight times as much between
    warps."""
    BLOCK: tl.constexpr = x.shape[0]
    in_rows = tl.reshape(x, [BLOCK // 16, 16])
    totals = tl.sum(in_rows, 1)
    before = tl.cumsum(totals, 0) - totals
    return tl.reshape(tl.cumsum(in_rows, 1) + before[:, None], [BLOCK])


@triton.jit
def _pad(indices, values, found, k, BLOCK: tl.constexpr, VALUES: tl.constexpr):
    """-1, and 0 for a value, past the entries found."""
    j = tl.arange(0, BLOCK)
    if found < k:
        tl.store(indices + j, -1, mask=(j >= found) & (j < k))
        if VALUES:
            tl.store(values + j, tl.zeros([BLOCK], tl.float32), mask=(j >= found) & (j < k))


@triton.jit
def _take(key, pos, least, reach, k, indices, values, VALUES: tl.constexpr):
    """Store k of the `reach` >= k keys from `least` on, in the order of their positions."""
    take = key >= least
    if reach > k:  # of equal ones the first
        tie = (key == least).to(tl.int32)
        take = (key > least) | ((tie > 0) & (ranks(tie) <= k - reach + tl.sum(tie, 0)))
    put(indices, values, ranks(take.to(tl.int32)) - 1, pos, key, take, VALUES)


@triton.jit
def _select(key, pos, k, indices, values, TAIL: tl.constexpr, VALUES: tl.constexpr):
    """Store the k best of up to 2**13 keys, in the order of their positions; returns how many."""
    lowest, highest, all_ = survey(key)
    k = tl.minimum(k, all_)
    if k > 0:
        least, reach = threshold(key, k, k * 0, lowest, highest, all_, TAIL)
        _take(key, pos, least, reach, k, indices, values, VALUES)
    return k


@triton.jit(do_not_specialize=["k"])
def _few(
    scores,
    lengths,
    indices,
    values,
    k,
    width,
    stride,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """The winners of a row that a warp holds: the k-th highest after k maxima at most."""
    row = tl.program_id(0).to(tl.int64)
    if CHAINED:
        gdc_wait()
    lane = tl.arange(0, WIDTH)
    x = tl.load(scores + row * stride + lane, mask=lane < width, other=float("-inf"))
    key = ordered(tl.where(lane < tl.load(lengths + row), x, float("-inf")))
    indices += row * k
    values += row * k
    found = tl.minimum(k, tl.sum((key > MINUS_INF).to(tl.int32), 0))
    if found > 0:
        least = tl.max(key, 0)
        reach = tl.sum((key == least).to(tl.int32), 0)
        while reach < found:
            least = tl.max(tl.where(key < least, key, MINUS_INF), 0)
            reach += tl.sum((key == least).to(tl.int32), 0)
        _take(key, lane, least, reach, found, indices, values, VALUES)
    _pad(indices, values, found, k, FEW, VALUES)


@triton.jit
def _select_row(scores, length, k, indices, values, BLOCK: tl.constexpr, VALUES: tl.constexpr):
    """_select over a whole row in memory."""
    lane = tl.arange(0, BLOCK)
    least = _threshold_of_row(scores, length, k, BLOCK)
    above = tl.zeros([BLOCK], tl.int32)
    for i in tl.range(0, length, BLOCK):
        above += (ordered(_raw(scores, i, lane, length, False)) > least).to(tl.int32)
    need = k - tl.sum(above, 0)
    taken = 0
    ties = 0
    for i in tl.range(0, length, BLOCK):
        key = ordered(_raw(scores, i, lane, length, False))
        tie = ((key == least) & (key > MINUS_INF)).to(tl.int32)
        take = (key > least) | ((tie > 0) & (ranks(tie) + ties <= need))
        rank = ranks(take.to(tl.int32))
        put(indices, values, taken + rank - 1, i + lane, key, take, VALUES)
        taken += tl.sum(take.to(tl.int32), 0)
        ties += tl.sum(tie, 0)
    return taken


@triton.jit
def _bound(x, drawn, length, k):
    """A score that some 1.4 k of the row should reach."""
    key = ordered(x)
    # of the sample, as many as of the row, and four standard deviations more
    wanted = k.to(tl.float32) * drawn.to(tl.float32) / length.to(tl.float32)
    wanted = (wanted + 4.0 * tl.sqrt(wanted)).to(tl.int32) + 4
    least = wanted * 0 + (MINUS_INF + 1)
    lowest, highest, all_ = survey(key)
    if wanted < all_:
        least, _ = threshold(key, wanted, wanted // 6, lowest, highest, all_, False)
    return float_of(least)


@triton.jit(do_not_specialize=["k"])
def _collect(
    scores,
    sample,
    lengths,
    candidates,
    counts,
    k,
    stride,
    sample_stride,
    CHUNKS: tl.constexpr,
    ROOM: tl.constexpr,
    SAMPLE: tl.constexpr,
    EACH: tl.constexpr,
    WHOLE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """What may win of one chunk of a row, ascending: the score in the high half, the position in
    the low one; and how many they are."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    length = tl.load(lengths + row)
    part = (length + CHUNKS * STEP - 1) // (CHUNKS * STEP) * STEP
    lo = chunk * part
    hi = tl.minimum(lo + part, length)
    found = 0
    if (length > 2 * STEP) & (lo < hi):  # shorter rows are selected from directly
        drawn = tl.arange(0, SAMPLE)
        valid = length // EACH
        step = tl.maximum((valid + SAMPLE - 1) // SAMPLE, 1)
        valid = valid // step
        sample += row * sample_stride
        some = tl.load(sample + drawn * step, mask=drawn < valid, other=float("-inf"))
        scores += row * stride
        candidates += (row * CHUNKS + chunk) * ROOM
        lane = tl.arange(0, STEP)
        ahead = _raw(scores, lo, lane, hi, WHOLE)
        least = _bound(some, valid, length, k)
        for i in tl.range(lo, hi, STEP):
            x = tl.where(i + lane < hi, ahead, float("-inf"))
            if i + STEP < hi:
                ahead = _raw(scores, i + STEP, lane, hi, WHOLE)
            take = x >= least
            rank = ranks(take.to(tl.int32))
            to = rank + found - 1
            both = (x.to(tl.int32, bitcast=True).to(tl.int64) << 32) + (i + lane)
            tl.store(candidates + to, both, mask=take & (to < ROOM))
            found += tl.sum(take.to(tl.int32), 0)
    tl.store(counts + row * CHUNKS + chunk, found)


@triton.jit
def _select_packed(
    candidates,
    counts,
    total,
    k,
    indices,
    values,
    CHUNKS: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
    VALUES: tl.constexpr,
):
    """_select of a row's candidates, up to BLOCK, brought together chunk after chunk."""
    lane = tl.arange(0, BLOCK)
    at = lane
    before = 0
    for chunk in tl.static_range(CHUNKS):
        at = tl.where(lane >= before, lane - before + chunk * ROOM, at)
        before += tl.load(counts + chunk)
    key, pos = apart(tl.load(candidates + at, mask=lane < total, other=0), lane < total)
    return _select(key, pos, k, indices, values, True, VALUES)


@triton.jit
def _select_all(scores, length, k, indices, values, BLOCK: tl.constexpr, VALUES: tl.constexpr):
    """_select of a row of up to BLOCK scores."""
    lane = tl.arange(0, BLOCK)
    key = ordered(_raw(scores, 0, lane, length, False))
    return _select(key, lane, k, indices, values, False, VALUES)


@triton.jit
def _select_short(scores, length, k, indices, values, BLOCK: tl.constexpr, VALUES: tl.constexpr):
    """_select of a row of up to 2 * BLOCK scores."""
    if length <= BLOCK:
        found = _select_all(scores, length, k, indices, values, BLOCK, VALUES)
    else:
        found = _select_all(scores, length, k, indices, values, 2 * BLOCK, VALUES)
    return found


class Constants(NamedTuple):
    CHUNKS: int
    ROOM: int
    LONG: bool
    VALUES: bool
    CHAINED: bool


@triton.jit(do_not_specialize=["k"])
def _topk(scores, lengths, candidates, counts, indices, values, k, stride, C: tl.constexpr):
    """The winners of a row.  LONG: _collect ran."""
    row = tl.program_id(0).to(tl.int64)
    if C.CHAINED:
        gdc_wait()
    length = tl.load(lengths + row)
    scores += row * stride
    indices += row * k
    values += row * k
    if C.LONG:
        candidates += row * C.CHUNKS * C.ROOM
        counts += row * C.CHUNKS
        EACH: tl.constexpr = STEP // C.CHUNKS
        each = tl.load(counts + tl.arange(0, C.CHUNKS))
        # asked for before it is known whether they are there: 9 us for a row instead of 15
        lane = tl.arange(0, STEP)
        both = tl.load(candidates + lane // EACH * C.ROOM + lane % EACH)
        valid = lane % EACH < tl.load(counts + lane // EACH)
        total = tl.sum(each, 0)
        most = tl.max(each, 0)
        if length <= 2 * STEP:
            found = _select_short(scores, length, k, indices, values, STEP, C.VALUES)
        elif (total >= k) & (most <= EACH):
            key, pos = apart(both, valid)
            found = _select(key, pos, k, indices, values, True, C.VALUES)
        elif (total >= k) & (most <= C.ROOM) & (total <= 2 * STEP):
            found = _select_packed(
                candidates, counts, total, k, indices, values, C.CHUNKS, C.ROOM, 2 * STEP, C.VALUES
            )
        else:
            found = _select_row(scores, length, k, indices, values, STEP, C.VALUES)
    else:
        found = _select_short(scores, length, k, indices, values, STEP, C.VALUES)
    _pad(indices, values, found, k, 2 * STEP, C.VALUES)


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
    (rows, width), device = scores.shape, scores.device
    if width <= NARROW and k <= MAXIMA:
        chained = gpu.has_chained_launch(device)
        launches.kernel(_few, rows)(
            scores,
            lengths,
            indices,
            values,
            k,
            width,
            scores.stride(0),
            WIDTH=max(16, triton.next_power_of_2(width)),
            VALUES=values.numel() > 0,
            CHAINED=chained,
            num_warps=1,
            **({"launch_pdl": True} if chained else {}),
        )
        return
    if hopper.supports(device):
        way = hopper_short if hopper_short.supports(scores, k, sample) else hopper
        way.launch(scores, lengths, indices, values, k, sample)
        return
    # enough programs for every SM, and for their neighbours to hide each other's waits
    chunks = 16 if rows <= 16 else 8 if rows <= 64 else 4 if rows <= 512 else 1
    # one chunk may hold all that matters: high scores come together
    room = 2 * BLOCK if chunks == 1 else BLOCK
    long = width > 2 * BLOCK
    candidates = memory.empty((rows if long else 0, chunks, room), torch.int64, device)
    counts = memory.empty((rows, chunks), torch.int32, device)
    chained = long and gpu.has_chained_launch(device)
    together = {"launch_pdl": True} if chained else {}
    if long:
        of, each = (scores, 1) if sample is None else (sample, EVERY)
        most = BLOCK if width <= 2**18 else 4 * BLOCK  # of a sample
        launches.kernel(_collect, rows, chunks)(
            scores,
            of,
            lengths,
            candidates,
            counts,
            k,
            scores.stride(0),
            of.stride(0),
            CHUNKS=chunks,
            ROOM=room,
            SAMPLE=min(most, triton.next_power_of_2(width // each)),
            EACH=each,
            WHOLE=width % BLOCK == 0 and scores.stride(0) % BLOCK == 0,
            CHAINED=chained,
            num_warps=8 if rows <= 16 else 4,
            **together,
        )
    launches.kernel(_topk, rows)(
        scores,
        lengths,
        candidates,
        counts,
        indices,
        values,
        k,
        scores.stride(0),
        C=Constants(
            CHUNKS=chunks,
            ROOM=room,
            LONG=long,
            VALUES=values.numel() > 0,
            CHAINED=chained,
        ),
        num_warps=8,
        **together,
    )
