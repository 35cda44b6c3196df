# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The query heads of prolog.py on Hopper (Gluon), up to 256 tokens: one program a head and a block
of tokens, from c to the head's outputs; w_uq_qr and w_uk pass through one ring.
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
from ...common.gluon_names import barrier, reinterpret, tma_load, tma_store
from ...common.hopper.tma import DTYPES, aligned, describe_matrix, forget
from ...common.tiling import power_of_two
from ...runtime import launches
from .absorption import put, times
from .fused_gemm import columns_first, describe_weight, load_weight, ring, weight_tiles
from .rotation import rotate


@gluon.jit
def _ask(w, c, w_tiles, c_tiles, full, step, wanted, head, token, FORM: gl.constexpr):
    """Three blocks of w_uq_qr and one of c, for step `step`, into its place in the ring."""
    STAGES: gl.constexpr = c_tiles.shape[0]
    BLOCK_T: gl.constexpr = c_tiles.shape[1]
    BLOCK_K: gl.constexpr = c_tiles.shape[2]
    stage = step % STAGES
    bar = full.index(stage)
    k = step * BLOCK_K
    mbarrier.expect(bar, (3 * 64 + BLOCK_T) * BLOCK_K * 2, pred=wanted)
    for i in gl.static_range(3):
        tile = w_tiles.index(stage * 3 + i)
        load_weight(w, (head * 3 + i) * 64, k, bar, tile, FORM, wanted)
    tma_load(c, [token, k], bar, c_tiles.index(stage), pred=wanted)


@gluon.jit
def _ask_last(w_uk, w_tiles, c_tiles, full, step, head, CHUNKS: gl.constexpr, LAST: gl.constexpr):
    """Two blocks of w_uk, for step `step` of the LAST ones: twice 64 columns, or the upper and the
    lower half of 64 columns."""
    STAGES: gl.constexpr = c_tiles.shape[0]
    BLOCK_K: gl.constexpr = c_tiles.shape[2]
    stage = step % STAGES
    bar = full.index(stage)
    wanted = step < CHUNKS + LAST
    mbarrier.expect(bar, 2 * 64 * BLOCK_K * 2, pred=wanted)
    for i in gl.static_range(2):
        tile = reinterpret(w_tiles.index(stage * 3 + i), w_uk.dtype, [BLOCK_K, 64], w_uk.layout)
        row = head * 128 + (i * 64 if BLOCK_K == 64 else 0)
        column = (step - CHUNKS) * BLOCK_K + (0 if BLOCK_K == 64 else i * 64)
        tma_load(w_uk, [row, column], bar, tile, pred=wanted)


@gluon.jit
def _step(w_tiles, c_tiles, full, i, a, b, turned, FORM: gl.constexpr):
    """The three products of step i; when it returns, those of the step before are done in every
    warp, and its tiles are free."""
    STAGES: gl.constexpr = c_tiles.shape[0]
    BLOCK_K: gl.constexpr = c_tiles.shape[2]
    stage = i % STAGES
    mbarrier.wait(full.index(stage), (i // STAGES) & 1)
    c_tile = c_tiles.index(stage).permute([1, 0])
    w_tile = columns_first(w_tiles.index(stage * 3), 64, BLOCK_K, FORM)
    a = warpgroup_mma(w_tile, c_tile, a, is_async=True)
    w_tile = columns_first(w_tiles.index(stage * 3 + 1), 64, BLOCK_K, FORM)
    b = warpgroup_mma(w_tile, c_tile, b, is_async=True)
    w_tile = columns_first(w_tiles.index(stage * 3 + 2), 64, BLOCK_K, FORM)
    turned = warpgroup_mma(w_tile, c_tile, turned, is_async=True)
    a, b, turned = warpgroup_mma_wait(num_outstanding=3, deps=(a, b, turned))
    barrier()
    return a, b, turned


@gluon.jit
def _place(c_tiles, i: gl.constexpr):
    """The i-th [BLOCK_T, 64] of the tiles of c."""
    HALVES: gl.constexpr = c_tiles.shape[2] // 64
    shape: gl.constexpr = [HALVES, c_tiles.shape[1], 64]
    tile = reinterpret(c_tiles.index(i // HALVES), c_tiles.dtype, shape, c_tiles.layout)
    return tile.index(i % HALVES)


@gluon.jit(do_not_specialize=["tokens"])
def _query(
    c,
    w,
    w_uk,
    query,
    query_rope,
    sin,
    cos,
    tokens,
    HEADS: gl.constexpr,
    R: gl.constexpr,
    CHUNKS: gl.constexpr,
    STAGES: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    FORM: gl.constexpr,
):
    """A head from c to its outputs: the last 64 columns of c W are rotated, the first 128 absorbed.
    Transposed, [columns, tokens], but for the absorption of many tokens.  Eight warps halve the
    tokens, not the columns."""
    dtype: gl.constexpr = c.dtype
    BLOCK_T: gl.constexpr = c.block_shape[0]
    BLOCK_K: gl.constexpr = c.block_shape[1]
    LAST: gl.constexpr = R // BLOCK_K
    SWAP: gl.constexpr = BLOCK_T < 64
    head = gl.program_id(0)
    token = gl.program_id(1) * BLOCK_T
    w_tiles = weight_tiles(w, STAGES * 3, 64, BLOCK_K, FORM)
    c_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_T, BLOCK_K], c.layout)
    full = ring(STAGES)
    for each in gl.static_range(STAGES):
        mbarrier.expect(full.index(each), (3 * 64 + BLOCK_T) * BLOCK_K * 2)
        for part in gl.static_range(3):
            tile = w_tiles.index(each * 3 + part)
            load_weight(w, (head * 3 + part) * 64, each * BLOCK_K, full.index(each), tile, FORM)
    gdc_launch_dependents()
    gdc_wait()
    for each in gl.static_range(STAGES):
        tma_load(c, [token, each * BLOCK_K], full.index(each), c_tiles.index(each))

    GROUPS: gl.constexpr = gl.num_warps() // 4
    summed: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, GROUPS], instr_shape=[16, BLOCK_T // GROUPS, 16]
    )
    a = gl.zeros([64, BLOCK_T], gl.float32, summed)
    b = gl.zeros([64, BLOCK_T], gl.float32, summed)
    turned = gl.zeros([64, BLOCK_T], gl.float32, summed)
    for i in range(CHUNKS - STAGES + 1):
        a, b, turned = _step(w_tiles, c_tiles, full, i, a, b, turned, FORM)
        _ask(w, c, w_tiles, c_tiles, full, i + STAGES - 1, i > 0, head, token, FORM)
    for i in range(CHUNKS - STAGES + 1, CHUNKS):
        a, b, turned = _step(w_tiles, c_tiles, full, i, a, b, turned, FORM)
        _ask_last(w_uk, w_tiles, c_tiles, full, i + STAGES - 1, head, CHUNKS, LAST)
    a, b, turned = warpgroup_mma_wait(num_outstanding=0, deps=(a, b, turned))
    barrier()
    _ask_last(w_uk, w_tiles, c_tiles, full, CHUNKS - 1 + STAGES, head, CHUNKS, LAST)

    # no tile of c is needed any more: they hold the head's rounded query, and then its outputs
    put(a, _place(c_tiles, 0), True)
    put(b, _place(c_tiles, 1), True)
    put(turned, _place(c_tiles, 2), True)
    fence_async_shared()
    barrier()
    rotate(
        _place(c_tiles, 2),
        query_rope + head * 64,
        HEADS * 64,
        sin,
        cos,
        token,
        tokens,
        BLOCK_T,
        INTERLEAVED,
    )
    shape: gl.constexpr = [64, BLOCK_T] if SWAP else [BLOCK_T, 64]
    absorbed: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4 * GROUPS, 1], instr_shape=[16, BLOCK_T if SWAP else 64, 16]
    )
    for last in range(LAST):
        step = CHUNKS + last
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        one = reinterpret(w_tiles.index(stage * 3), dtype, [BLOCK_K, 64], w_uk.layout)
        two = reinterpret(w_tiles.index(stage * 3 + 1), dtype, [BLOCK_K, 64], w_uk.layout)
        column = head * R + last * BLOCK_K
        if BLOCK_K == 64:
            out = times(c_tiles.index(0), one, gl.zeros(shape, gl.float32, absorbed), SWAP)
            out = times(c_tiles.index(1), two, out, SWAP)
            out = warpgroup_mma_wait(num_outstanding=0, deps=(out,))
            place = c_tiles.index(2 + last % 2)
            tma.store_wait(1)
            barrier()
            put(out, place, SWAP)
            fence_async_shared()
            barrier()
            tma_store(query, [token, column], place)
        else:
            left = times(c_tiles.index(0), one, gl.zeros(shape, gl.float32, absorbed), SWAP)
            right = times(c_tiles.index(0), two, gl.zeros(shape, gl.float32, absorbed), SWAP)
            left, right = warpgroup_mma_wait(num_outstanding=0, deps=(left, right))
            tma.store_wait(0)
            barrier()
            put(left, _place(c_tiles, 4), SWAP)
            put(right, _place(c_tiles, 5), SWAP)
            fence_async_shared()
            barrier()
            tma_store(query, [token, column], _place(c_tiles, 4))
            tma_store(query, [token, column + 64], _place(c_tiles, 5))
        _ask_last(w_uk, w_tiles, c_tiles, full, step + STAGES, head, CHUNKS, LAST)
    forget(full)
    tma.store_wait(0)


def supports(c: Tensor, weight: Tensor, w_uk: Tensor, rotary: int) -> bool:
    """A head for nearly every multiprocessor, the sizes of DeepSeek's heads, alignment for TMA."""
    tokens, depth = c.shape
    heads, plain, rank = w_uk.shape
    sizes = plain == 128 and rotary == 64 and rank % 128 == 0 and depth % 128 == 0 and depth >= 512
    return (
        gpu.is_hopper(c.device)
        and tokens <= 256
        and 96 <= heads <= gpu.num_sms(c.device)
        and w_uk.dtype in DTYPES
        and sizes
        and aligned(c, weight, w_uk)
    )


def launch(
    c: Tensor,
    weight: Tensor,
    form: int,
    w_uk: Tensor,
    sin: Tensor,
    cos: Tensor,
    query: Tensor,
    query_rope: Tensor,
    interleaved: bool,
    *,
    forked: bool,
) -> None:
    """c [T, K] -> query [.., N, R], query_rope [.., N, D], in one launch."""
    tokens, depth = c.shape
    count, _, rank = w_uk.shape
    tile = max(8, power_of_two(tokens))
    # deep tiles, for a step costs the same whatever its depth; with 128 tokens too few would fit
    k = 128 if tile <= 64 else 64
    stages = min(4 if k == 128 else 7, 226 * 1024 // ((3 * 64 + tile) * k * 2))
    launches.kernel(_query, count, -(-tokens // tile))(
        describe_matrix(c, tokens, depth, [tile, k]),
        describe_weight(weight, form, depth, count * 192, 64, k),
        describe_matrix(w_uk, count * 128, rank, [k, 64]),
        describe_matrix(query, tokens, count * rank, [tile, 64]),
        query_rope,
        sin,
        cos,
        tokens,
        HEADS=count,
        R=rank,
        CHUNKS=depth // k,
        STAGES=stages,
        INTERLEAVED=interleaved,
        FORM=form,
        num_warps=8 if tile == 256 else 4,
        launch_pdl=not forked,
    )
