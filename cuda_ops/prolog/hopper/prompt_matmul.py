# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A product of many tokens on Hopper (Gluon): one warp loads by TMA, two warpgroups multiply.

A program walks over tiles of 128 tokens and 256 columns, whose bytes through L2 are the fewest that
registers and shared memory allow, or of NZ, whose rows of 32 bytes TMA copies slowly, 256 tokens
and 128 columns; each warpgroup has half of the tokens.  While it stores a tile, the loads of the
next one are on their way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...common import gpu, handover
from ...common.gluon_names import reinterpret
from ...common.hopper.barriers import in_turn
from ...common.hopper.tma import describe_matrix
from ...common.tiling import cdiv
from ...common.weight_forms import NZ
from ...runtime import launches
from .fused_gemm import (
    columns_first,
    describe_weight,
    describe_x,
    halves,
    load_weight_of,
    load_x,
    put,
    tile_at,
    weight_tiles,
)

STEP, CUT = 64, 4  # k of a tile; parts in which a warpgroup stores its columns
BLOCK_K, PARTS, STAGES = gl.constexpr(STEP), gl.constexpr(CUT), gl.constexpr(4)


class Shared(NamedTuple):
    """Tiles of x and of the weight in a ring, those of the output, and the ring's barriers."""

    x: Any
    w: Any
    out: Any
    full: Any
    empty: Any


class Constants(NamedTuple):
    """SIZE: of a head of x, whose last dims `turned` has; 0: all are x's."""

    K: int
    N: int
    SIZE: int
    BLOCK_T: int
    BLOCK_N: int
    FORM: int


@gluon.jit
def _load(x, turned, w, shared, tokens, tiles, C: gl.constexpr):
    step = 0
    for number in range(gl.program_id(0), tiles, gl.num_programs(0)):
        group, token, column = tile_at(number, tokens, C.N, C.BLOCK_T, C.BLOCK_N)
        for k in range(0, C.K, BLOCK_K):
            stage = step % STAGES
            mbarrier.wait(shared.empty.index(stage), (step // STAGES + 1) & 1)
            bar = shared.full.index(stage)
            mbarrier.expect(bar, (C.BLOCK_T + C.BLOCK_N) * BLOCK_K * 2)
            load_weight_of(w, group, column, k, bar, shared.w.index(stage), C.N, C.K, C.FORM)
            load_x(x, turned, token, group * C.K + k, bar, shared.x.index(stage), C.SIZE)
            step += 1


@gluon.jit
def _multiply(out, shared, tokens, tiles, WG: gl.constexpr, C: gl.constexpr):
    BLOCK_N: gl.constexpr = C.BLOCK_N
    HALF: gl.constexpr = C.BLOCK_T // 2
    PART: gl.constexpr = BLOCK_N // PARTS
    x_tiles, w_tiles, out_tiles, full, empty = shared
    x_halves = reinterpret(x_tiles, x_tiles.dtype, [STAGES * 2, HALF, BLOCK_K], x_tiles.layout)
    summed: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    step = 0
    for number in range(gl.program_id(0), tiles, gl.num_programs(0)):
        group, token, column = tile_at(number, tokens, C.N, C.BLOCK_T, C.BLOCK_N)
        acc = gl.zeros([HALF, BLOCK_N], gl.float32, summed)
        for k in range(0, C.K, BLOCK_K):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            w_tile = columns_first(w_tiles.index(stage), BLOCK_N, BLOCK_K, C.FORM).permute([1, 0])
            acc = warpgroup_mma(x_halves.index(stage * 2 + WG), w_tile, acc, is_async=True)
            # the product before is done
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=k > 0)
            step += 1
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index((step - 1) % STAGES))
        low, high = halves(acc.to(out.dtype))
        a, b = halves(low)
        c, d = halves(high)
        row = token + WG * HALF
        column += group * C.N
        put(a, out, row, column, out_tiles.index(WG * 2))
        put(b, out, row, column + PART, out_tiles.index(WG * 2 + 1))
        put(c, out, row, column + 2 * PART, out_tiles.index(WG * 2))
        put(d, out, row, column + 3 * PART, out_tiles.index(WG * 2 + 1))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tokens", "tiles"])
def _product(
    x,
    turned,
    w,
    out,
    tokens,
    tiles,
    C: gl.constexpr,
    FIRST: gl.constexpr,
):
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, C.BLOCK_T, BLOCK_K], x.layout)
    w_tiles = weight_tiles(w, STAGES, C.BLOCK_N, BLOCK_K, C.FORM)
    out_tiles = gl.allocate_shared_memory(
        out.dtype, [4, C.BLOCK_T // 2, C.BLOCK_N // PARTS], out.layout
    )
    full, empty = in_turn(STAGES, 2)
    shared = Shared(x_tiles, w_tiles, out_tiles, full, empty)
    handover.begin(FIRST)
    handover.follow(FIRST, False)
    gl.warp_specialize(
        [
            (_multiply, (out, shared, tokens, tiles, 0, C)),
            (_multiply, (out, shared, tokens, tiles, 1, C)),
            (_load, (x, turned, w, shared, tokens, tiles, C)),
        ],
        [4, 1],
        [232, 24],
    )


def _tile_of(form: int) -> tuple[int, int]:
    """(tokens, columns)"""
    return (256, 128) if form == NZ else (128, 256)


def _tiles(tokens: int, n: int, groups: int, form: int) -> int:
    rows, width = _tile_of(form)
    return groups * cdiv(tokens, rows) * cdiv(n, width)


def supports(x: Tensor, n: int, groups: int, form: int) -> bool:
    """Of what nz_matmul supports: a tile for nearly every multiprocessor, and rows that TMA can
    store."""
    tokens, depth = x.shape[0], x.shape[1] // groups
    fills = 10 * _tiles(tokens, n, groups, form) >= 9 * gpu.num_sms(x.device)
    whole = depth % STEP == 0 and n % _tile_of(form)[1] == 0
    return tokens > 256 and fills and n % 8 == 0 and (groups == 1 or whole)


def launch(
    x: Tensor,
    weight: Tensor,
    form: int,
    n: int,
    out: Tensor,
    *,
    first: bool,
    forked: bool,
    groups: int,
    turned: Tensor | None,
    size: int,
) -> None:
    """out [T, groups N] = x [T, groups K] times the weights, as nz_matmul.launch."""
    tokens, depth = x.shape[0], x.shape[1] // groups
    rows, width = _tile_of(form)
    tiles = _tiles(tokens, n, groups, form)
    launches.kernel(_product, min(tiles, gpu.num_sms(x.device)))(
        *describe_x(x, turned, rows, STEP),
        describe_weight(weight, form, depth, n, width, STEP, groups),
        describe_matrix(out, tokens, groups * n, [rows // 2, width // CUT]),
        tokens,
        tiles,
        C=Constants(depth, n, size, rows, width, form),
        FIRST=first,
        num_warps=4,
        launch_pdl=not forked,
    )
