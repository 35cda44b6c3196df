# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What the products by several weights share on Hopper (Gluon): the ring of tiles, which part of
the product a program has, and blocks of weights of each form (weight_forms.py).

    form         block                    in shared memory
    NZ           [columns / 16, K, 16]    with the 32-byte swizzle the bytes of [columns, K]
    ROW_MAJOR    [K, columns]             turned by the product
    LINEAR       [columns, K]             as the product wants it

Of grouped products a weight is those of all groups, one behind the other, and x [T, groups K].
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...common.gluon_names import barrier, reinterpret, tma_load, tma_store
from ...common.hopper.tma import describe_matrix, describe_nz
from ...common.tiling import TURNED
from ...common.weight_forms import NZ, ROW_MAJOR, ends

_LAST = gl.constexpr(TURNED)


def describe_weight(
    weight: Tensor, form: int, depth: int, size: int, columns: int, k: int, groups: int = 1
) -> TensorDescriptor:
    """Blocks of `columns` columns and `k` rows of a weight of `depth` rows and `size` columns a
    group, or of one that is not there (0)."""
    if form == NZ:
        return describe_nz(weight, depth, groups * size, columns, k)
    if form == ROW_MAJOR:
        return describe_matrix(weight, groups * depth, max(size, 8), [k, columns])
    return describe_matrix(weight, max(groups * size, 1), depth, [columns, k])


def describe_x(x: Tensor, turned: Tensor | None, tokens: int, k: int) -> list[TensorDescriptor]:
    """Of x and `turned`, as load_x takes them."""
    count = x.shape[0]
    if turned is None:
        return [describe_matrix(x, count, x.shape[1], [tokens, k])] * 2
    return [describe_matrix(each, count, each.shape[1], [tokens, TURNED]) for each in (x, turned)]


@gluon.jit
def weight_tiles(
    w, COUNT: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, FORM: gl.constexpr
):
    if FORM == NZ:
        shape: gl.constexpr = [COUNT, BLOCK_N // 16, BLOCK_K, 16]
    elif FORM == ROW_MAJOR:
        shape: gl.constexpr = [COUNT, BLOCK_K, BLOCK_N]
    else:
        shape: gl.constexpr = [COUNT, BLOCK_N, BLOCK_K]
    return gl.allocate_shared_memory(w.dtype, shape, w.layout)


@gluon.jit
def load_weight(w, column, k, bar, tile, FORM: gl.constexpr, pred=True):
    if FORM == NZ:
        tma_load(w, [column // 16, k, 0], bar, tile, pred=pred)
    elif FORM == ROW_MAJOR:
        tma_load(w, [k, column], bar, tile, pred=pred)
    else:
        tma_load(w, [column, k], bar, tile, pred=pred)


@gluon.jit
def load_weight_of(
    w, group, column, k, bar, tile, N: gl.constexpr, K: gl.constexpr, FORM: gl.constexpr, pred=True
):
    """A block of a group's weight [K, N]."""
    if FORM == ROW_MAJOR:
        load_weight(w, column, group * K + k, bar, tile, FORM, pred)
    else:
        load_weight(w, group * N + column, k, bar, tile, FORM, pred)


@gluon.jit
def load_x(x, turned, token, k, bar, tile, SIZE: gl.constexpr, pred=True):
    """x[token:, k:].  SIZE: of a head, whose last 64 dims `turned` [T, heads 64] has; 0: all are
    x's."""
    if SIZE == 0:
        tma_load(x, [token, k], bar, tile, pred=pred)
    else:
        ROWS: gl.constexpr = tile.shape[0]
        PARTS: gl.constexpr = tile.shape[1] // _LAST
        parts = reinterpret(tile, tile.dtype, [PARTS, ROWS, _LAST], x.layout)
        for part in gl.static_range(PARTS):
            at = k + part * _LAST
            last = at % SIZE >= SIZE - _LAST
            other = at % SIZE < SIZE - _LAST
            tma_load(x, [token, at], bar, parts.index(part), pred=other & pred)
            at = at // SIZE * _LAST
            tma_load(turned, [token, at], bar, parts.index(part), pred=last & pred)


@gluon.jit
def columns_first(tile, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, FORM: gl.constexpr):
    """A block as the [columns, K] side of a transposed product."""
    if FORM == NZ:
        layout: gl.constexpr = gl.NVMMASharedLayout(32, 16, rank=2, transposed=True)
        return reinterpret(tile, tile.dtype, [BLOCK_N, BLOCK_K], layout)
    elif FORM == ROW_MAJOR:
        return tile.permute([1, 0])
    else:
        return tile


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
def own(block, N: gl.constexpr, BLOCK_N: gl.constexpr):
    """(first column of the sum, first block, columns) of the weight that a block is of; N: how many
    columns each of the four has."""
    B: gl.constexpr = ends(N, BLOCK_N)
    base = 0
    begin = 0
    size = N[0]
    if N[1] > 0:
        base = gl.where(block >= B[0], N[0], base)
        begin = gl.where(block >= B[0], B[0], begin)
        size = gl.where(block >= B[0], N[1], size)
    if N[2] > 0:
        base = gl.where(block >= B[1], N[0] + N[1], base)
        begin = gl.where(block >= B[1], B[1], begin)
        size = gl.where(block >= B[1], N[2], size)
    if N[3] > 0:
        base = gl.where(block >= B[2], N[0] + N[1] + N[2], base)
        begin = gl.where(block >= B[2], B[2], begin)
        size = gl.where(block >= B[2], N[3], size)
    return base, begin, size


@gluon.jit
def tile_at(number, tokens, N: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_N: gl.constexpr):
    """(group, first token, first column): the blocks of 2048 tokens share each block of weights in
    L2."""
    HEIGHT: gl.constexpr = 2048 // BLOCK_T
    BLOCKS: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    count = (tokens + BLOCK_T - 1) // BLOCK_T
    group = number // (count * BLOCKS)
    inside = number % (count * BLOCKS)
    first = inside // (HEIGHT * BLOCKS) * HEIGHT
    height = gl.minimum(count - first, HEIGHT)
    inside %= HEIGHT * BLOCKS
    return group, (first + inside % height) * BLOCK_T, inside // height * BLOCK_N


@gluon.jit
def halves(x):
    rows: gl.constexpr = x.shape[0]
    columns: gl.constexpr = x.shape[1] // 2
    return gl.split(x.reshape([rows, 2, columns]).permute([0, 2, 1]))


@gluon.jit
def put(part, out, token, column, tile):
    """Columns, through a tile that the store before the last one has left."""
    tma.store_wait(1)
    barrier()
    tile.store(part)
    fence_async_shared()
    barrier()
    tma_store(out, [token, column], tile)
