# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""query_heads.py with w_uq_qr in e4m3: one program a head and a block of tokens.

The same ring in bytes.  A step is a block of 128 k, whose three sums are scaled and added in
float32 one behind the other, while the tensor cores make the next; then w_uk follows in bf16, 64
columns a step.
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

from ..common import gpu, launches
from ..common.gluon_names import barrier, reinterpret, tma_load, tma_store
from ..common.tiling import power_of_two
from .absorption import put, times
from .quantised_matmul import SWAPPED
from .rotation import rotate
from .tma import DTYPES, aligned, describe_box, describe_matrix

BLOCKS = gl.constexpr(3)  # of 64 columns: 128 that are absorbed, 64 that are rotated


@gluon.jit
def _ask(w, c, w_tiles, c_tiles, full, step, head, token):
    """Three blocks of w_uq_qr and one of c, for step `step`, into its place in the ring."""
    STAGES: gl.constexpr = c_tiles.shape[0]
    stage = step % STAGES
    bar = full.index(stage)
    mbarrier.expect(bar, (3 * 64 + c_tiles.shape[1]) * 128)
    for i in gl.static_range(BLOCKS):
        tma_load(w, [(head * 3 + i) * 64, step * 128], bar, w_tiles.index(stage * 3 + i))
    tma_load(c, [token, step * 128], bar, c_tiles.index(stage))


@gluon.jit
def _ask_last(
    w_uk, w_tiles, full, step, head, STAGES: gl.constexpr, CHUNKS: gl.constexpr,
    LAST: gl.constexpr,
):  # fmt: skip
    """The upper and the lower half of 64 columns of w_uk, for step `step` of the LAST ones."""
    stage = step % STAGES
    bar = full.index(stage)
    wanted = step < CHUNKS + LAST
    mbarrier.expect(bar, 128 * 64 * 2, pred=wanted)
    for i in gl.static_range(2):
        tile = reinterpret(w_tiles.index(stage * 3 + i), w_uk.dtype, [64, 64], w_uk.layout)
        tma_load(w_uk, [head * 128 + i * 64, (step - CHUNKS) * 64], bar, tile, pred=wanted)


@gluon.jit
def _scales(
    c_scale, w_scale, t, tokens, head, step, CHUNKS: gl.constexpr, WIDE: gl.constexpr
):  # fmt: skip
    """(of the tokens, of the three blocks of columns)"""
    there = step < CHUNKS
    by = gl.load(
        c_scale + t.to(gl.int64) * CHUNKS + step, mask=(t < tokens) & there, other=0.0
    )  # fmt: skip
    row = w_scale + step * WIDE
    x = gl.load(row + head * 3 // 2, mask=there, other=0.0)
    y = gl.load(row + (head * 3 + 1) // 2, mask=there, other=0.0)
    z = gl.load(row + (head * 3 + 2) // 2, mask=there, other=0.0)
    return by, x, y, z


@gluon.jit
def _sums(w_tile, c_tile, zero, SWAP: gl.constexpr):
    """The product of a step, on its way."""
    if SWAP:
        return warpgroup_mma(w_tile, c_tile.permute([1, 0]), zero, use_acc=False, is_async=True)
    else:
        return warpgroup_mma(c_tile, w_tile.permute([1, 0]), zero, use_acc=False, is_async=True)


@gluon.jit
def _step(w_tiles, c_tiles, full, i, a, b, turned, by, x, y, z, zero, SWAP: gl.constexpr):
    """The three products of step i; when it returns they are done in every warp, and its tiles are
    free."""
    STAGES: gl.constexpr = c_tiles.shape[0]
    stage = i % STAGES
    mbarrier.wait(full.index(stage), (i // STAGES) & 1)
    one = _sums(w_tiles.index(stage * 3), c_tiles.index(stage), zero, SWAP)
    two = _sums(w_tiles.index(stage * 3 + 1), c_tiles.index(stage), zero, SWAP)
    three = _sums(w_tiles.index(stage * 3 + 2), c_tiles.index(stage), zero, SWAP)
    if SWAP:
        by = by[None, :]
    else:
        by = by[:, None]
    one = warpgroup_mma_wait(num_outstanding=2, deps=(one,))
    a += one * (by * x)
    two = warpgroup_mma_wait(num_outstanding=1, deps=(two,))
    b += two * (by * y)
    three = warpgroup_mma_wait(num_outstanding=0, deps=(three,))
    turned += three * (by * z)
    barrier()
    return a, b, turned


@gluon.jit
def _absorbed(left, right, w_tiles, full, step, w_uk, nothing, SWAP: gl.constexpr):
    """The rounded query times 64 columns of w_uk, on its way."""
    STAGES: gl.constexpr = full.shape[0]
    stage = step % STAGES
    mbarrier.wait(full.index(stage), (step // STAGES) & 1)
    upper = reinterpret(w_tiles.index(stage * 3), w_uk.dtype, [64, 64], w_uk.layout)
    lower = reinterpret(w_tiles.index(stage * 3 + 1), w_uk.dtype, [64, 64], w_uk.layout)
    out = times(left, upper, nothing, SWAP)
    return times(right, lower, out, SWAP)


@gluon.jit(do_not_specialize=["tokens"])
def _query(
    c, c_scale, w, w_scale, w_uk, query, query_rope, sin, cos, tokens,
    HEADS: gl.constexpr, R: gl.constexpr, CHUNKS: gl.constexpr, STAGES: gl.constexpr,
    SWAP: gl.constexpr, INTERLEAVED: gl.constexpr,
):  # fmt: skip
    """A head from c to its outputs; SWAP: sums are transposed, [columns, tokens]."""
    dtype: gl.constexpr = w_uk.dtype
    TOKENS: gl.constexpr = c.block_shape[0]
    LAST: gl.constexpr = R // 64
    WIDE: gl.constexpr = (HEADS * 192 + 127) // 128
    head = gl.program_id(0)
    token = gl.program_id(1) * TOKENS
    w_tiles = gl.allocate_shared_memory(c.dtype, [STAGES * 3, 64, 128], w.layout)
    c_tiles = gl.allocate_shared_memory(c.dtype, [STAGES, TOKENS, 128], c.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for each in gl.static_range(STAGES):
        mbarrier.init(full.index(each), count=1)
    fence_async_shared()
    barrier()
    for each in gl.static_range(STAGES):
        mbarrier.expect(full.index(each), (3 * 64 + TOKENS) * 128)
        for part in gl.static_range(BLOCKS):
            row = (head * 3 + part) * 64
            tma_load(w, [row, each * 128], full.index(each), w_tiles.index(each * 3 + part))
    gdc_launch_dependents()
    gdc_wait()
    for each in gl.static_range(STAGES):
        tma_load(c, [token, each * 128], full.index(each), c_tiles.index(each))

    summed: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1],
        instr_shape=[16, TOKENS if SWAP else 64, 32],
    )  # fmt: skip
    zero = gl.zeros([64, TOKENS] if SWAP else [TOKENS, 64], gl.float32, summed)
    t = token + gl.arange(0, TOKENS, gl.SliceLayout(0 if SWAP else 1, summed))
    a = zero
    b = zero
    turned = zero
    by, x, y, z = _scales(c_scale, w_scale, t, tokens, head, 0, CHUNKS, WIDE)
    for i in range(CHUNKS - STAGES):
        ahead = _scales(c_scale, w_scale, t, tokens, head, i + 1, CHUNKS, WIDE)
        a, b, turned = _step(w_tiles, c_tiles, full, i, a, b, turned, by, x, y, z, zero, SWAP)
        by, x, y, z = ahead
        _ask(w, c, w_tiles, c_tiles, full, i + STAGES, head, token)
    for i in range(CHUNKS - STAGES, CHUNKS):
        ahead = _scales(c_scale, w_scale, t, tokens, head, i + 1, CHUNKS, WIDE)
        a, b, turned = _step(w_tiles, c_tiles, full, i, a, b, turned, by, x, y, z, zero, SWAP)
        by, x, y, z = ahead
        _ask_last(w_uk, w_tiles, full, i + STAGES, head, STAGES, CHUNKS, LAST)

    # no tile of c is needed any more: they hold the head's rounded query, and then its outputs
    halves: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    left = reinterpret(c_tiles.index(0), dtype, [TOKENS, 64], halves)
    right = reinterpret(c_tiles.index(1), dtype, [TOKENS, 64], halves)
    place = reinterpret(c_tiles.index(2), dtype, [TOKENS, 64], halves)
    beside = reinterpret(c_tiles.index(3), dtype, [TOKENS, 64], halves)
    put(a, left, SWAP)
    put(b, right, SWAP)
    put(turned, place, SWAP)
    fence_async_shared()
    barrier()
    rotate(place, query_rope + head * 64, HEADS * 64, sin, cos, token, tokens, TOKENS, INTERLEAVED)
    absorbed: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1],
        instr_shape=[16, TOKENS if SWAP else 64, 16],
    )  # fmt: skip
    nothing = gl.zeros([64, TOKENS] if SWAP else [TOKENS, 64], gl.float32, absorbed)
    for last in range(LAST // 2):
        step = CHUNKS + last * 2
        out = _absorbed(left, right, w_tiles, full, step, w_uk, nothing, SWAP)
        more = _absorbed(left, right, w_tiles, full, step + 1, w_uk, nothing, SWAP)
        out, more = warpgroup_mma_wait(num_outstanding=0, deps=(out, more))
        tma.store_wait(0)
        barrier()
        put(out, place, SWAP)
        put(more, beside, SWAP)
        fence_async_shared()
        barrier()
        column = head * R + last * 128
        tma_store(query, [token, column], place)
        tma_store(query, [token, column + 64], beside)
        for i in gl.static_range(2):
            _ask_last(w_uk, w_tiles, full, step + i + STAGES, head, STAGES, CHUNKS, LAST)
    tma.store_wait(0)


def supports(c: Tensor, weight: Tensor, w_uk: Tensor, rotary: int) -> bool:
    """A head for nearly every multiprocessor, the sizes of DeepSeek's heads, alignment for TMA."""
    tokens, depth = c.shape
    heads, plain, rank = w_uk.shape
    sizes = plain == 128 and rotary == 64 and rank % 128 == 0 and depth % 128 == 0 and depth >= 1024
    return (
        gpu.is_hopper(c.device)
        and tokens <= 256
        and 96 <= heads <= gpu.processors(c.device)
        and w_uk.dtype in DTYPES
        and sizes
        and aligned(c, weight, w_uk)
    )


def launch(
    c: Tensor, c_scale: Tensor, weight: Tensor, w_scale: Tensor, w_uk: Tensor, sin: Tensor,
    cos: Tensor, query: Tensor, query_rope: Tensor, interleaved: bool, *, forked: bool,
) -> None:  # fmt: skip
    """c [T, K] -> query [.., N, R], query_rope [.., N, D], in one launch."""
    tokens, depth = c.shape
    count, _, rank = w_uk.shape
    tile = min(128, max(8, power_of_two(tokens)))
    stages = min(8, 225 * 1024 // ((3 * 64 + tile) * 128))
    launches.kernel(_query, count, -(-tokens // tile))(
        describe_box(c, [tokens, depth], [depth, 1], [tile, 128]), c_scale,
        describe_box(weight, [count * 192, depth], [depth, 1], [64, 128]), w_scale,
        describe_matrix(w_uk, count * 128, rank, [64, 64]),
        describe_matrix(query, tokens, count * rank, [tile, 64]),
        query_rope, sin, cos, tokens,
        HEADS=count, R=rank, CHUNKS=depth // 128, STAGES=stages, SWAP=tile <= SWAPPED,
        INTERLEAVED=interleaved, num_warps=8 if tile == 128 else 4, launch_pdl=not forked,
    )  # fmt: skip
