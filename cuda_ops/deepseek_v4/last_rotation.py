# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Where a token stands; the rotation of a head's last dims, neighbours as pairs, in place."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def standing(act_seqs, seqused, token, steps, USED: tl.constexpr):
    """(request, position, whether it is there) of a token of [B, S]."""
    request = token // steps
    j = token % steps
    used = tl.cast(steps, tl.int64)
    if USED:
        used = tl.minimum(tl.maximum(tl.load(seqused + request).to(tl.int64), 0), steps)
    position = tl.load(act_seqs + request).to(tl.int64) - used + j
    return request, position, (j < used) & (position >= 0)


@triton.jit
def other_of(j, D: tl.constexpr, DR: tl.constexpr):
    """The dim that makes a pair with j, or j where it is not turned."""
    PLAIN: tl.constexpr = D - DR
    return tl.where(j >= PLAIN, ((j - PLAIN) ^ 1) + PLAIN, j)


@triton.jit
def angles(sin, cos, j, mask, D: tl.constexpr, DR: tl.constexpr):
    """(cosines, sines with their sign) of dims j; 1 and 0 where they are not turned.  `sin` and
    `cos` are those of a token; entry 2i is pair i's, no odd one is read."""
    PLAIN: tl.constexpr = D - DR
    at = (j - PLAIN) // 2 * 2
    mask = mask & (j >= PLAIN) & (j < D)
    c = tl.load(cos + at, mask=mask, other=1.0).to(tl.float32)
    s = tl.load(sin + at, mask=mask, other=0.0).to(tl.float32)
    return c, tl.where(((j - PLAIN) & 1) == 1, s, -s)
