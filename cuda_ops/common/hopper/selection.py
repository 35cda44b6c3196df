# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What both ways of the top-k on Hopper are made of: thresholds, ranks, selections.

A tile of scores is [.., 128]: a warp holds whole rows of it, one after the other, a thread four
neighbours of each.  What a block must agree on (a count, a range) takes one exchange of a number
per warp; so does the place of each winner, after a scan inside the warps.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..ordered import MINUS_INF, cuts, float_of, inside, ordered, put, span


@gluon.constexpr_function
def tiled(size, warps):
    """Of a tile [size / 128, 128]."""
    return gl.BlockedLayout([size // 128 // warps, 4], [1, 32], [warps, 1], [1, 0])


@gluon.jit
def plus(a, b):
    return a + b


@gluon.jit
def lanes(BLOCK: gl.constexpr):
    """0 .. BLOCK - 1, as a tile."""
    L: gl.constexpr = tiled(BLOCK, gl.num_warps())
    row = gl.arange(0, BLOCK // 128, layout=gl.SliceLayout(1, L))
    return row[:, None] * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, L))[None, :]


@gluon.jit
def _of_warps(x):
    """A tile as [warps, what a warp holds]."""
    return gl.reshape(x, [gl.num_warps(), x.numel // gl.num_warps()])


@gluon.jit
def _count(x):
    """Sum of a tile, by all threads."""
    W: gl.constexpr = gl.num_warps()
    every: gl.constexpr = gl.BlockedLayout([W], [32], [W], [0])
    return gl.sum(gl.convert_layout(gl.sum(_of_warps(x), 1), every), 0)


@gluon.jit
def _survey(key):
    """(lowest that is there, highest, how many are there) of a tile, in one exchange."""
    W: gl.constexpr = gl.num_warps()
    every: gl.constexpr = gl.BlockedLayout([W, 2, 2], [32, 1, 1], [W, 1, 1], [2, 1, 0])
    mine = _of_warps(key)
    valid = mine > MINUS_INF
    low = gl.min(gl.where(valid, mine, 0x7FFFFFFF), 1)
    number = gl.sum(valid.to(gl.int32), 1)
    all_ = gl.join(gl.join(low, gl.max(mine, 1)), gl.join(number, number))
    left, right = gl.split(gl.convert_layout(all_, every))
    low, high = gl.split(left)
    number, _ = gl.split(right)
    return gl.min(low, 0), gl.max(high, 0), gl.sum(number, 0)


@gluon.jit
def ranks(x):
    """(inclusive sums of a tile, row after row, their total)."""
    BLOCK: gl.constexpr = x.numel
    W: gl.constexpr = gl.num_warps()
    R: gl.constexpr = BLOCK // 128
    pairs: gl.constexpr = gl.BlockedLayout([R // W, max(1, R // 32)], [1, 32], [W, 1], [1, 0])
    totals = gl.sum(x, 1)
    all_ = gl.convert_layout(totals, gl.SliceLayout(0, pairs))
    row = gl.arange(0, R, layout=gl.SliceLayout(1, pairs))
    other = gl.arange(0, R, layout=gl.SliceLayout(0, pairs))
    before = gl.sum(gl.where(other[None, :] < row[:, None], all_[None, :], 0), 1)
    before = gl.convert_layout(before, totals.type.layout)
    return gl.associative_scan(x, 1, plus) + before[:, None], gl.sum(all_, 0)


@gluon.jit
def _first_cuts(lo, hi, k, above, tail):
    """Of the range of values: thirds; of a tail, whose density falls as an exponential, a guess."""
    low, high = float_of(lo), float_of(hi - 1)
    step = high * 0.33333334 - low * 0.33333334
    guess = (high - low) * gl.log(above.to(gl.float32) / k.to(gl.float32))
    guess = guess / gl.log(above.to(gl.float32))
    first = gl.where(tail, low + 0.75 * guess, low + step)
    second = gl.where(tail, low + 1.6 * guess, high - step)
    return inside(lo, hi, ordered(first), ordered(second))


@gluon.jit
def _narrow(lo, hi, above, below, d1, d2, n1, n2, k, hit):
    """lo .. hi around the k-th largest, after counting: `above` >= k reach lo, `below` < k reach
    hi.  Also whether the k-th lay between the cuts, or next to the thirds."""
    over, under = n2 >= k, n1 < k
    low = gl.where(over, d2, gl.where(under, lo, d1))
    high = gl.where(over, hi, gl.where(under, d1, d2))
    above = gl.where(over, n2, gl.where(under, above, n1))
    below = gl.where(over, below, gl.where(under, n1, n2))
    return low, high, above, below, ((~over) & (~under)) | ~hit


@gluon.jit
def _count_both(key, d1, d2):
    both = _count((key >= d1).to(gl.int32) + ((key >= d2).to(gl.int32) << 16))
    return both & 0xFFFF, both >> 16


@gluon.jit
def _threshold(key, k, slack, lowest, highest, above, tail):
    """(lo, how many keys reach it): k to k + slack, or more where they are equal.  `above` >= k of
    them, fewer than 2**15, are there.

    A round whose guess holds at least halves the range of keys, as two or more are in it; one that
    fails is followed by one of thirds: of 2**32 keys one is left after 42 rounds at most, whatever
    the distribution.  Of 3000 normal scores the 2048th takes 6, where thirds alone take 9."""
    lo, hi = lowest, highest + 1
    below = above * 0
    hit = above >= 0
    if (span(lo, hi) > 1) & (above > k + slack):
        d1, d2 = _first_cuts(lo, hi, k, above, tail)
        n1, n2 = _count_both(key, d1, d2)
        lo, hi, above, below, hit = _narrow(lo, hi, above, below, d1, d2, n1, n2, k, hit)
    while (span(lo, hi) > 1) & (above > k + slack):
        d1, d2 = cuts(lo, hi, k, above, below, slack, hit)
        n1, n2 = _count_both(key, d1, d2)
        lo, hi, above, below, hit = _narrow(lo, hi, above, below, d1, d2, n1, n2, k, hit)
    return lo, above


@gluon.jit
def raw(scores, i, lane, end, WHOLE: gl.constexpr):
    """Scores i + lane below `end`, -inf past it.  WHOLE: the row's memory goes on to the tile's
    end, and what lies there does not matter: a mask would make the load four times narrower."""
    if WHOLE:
        return gl.load(scores + i + lane)
    return gl.load(scores + i + lane, mask=i + lane < end, other=float("-inf"))


@gluon.jit
def _threshold_of_row(scores, length, k, BLOCK: gl.constexpr):
    """_threshold without slack, over a whole row in memory."""
    lane = lanes(BLOCK)
    lo = length * 0 + (MINUS_INF + 1)
    hi = length * 0 + 2147483647
    above = length
    below = length * 0
    while (span(lo, hi) > 1) & (above > k):
        d1, d2 = cuts(lo, hi, k, above, below, below * 0, below < 0)
        n1 = lane * 0
        n2 = lane * 0
        for i in range(0, length, BLOCK):
            key = ordered(raw(scores, i, lane, length, False))
            n1 += (key >= d1).to(gl.int32)
            n2 += (key >= d2).to(gl.int32)
        lo, hi, above, below, _ = _narrow(
            lo, hi, above, below, d1, d2, _count(n1), _count(n2), k, below < 0
        )
    return lo


@gluon.jit
def select(key, pos, k, indices, values, tail, VALUES: gl.constexpr):
    """Store the k best of a tile of up to 2**13 keys, in the order of their positions; returns how
    many."""
    lowest, highest, all_ = _survey(key)
    k = gl.minimum(k, all_)
    if k > 0:
        least, reach = _threshold(key, k, k * 0, lowest, highest, all_, tail)
        take = (key >= least).to(gl.int32)
        if reach > k:  # of equal ones the first
            tie = (key == least).to(gl.int32)
            rank, ties = ranks(tie)
            take = gl.where((key > least) | ((tie > 0) & (rank <= k - reach + ties)), 1, 0)
        to, _ = ranks(take)
        put(indices, values, to - 1, pos, key, take > 0, VALUES)
    return k


@gluon.jit
def select_row(scores, length, k, indices, values, BLOCK: gl.constexpr, VALUES: gl.constexpr):
    """select over a whole row in memory."""
    lane = lanes(BLOCK)
    least = _threshold_of_row(scores, length, k, BLOCK)
    above = lane * 0
    for i in range(0, length, BLOCK):
        above += (ordered(raw(scores, i, lane, length, False)) > least).to(gl.int32)
    need = k - _count(above)
    taken = 0
    before = 0
    for i in range(0, length, BLOCK):
        key = ordered(raw(scores, i, lane, length, False))
        tie = ((key == least) & (key > MINUS_INF)).to(gl.int32)
        rank, ties = ranks(tie)
        take = gl.where((key > least) | ((tie > 0) & (rank + before <= need)), 1, 0)
        to, more = ranks(take)
        put(indices, values, taken + to - 1, i + lane, key, take > 0, VALUES)
        taken += more
        before += ties
    return taken


@gluon.jit
def bound(x, drawn, length, k):
    """A score that some 1.4 k of the row should reach."""
    key = ordered(x)
    # of the sample, as many as of the row, and four standard deviations more
    wanted = k.to(gl.float32) * drawn.to(gl.float32) / length.to(gl.float32)
    wanted = (wanted + 4.0 * gl.sqrt(wanted)).to(gl.int32) + 4
    least = wanted * 0 + (MINUS_INF + 1)
    lowest, highest, all_ = _survey(key)
    if wanted < all_:
        least, _ = _threshold(key, wanted, wanted // 6, lowest, highest, all_, False)
    return float_of(least)
