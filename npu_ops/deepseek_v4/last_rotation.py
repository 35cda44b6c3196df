# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The rotation of a head's last dims, neighbours as pairs, where they stand: the vector unit takes
the pairs apart and interleaves the turned ones, one operation each.  And where a token stands."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.lengths import within

FARTHEST = tl.constexpr(2147483647)
WIDEST, TURNED = 1024, 128  # dims of a head; those of them that turn


@triton.jit
def standing(act_seqs, seqused, row, steps, USED: tl.constexpr):
    """(request, position) of a token of [B, S]; the position of one that is not there is -1."""
    request = row // steps
    j = row - request * steps
    used = steps
    if USED:
        used = within(seqused + request, steps)
    position = within(act_seqs + request, FARTHEST) - used + j
    return request, tl.where(j < used, tl.maximum(position, -1), -1)


@triton.jit
def angles(sin, cos, ROTARY: tl.constexpr):
    """The sines and cosines of a token's pairs: entry 2i is pair i's, the odd ones are not used."""
    d = tl.arange(0, ROTARY)
    s, _ = tl.split(tl.load(sin + d).reshape(ROTARY // 2, 2))
    c, _ = tl.split(tl.load(cos + d).reshape(ROTARY // 2, 2))
    return s.to(tl.float32), c.to(tl.float32)


@triton.jit
def turned(left, right, s, c):
    """The pairs turned, one beside the other."""
    return tl.join(left * c - right * s, right * c + left * s)


def not_turned(size: int, rotary: int, what: str) -> str | None:
    """Why no tile of heads is copied in whole blocks, or fits UB, or None."""
    if rotary % 16 or (size - rotary) % 16:
        return f"{rotary} rotary dims of {size} in {what}: both they and the rest come in 16s"
    if size > WIDEST or not 0 < rotary <= TURNED:
        return (
            f"{rotary} rotary dims of {size} in {what}: supported are up to {TURNED} of up to "
            f"{WIDEST}, of which UB holds a tile"
        )
    return None
