# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The fp8 products of quantized_matmul.py on Hopper (Gluon): tiles of [N, K] go by TMA to wgmma.

A step is one block of 128 k: its sum is made in the tensor cores, then multiplied by the scales of
its tokens and of its weights, which shared memory has of many blocks, and added in float32.  Up to
32 tokens are the short side of a transposed product, [columns, tokens]; of more, a thread has two
tokens and all columns.  As in nz_matmul.py a program asks for its weights before it waits for the
kernel that writes x.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
from ...common.gluon_names import barrier, reinterpret, tma_load
from ...common.hopper.tma import aligned, describe_box, forget
from ...common.tiling import Tiling, cdiv, power_of_two
from ...common.weight_forms import ends
from ...runtime import launches
from .fused_gemm import own, place, ring

SWAPPED = 32  # tokens of one transposed product
SCALES = 2048  # that shared memory has at a time


class Constants(NamedTuple):
    """KB: blocks of k; CHUNKS: of them in a run, of whose scales WINDOW are held at a time."""

    KB: int
    CHUNKS: int
    N: tuple[int, ...]
    BLOCK_T: int
    BLOCK_N: int
    STAGES: int
    WINDOW: int
    GROUP: int
    GROUPS: int
    SWAP: bool
    FIRST: bool
    LATE: bool
    SECOND: bool


@gluon.jit
def _fetch(
    w,
    base,
    block,
    FIRST: gl.constexpr,
    END: gl.constexpr,
    BLOCK_N: gl.constexpr,
    k,
    bar,
    tile,
    wanted,
):
    """One tile of the weight whose blocks are [FIRST, END), if `block` is one of them, and which
    begins at column `base`."""
    if END > FIRST:
        mine = (block >= FIRST) & (block < END) & wanted
        tma_load(w, [base + (block - FIRST) * BLOCK_N, k], bar, tile, pred=mine)


@gluon.jit
def _scale(
    scale,
    block,
    k_block,
    FIRST: gl.constexpr,
    END: gl.constexpr,
    BLOCK_N: gl.constexpr,
    KB: gl.constexpr,
    SIZE: gl.constexpr,
):
    """Of blocks of k, or zeros where the weight is another one, or k has ended."""
    mine = (block >= FIRST) & (block < END) & (k_block < KB)
    column = (block - FIRST) * BLOCK_N // 128
    return gl.load(scale + k_block * ((SIZE + 127) // 128) + column, mask=mine, other=0.0)


@gluon.jit
def _scales(s0, s1, s2, block, k_block, KB: gl.constexpr, N: gl.constexpr, BLOCK_N: gl.constexpr):
    """Of the weights' blocks of k."""
    B: gl.constexpr = ends(N, BLOCK_N)
    by = _scale(s0, block, k_block, 0, B[0], BLOCK_N, KB, N[0])
    if N[1] > 0:
        by += _scale(s1, block, k_block, B[0], B[1], BLOCK_N, KB, N[1])
    if N[2] > 0:
        by += _scale(s2, block, k_block, B[1], B[2], BLOCK_N, KB, N[2])
    return by


@gluon.jit
def _store(acc, out, tokens, token, first, block, run, N: gl.constexpr, GROUPS: gl.constexpr):
    """out[run, t, column] = acc [BLOCK_T, WIDTH]: the block's own columns, of tokens there
    are."""
    WIDTH: gl.constexpr = acc.shape[1]
    LANES: gl.constexpr = WIDTH // 4
    along: gl.constexpr = gl.BlockedLayout(
        [1, 4], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0]
    )
    base, begin, size = own(block, N, WIDTH)
    n = (block - begin) * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, along))[None, :]
    t = token + gl.arange(0, acc.shape[0], gl.SliceLayout(1, along))[:, None]
    at = (run.to(gl.int64) * tokens + t) * ((N[0] + N[1] + N[2]) * GROUPS) + first + base
    result = gl.convert_layout(acc.to(out.dtype.element_ty), along)
    gl.store(out + at + n, result, mask=(n < size) & (t < tokens))


@gluon.jit(do_not_specialize=["tokens"])
def _product(
    x,
    x_scale,
    w0,
    w1,
    w2,
    s0,
    s1,
    s2,
    out,
    tokens,
    C: gl.constexpr,
):
    BLOCK_T: gl.constexpr = C.BLOCK_T
    BLOCK_N: gl.constexpr = C.BLOCK_N
    STAGES: gl.constexpr = C.STAGES
    N: gl.constexpr = C.N
    B: gl.constexpr = ends(N, BLOCK_N)
    BYTES: gl.constexpr = (BLOCK_N + BLOCK_T) * 128
    w_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_N, 128], w0.layout)
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_T, 128], x.layout)
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    table = gl.allocate_shared_memory(gl.float32, [C.WINDOW, BLOCK_T], ROWS)
    scales = reinterpret(table, gl.float32, [C.WINDOW, BLOCK_T], FLAT)
    full = ring(STAGES)
    token, block, run = place(tokens, BLOCK_T, B[2], C.GROUP)
    lo = run * C.CHUNKS
    group = gl.program_id(2)
    row = group * tokens + token  # of x
    column = group * N[0]  # of a group's one weight, and of out
    x_scale += group.to(gl.int64) * tokens * C.KB
    s0 += group * (C.KB * ((N[0] + 127) // 128))

    LANES: gl.constexpr = min(C.WINDOW, 32)
    along: gl.constexpr = gl.BlockedLayout(
        [1, 1], [LANES, 32 // LANES], [1, gl.num_warps()], [0, 1]
    )
    t = token + gl.arange(0, BLOCK_T, gl.SliceLayout(0, along))
    k_block = lo + gl.arange(0, C.WINDOW, gl.SliceLayout(1, along))

    handover.begin(C.FIRST)
    for i in gl.static_range(STAGES):
        bar = full.index(i)
        mbarrier.expect(bar, BYTES)
        _fetch(w0, column, block, 0, B[0], BLOCK_N, (lo + i) * 128, bar, w_tiles.index(i), True)
        _fetch(w1, column, block, B[0], B[1], BLOCK_N, (lo + i) * 128, bar, w_tiles.index(i), True)
        _fetch(w2, column, block, B[1], B[2], BLOCK_N, (lo + i) * 128, bar, w_tiles.index(i), True)
    by = _scales(s0, s1, s2, block, k_block, C.KB, N, BLOCK_N)
    handover.follow(C.FIRST, C.LATE, C.SECOND)
    for i in gl.static_range(STAGES):
        tma_load(x, [row, (lo + i) * 128], full.index(i), x_tiles.index(i))

    summed: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[gl.num_warps(), 1],
        instr_shape=[16, BLOCK_T if C.SWAP else BLOCK_N, 32],
    )
    zero = gl.zeros([BLOCK_N, BLOCK_T] if C.SWAP else [BLOCK_T, BLOCK_N], gl.float32, summed)
    of_tokens: gl.constexpr = gl.SliceLayout(0 if C.SWAP else 1, summed)
    acc = zero
    for first in range(0, C.CHUNKS, C.WINDOW):
        at = x_scale + t.to(gl.int64)[None, :] * C.KB + k_block[:, None]
        there = (t < tokens)[None, :] & (k_block < C.KB)[:, None]
        table.store(gl.load(at, mask=there, other=0.0) * by[:, None])
        barrier()  # as the one in the loop, behind which no warp reads the scales before these
        for step in range(first, gl.minimum(first + C.WINDOW, C.CHUNKS)):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            x_tile = x_tiles.index(stage)
            w_tile = w_tiles.index(stage)
            if C.SWAP:
                x_side = x_tile.permute([1, 0])
                part = warpgroup_mma(w_tile, x_side, zero, use_acc=False, is_async=True)
            else:
                w_side = w_tile.permute([1, 0])
                part = warpgroup_mma(x_tile, w_side, zero, use_acc=False, is_async=True)
            scale = scales.index(step - first).load(of_tokens)
            part = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
            barrier()  # done in every warp: the tiles are free
            later = step + STAGES
            wanted = later < C.CHUNKS
            k = (lo + later) * 128
            bar = full.index(stage)
            mbarrier.expect(bar, BYTES, pred=wanted)
            _fetch(w0, column, block, 0, B[0], BLOCK_N, k, bar, w_tile, wanted)
            _fetch(w1, column, block, B[0], B[1], BLOCK_N, k, bar, w_tile, wanted)
            _fetch(w2, column, block, B[1], B[2], BLOCK_N, k, bar, w_tile, wanted)
            tma_load(x, [row, k], bar, x_tile, pred=wanted)
            if C.SWAP:
                acc += part * scale[None, :]
            else:
                acc += part * scale[:, None]
        k_block += C.WINDOW
        by = _scales(s0, s1, s2, block, k_block, C.KB, N, BLOCK_N)

    if C.SWAP:
        acc = acc.permute([1, 0])
    _store(acc, out, tokens, token, column, block, run, N, C.GROUPS)
    forget(full)
    if C.LATE:
        gdc_wait()


def supports(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """e4m3, the weights [K, N] views of [N, K], and rows that TMA can step over."""
    return gpu.is_hopper(x.device) and x.shape[1] % 16 == 0 and aligned(x, *weights)


def launch(
    x: Tensor,
    x_scale: Tensor,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor | None],
    sizes: Sequence[int],
    out: Tensor,
    chunks: int,
    grid: int,
    config: Tiling,
    *,
    first: bool,
    late: bool,
    second: bool,
    forked: bool,
    groups: int = 1,
) -> None:
    """out [RUNS, T, sum of sizes] = x [T, K] times the weights, `chunks` blocks of k a run; size
    0: there is no such weight.  `groups`: x is [groups T, K], and out [RUNS, T, groups N]."""
    tokens, depth = x.shape[0] // groups, x.shape[1]
    launches.kernel(_product, grid, out.shape[0], groups)(
        describe_box(x, [groups * tokens, depth], [depth, 1], [config.tokens, 128]),
        x_scale,
        *(
            describe_box(weight, [max(groups * size, 1), depth], [depth, 1], [config.columns, 128])
            for weight, size in zip(weights, sizes, strict=True)
        ),
        *scales,
        out,
        tokens,
        C=Constants(
            KB=cdiv(depth, 128),
            CHUNKS=chunks,
            N=(*sizes, 0),
            BLOCK_T=config.tokens,
            BLOCK_N=config.columns,
            STAGES=min(chunks, config.stages),
            WINDOW=min(power_of_two(chunks), SCALES // config.tokens),
            GROUP=config.group,
            GROUPS=groups,
            SWAP=config.swap,
            FIRST=first,
            LATE=late,
            SECOND=second,
        ),
        num_warps=config.warps,
        launch_pdl=not forked,
    )
