# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""topk.py on Hopper where rows are short: a warp collects from a part of a row by itself.

Warps agree on the threshold, then none waits for another: each stores the candidates of its part,
in order, in a place of its own.  A program that has a whole row selects from them at once; of few
rows several programs share one, and a second kernel selects.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ....dispatch.common import memory
from ...common.gluon_names import barrier
from ...common.hopper.selection import bound, lanes, plus, select, select_row
from ...common.ordered import apart, ordered
from ...common.tiling import power_of_two
from ...common.topk import BLOCK, EVERY
from ...runtime import launches

EACH = gl.constexpr(EVERY)
TILE = gl.constexpr(512)  # scores a warp reads at once
STEP = gl.constexpr(BLOCK)  # and a program that searches a whole row


@gluon.jit
def _asked(scores, at, width):
    """Scores at `at`, of `width` in memory: its divisors, which those of a length would not be,
    say how wide a load may be."""
    return gl.load(scores + at, mask=at < width, other=float("-inf"))


@gluon.jit
def _below(x, at, end):
    return gl.where(at < end, x, float("-inf"))


@gluon.jit
def _sampled(sample, length, width, SAMPLE: gl.constexpr):
    """(a row's sample, how many it has): every EACH-th of `width` scores, asked for before the
    length is known."""
    lane = lanes(SAMPLE)
    x = gl.load(sample + lane, mask=lane < width // EACH, other=float("-inf"))
    return _below(x, lane, length // EACH), length // EACH


@gluon.jit
def _collected(
    scores,
    drawn,
    valid,
    candidates,
    counts,
    length,
    lo,
    hi,
    width,
    k,
    ROOM: gl.constexpr,
    W: gl.constexpr,
):
    """Store what may win of a row's scores lo .. hi, a part a warp, ascending: the score in the
    high half, the position in the low one; and how many they are, past ROOM in vain."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [W, 1], [1, 0])
    warp = gl.arange(0, W, layout=gl.SliceLayout(1, L))
    lane = gl.arange(0, TILE, layout=gl.SliceLayout(0, L))
    part = (gl.maximum(hi - lo, 0) + W * 128 - 1) // (W * 128) * 128
    at = (lo + warp * part)[:, None] + lane[None, :]
    end = gl.minimum(lo + warp * part + part, hi)[:, None]
    ahead = _asked(scores, at, width)
    least = bound(drawn, valid, length, k)
    found = warp * 0
    for i in range(0, part, TILE):
        x = _below(ahead, i + at, end)
        if i + TILE < part:
            ahead = _asked(scores, i + TILE + at, width)
        take = x >= least
        rank = gl.associative_scan(take.to(gl.int32), 1, plus) + found[:, None]
        both = (x.to(gl.int32, bitcast=True).to(gl.int64) << 32) + (i + at)
        to = (warp * ROOM)[:, None] + (rank - 1)
        gl.store(candidates + to, both, mask=take & (rank <= ROOM))
        found += gl.sum(take.to(gl.int32), 1)
    gl.store(counts + warp, found)


class Constants(NamedTuple):
    """Chunks of a row, candidates of it that are held, size of a sample, parts of all chunks."""

    CHUNKS: int
    HELD: int
    SAMPLE: int
    PARTS: int


@gluon.jit(do_not_specialize=["k"])
def _collect(
    scores,
    sample,
    lengths,
    candidates,
    counts,
    k,
    width,
    stride,
    sample_stride,
    C: gl.constexpr,
):
    """The candidates of one chunk of a row."""
    row = gl.program_id(0).to(gl.int64)
    chunk = gl.program_id(1)
    gdc_launch_dependents()
    gdc_wait()
    length = gl.load(lengths + row)
    drawn, valid = _sampled(sample + row * sample_stride, length, width, C.SAMPLE)
    part = (length + C.CHUNKS * 1024 - 1) // (C.CHUNKS * 1024) * 1024
    lo = chunk * part
    hi = gl.minimum(lo + part, length)
    if length > C.HELD:  # shorter rows are selected from directly
        first = row * C.PARTS + chunk * (C.PARTS // C.CHUNKS)
        _collected(
            scores + row * stride,
            drawn,
            valid,
            candidates + first * (C.HELD // 4),
            counts + first,
            length,
            lo,
            hi,
            width,
            k,
            C.HELD // 4,
            C.PARTS // C.CHUNKS,
        )


@gluon.jit
def _dealt(candidates, counts, PARTS: gl.constexpr, HELD: gl.constexpr):
    """A row's candidates, if each part has HELD / PARTS at most: nothing need move."""
    lane = lanes(HELD)
    EACH: gl.constexpr = HELD // PARTS
    both = gl.load(candidates + lane // EACH * (HELD // 4) + lane % EACH)
    return both, lane % EACH < gl.load(counts + lane // EACH)


@gluon.jit
def _packed(candidates, counts, total, PARTS: gl.constexpr, HELD: gl.constexpr):
    """The same, up to HELD, brought together part after part."""
    lane = lanes(HELD)
    at = lane
    before = 0
    for part in range(PARTS):
        at = gl.where(lane >= before, lane - before + part * (HELD // 4), at)
        before += gl.load(counts + part)
    return gl.load(candidates + at, mask=lane < total, other=0), lane < total


@gluon.jit(do_not_specialize=["k"])
def _topk(
    scores,
    sample,
    lengths,
    candidates,
    counts,
    indices,
    values,
    k,
    width,
    stride,
    sample_stride,
    VALUES: gl.constexpr,
    C: gl.constexpr,
):
    """The winners of a row.  Of many CHUNKS _collect has brought the candidates."""
    row = gl.program_id(0).to(gl.int64)
    gdc_launch_dependents()
    gdc_wait()
    length = gl.load(lengths + row)
    scores += row * stride
    indices += row * k
    values += row * k
    lane = lanes(C.HELD)
    candidates += row * C.PARTS * (C.HELD // 4)
    counts += row * C.PARTS
    short = length <= C.HELD
    if C.CHUNKS == 1:
        drawn, valid = _sampled(sample + row * sample_stride, length, width, C.SAMPLE)
        if ~short:
            _collected(
                scores,
                drawn,
                valid,
                candidates,
                counts,
                length,
                0,
                length,
                width,
                k,
                C.HELD // 4,
                C.PARTS,
            )
        barrier()  # what others have stored is loaded
    every: gl.constexpr = gl.BlockedLayout([max(1, C.PARTS // 32)], [32], [gl.num_warps()], [0])
    each = gl.load(counts + gl.arange(0, C.PARTS, layout=every))
    # asked for before it is known whether they are there
    both, there = _dealt(candidates, counts, C.PARTS, C.HELD)
    total = gl.sum(each, 0)
    most = gl.max(each, 0)
    if (~short) & (most > C.HELD // C.PARTS) & (most <= C.HELD // 4) & (total <= C.HELD):
        both, there = _packed(candidates, counts, total, C.PARTS, C.HELD)
    # a selection is much code, which compiles for a second: one, of any keys
    if short | ((total >= k) & (total <= C.HELD) & (most <= C.HELD // 4)):
        if short:
            key, pos = ordered(_below(_asked(scores, lane, width), lane, length)), lane
        else:
            key, pos = apart(both, there)
        found = select(key, pos, k, indices, values, ~short, VALUES)
    else:
        found = select_row(scores, length, k, indices, values, STEP, VALUES)
    if found < k:  # -1, and 0 for a value, past the entries found
        past = (lane >= found) & (lane < k)
        gl.store(indices + lane, -1, mask=past)
        if VALUES:
            gl.store(values + lane, (lane * 0).to(values.dtype.element_ty), mask=past)


def _held(k: int) -> int:
    """Room for the candidates of a row: for those that bound expects of a sample of every EVERY-th
    score, and for three standard deviations more."""
    return 2048 if k <= 512 else 4096


def supports(scores: Tensor, k: int, sample: Tensor | None) -> bool:
    """Few rows that are shorter still take one launch of topk.py."""
    rows, width = scores.shape
    least = 2 * BLOCK if rows <= 64 else _held(k)
    return sample is not None and k <= 2048 and least < width <= 2**15


def launch(
    scores: Tensor, lengths: Tensor, indices: Tensor, values: Tensor, k: int, sample: Tensor
) -> None:
    """See topk.topk."""
    (rows, width), device = scores.shape, scores.device
    # H200, 2026-11, 16K scores of which 512, with the indexer on e4m3: 1 row 8.8 us, with 4 chunks
    # 9.6, with one 12.0; 32 rows 33.8, with 8 chunks 35.1, with one 36.0; 128 rows 94.9 to 95.9
    chunks = 8 if rows <= 16 else 4 if rows <= 64 else 1
    warps = 8 if chunks == 1 else 4  # that collect
    held, parts = _held(k), chunks * warps
    candidates = memory.empty((rows, parts, held // 4), torch.int64, device)
    counts = memory.empty((rows, parts), torch.int32, device)
    every = (scores, sample, lengths, candidates, counts)
    strides = (k, width, scores.stride(0), sample.stride(0))
    sampled = max(1024, power_of_two(width // EVERY))
    C = Constants(CHUNKS=chunks, HELD=held, SAMPLE=sampled, PARTS=parts)
    if chunks > 1:
        launches.kernel(_collect, rows, chunks)(
            *every, *strides, C=C, num_warps=warps, launch_pdl=True
        )
    launches.kernel(_topk, rows)(
        *every,
        indices,
        values,
        *strides,
        VALUES=values.numel() > 0,
        C=C,
        num_warps=8,
        launch_pdl=True,
    )
