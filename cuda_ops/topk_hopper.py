# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The kernels of topk.py on Hopper (Gluon): the same two steps, laid out so that little passes
between threads.

A tile of scores is [.., 128]: a warp holds whole rows of it, one after the other, a thread four
neighbours of each.  What a block must agree on (a count, a range) takes one exchange of a number
per warp; so does the place of each winner, after a scan inside the warps.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..dispatch.common import memory

TILE = 4096  # scores a program handles at once
EVERY = 16  # a sample that comes with the scores has every 16th of them

MINUS_INF = gl.constexpr(-2139095041)  # ordered(-inf); the lowest that is there is one above


@gluon.constexpr_function
def tiled(size, warps):
    """Of a tile [size / 128, 128]."""
    return gl.BlockedLayout([size // 128 // warps, 4], [1, 32], [warps, 1], [1, 0])


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def _ordered(x):
    """int32 whose order is that of the floats."""
    bits = (x + 0.0).to(gl.int32, bitcast=True)  # + 0.0: one zero, not two
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@gluon.jit
def _float(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(gl.float32, bitcast=True)


@gluon.jit
def _lanes(SIZE: gl.constexpr):
    """0 .. SIZE - 1, as a tile."""
    L: gl.constexpr = tiled(SIZE, gl.num_warps())
    row = gl.arange(0, SIZE // 128, layout=gl.SliceLayout(1, L))
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
def _range(key):
    """(lowest that is there, highest) of a tile."""
    W: gl.constexpr = gl.num_warps()
    every: gl.constexpr = gl.BlockedLayout([W, 2], [32, 1], [W, 1], [1, 0])
    mine = _of_warps(key)
    # ~ swaps the order: one reduction for both
    there = gl.where(mine > MINUS_INF, mine, 0x7FFFFFFF)
    both = gl.join(~gl.min(there, 1), gl.max(mine, 1))
    low, high = gl.split(gl.convert_layout(both, every))
    return ~gl.max(low, 0), gl.max(high, 0)


@gluon.jit
def _ranks(x):
    """(inclusive sums of a tile, row after row, their total)."""
    SIZE: gl.constexpr = x.numel
    W: gl.constexpr = gl.num_warps()
    R: gl.constexpr = SIZE // 128
    pairs: gl.constexpr = gl.BlockedLayout([R // W, R // 32], [1, 32], [W, 1], [1, 0])
    totals = gl.sum(x, 1)
    all_ = gl.convert_layout(totals, gl.SliceLayout(0, pairs))
    row = gl.arange(0, R, layout=gl.SliceLayout(1, pairs))
    other = gl.arange(0, R, layout=gl.SliceLayout(0, pairs))
    before = gl.sum(gl.where(other[None, :] < row[:, None], all_[None, :], 0), 1)
    before = gl.convert_layout(before, totals.type.layout)
    return gl.associative_scan(x, 1, _plus) + before[:, None], gl.sum(all_, 0)


@gluon.jit
def _cuts(lo, hi, linear):
    """Two thresholds inside lo .. hi that cut it in three: as floats, or as keys."""
    third = (hi - lo + 2) // 3
    low, high = _float(lo.to(gl.int32)), _float((hi - 1).to(gl.int32))
    step = high * 0.33333334 - low * 0.33333334
    d1 = gl.where(linear, _ordered(low + step).to(gl.int64), lo + third)
    d2 = gl.where(linear, _ordered(high - step).to(gl.int64), lo + third + third)
    d1 = gl.minimum(gl.maximum(d1, lo + 1), hi - 1)
    return d1, gl.minimum(gl.maximum(d2, d1), hi - 1)


@gluon.jit
def _narrow(lo, hi, above, d1, d2, n1, n2, k):
    """lo .. hi around the k-th largest, after counting: `above` >= k reach lo, fewer reach hi."""
    low = gl.where(n2 >= k, d2, gl.where(n1 >= k, d1, lo))
    high = gl.where(n2 >= k, hi, gl.where(n1 >= k, d2, d1))
    return low, high, gl.where(n2 >= k, n2, gl.where(n1 >= k, n1, above))


@gluon.jit
def _threshold(key, k, slack, above):
    """(lo, how many keys reach it): k to k + slack, or more where they are equal.  `above` >= k of
    them, fewer than 2**15, are there.  Two cuts of the range of values bring it into a few powers
    of two; then it is the keys' range that is cut, to a third each time: of 2**32 keys one is left
    after 21, so that 23 rounds are enough for any distribution.  Normal scores take 8."""
    lowest, highest = _range(key)
    lo = lowest.to(gl.int64)
    hi = highest.to(gl.int64) + 1
    turn = above * 0
    while (hi - lo > 1) & (above > k + slack):
        d1, d2 = _cuts(lo, hi, turn < 2)
        first = (key >= d1.to(gl.int32)).to(gl.int32)
        both = _count(first + ((key >= d2.to(gl.int32)).to(gl.int32) << 16))
        lo, hi, above = _narrow(lo, hi, above, d1, d2, both & 0xFFFF, both >> 16, k)
        turn += 1
    return lo.to(gl.int32), above


@gluon.jit
def _raw(scores, i, lane, end, WHOLE: gl.constexpr):
    """Scores i + lane below `end`, -inf past it.  WHOLE: the row's memory goes on to the tile's
    end, and what lies there does not matter: a mask would make the load four times narrower."""
    if WHOLE:
        return gl.load(scores + i + lane)
    return gl.load(scores + i + lane, mask=i + lane < end, other=float("-inf"))


@gluon.jit
def _threshold_of_row(scores, length, k, SIZE: gl.constexpr):
    """_threshold without slack, over a whole row in memory."""
    lane = _lanes(SIZE)
    lo = (length * 0).to(gl.int64) + (MINUS_INF + 1)
    hi = lo * 0 + 2147483648
    above = length
    while (hi - lo > 1) & (above > k):
        d1, d2 = _cuts(lo, hi, False)
        n1 = lane * 0
        n2 = lane * 0
        for i in range(0, length, SIZE):
            key = _ordered(_raw(scores, i, lane, length, False))
            n1 += (key >= d1.to(gl.int32)).to(gl.int32)
            n2 += (key >= d2.to(gl.int32)).to(gl.int32)
        lo, hi, above = _narrow(lo, hi, above, d1, d2, _count(n1), _count(n2), k)
    return lo.to(gl.int32)


@gluon.jit
def _store(indices, values, to, pos, key, take, VALUES: gl.constexpr):
    gl.store(indices + to, pos, mask=take)
    if VALUES:
        gl.store(values + to, _float(key).to(values.dtype.element_ty), mask=take)


@gluon.jit
def _select(key, pos, all_, k, indices, values, VALUES: gl.constexpr):
    """Store the k best of a tile of keys of which all_, up to 2**13, are there, in the order of
    their positions; returns how many."""
    k = gl.minimum(k, all_)
    if k > 0:
        least, reach = _threshold(key, k, 0, all_)
        take = (key >= least).to(gl.int32)
        if reach > k:  # of equal ones the first
            tie = (key == least).to(gl.int32)
            rank, ties = _ranks(tie)
            take = gl.where((key > least) | ((tie > 0) & (rank <= k - reach + ties)), 1, 0)
        to, _ = _ranks(take)
        _store(indices, values, to - 1, pos, key, take > 0, VALUES)
    return k


@gluon.jit
def _select_row(scores, length, k, indices, values, SIZE: gl.constexpr, VALUES: gl.constexpr):
    """_select over a whole row in memory."""
    lane = _lanes(SIZE)
    least = _threshold_of_row(scores, length, k, SIZE)
    above = lane * 0
    for i in range(0, length, SIZE):
        above += (_ordered(_raw(scores, i, lane, length, False)) > least).to(gl.int32)
    need = k - _count(above)
    taken = 0
    before = 0
    for i in range(0, length, SIZE):
        key = _ordered(_raw(scores, i, lane, length, False))
        tie = ((key == least) & (key > MINUS_INF)).to(gl.int32)
        rank, ties = _ranks(tie)
        take = gl.where((key > least) | ((tie > 0) & (rank + before <= need)), 1, 0)
        to, more = _ranks(take)
        _store(indices, values, taken + to - 1, i + lane, key, take > 0, VALUES)
        taken += more
        before += ties
    return taken


@gluon.jit
def _bound(sample, length, k, EACH: gl.constexpr, SAMPLE: gl.constexpr):
    """A score that some 1.4 k of the row should reach.  EACH: `sample` has every EACH-th."""
    there = length // EACH
    step = (there + SAMPLE - 1) // SAMPLE
    there = there // step
    lane = _lanes(SAMPLE)
    key = _ordered(gl.load(sample + lane * step, mask=lane < there, other=float("-inf")))
    # of the sample, as many as of the row, and four standard deviations more
    wanted = k.to(gl.float32) * there.to(gl.float32) / length.to(gl.float32)
    wanted = (wanted + 4.0 * gl.sqrt(wanted)).to(gl.int32) + 4
    least = wanted * 0 + (MINUS_INF + 1)
    all_ = _count((key > MINUS_INF).to(gl.int32))
    if wanted < all_:
        least, _ = _threshold(key, wanted, wanted // 12, all_)
    return _float(least)


@gluon.jit(do_not_specialize=["k"])
def collect(
    scores, sample, lengths, candidates, counts, k, stride, sample_stride,
    CHUNKS: gl.constexpr, ROOM: gl.constexpr, SAMPLE: gl.constexpr, EACH: gl.constexpr,
    SIZE: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """What may win of one chunk of a row, ascending: the score in the high half, the position in
    the low one; and how many they are."""
    row = gl.program_id(0).to(gl.int64)
    chunk = gl.program_id(1)
    gdc_launch_dependents()
    gdc_wait()
    length = gl.load(lengths + row)
    part = (length + CHUNKS * SIZE - 1) // (CHUNKS * SIZE) * SIZE
    lo = chunk * part
    hi = gl.minimum(lo + part, length)
    found = 0
    if (length > 2 * SIZE) & (lo < hi):  # shorter rows are selected from directly
        scores += row * stride
        candidates += (row * CHUNKS + chunk) * ROOM
        lane = _lanes(SIZE)
        ahead = _raw(scores, lo, lane, hi, WHOLE)
        least = _bound(sample + row * sample_stride, length, k, EACH, SAMPLE)
        for i in range(lo, hi, SIZE):
            x = ahead
            if i + SIZE < hi:
                ahead = _raw(scores, i + SIZE, lane, hi, WHOLE)
            elif WHOLE:
                x = gl.where(i + lane < hi, x, float("-inf"))
            take = x >= least
            rank, more = _ranks(take.to(gl.int32))
            if found + more <= ROOM:
                both = (x.to(gl.int32, bitcast=True).to(gl.int64) << 32) + (i + lane)
                gl.store(candidates + (rank + (found - 1)), both, mask=take)
            found += more
    gl.store(counts + row * CHUNKS + chunk, found)


@gluon.jit
def _apart(both, there):
    """(key, position) of candidates; -inf where there is none."""
    score = (both >> 32).to(gl.int32).to(gl.float32, bitcast=True)
    return gl.where(there, _ordered(score), MINUS_INF), both.to(gl.int32)


@gluon.jit
def _dealt(candidates, counts, CHUNKS: gl.constexpr, ROOM: gl.constexpr, SIZE: gl.constexpr):
    """A row's candidates, if each chunk has SIZE / CHUNKS at most: nothing need move."""
    L: gl.constexpr = tiled(SIZE, gl.num_warps())
    EACH: gl.constexpr = SIZE // CHUNKS
    chunk = gl.arange(0, SIZE // 128, layout=gl.SliceLayout(1, L)) * 128 // EACH
    slot = _lanes(SIZE) % EACH
    both = gl.load(candidates + (chunk * ROOM)[:, None] + slot)
    return _apart(both, slot < gl.load(counts + chunk)[:, None])


@gluon.jit
def _packed(candidates, counts, total, CHUNKS: gl.constexpr, ROOM: gl.constexpr,
            SIZE: gl.constexpr):  # fmt: skip
    """A row's candidates, chunk after chunk."""
    lane = _lanes(SIZE)
    at = lane
    before = 0
    for chunk in gl.static_range(CHUNKS):
        at = gl.where(lane >= before, lane - before + chunk * ROOM, at)
        before += gl.load(counts + chunk)
    return _apart(gl.load(candidates + at, mask=lane < total, other=0), lane < total)


@gluon.jit
def _whole_row(scores, length, k, indices, values, SIZE: gl.constexpr, VALUES: gl.constexpr):
    """_select of a row of up to SIZE scores."""
    lane = _lanes(SIZE)
    key = _ordered(_raw(scores, 0, lane, length, False))
    all_ = _count((key > MINUS_INF).to(gl.int32))
    return _select(key, lane, all_, k, indices, values, VALUES)


@gluon.jit(do_not_specialize=["k"])
def select(
    scores, lengths, candidates, counts, indices, values, k, stride,
    CHUNKS: gl.constexpr, ROOM: gl.constexpr, SIZE: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    row = gl.program_id(0).to(gl.int64)
    gdc_launch_dependents()
    gdc_wait()
    length = gl.load(lengths + row)
    scores += row * stride
    indices += row * k
    values += row * k
    candidates += row * CHUNKS * ROOM
    counts += row * CHUNKS
    if length <= SIZE:
        found = _whole_row(scores, length, k, indices, values, SIZE, VALUES)
    elif length <= 2 * SIZE:
        found = _whole_row(scores, length, k, indices, values, 2 * SIZE, VALUES)
    else:
        every: gl.constexpr = gl.BlockedLayout([CHUNKS], [32], [gl.num_warps()], [0])
        each = gl.load(counts + gl.arange(0, CHUNKS, layout=every))
        total = gl.sum(each, 0)
        most = gl.max(each, 0)
        if (total >= k) & (most <= SIZE // CHUNKS):
            key, pos = _dealt(candidates, counts, CHUNKS, ROOM, SIZE)
            found = _select(key, pos, total, k, indices, values, VALUES)
        elif (total >= k) & (most <= ROOM) & (total <= 2 * SIZE):
            key, pos = _packed(candidates, counts, total, CHUNKS, ROOM, 2 * SIZE)
            found = _select(key, pos, total, k, indices, values, VALUES)
        else:
            found = _select_row(scores, length, k, indices, values, SIZE, VALUES)
    if found < k:  # -1, and 0 for a value, past the entries found
        lane = _lanes(2 * SIZE)
        past = (lane >= found) & (lane < k)
        gl.store(indices + lane, -1, mask=past)
        if VALUES:
            gl.store(values + lane, (lane * 0).to(values.dtype.element_ty), mask=past)


def topk(
    scores: Tensor, lengths: Tensor, indices: Tensor, values: Tensor, k: int, sample: Tensor | None
) -> None:
    """See topk.topk."""
    rows, width = scores.shape
    device = scores.device
    # H200, 2026-11, 64K scores: 32 rows take 15.8 us with 8 chunks and 21.6 with 16; 128 rows 26.6
    # with 2 and 29.7 with 4
    chunks = 16 if rows <= 16 else 8 if rows <= 64 else 2 if rows <= 512 else 1
    # one chunk may hold all that matters: high scores come together
    room = 2 * TILE if chunks == 1 else TILE
    candidates = memory.empty((rows, chunks, room), torch.int64, device)
    counts = memory.empty((rows, chunks), torch.int32, device)
    if width > 2 * TILE:
        of = scores if sample is None else sample
        collect[(rows, chunks)](
            scores, of, lengths, candidates, counts, k, scores.stride(0), of.stride(0),
            CHUNKS=chunks, ROOM=room, SAMPLE=TILE if width <= 2**18 else 4 * TILE,
            EACH=1 if sample is None else EVERY, SIZE=TILE,
            WHOLE=width % TILE == 0 and scores.stride(0) % TILE == 0, num_warps=8, launch_pdl=True,
        )  # fmt: skip
    select[(rows,)](
        scores, lengths, candidates, counts, indices, values, k, scores.stride(0), CHUNKS=chunks,
        ROOM=room, SIZE=TILE, VALUES=values.numel() > 0, num_warps=8, launch_pdl=True,
    )  # fmt: skip
