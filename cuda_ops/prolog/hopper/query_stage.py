# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The absorption of prolog.py on Hopper (Gluon): what a product made of many tokens.

One program a head, or a few: the head's whole w_uk, asked for before that product has ended, stays
for all its blocks of tokens.  A block of columns leaves by TMA while the next one is summed, and
the next tokens are on their way.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...common import gpu
from ...common.gluon_names import barrier, tma_load, tma_store
from ...common.hopper.tma import DTYPES, aligned, describe_matrix, forget
from ...common.tiling import cdiv
from ...runtime import launches

BLOCK_N = 64


@gluon.jit(do_not_specialize=["tokens", "programs"])
def _absorb(
    q_blocks,
    w_blocks,
    out_blocks,
    tokens,
    programs,
    DN: gl.constexpr,
    D: gl.constexpr,
    R: gl.constexpr,
):
    dtype: gl.constexpr = q_blocks.dtype
    BLOCK_T: gl.constexpr = q_blocks.block_shape[0]
    WIDE: gl.constexpr = w_blocks.block_shape[1]
    PARTS: gl.constexpr = R // WIDE
    head = gl.program_id(0)
    first = gl.program_id(1)
    count = ((tokens + BLOCK_T - 1) // BLOCK_T - first + programs - 1) // programs
    w_tiles = gl.allocate_shared_memory(dtype, [PARTS, DN, WIDE], w_blocks.layout)
    q_tiles = gl.allocate_shared_memory(dtype, [2, BLOCK_T, DN], q_blocks.layout)
    out_tiles = gl.allocate_shared_memory(dtype, [2, BLOCK_T, WIDE], out_blocks.layout)
    w_full = gl.allocate_shared_memory(gl.int64, [PARTS, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for part in gl.static_range(PARTS):
        mbarrier.init(w_full.index(part), count=1)
    for each in gl.static_range(2):
        mbarrier.init(full.index(each), count=1)
    fence_async_shared()
    barrier()
    for part in gl.static_range(PARTS):
        bar = w_full.index(part)
        mbarrier.expect(bar, DN * WIDE * 2)
        tma_load(w_blocks, [head * DN, part * WIDE], bar, w_tiles.index(part))
    gdc_wait()
    gdc_launch_dependents()
    mbarrier.expect(full.index(0), BLOCK_T * DN * 2)
    tma_load(q_blocks, [first * BLOCK_T, head * (DN + D)], full.index(0), q_tiles.index(0))

    summed: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, WIDE, 16]
    )
    zero = gl.zeros([BLOCK_T, WIDE], gl.float32, summed)
    for i in range(count):
        token = (first + i * programs) * BLOCK_T
        stage = i % 2
        # the block before the last one is done in every warp
        wanted = i + 1 < count
        bar = full.index(1 - stage)
        mbarrier.expect(bar, BLOCK_T * DN * 2, pred=wanted)
        later = token + programs * BLOCK_T
        tma_load(q_blocks, [later, head * (DN + D)], bar, q_tiles.index(1 - stage), pred=wanted)
        mbarrier.wait(full.index(stage), (i // 2) & 1)
        q_tile = q_tiles.index(stage)
        mbarrier.wait(w_full.index(0), 0)
        ahead = warpgroup_mma(q_tile, w_tiles.index(0), zero, use_acc=False, is_async=True)
        for part in gl.static_range(PARTS):
            now = ahead
            if part + 1 < PARTS:
                mbarrier.wait(w_full.index(part + 1), 0)
                w_tile = w_tiles.index(part + 1)
                ahead = warpgroup_mma(q_tile, w_tile, zero, use_acc=False, is_async=True)
                acc = warpgroup_mma_wait(num_outstanding=1, deps=(now,))
            else:
                acc = warpgroup_mma_wait(num_outstanding=0, deps=(now,))
            out_tile = out_tiles.index(part % 2)
            tma.store_wait(1)
            barrier()
            out_tile.store(acc.to(dtype))
            fence_async_shared()
            barrier()
            tma_store(out_blocks, [token, head * R + part * WIDE], out_tile)
    forget(w_full)
    forget(full)
    tma.store_wait(0)


def supports(q: Tensor, w_uk: Tensor) -> bool:
    """One run of products, blocks that divide everything, and alignment for TMA."""
    runs, tokens, total = q.shape
    _, plain, rank = w_uk.shape
    return (
        gpu.is_hopper(q.device)
        and runs == 1
        and tokens > 32
        and q.dtype in DTYPES
        and plain in (64, 128)
        and rank % BLOCK_N == 0
        and rank <= 512
        and total % 8 == 0
        and aligned(q, w_uk)
    )


def launch(q: Tensor, w_uk: Tensor, query: Tensor, rotary: int) -> None:
    """q [1, T, N (DN + D) ..] -> query [.., N, R].  Behind it a kernel may count on q."""
    _, tokens, total = q.shape
    heads, plain, rank = w_uk.shape
    tile = 64 if tokens <= 64 else 128
    programs = max(1, min(cdiv(tokens, tile), gpu.num_sms(q.device) // heads))
    launches.kernel(_absorb, heads, programs)(
        describe_matrix(q, tokens, total, [tile, plain]),
        describe_matrix(w_uk, heads * plain, rank, [plain, BLOCK_N]),
        describe_matrix(query, tokens, heads * rank, [tile, BLOCK_N]),
        tokens,
        programs,
        DN=plain,
        D=rotary,
        R=rank,
        num_warps=tile // 16,
        launch_pdl=True,
    )
