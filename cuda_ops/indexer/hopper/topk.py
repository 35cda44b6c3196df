# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The kernels of topk.py on Hopper (Gluon): the same two steps, laid out so that little passes
between threads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ....dispatch.common import memory
from ...common import gpu
from ...common.hopper.selection import bound, lanes, ranks, raw, select, select_row, tiled
from ...common.ordered import apart, ordered
from ...common.topk import BLOCK, EVERY
from ...runtime import launches

STEP = gl.constexpr(BLOCK)  # scores that a program reads at once


@gluon.jit
def _sampled(sample, length, EACH: gl.constexpr, SAMPLE: gl.constexpr, SPARSE: gl.constexpr):
    """(a row's sample, how many it has): every EACH-th score or, where SPARSE, fewer."""
    lane = lanes(SAMPLE)
    valid = length // EACH
    if SPARSE:
        step = gl.maximum((valid + SAMPLE - 1) // SAMPLE, 1)
        valid = valid // step
        x = gl.load(sample + lane * step, mask=lane < valid, other=float("-inf"))
    else:  # asked for before the length is known
        x = gl.where(lane < valid, gl.load(sample + lane), float("-inf"))
    return x, valid


@gluon.jit(do_not_specialize=["k"])
def _collect(
    scores,
    sample,
    lengths,
    candidates,
    counts,
    k,
    stride,
    sample_stride,
    CHUNKS: gl.constexpr,
    ROOM: gl.constexpr,
    SAMPLE: gl.constexpr,
    EACH: gl.constexpr,
    SPARSE: gl.constexpr,
    WHOLE: gl.constexpr,
):
    """What may win of one chunk of a row, ascending: the score in the high half, the position in
    the low one; and how many they are."""
    row = gl.program_id(0).to(gl.int64)
    chunk = gl.program_id(1)
    gdc_launch_dependents()
    gdc_wait()
    length = gl.load(lengths + row)
    drawn, valid = _sampled(sample + row * sample_stride, length, EACH, SAMPLE, SPARSE)
    part = (length + CHUNKS * STEP - 1) // (CHUNKS * STEP) * STEP
    lo = chunk * part
    hi = gl.minimum(lo + part, length)
    found = 0
    if (length > 2 * STEP) & (lo < hi):  # shorter rows are selected from directly
        scores += row * stride
        candidates += (row * CHUNKS + chunk) * ROOM
        lane = lanes(STEP)
        ahead = raw(scores, lo, lane, hi, WHOLE)
        least = bound(drawn, valid, length, k)
        for i in range(lo, hi, STEP):
            x = ahead
            if i + STEP < hi:
                ahead = raw(scores, i + STEP, lane, hi, WHOLE)
            elif WHOLE:
                x = gl.where(i + lane < hi, x, float("-inf"))
            take = x >= least
            rank, more = ranks(take.to(gl.int32))
            if found + more <= ROOM:
                both = (x.to(gl.int32, bitcast=True).to(gl.int64) << 32) + (i + lane)
                gl.store(candidates + (rank + (found - 1)), both, mask=take)
            found += more
    gl.store(counts + row * CHUNKS + chunk, found)


@gluon.jit
def _dealt(candidates, counts, CHUNKS: gl.constexpr, ROOM: gl.constexpr, BLOCK: gl.constexpr):
    """A row's candidates, if each chunk has BLOCK / CHUNKS at most: nothing need move."""
    L: gl.constexpr = tiled(BLOCK, gl.num_warps())
    EACH: gl.constexpr = BLOCK // CHUNKS
    chunk = gl.arange(0, BLOCK // 128, layout=gl.SliceLayout(1, L)) * 128 // EACH
    slot = lanes(BLOCK) % EACH
    both = gl.load(candidates + (chunk * ROOM)[:, None] + slot)
    return both, slot < gl.load(counts + chunk)[:, None]


@gluon.jit
def _packed(
    candidates, counts, total, CHUNKS: gl.constexpr, ROOM: gl.constexpr, BLOCK: gl.constexpr
):
    """(key, position) of a row's candidates, up to BLOCK, brought together chunk after chunk."""
    lane = lanes(BLOCK)
    at = lane
    before = 0
    for chunk in gl.static_range(CHUNKS):
        at = gl.where(lane >= before, lane - before + chunk * ROOM, at)
        before += gl.load(counts + chunk)
    return apart(gl.load(candidates + at, mask=lane < total, other=0), lane < total)


@gluon.jit
def _select_all(scores, length, k, indices, values, BLOCK: gl.constexpr, VALUES: gl.constexpr):
    """select of a row of up to BLOCK scores."""
    lane = lanes(BLOCK)
    key = ordered(raw(scores, 0, lane, length, False))
    return select(key, lane, k, indices, values, False, VALUES)


@gluon.jit
def _select_short(scores, length, k, indices, values, BLOCK: gl.constexpr, VALUES: gl.constexpr):
    """select of a row of up to 2 * BLOCK scores."""
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


@gluon.jit(do_not_specialize=["k"])
def _topk(scores, lengths, candidates, counts, indices, values, k, stride, C: gl.constexpr):
    """The winners of a row.  LONG: _collect ran."""
    row = gl.program_id(0).to(gl.int64)
    gdc_launch_dependents()
    gdc_wait()
    length = gl.load(lengths + row)
    scores += row * stride
    indices += row * k
    values += row * k
    if C.LONG:
        candidates += row * C.CHUNKS * C.ROOM
        counts += row * C.CHUNKS
        every: gl.constexpr = gl.BlockedLayout([C.CHUNKS], [32], [gl.num_warps()], [0])
        each = gl.load(counts + gl.arange(0, C.CHUNKS, layout=every))
        # asked for before it is known whether they are there
        both, valid = _dealt(candidates, counts, C.CHUNKS, C.ROOM, STEP)
        total = gl.sum(each, 0)
        most = gl.max(each, 0)
        # a selection is much code, which compiles for a second: one of each size, of any keys
        short = length <= 2 * STEP
        if (length <= STEP) | ((~short) & (total >= k) & (most <= STEP // C.CHUNKS)):
            if short:
                pos = lanes(STEP)
                key = ordered(raw(scores, 0, pos, length, False))
            else:
                key, pos = apart(both, valid)
            found = select(key, pos, k, indices, values, ~short, C.VALUES)
        elif short | ((total >= k) & (most <= C.ROOM) & (total <= 2 * STEP)):
            if short:
                pos = lanes(2 * STEP)
                key = ordered(raw(scores, 0, pos, length, False))
            else:
                key, pos = _packed(candidates, counts, total, C.CHUNKS, C.ROOM, 2 * STEP)
            found = select(key, pos, k, indices, values, ~short, C.VALUES)
        else:
            found = select_row(scores, length, k, indices, values, STEP, C.VALUES)
    else:
        found = _select_short(scores, length, k, indices, values, STEP, C.VALUES)
    if found < k:  # -1, and 0 for a value, past the entries found
        lane = lanes(2 * STEP)
        past = (lane >= found) & (lane < k)
        gl.store(indices + lane, -1, mask=past)
        if C.VALUES:
            gl.store(values + lane, (lane * 0).to(values.dtype.element_ty), mask=past)


def supports(device: torch.device) -> bool:
    return gpu.is_hopper(device)


def launch(
    scores: Tensor, lengths: Tensor, indices: Tensor, values: Tensor, k: int, sample: Tensor | None
) -> None:
    """See topk.topk."""
    rows, width = scores.shape
    device = scores.device
    # H200, 2026-11, 64K scores: 32 rows take 15.8 us, with 16 chunks 21.6; 128 rows 26.6, with 4
    # chunks 29.7.  4 warps instead of 8: 15.0 for 32 rows alone, but the indexer lost 3 us by them
    chunks = 16 if rows <= 16 else 8 if rows <= 64 else 2 if rows <= 512 else 1
    # one chunk may hold all that matters: high scores come together
    room = 2 * BLOCK if chunks == 1 else BLOCK
    long = width > 2 * BLOCK
    candidates = memory.empty((rows if long else 0, chunks, room), torch.int64, device)
    counts = memory.empty((rows, chunks), torch.int32, device)
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
            SPARSE=width // each > most or width // each % most > 0,
            WHOLE=width % BLOCK == 0 and scores.stride(0) % BLOCK == 0,
            num_warps=8,
            launch_pdl=True,
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
        C=Constants(CHUNKS=chunks, ROOM=room, LONG=long, VALUES=values.numel() > 0),
        num_warps=8,
        launch_pdl=True,
    )
