# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The target of indexer_loss.py for wide keys, on a Hopper GPU.

The queries of a row fill 147 KB of shared memory (128 heads of 576), which leaves room for one
tile of 64 keys.  So the tile is a ring of pieces 64 columns wide: a piece is asked for again, for
the next tile, as soon as both consumers have multiplied it.  Up to 64 heads leave room for two
tiles: each consumer has its own, and takes every other tile of the keys.

    warps 0-3, 4-7    scores of a tile, piece by piece, then their statistics; of 64 heads each, or
                      (SPLIT) of all heads and half of the keys
    warps 8-11        gather

Each consumer adds its heads' share of the target to zeros: two addends, whose order is no matter.

H200, 2026-11, 128 heads, D 576, S 4096, 8K keys, K 2048: 4912 us, with lse 2597 us (plain Triton
9003 and 5360).
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...common import gpu
from ...common.gluon_names import barrier, cp_async
from ...common.hopper.layouts import GATHER, LINE
from ...common.hopper.layouts import S as SCORES
from ...common.log2 import LOG2E
from ...common.loss import LARGEST_D
from ...runtime import launches

LOWEST = gl.constexpr(-1e30)


@gluon.jit
def _gather(
    key,
    key_rope,
    key_stride,
    rope_stride,
    slots,
    end,
    ring,
    bars,
    PIECES: gl.constexpr,
    TILES: gl.constexpr,
    ROPE_FROM: gl.constexpr,
    PASSES: gl.constexpr,
):
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, GATHER))
    d = gl.arange(0, 64, layout=gl.SliceLayout(0, GATHER))
    first = 0  # the tile's first piece
    phase = 1
    for _ in range(PASSES):
        slot = gl.load(slots + row, mask=row < end, other=-1)
        for n in range(0, end, 64):
            valid = (slot >= 0)[:, None]
            at = gl.maximum(slot, 0).to(gl.int64)
            key_at = (key + at * key_stride)[:, None] + d[None, :]
            rope_at = (key_rope + at * rope_stride)[:, None] + d[None, :]
            ahead = n + 64 + row
            slot = gl.load(slots + ahead, mask=ahead < end, other=-1)
            for c in gl.static_range(PIECES):
                mbarrier.wait(bars.index(TILES * PIECES + first + c), phase)
                if c < ROPE_FROM:
                    cp_async(ring.index(first + c), key_at + c * 64, mask=valid)
                else:
                    cp_async(ring.index(first + c), rope_at + (c - ROPE_FROM) * 64, mask=valid)
                async_copy.mbarrier_arrive(bars.index(first + c), increment_count=False)
            if TILES == 2:
                phase = phase ^ (first // PIECES)
                first = PIECES - first
            else:
                phase = phase ^ 1
    async_copy.wait_group(0)


@gluon.jit
def _release(bars, which: gl.constexpr):
    """After every warp of the group is here."""
    barrier()
    mbarrier.arrive(bars.index(which), count=1)


@gluon.jit
def _scores(
    q,
    ring,
    bars,
    phase,
    zero,
    GROUP: gl.constexpr,
    PIECES: gl.constexpr,
    SPLIT: gl.constexpr,
    S: gl.constexpr,
):
    """[64 heads, 64 keys]; `zero` is 0, but not to the compiler, which would else make all
    descriptors ahead of the loop and spill them."""
    FIRST: gl.constexpr = GROUP * PIECES if SPLIT else 0  # of the ring
    HEADS: gl.constexpr = 0 if SPLIT else GROUP * PIECES
    FREE: gl.constexpr = FIRST + (2 * PIECES if SPLIT else PIECES)
    s = gl.zeros([64, 64], gl.float32, layout=S)
    for c in gl.static_range(PIECES):
        mbarrier.wait(bars.index(FIRST + c), phase)
        fence_async_shared()
        s = warpgroup_mma(
            q.index(HEADS + c + zero),
            ring.index(FIRST + c + zero).permute((1, 0)),
            s,
            use_acc=c > 0,
            is_async=True,
        )
        if c > 0:
            s = warpgroup_mma_wait(1, deps=[s])
            _release(bars, FREE + c - 1)
    s = warpgroup_mma_wait(0, deps=[s])
    _release(bars, FREE + PIECES - 1)
    return s


@gluon.jit
def _consume(
    shared,
    of_row,
    of_lse,
    target,
    scale_log2,
    GROUP: gl.constexpr,
    N: gl.constexpr,
    PIECES: gl.constexpr,
    HAS_LSE: gl.constexpr,
    SPLIT: gl.constexpr,
):
    q, ring, bars = shared
    slots, end = of_row
    lse, lse_head = of_lse
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    column = gl.arange(0, 64, layout=LINE)
    FIRST_HEAD: gl.constexpr = 0 if SPLIT else GROUP * 64
    BEGIN: gl.constexpr = GROUP * 64 if SPLIT else 0
    STEP: gl.constexpr = 128 if SPLIT else 64
    head = FIRST_HEAD + gl.arange(0, 64, layout=ROW)
    mbarrier.wait(bars.index(4 * PIECES if SPLIT else 2 * PIECES), 0)
    phase = 0
    if HAS_LSE:
        of_head = lse + head.to(gl.int64) * lse_head
        row_lse = gl.load(of_head, mask=head < N, other=0.0).to(gl.float32) * LOG2E
    else:
        row_max = gl.full([64], LOWEST, gl.float32, layout=ROW)
        row_sum = gl.full([64], 0.0, gl.float32, layout=ROW)
        for n in range(0, end, 64):
            slot = gl.load(slots + n + column, mask=n + column < end, other=-1)
            s = _scores(q, ring, bars, phase, n >> 30, GROUP, PIECES, False, SCORES)
            valid = gl.convert_layout(slot, gl.SliceLayout(0, SCORES)) >= 0
            s = gl.where(valid[None, :], s * scale_log2, float("-inf"))
            new_max = gl.maximum(row_max, gl.max(s, 1))
            row_sum = row_sum * gl.exp2(row_max - new_max) + gl.sum(
                gl.exp2(s - new_max[:, None]), 1
            )
            row_max = new_max
            phase = phase ^ 1
        row_lse = row_max + gl.log2(row_sum)
    row_lse = gl.where(row_lse == float("-inf"), 0.0, row_lse)
    # heads that are not there add nothing
    row_lse = gl.where(head < N, row_lse, float("inf"))
    for n in range(BEGIN, end, STEP):
        slot = gl.load(slots + n + column, mask=n + column < end, other=-1)
        s = _scores(q, ring, bars, phase, n >> 30, GROUP, PIECES, SPLIT, SCORES)
        p = gl.exp2(s * scale_log2 - row_lse[:, None])
        if FIRST_HEAD + 64 > N:
            # the zeros of heads that are not there, times an infinite key, are NaN
            p = gl.where((head < N)[:, None], p, 0.0)
        mass = gl.convert_layout(gl.sum(p, 0), LINE)
        gl.atomic_add(target + n + column, mass, mask=slot >= 0, sem="relaxed")
        phase = phase ^ 1


@gluon.jit(do_not_specialize=["K"])
def _targets(
    query,
    query_rope,
    key,
    key_rope,
    slots,
    ends,
    lse,
    target,
    scale_log2,
    S,
    K,
    q_batch,
    q_head,
    q_row,
    qr_batch,
    qr_head,
    qr_row,
    k_batch,
    k_row,
    kr_batch,
    kr_row,
    l_batch,
    l_head,
    l_row,
    N: gl.constexpr,
    PIECES: gl.constexpr,
    ROPE_FROM: gl.constexpr,
    HAS_LSE: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """slots [rows, K] int32, -1 where absent, of which the first `ends` [rows] are visited."""
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = key.dtype.element_ty
    batch = (gl.program_id(0) // S).to(gl.int64)
    # late rows see most keys: they start first
    row = (S - 1 - gl.program_id(0) % S).to(gl.int64)
    GROUPS: gl.constexpr = 1 if SPLIT else 2  # of heads
    TILES: gl.constexpr = 2 if SPLIT else 1  # of keys
    RING: gl.constexpr = TILES * PIECES
    q = gl.allocate_shared_memory(dtype, [GROUPS * PIECES, 64, 64], SWIZZLED)
    ring = gl.allocate_shared_memory(dtype, [RING, 64, 64], SWIZZLED)
    # a piece has arrived, a piece is free, and the queries are there
    bars = gl.allocate_shared_memory(gl.int64, [2 * RING + 1, 1], mbarrier.MBarrierLayout())
    for c in gl.static_range(RING):
        mbarrier.init(bars.index(c), count=128)
        mbarrier.init(bars.index(RING + c), count=GROUPS)
    mbarrier.init(bars.index(2 * RING), count=128)
    barrier()
    h = gl.arange(0, 64, layout=gl.SliceLayout(1, GATHER))
    d = gl.arange(0, 64, layout=gl.SliceLayout(0, GATHER))
    query += batch * q_batch + row * q_row
    query_rope += batch * qr_batch + row * qr_row
    for group in gl.static_range(GROUPS):
        head = (group * 64 + h).to(gl.int64)
        mask = (head < N)[:, None]
        at = (query + head * q_head)[:, None] + d[None, :]
        rope_at = (query_rope + head * qr_head)[:, None] + d[None, :]
        for c in gl.static_range(PIECES):
            if c < ROPE_FROM:
                cp_async(q.index(group * PIECES + c), at + c * 64, mask=mask)
            else:
                cp_async(q.index(group * PIECES + c), rope_at + (c - ROPE_FROM) * 64, mask=mask)
    async_copy.mbarrier_arrive(bars.index(2 * RING), increment_count=False)
    end = gl.load(ends + batch * S + row)
    slots += (batch * S + row) * K
    target += (batch * S + row) * K
    lse += batch * l_batch + row * l_row
    key += batch * k_batch
    key_rope += batch * kr_batch
    shared = (q, ring, bars)
    of_row, of_lse = (slots, end), (lse, l_head)
    # constants stand here themselves: through a variable they would become tensors
    gl.warp_specialize(
        [
            (_consume, (shared, of_row, of_lse, target, scale_log2, 0, N, PIECES, HAS_LSE, SPLIT)),
            (_consume, (shared, of_row, of_lse, target, scale_log2, 1, N, PIECES, HAS_LSE, SPLIT)),
            (
                _gather,
                (
                    key,
                    key_rope,
                    k_row,
                    kr_row,
                    slots,
                    end,
                    ring,
                    bars,
                    PIECES,
                    TILES,
                    ROPE_FROM,
                    1 if HAS_LSE else 2,
                ),
            ),
        ],
        [4, 4],
        [168, 96],
    )


def supports(
    query: Tensor,
    key: Tensor,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    softmax_lse: Tensor | None,
) -> bool:
    """Up to 128 heads (64 and fewer with their lse), wide keys, and steps of 16 numbers, by which
    the compiler knows that rows are aligned."""
    given = [x for x in (query, key, query_rope, key_rope) if x is not None]
    D, DR = query.shape[-1], 0 if query_rope is None else query_rope.shape[-1]
    return (
        (64 if softmax_lse is None else 0) < query.shape[1] <= 128
        and 256 < D + DR <= LARGEST_D
        and D % 64 == DR % 64 == 0
        and all(x.data_ptr() % 16 == 0 for x in given)
        and all(step % 16 == 0 for x in given for step in x.stride()[:-1])
        and (softmax_lse is None or softmax_lse.dtype is torch.float32)
        and gpu.is_hopper(query.device)
    )


def launch(
    query: Tensor,
    key: Tensor,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    slots: Tensor,
    ends: Tensor,
    softmax_lse: Tensor | None,
    target: Tensor,
    scaling: float,
) -> None:
    """Adds to `target` [B, S, K]; `slots` [B, S, K] count up to `ends` [B, S], -1 does not."""
    B, N, S, D = query.shape
    DR = 0 if query_rope is None else query_rope.shape[-1]
    q_rope = query if query_rope is None else query_rope
    k_rope = key if key_rope is None else key_rope
    launches.kernel(_targets, B * S)(
        query,
        q_rope,
        key,
        k_rope,
        slots,
        ends,
        target if softmax_lse is None else softmax_lse,
        target,
        scaling * LOG2E.value,
        S,
        slots.shape[2],
        *query.stride()[:3],
        *q_rope.stride()[:3],
        *key.stride()[:2],
        *k_rope.stride()[:2],
        *((0, 0, 0) if softmax_lse is None else softmax_lse.stride()),
        N=N,
        PIECES=(D + DR) // 64,
        ROPE_FROM=D // 64,
        HAS_LSE=softmax_lse is not None,
        SPLIT=N <= 64,
        num_warps=4,
    )
