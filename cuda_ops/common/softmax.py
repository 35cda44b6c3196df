# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The softmax of plain kernels that read a row's keys tile by tile, for a tile of heads.  Scores
and maxima are to base 2; a head that sees nothing has the sum 0."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from .log2 import LN2, LOG2E


@triton.jit
def step(s, row_max, row_sum):
    """(weights, factor of all before, sums, maxima) with the scores of a tile."""
    new_max = tl.maximum(row_max, tl.max(s, 1))
    alpha = tl.exp2(row_max - new_max)
    weight = tl.exp2(s - new_max[:, None])
    return weight, alpha, row_sum * alpha + tl.sum(weight, 1), new_max


@triton.jit
def merged(top, weight, sinks, head, HAS_SINK: tl.constexpr):
    """(what each part weighs, its sum, that with the sink, maximum) of a row and a head, of whose
    parts these are the maxima and sums."""
    row_max = tl.max(top, 0)
    weight = weight * tl.exp2(top - row_max)
    row_sum = tl.sum(weight, 0)
    total = row_sum
    if HAS_SINK:
        total += tl.exp2(tl.load(sinks + head).to(tl.float32) * LOG2E - row_max)
    return weight, row_sum, total, row_max


@triton.jit
def finish(row_max, row_sum, heads, sinks, results, WIDTH: tl.constexpr, C: tl.constexpr):
    """(1 / sums with the sinks, where WIDTH columns belong, which heads saw a key) of `heads`: row,
    part of its keys, heads, which of them exist.  The statistics of parts are stored here; what
    merges them may begin."""
    row, split, head, mask = heads
    out, partial, partial_max, partial_sum = results
    if C.CHAINED:
        gdc_launch_dependents()
    seen = row_sum != 0  # a NaN is there, and stays one
    if C.SPLITS == 1:
        total = row_sum
        if C.HAS_SINK:
            sink = tl.load(sinks + head, mask=mask, other=0.0).to(tl.float32)
            total += tl.exp2(sink * LOG2E - row_max)
        inverse = tl.where(seen, 1.0 / tl.where(seen, total, 1.0), 0.0)
        to = out + (row * C.HEADS + head) * WIDTH
    else:
        inverse = tl.where(seen, 1.0 / tl.where(seen, row_sum, 1.0), 0.0)
        piece = (row * C.SPLITS + split) * C.HEADS + head
        to = partial + piece * WIDTH
        tl.store(partial_max + piece, row_max, mask=mask)
        tl.store(partial_sum + piece, row_sum, mask=mask)
    return inverse, to, seen


@triton.jit
def store(
    acc, row_max, row_sum, heads, sinks, results, lse, d, WIDTH: tl.constexpr, C: tl.constexpr
):
    """What `heads` (as in `finish`) have seen: columns d of `acc`, and of one part the
    log-sum-exp."""
    row, _, head, mask = heads
    inverse, to, seen = finish(row_max, row_sum, heads, sinks, results, WIDTH, C)
    if C.SPLITS == 1 and C.STATS:
        piece = row * C.HEADS + head
        log = row_max * LN2 + tl.log(tl.where(seen, row_sum, 1.0))
        tl.store(lse + piece, tl.where(seen, log, float("-inf")), mask=mask)
    o = (acc * inverse[:, None]).to(to.dtype.element_ty)
    tl.store(to[:, None] + d[None, :], o, mask=mask[:, None] & (d < WIDTH)[None, :])
