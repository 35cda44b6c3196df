# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Barriers by which warps of a program hand over what lies in shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..gluon_names import barrier


@gluon.jit
def in_turn(STAGES: gl.constexpr, READERS: gl.constexpr):
    """Of places that are filled and emptied in turn, each by READERS: (full, empty)."""
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    fence_async_shared()
    barrier()
    return full, empty


@gluon.jit
def two_barriers():
    """Of two tiles, each filled by one."""
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    first, second = bars.index(0), bars.index(1)
    mbarrier.init(first, count=1)
    mbarrier.init(second, count=1)
    fence_async_shared()
    barrier()
    return bars
