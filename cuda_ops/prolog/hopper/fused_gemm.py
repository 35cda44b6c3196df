# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What the products by several weights share on Hopper (Gluon): the ring of tiles, and which part
of the product a program has."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...common.gluon_names import barrier


@gluon.jit
def ring(STAGES: gl.constexpr):
    """A barrier for each place of a ring of tiles, told that copies arrive there."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for each in gl.static_range(STAGES):
        mbarrier.init(full.index(each), count=1)
    fence_async_shared()
    barrier()
    return full


@gluon.jit
def place(tokens, BLOCK_T: gl.constexpr, BLOCKS: gl.constexpr, GROUP: gl.constexpr):
    """(first token, block of columns, run of k): GROUP blocks of tokens share each block of weights
    in L2."""
    program = gl.program_id(0)
    run = gl.program_id(1)
    first = program // (GROUP * BLOCKS) * GROUP
    height = gl.minimum((tokens + BLOCK_T - 1) // BLOCK_T - first, GROUP)
    token = (first + program % (GROUP * BLOCKS) % height) * BLOCK_T
    return token, program % (GROUP * BLOCKS) // height, run


@gluon.jit
def own(
    block, N0: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr, N3: gl.constexpr,
    B0: gl.constexpr, B1: gl.constexpr, B2: gl.constexpr,
):  # fmt: skip
    """(first column of the sum, first block, columns) of the weight that a block is of; weights end
    at blocks B0, B1, B2."""
    base = 0
    begin = 0
    size = N0
    if N1 > 0:
        base = gl.where(block >= B0, N0, base)
        begin = gl.where(block >= B0, B0, begin)
        size = gl.where(block >= B0, N1, size)
    if N2 > 0:
        base = gl.where(block >= B1, N0 + N1, base)
        begin = gl.where(block >= B1, B1, begin)
        size = gl.where(block >= B1, N2, size)
    if N3 > 0:
        base = gl.where(block >= B2, N0 + N1 + N2, base)
        begin = gl.where(block >= B2, B2, begin)
        size = gl.where(block >= B2, N3, size)
    return base, begin, size
