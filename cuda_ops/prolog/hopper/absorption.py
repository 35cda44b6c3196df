# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A head's rounded query times w_uk on Hopper (Gluon), transposed or not."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma


@gluon.jit
def times(q, w, acc, SWAP: gl.constexpr):
    """acc + q w, transposed if SWAP."""
    if SWAP:
        return warpgroup_mma(w.permute([1, 0]), q.permute([1, 0]), acc, is_async=True)
    else:
        return warpgroup_mma(q, w, acc, is_async=True)


@gluon.jit
def put(out, place, SWAP: gl.constexpr):
    if SWAP:
        place.permute([1, 0]).store(out.to(place.dtype))
    else:
        place.store(out.to(place.dtype))
