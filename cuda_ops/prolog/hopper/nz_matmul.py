# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The fused products of nz_matmul on Hopper (Gluon): weights go by TMA straight to wgmma.

A block of an NZ weight is [columns / 16, K, 16]; copied with the 32-byte swizzle, its bytes in
shared memory are a [columns, K] operand whose columns are the contiguous side, so nothing is ever
rearranged, nor is a block of the other forms (fused_gemm.py).  The product is computed transposed,
[columns, tokens], with the tokens as the short side.  A program asks for as many weight tiles as
its shared memory holds before it waits for the kernel that writes x: that hides the end of that
kernel, and the start of this one.  Where an op starts here it waits first (common/handover.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from ...common import gpu, handover
from ...common.gluon_names import barrier, reinterpret
from ...common.hopper.tma import DTYPES, aligned, forget
from ...common.tiling import Tiling
from ...common.weight_forms import ends, steps_over
from ...runtime import launches
from .fused_gemm import (
    columns_first,
    describe_weight,
    describe_x,
    load_weight_of,
    load_x,
    own,
    place,
    ring,
    weight_tiles,
)
from .rotation import pass_on, rotate


@gluon.jit
def _fetch(
    w,
    group,
    block,
    FIRST: gl.constexpr,
    END: gl.constexpr,
    BLOCK_N: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    FORM: gl.constexpr,
    k,
    bar,
    tile,
    wanted,
):
    """One tile of the weight whose blocks are [FIRST, END), if `block` is one of them."""
    if END > FIRST:
        mine = (block >= FIRST) & (block < END) & wanted
        load_weight_of(w, group, (block - FIRST) * BLOCK_N, k, bar, tile, N, K, FORM, mine)


@gluon.jit
def _store(acc, out, tokens, token, group, block, run, N: gl.constexpr, GROUPS: gl.constexpr):
    """out[run, t, column] = acc [BLOCK_N, BLOCK_T]: the block's own columns, of tokens there
    are."""
    BLOCK_N: gl.constexpr = acc.shape[0]
    BLOCK_T: gl.constexpr = acc.shape[1]
    COLUMN_THREADS: gl.constexpr = min(32, BLOCK_N // 4)
    along: gl.constexpr = gl.BlockedLayout(
        [4, 1], [COLUMN_THREADS, 32 // COLUMN_THREADS], [1, gl.num_warps()], [0, 1]
    )
    base, begin, size = own(block, N, BLOCK_N)
    n = (block - begin) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, along))
    t = token + gl.arange(0, BLOCK_T, gl.SliceLayout(0, along))
    TOTAL: gl.constexpr = (N[0] + N[1] + N[2] + N[3]) * GROUPS
    at = (run.to(gl.int64) * tokens + t) * TOTAL + group * N[0] + base
    result = gl.convert_layout(acc.to(out.dtype.element_ty), along)
    gl.store(
        out + at[None, :] + n[:, None], result, mask=(n < size)[:, None] & (t < tokens)[None, :]
    )


@gluon.jit
def _clear(zeroed, numbers):
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    for first in range(gl.program_id(0) * 128, numbers, gl.num_programs(0) * 128):
        at = first + gl.arange(0, 128, lanes)
        gl.store(zeroed + at, gl.full([128], 0, gl.int32, lanes), mask=at < numbers)


@gluon.jit(do_not_specialize=["tokens", "ahead", "numbers"])
def _product(
    x,
    turned,
    w0,
    w1,
    w2,
    w3,
    out,
    sin,
    cos,
    zeroed,
    tokens,
    ahead,
    numbers,
    K: gl.constexpr,
    RUN: gl.constexpr,
    N: gl.constexpr,
    BLOCK_T: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    GROUPS: gl.constexpr,
    SIZE: gl.constexpr,
    FIRST: gl.constexpr,
    LATE: gl.constexpr,
    HEAD: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    FORM: gl.constexpr,
):
    B: gl.constexpr = ends(N, BLOCK_N)
    BYTES: gl.constexpr = (BLOCK_N + BLOCK_T) * BLOCK_K * 2
    CHUNKS: gl.constexpr = RUN // BLOCK_K  # past the end of K, a copy fills in zeros
    w_tiles = weight_tiles(w0, STAGES, BLOCK_N, BLOCK_K, FORM)
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_T, BLOCK_K], x.layout)
    full = ring(STAGES)
    token, block, run = place(tokens, BLOCK_T, B[3], GROUP)
    group = gl.program_id(2)
    lo = run * RUN
    x_lo = group * K + lo

    handover.begin(FIRST)
    # the first `ahead` weights, as far as they fit; then x, once it is there
    for i in range(ahead):
        k = lo + i * BLOCK_K
        bar = full.index(i)
        w_tile = w_tiles.index(i)
        mbarrier.expect(bar, BYTES)
        _fetch(w0, group, block, 0, B[0], BLOCK_N, N[0], K, FORM, k, bar, w_tile, True)
        _fetch(w1, group, block, B[0], B[1], BLOCK_N, N[1], K, FORM, k, bar, w_tile, True)
        _fetch(w2, group, block, B[1], B[2], BLOCK_N, N[2], K, FORM, k, bar, w_tile, True)
        _fetch(w3, group, block, B[2], B[3], BLOCK_N, N[3], K, FORM, k, bar, w_tile, True)
    handover.follow(FIRST, LATE)
    for i in range(ahead):
        load_x(x, turned, token, x_lo + i * BLOCK_K, full.index(i), x_tiles.index(i), SIZE)
    if zeroed is not None:
        _clear(zeroed, numbers)

    summed: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BLOCK_T, 16]
    )
    acc = gl.zeros([BLOCK_N, BLOCK_T], gl.float32, summed)
    for i in range(CHUNKS):
        stage = i % STAGES
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        w_tile = columns_first(w_tiles.index(stage), BLOCK_N, BLOCK_K, FORM)
        acc = warpgroup_mma(w_tile, x_tiles.index(stage).permute([1, 0]), acc, is_async=True)
        # the product before is done in every warp, its tiles are free
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        barrier()
        later = i + STAGES - 1
        wanted = (i > 0) & (later < CHUNKS)
        next_stage = later % STAGES
        k = lo + later * BLOCK_K
        bar = full.index(next_stage)
        w_next = w_tiles.index(next_stage)
        mbarrier.expect(bar, BYTES, pred=wanted)
        _fetch(w0, group, block, 0, B[0], BLOCK_N, N[0], K, FORM, k, bar, w_next, wanted)
        _fetch(w1, group, block, B[0], B[1], BLOCK_N, N[1], K, FORM, k, bar, w_next, wanted)
        _fetch(w2, group, block, B[1], B[2], BLOCK_N, N[2], K, FORM, k, bar, w_next, wanted)
        _fetch(w3, group, block, B[2], B[3], BLOCK_N, N[3], K, FORM, k, bar, w_next, wanted)
        x_next = x_tiles.index(next_stage)
        load_x(x, turned, token, group * K + k, bar, x_next, SIZE, wanted)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))

    if HEAD > 0:
        # 64 columns at a time, through shared memory; the first ones of a head are rotated
        PARTS: gl.constexpr = BLOCK_N // 64
        whole: gl.constexpr = [STAGES * BLOCK_K // BLOCK_N, BLOCK_T, BLOCK_N]
        parts: gl.constexpr = [STAGES * BLOCK_K // 64, BLOCK_T, 64]
        barrier()  # the last product is done in every warp, not only in this one
        result = reinterpret(x_tiles, x.dtype, whole, x.layout).index(0)
        result.permute([1, 0]).store(acc.to(out.dtype.element_ty))
        barrier()
        for part in gl.static_range(PARTS):
            tile = reinterpret(x_tiles, x.dtype, parts, x.layout).index(part)
            number = block * PARTS + part
            at = out + number * 64
            if number % (HEAD // 64) == 0:
                rotate(tile, at, N[0], sin, cos, token, tokens, BLOCK_T, INTERLEAVED)
            else:
                pass_on(tile, at, N[0], token, tokens, BLOCK_T)
    else:
        _store(acc, out, tokens, token, group, block, run, N, GROUPS)
    forget(full)
    if LATE:
        gdc_wait()


def supports(
    x: Tensor,
    weights: Sequence[Tensor],
    sizes: Sequence[int],
    forms: Sequence[int],
    groups: int = 1,
) -> bool:
    """All weights of one form, in half precision, and aligned as TMA wants it; groups whose K a
    tile ends with."""
    depth = x.shape[1] // groups
    return (
        gpu.is_hopper(x.device)
        and x.dtype in DTYPES
        and len(set(forms)) == 1
        and steps_over(forms[0], depth, sizes)
        and (groups == 1 or depth % 64 == 0)
        and aligned(x, *weights)
    )


def launch(
    x: Tensor,
    weights: Sequence[Tensor],
    form: int,
    sizes: Sequence[int],
    out: Tensor,
    run: int,
    grid: int,
    tiling: Tiling,
    *,
    first: bool = False,
    forked: bool = False,
    late: bool = False,
    zeroed: Tensor | None = None,
    head: int = 0,
    sin: Tensor | None = None,
    cos: Tensor | None = None,
    interleaved: bool = False,
    groups: int = 1,
    turned: Tensor | None = None,
    size: int = 0,
) -> None:
    """out [RUNS, T, sum of sizes] = x [T, K] times the weights; size 0: there is no such weight.
    `late`: the kernel before is none that x comes from, so it is waited for at the end.
    `head`: columns of a head, of which the first 64 are rotated.  `groups`: x is [T, groups K], of
    which runs divide K, and out [RUNS, T, groups N].  `turned` [T, .., 64]: the last dims of each
    `size` of x."""
    tokens, depth = x.shape[0], x.shape[1] // groups
    chunks = run // tiling.k
    described = [
        describe_weight(weight, form, depth, n, tiling.columns, tiling.k, groups)
        for weight, n in zip(weights, sizes, strict=True)
    ]
    launches.kernel(_product, grid, out.shape[0], groups)(
        *describe_x(x, turned, tiling.tokens, tiling.k),
        *described,
        out,
        sin,
        cos,
        zeroed,
        tokens,
        min(chunks, tiling.stages),
        0 if zeroed is None else zeroed.numel(),
        K=depth,
        RUN=run,
        N=tuple(sizes),
        BLOCK_T=tiling.tokens,
        BLOCK_N=tiling.columns,
        BLOCK_K=tiling.k,
        STAGES=min(max(chunks, 2), tiling.stages),
        GROUP=tiling.group,
        GROUPS=groups,
        SIZE=size,
        FIRST=first,
        LATE=late,
        HEAD=head,
        INTERLEAVED=interleaved,
        FORM=form,
        num_warps=tiling.warps,
        launch_pdl=not forked,
    )
