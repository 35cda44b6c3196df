# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Floats as int32 of the same order, and cuts between such keys: what both dialects of the top-k
do with numbers, whatever their layout."""

from __future__ import annotations

import triton
import triton.language as tl

MINUS_INF = tl.constexpr(-2139095041)  # ordered(-inf); the lowest that is there is one above


@triton.jit
def ordered(x):
    """int32 whose order is that of the floats."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # + 0.0: one zero, not two
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def float_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def span(lo, hi):
    """hi - lo of int32 that may lie 2**32 apart."""
    return (hi - lo).to(tl.uint32, bitcast=True)


@triton.jit
def inside(lo, hi, d1, d2):
    """Two thresholds, neither of which leaves lo .. hi as it is."""
    d1 = tl.minimum(tl.maximum(d1, lo + 1), hi - 1)
    return d1, tl.minimum(tl.maximum(d2, d1), hi - 1)


@triton.jit
def cuts(lo, hi, k, above, below, slack, hit):
    """Around where the k-th lies if the keys are spread evenly; thirds if that just failed."""
    wide = span(lo, hi).to(tl.float32)
    near = tl.rsqrt((above - below).to(tl.float32))
    at = ((above - k).to(tl.float32) - 0.5 * slack.to(tl.float32)) * (near * near)
    first = tl.where(hit, tl.maximum(at - 0.35 * near, 0.0), 0.33333334)
    second = tl.where(hit, tl.minimum(at + 0.35 * near, 1.0), 0.6666667)
    d1 = lo + (first * wide).to(tl.uint32).to(tl.int32, bitcast=True)
    d2 = lo + (second * wide).to(tl.uint32).to(tl.int32, bitcast=True)
    return inside(lo, hi, d1, d2)


@triton.jit
def put(indices, values, to, pos, key, take, VALUES: tl.constexpr):
    """Store the positions, and the scores, of the keys to take."""
    tl.store(indices + to, pos, mask=take)
    if VALUES:
        tl.store(values + to, float_of(key).to(values.dtype.element_ty), mask=take)


@triton.jit
def apart(both, valid):
    """(key, position) of candidates; -inf where there is none."""
    score = (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(valid, ordered(score), MINUS_INF), both.to(tl.int32)
