# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""An fp8 product of many tokens on Hopper (Gluon): one warp loads by TMA, two warpgroups multiply.

A program walks over tiles of 256 tokens and 128 columns.  A step is one block of 128 k: each
warpgroup multiplies its half of the tokens, 64 at a time, and then adds their sum, times the scales
of its tokens and of the weight, in float32, while the other warpgroup multiplies.  A product that
is the next one's x is quantized as it is stored: a tile has a whole block of 128 columns.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...common import gpu, handover, quantize
from ...common.gluon_names import reinterpret, tma_load
from ...common.hopper.barriers import in_turn
from ...common.hopper.tma import DTYPES, describe_box
from ...common.tiling import cdiv
from ...runtime import launches
from .fused_gemm import halves, put, tile_at
from .prompt_matmul import Shared

TOKENS, COLUMNS, HALF = 256, 128, 64
BLOCK_T, BLOCK_N, WAVE = gl.constexpr(TOKENS), gl.constexpr(COLUMNS), gl.constexpr(HALF)
BLOCK_K, STAGES = gl.constexpr(128), gl.constexpr(4)


@gluon.jit
def _load(x, w, shared, tokens, tiles, KB: gl.constexpr, N: gl.constexpr):
    step = 0
    for number in range(gl.program_id(0), tiles, gl.num_programs(0)):
        group, token, column = tile_at(number, tokens, N, BLOCK_T, BLOCK_N)
        for k_block in range(KB):
            stage = step % STAGES
            mbarrier.wait(shared.empty.index(stage), (step // STAGES + 1) & 1)
            bar = shared.full.index(stage)
            mbarrier.expect(bar, (BLOCK_T + BLOCK_N) * BLOCK_K)
            k = k_block * BLOCK_K
            tma_load(w, [group * N + column, k], bar, shared.w.index(stage))
            tma_load(x, [group * tokens + token, k], bar, shared.x.index(stage))
            step += 1


@gluon.jit
def _store(
    acc,
    out,
    out_scale,
    tiles,
    token,
    tokens,
    column,
    WG: gl.constexpr,
    SECOND: gl.constexpr,
    DTYPE: gl.constexpr,
    BLOCKS: gl.constexpr,
):
    """acc [64, 128], the first or the second of a warpgroup, into out[token:, column:]; BLOCKS: of
    128 columns that out has, 0: it is not quantized."""
    if BLOCKS > 0:
        rounded = acc.to(DTYPE).to(gl.float32)
        values, scale = quantize.of_floats(rounded, 1.0, quantize.NATIVE_FP8, True)
        t = token + gl.arange(0, WAVE, gl.SliceLayout(1, acc.type.layout))
        at = out_scale + t.to(gl.int64) * BLOCKS + column // BLOCK_N
        gl.store(at, scale, mask=t < tokens)
        tile = tiles.index(WG * 2 + SECOND)
        put(values.to(gl.float8e4nv, bitcast=True), out, token, column, tile)
    else:
        low, high = halves(acc.to(DTYPE))
        put(low, out, token, column, tiles.index(WG * 2))
        put(high, out, token, column + BLOCK_N // 2, tiles.index(WG * 2 + 1))


@gluon.jit
def _multiply(
    shared,
    scales,
    to,
    tokens,
    tiles,
    WG: gl.constexpr,
    KB: gl.constexpr,
    N: gl.constexpr,
    DTYPE: gl.constexpr,
    BLOCKS: gl.constexpr,
):
    x_tiles, w_tiles, out_tiles, full, empty = shared
    x_scale, w_scale = scales
    out, out_scale = to
    NB: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    waves = reinterpret(x_tiles, x_tiles.dtype, [STAGES * 4, WAVE, BLOCK_K], x_tiles.layout)
    summed: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 32]
    )
    part = gl.zeros([WAVE, BLOCK_N], gl.float32, summed)
    step = 0
    for number in range(gl.program_id(0), tiles, gl.num_programs(0)):
        group, token, column = tile_at(number, tokens, N, BLOCK_T, BLOCK_N)
        token += WG * (2 * WAVE)
        t = token + gl.arange(0, WAVE, gl.SliceLayout(1, summed))
        there_a = t < tokens
        there_b = t + WAVE < tokens
        row = group.to(gl.int64) * tokens + t
        scale_a = x_scale + row * KB
        scale_b = scale_a + WAVE * KB
        scale_w = w_scale + group * (KB * NB) + column // BLOCK_N
        # a step ahead
        a = gl.load(scale_a, mask=there_a, other=0.0)
        b = gl.load(scale_b, mask=there_b, other=0.0)
        by = gl.load(scale_w)
        acc_a = gl.zeros([WAVE, BLOCK_N], gl.float32, summed)
        acc_b = gl.zeros([WAVE, BLOCK_N], gl.float32, summed)
        for k_block in range(KB):
            stage = step % STAGES
            wave = stage * 4 + WG * 2
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            w_tile = w_tiles.index(stage).permute([1, 0])
            part = warpgroup_mma(waves.index(wave), w_tile, part, use_acc=False, is_async=True)
            now_a = a * by
            now_b = b * by
            more = k_block + 1 < KB
            a = gl.load(scale_a + (k_block + 1), mask=there_a & more, other=0.0)
            b = gl.load(scale_b + (k_block + 1), mask=there_b & more, other=0.0)
            by = gl.load(scale_w + (k_block + 1) * NB, mask=more, other=0.0)
            part = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
            acc_a += part * now_a[:, None]
            part = warpgroup_mma(waves.index(wave + 1), w_tile, part, use_acc=False, is_async=True)
            part = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
            mbarrier.arrive(empty.index(stage))
            acc_b += part * now_b[:, None]
            step += 1
        column += group * N
        _store(acc_a, out, out_scale, out_tiles, token, tokens, column, WG, 0, DTYPE, BLOCKS)
        token += WAVE
        _store(acc_b, out, out_scale, out_tiles, token, tokens, column, WG, 1, DTYPE, BLOCKS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tokens", "tiles"])
def _product(
    x,
    x_scale,
    w,
    w_scale,
    out,
    out_scale,
    tokens,
    tiles,
    KB: gl.constexpr,
    N: gl.constexpr,
    DTYPE: gl.constexpr,
    BLOCKS: gl.constexpr,
    FIRST: gl.constexpr,
    SECOND: gl.constexpr,
):
    PART: gl.constexpr = BLOCK_N if BLOCKS > 0 else BLOCK_N // 2
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_T, BLOCK_K], x.layout)
    w_tiles = gl.allocate_shared_memory(w.dtype, [STAGES, BLOCK_N, BLOCK_K], w.layout)
    out_tiles = gl.allocate_shared_memory(out.dtype, [4, WAVE, PART], out.layout)
    full, empty = in_turn(STAGES, 2)
    shared = Shared(x_tiles, w_tiles, out_tiles, full, empty)
    to = (out, out_scale)
    handover.begin(FIRST)
    handover.follow(FIRST, False, SECOND)
    scales = (x_scale, w_scale)
    gl.warp_specialize(
        [
            (_multiply, (shared, scales, to, tokens, tiles, 0, KB, N, DTYPE, BLOCKS)),
            (_multiply, (shared, scales, to, tokens, tiles, 1, KB, N, DTYPE, BLOCKS)),
            (_load, (x, w, shared, tokens, tiles, KB, N)),
        ],
        [4, 1],
        [232, 24],
    )


def _tiles(tokens: int, n: int, groups: int) -> int:
    return groups * cdiv(tokens, TOKENS) * cdiv(n, COLUMNS)


def supports(x: Tensor, n: int, groups: int, dtype: torch.dtype) -> bool:
    """Of what quantized_matmul.py supports: a tile for nearly every multiprocessor, and rows that
    TMA can store."""
    tokens = x.shape[0] // groups
    if tokens <= TOKENS:
        return False
    fills = 10 * _tiles(tokens, n, groups) >= 9 * gpu.num_sms(x.device)
    whole = groups == 1 or n % COLUMNS == 0
    return fills and whole and n % 8 == 0 and dtype in DTYPES


def launch(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    n: int,
    out: Tensor,
    out_scale: Tensor | None,
    dtype: torch.dtype,
    *,
    first: bool,
    second: bool,
    forked: bool,
    groups: int,
) -> None:
    """out [T, groups N] = x [groups T, K] times the weights, rounded to `dtype`; with `out_scale`
    it is then quantized, in blocks of 128 columns."""
    tokens, depth = x.shape[0] // groups, x.shape[1]
    tiles, columns = _tiles(tokens, n, groups), groups * n
    part = COLUMNS // 2 if out_scale is None else COLUMNS
    launches.kernel(_product, min(tiles, gpu.num_sms(x.device)))(
        describe_box(x, [groups * tokens, depth], [depth, 1], [TOKENS, 128]),
        x_scale,
        describe_box(weight, [columns, depth], [depth, 1], [COLUMNS, 128]),
        w_scale,
        describe_box(out, [tokens, columns], [columns, 1], [HALF, part]),
        out_scale,
        tokens,
        tiles,
        KB=cdiv(depth, 128),
        N=n,
        DTYPE=DTYPES[dtype],
        BLOCKS=0 if out_scale is None else columns // COLUMNS,
        FIRST=first,
        SECOND=second,
        num_warps=4,
        launch_pdl=not forked,
    )
