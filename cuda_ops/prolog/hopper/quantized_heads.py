# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""query_heads.py with w_uq_qr in e4m3: one program a head and a block of tokens.

The same ring in bytes.  A step is a block of 128 k, whose sums of the columns that are absorbed
are scaled and added in float32 while the tensor cores make those of the columns that are rotated;
then w_uk follows in the working dtype, 64 columns a step.
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

from ...common import gluon_names
from ...common.gluon_names import barrier, reinterpret, tma_load, tma_store
from ...common.hopper.tma import describe_box, describe_matrix, forget
from ...common.tiling import power_of_two
from ...runtime import launches
from . import query_heads
from .absorption import put, times
from .fused_gemm import ring
from .quantized_matmul import SWAPPED
from .rotation import rotate


@gluon.jit
def _ask(wide, slim, w_wide, w_slim, full, step, head, bytes: gl.constexpr):
    """The head's columns of w_uq_qr for step `step`, into its place in the ring, where `bytes`
    belong."""
    stage = step % full.shape[0]
    bar = full.index(stage)
    mbarrier.expect(bar, bytes)
    tma_load(wide, [head * 192, step * 128], bar, w_wide.index(stage))
    tma_load(slim, [head * 192 + 128, step * 128], bar, w_slim.index(stage))


@gluon.jit
def _ask_last(w_uk, w_wide, full, step, head, CHUNKS: gl.constexpr, LAST: gl.constexpr):
    """64 columns of w_uk, for step `step` of the LAST ones."""
    stage = step % full.shape[0]
    bar = full.index(stage)
    wanted = step < CHUNKS + LAST
    mbarrier.expect(bar, 128 * 64 * 2, pred=wanted)
    tile = reinterpret(w_wide.index(stage), w_uk.dtype, [128, 64], w_uk.layout)
    tma_load(w_uk, [head * 128, (step - CHUNKS) * 64], bar, tile, pred=wanted)


@gluon.jit
def _scales(c_scale, w_scale, t, tokens, head, step, CHUNKS: gl.constexpr, WIDE: gl.constexpr):
    """(of the tokens, of each 64 columns)"""
    valid = step < CHUNKS
    by = gl.load(c_scale + t.to(gl.int64) * CHUNKS + step, mask=(t < tokens) & valid, other=0.0)
    row = w_scale + step * WIDE
    x = gl.load(row + head * 3 // 2, mask=valid, other=0.0)
    y = gl.load(row + (head * 3 + 1) // 2, mask=valid, other=0.0)
    z = gl.load(row + (head * 3 + 2) // 2, mask=valid, other=0.0)
    return by, x, y, z


@gluon.jit
def _sums(w_tile, c_tile, zero, SWAP: gl.constexpr):
    """The product of a step, on its way."""
    if SWAP:
        return warpgroup_mma(w_tile, c_tile.permute([1, 0]), zero, use_acc=False, is_async=True)
    else:
        return warpgroup_mma(c_tile, w_tile.permute([1, 0]), zero, use_acc=False, is_async=True)


@gluon.jit
def _step(w_wide, w_slim, c_tiles, full, i, plain, turned, by, x, y, z, n, SWAP: gl.constexpr):
    """The products of step i; when it returns they are done in every warp, and its tiles are
    free."""
    stage = i % full.shape[0]
    mbarrier.wait(full.index(stage), (i // full.shape[0]) & 1)
    c_tile = c_tiles.index(stage)
    one = _sums(w_wide.index(stage), c_tile, plain, SWAP)
    two = _sums(w_slim.index(stage), c_tile, turned, SWAP)
    half = gl.where(n < 64, x, y)
    # the same numbers in the same threads
    last = gl.convert_layout(by * z, gl.SliceLayout(0 if SWAP else 1, turned.type.layout))
    if SWAP:
        by = by[None, :]
        half = half[:, None]
        last = last[None, :]
    else:
        by = by[:, None]
        half = half[None, :]
        last = last[:, None]
    one = warpgroup_mma_wait(num_outstanding=1, deps=(one,))
    plain += one * by * half
    two = warpgroup_mma_wait(num_outstanding=0, deps=(two,))
    turned += two * last
    barrier()
    return plain, turned


@gluon.jit
def _absorbed(q, w_wide, full, step, w_uk, nothing, SWAP: gl.constexpr):
    """The rounded query times 64 columns of w_uk, on its way."""
    stage = step % full.shape[0]
    mbarrier.wait(full.index(stage), (step // full.shape[0]) & 1)
    return times(
        q, reinterpret(w_wide.index(stage), w_uk.dtype, [128, 64], w_uk.layout), nothing, SWAP
    )


@gluon.jit
def _place(c_tiles, dtype: gl.constexpr, i: gl.constexpr, halves: gl.constexpr):
    """The i-th tile of c behind the first two, as [BLOCK_T, 64] of outputs."""
    return reinterpret(c_tiles.index(2 + i), dtype, [c_tiles.shape[1], 64], halves)


@gluon.jit(do_not_specialize=["tokens"])
def _query(
    c,
    c_scale,
    wide,
    slim,
    w_scale,
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
    SWAP: gl.constexpr,
    INTERLEAVED: gl.constexpr,
):
    """A head from c to its outputs; SWAP: sums are transposed, [columns, tokens]."""
    dtype: gl.constexpr = w_uk.dtype
    BLOCK_T: gl.constexpr = c.block_shape[0]
    LAST: gl.constexpr = R // 64
    WIDE: gl.constexpr = (HEADS * 192 + 127) // 128
    BYTES: gl.constexpr = (192 + BLOCK_T) * 128
    head = gl.program_id(0)
    token = gl.program_id(1) * BLOCK_T
    w_wide = gl.allocate_shared_memory(c.dtype, [STAGES, 128, 128], wide.layout)
    w_slim = gl.allocate_shared_memory(c.dtype, [STAGES, 64, 128], slim.layout)
    c_tiles = gl.allocate_shared_memory(c.dtype, [STAGES, BLOCK_T, 128], c.layout)
    full = ring(STAGES)
    for each in gl.static_range(STAGES):
        _ask(wide, slim, w_wide, w_slim, full, each, head, BYTES)
    gdc_launch_dependents()
    gdc_wait()
    for each in gl.static_range(STAGES):
        tma_load(c, [token, each * 128], full.index(each), c_tiles.index(each))

    summed: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[gl.num_warps(), 1],
        instr_shape=[16, BLOCK_T if SWAP else 128, 32],
    )
    narrow: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[gl.num_warps(), 1],
        instr_shape=[16, BLOCK_T if SWAP else 64, 32],
    )
    plain = gl.zeros([128, BLOCK_T] if SWAP else [BLOCK_T, 128], gl.float32, summed)
    turned = gl.zeros([64, BLOCK_T] if SWAP else [BLOCK_T, 64], gl.float32, narrow)
    t = token + gl.arange(0, BLOCK_T, gl.SliceLayout(0 if SWAP else 1, summed))
    n = gl.arange(0, 128, gl.SliceLayout(1 if SWAP else 0, summed))
    by, x, y, z = _scales(c_scale, w_scale, t, tokens, head, 0, CHUNKS, WIDE)
    for i in range(CHUNKS - STAGES):
        ahead = _scales(c_scale, w_scale, t, tokens, head, i + 1, CHUNKS, WIDE)
        plain, turned = _step(w_wide, w_slim, c_tiles, full, i, plain, turned, by, x, y, z, n, SWAP)
        by, x, y, z = ahead
        later = i + STAGES
        _ask(wide, slim, w_wide, w_slim, full, later, head, BYTES)
        tma_load(c, [token, later * 128], full.index(i % STAGES), c_tiles.index(i % STAGES))
    for i in range(CHUNKS - STAGES, CHUNKS):
        ahead = _scales(c_scale, w_scale, t, tokens, head, i + 1, CHUNKS, WIDE)
        plain, turned = _step(w_wide, w_slim, c_tiles, full, i, plain, turned, by, x, y, z, n, SWAP)
        by, x, y, z = ahead
        _ask_last(w_uk, w_wide, full, i + STAGES, head, CHUNKS, LAST)

    # no tile of c is needed any more: they hold the head's rounded query, and then its outputs
    halves: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    q = reinterpret(c_tiles, dtype, [STAGES // 2, BLOCK_T, 128], halves).index(0)
    free: gl.constexpr = STAGES - 2
    last_place = _place(c_tiles, dtype, free - 1, halves)
    put(plain, q, SWAP)
    put(turned, last_place, SWAP)
    fence_async_shared()
    barrier()
    rotate(
        last_place,
        query_rope + head * 64,
        HEADS * 64,
        sin,
        cos,
        token,
        tokens,
        BLOCK_T,
        INTERLEAVED,
    )
    absorbed: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[gl.num_warps(), 1],
        instr_shape=[16, BLOCK_T if SWAP else 64, 16],
    )
    nothing = gl.zeros([64, BLOCK_T] if SWAP else [BLOCK_T, 64], gl.float32, absorbed)
    out = _absorbed(q, w_wide, full, CHUNKS, w_uk, nothing, SWAP)
    for last in gl.static_range(LAST):
        step = CHUNKS + last
        if last + 1 < LAST:
            more = _absorbed(q, w_wide, full, step + 1, w_uk, nothing, SWAP)
            out = warpgroup_mma_wait(num_outstanding=1, deps=(out,))
        else:
            out = warpgroup_mma_wait(num_outstanding=0, deps=(out,))
        place = _place(c_tiles, dtype, last % free, halves)
        put(out, place, SWAP)
        tma.store_wait(free - 2)  # the next place is free
        fence_async_shared()
        barrier()
        tma_store(query, [token, head * R + last * 64], place)
        _ask_last(w_uk, w_wide, full, step + STAGES, head, CHUNKS, LAST)
        if last + 1 < LAST:
            out = more
    forget(full)
    tma.store_wait(0)


def supports(c: Tensor, weight: Tensor, w_uk: Tensor, rotary: int) -> bool:
    """What query_heads supports, of vectors of 1024 numbers or more."""
    return c.shape[1] >= 1024 and query_heads.supports(c, weight, w_uk, rotary)


def launch(
    c: Tensor,
    c_scale: Tensor,
    weight: Tensor,
    w_scale: Tensor,
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
    tile = min(128, max(8, power_of_two(tokens)))
    stages = min(8, 225 * 1024 // ((3 * 64 + tile) * 128))
    if not gluon_names.REINTERPRETS_PARTS:  # two tiles of c become one of the query
        stages -= stages % 2
    launches.kernel(_query, count, -(-tokens // tile))(
        describe_box(c, [tokens, depth], [depth, 1], [tile, 128]),
        c_scale,
        describe_box(weight, [count * 192, depth], [depth, 1], [128, 128]),
        describe_box(weight, [count * 192, depth], [depth, 1], [64, 128]),
        w_scale,
        describe_matrix(w_uk, count * 128, rank, [128, 64]),
        describe_matrix(query, tokens, count * rank, [tile, 64]),
        query_rope,
        sin,
        cos,
        tokens,
        HEADS=count,
        R=rank,
        CHUNKS=depth // 128,
        STAGES=stages,
        SWAP=tile <= SWAPPED,
        INTERLEAVED=interleaved,
        num_warps=8 if tile == 128 else 4,
        launch_pdl=not forked,
    )
