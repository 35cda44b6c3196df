# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The scores of block_indexer.py on a Hopper GPU, of blocks of 128 positions.

The 128 rows of a product are the heads of some tokens, its 128 columns the keys of a block, which
come by TMA.  Two warpgroups with 64 rows each multiply and look for each row's greatest; a second
program on their multiprocessor multiplies meanwhile.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from ...common import gpu, packed, rows
from ...common.gluon_names import barrier, reinterpret, tma_load
from ...common.hopper.rows import ends_of
from ...common.hopper.tma import DTYPES, describable, describe_box, forget
from ...runtime import launches

BLOCK = gl.constexpr(128)  # positions
LEAST_SCORE = gl.constexpr(-3.4028234663852886e38)
FORCED = gl.constexpr(3.4028234663852886e38)  # of a block that is always chosen
MOST_SCORE = gl.constexpr(3.402823263561193e38)  # the number below, of others
S = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 128, 16]))
ROW = gl.constexpr(gl.SliceLayout(1, S))
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))


@gluon.jit
def _page(block, hi, table, C: gl.constexpr):
    """Of a block below `hi`; -1 of none."""
    return gl.load(table + block * BLOCK // C.PAGE, mask=block < hi, other=-1)


@gluon.jit
def _ask(key, page, block, tile, bar, wanted, pages, C: gl.constexpr):
    """The keys of a block; zeros where it has no page."""
    page = gl.where((page >= 0) & (page < pages), page, pages).to(gl.int32)
    mbarrier.expect(bar, BLOCK * C.D * 2, pred=wanted)
    to = reinterpret(tile, key.dtype, key.block_shape, key.layout)
    tma_load(key, [page, block * BLOCK % C.PAGE, 0], bar, to, pred=wanted)


@gluon.jit(do_not_specialize=[*packed.NUMBERS, "first_row", "count", "chunks", "per_chunk"])
def _scores(
    query,
    key,
    lengths,
    key_lengths,
    table,
    scores,
    raw,
    found,
    tokens,
    requests,
    reach,
    table_stride,
    pages,
    first_row,
    count,
    chunks,
    per_chunk,
    strides,
    C: gl.constexpr,
):
    """`_scores` of the file above."""
    score_head, score_row, found_head = strides
    gdc_launch_dependents()  # the selection is set up meanwhile
    STAGES: gl.constexpr = C.STAGES
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_tile = gl.allocate_shared_memory(query.dtype, [128, C.D], LAYOUT)
    tiles = gl.allocate_shared_memory(query.dtype, [STAGES, BLOCK, C.D], LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    for each in gl.static_range(STAGES + 1):
        mbarrier.init(full.index(each), count=1)
    fence_async_shared()
    barrier()
    of = packed.Requests(lengths, key_lengths, table, tokens, requests, reach, table_stride, pages)
    program = gl.program_id(0)
    lo = program % chunks * per_chunk
    row = first_row + program // chunks * C.ROWS
    stop = gl.minimum(row + C.ROWS, first_row + count)
    mbarrier.expect(full.index(STAGES), 128 * C.D * 2)
    to = reinterpret(q_tile, query.dtype, query.block_shape, query.layout)
    tma_load(query, [row, 0, 0], full.index(STAGES), to)
    lane = gl.arange(0, 128, layout=ROW)
    owner = row + lane // C.BLOCK_H
    h = (lane % C.BLOCK_H).to(gl.int64)
    there = (owner < stop) & (h < C.HEADS)
    to = h * score_head + (owner - first_row).to(gl.int64) * score_row
    ends = ends_of(of, C.REQUESTS, LINE)
    done = 0
    while row < stop:
        request, first, end = packed.request_of(row, ends, of)
        keys = packed.keys_of(request, of)
        of_request = table + request.to(gl.int64) * table_stride
        mine = there & (owner >= row) & (owner < end)
        limit = gl.where(mine, rows.sees(owner - first, end - first, keys, True), 0)
        blocks = (limit + BLOCK - 1) // BLOCK
        if lo == 0:
            gl.store(found + h * found_head + owner - first_row, blocks, mask=mine)
        least = gl.min(gl.where(mine, limit, 2147483647), 0)
        hi = gl.minimum(lo + per_chunk, gl.max(blocks, 0))
        ahead = _page(lo, hi, of_request, C)
        for i in gl.static_range(STAGES):
            tile = (done + i) % STAGES
            _ask(key, ahead, lo + i, tiles.index(tile), full.index(tile), lo + i < hi, pages, C)
            ahead = _page(lo + i + 1, hi, of_request, C)
        mbarrier.wait(full.index(STAGES), 0)
        for w in range(lo, hi):
            tile = done % STAGES
            mbarrier.wait(full.index(tile), (done // STAGES) & 1)
            s = gl.full([128, BLOCK], 0.0, gl.float32, layout=S)
            s = warpgroup_mma(
                q_tile, tiles.index(tile).permute((1, 0)), s, use_acc=False, is_async=True
            )
            page = _page(w, hi, of_request, C)
            known = (page >= 0) & (page < pages)
            s = warpgroup_mma_wait(0, deps=[s])
            barrier()  # both warpgroups have read the tile
            later = w + STAGES
            _ask(key, ahead, later, tiles.index(tile), full.index(tile), later < hi, pages, C)
            ahead = _page(later + 1, hi, of_request, C)
            # a NaN comes last, and where no key is hidden a row's greatest alone is asked
            hidden = ((w + 1) * BLOCK > least) | (known == 0)
            if hidden:
                position = w * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, S))
                s = gl.where(s > LEAST_SCORE, s, LEAST_SCORE)
                seen = (position[None, :] < limit[:, None]) & known
                s = gl.where(seen, s, float("-inf"))
            best = gl.max(s, 1)
            best = gl.where((best > LEAST_SCORE) | hidden, best, LEAST_SCORE)
            kept = mine & (w < blocks)
            if C.VALUES:
                gl.store(raw + to + w, best, mask=kept)
            forced = (w < C.INIT) | (w >= blocks - C.LOCAL)
            score = gl.where(forced, FORCED, gl.minimum(best, MOST_SCORE))
            score = gl.where(best > float("-inf"), score, float("-inf"))
            gl.store(scores + to + w, score, mask=kept)
            done += 1
        row = end
    forget(full)


def supports(query: Tensor, key: Tensor, heads: int, block: int) -> bool:
    """Blocks of 128 positions that lie on one page each; a tile of queries has the heads of whole
    tokens, `heads` each."""
    return (
        gpu.is_hopper(query.device)
        and query.dtype in DTYPES
        and query.shape[-1] in (64, 128)
        and heads <= 128
        and block == BLOCK.value
        and key.shape[1] % BLOCK.value == 0
        and key.numel() > 0
        and describable(query)
        and describable(key)
    )


def launch(query: Tensor, key: Tensor, programs: int, C: Any, **x: Any) -> None:
    """The call of the file above, without the strides of what is described."""
    pages, page, _, dim = key.shape
    shape, steps = [pages, page, dim], [*key.stride()[:2], 1]
    launches.kernel(_scores, programs)(
        describe_box(query, [*query.shape], [*query.stride()], [C.ROWS, C.BLOCK_H, dim]),
        describe_box(key, shape, steps, [1, BLOCK.value, dim]),
        **x,
        C=C,
        num_warps=8,
        maxnreg=128,
    )
