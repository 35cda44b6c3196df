# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The target and the loss of indexer_loss.py for keys of up to 256 columns, on a Hopper GPU.

A program owns a row; four of them run on a multiprocessor at a time, so that one multiplies while
others wait for keys or take exponentials.  Its queries lie in shared memory beside two tiles of 64
keys, one of which is on its way.  Rows of the products are keys, so that a sum over heads stays
within four threads; those of the first pass, where log-sum-exps are not given, are heads.

The places of a row's keys lie in shared memory as well.  Those of a tile make room for what its
keys add to the target once they have been read: a mass, or -1 where a slot does not count.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...common import gpu
from ...common.gluon_names import barrier, cp_async, reinterpret
from ...common.hopper.layouts import GATHER
from ...common.hopper.layouts import S as SCORES
from ...common.hopper.rows import gather_rows
from ...common.log2 import LOG2E
from ...common.loss import normalised, padded, softmax_of_scores, valid_slots
from ...runtime import launches

LOWEST = gl.constexpr(-1e30)


@gluon.constexpr_function
def _products(HEADS):
    """[64 keys, heads]"""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])


@gluon.jit
def _arrive():
    """A tile is here, and every thread is done with the one before."""
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()


@gluon.jit
def _log_sum_exps(
    q, keys, places, key, key_row, tiles, scale_log2, HEADS: gl.constexpr, D: gl.constexpr
):
    """To base 2; rows of these products are heads, so that a sum over keys stays within a warp."""
    row_max = gl.full([HEADS], LOWEST, gl.float32, layout=gl.SliceLayout(1, SCORES))
    row_sum = gl.full([HEADS], 0.0, gl.float32, layout=gl.SliceLayout(1, SCORES))
    gather_rows(key, key_row, places.index(0), keys.index(0), D, False)
    for t in range(tiles):
        _arrive()
        z = gl.zeros([HEADS, 64], gl.float32, layout=SCORES)
        z = warpgroup_mma(q, keys.index(t % 2).permute((1, 0)), z, use_acc=False, is_async=True)
        if t + 1 < tiles:
            gather_rows(key, key_row, places.index(t + 1), keys.index((t + 1) % 2), D, False)
        valid = places.index(t).load(gl.SliceLayout(0, SCORES)) >= 0
        z = gl.where(valid[None, :], warpgroup_mma_wait(0, deps=[z]) * scale_log2, float("-inf"))
        new_max = gl.maximum(row_max, gl.max(z, 1))
        row_sum = row_sum * gl.exp2(row_max - new_max) + gl.sum(gl.exp2(z - new_max[:, None]), 1)
        row_max = new_max
    async_copy.wait_group(0)
    barrier()
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    stats = reinterpret(keys, gl.float32, [64 * D], FLAT).slice(0, HEADS)
    stats.store(row_max + gl.log2(row_sum))
    barrier()
    row_lse = stats.load(gl.SliceLayout(0, _products(HEADS)))
    barrier()
    return row_lse


@gluon.jit
def _targets(
    query,
    key,
    indices,
    lse,
    index_score,
    target,
    loss,
    scale_log2,
    chunk_offset,
    S,
    key_length,
    K,
    eps,
    strides,
    N: gl.constexpr,
    HEADS: gl.constexpr,
    D: gl.constexpr,
    K_PAD: gl.constexpr,
    HAS_LSE: gl.constexpr,
):
    (
        q_batch,
        q_head,
        q_row,
        k_batch,
        k_row,
        i_batch,
        i_row,
        l_batch,
        l_head,
        l_row,
        s_batch,
        s_row,
    ) = strides
    P: gl.constexpr = _products(HEADS)
    LINE: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = key.dtype.element_ty
    # late rows see most keys: they start first
    row = S - 1 - gl.program_id(0) % S
    batch = (gl.program_id(0) // S).to(gl.int64)
    row_wide = row.to(gl.int64)
    key += batch * k_batch
    at = (batch * S + row_wide) * K

    slot = gl.arange(0, K_PAD, layout=LINE)
    of_row = indices + batch * i_batch + row_wide * i_row
    index, counts = valid_slots(of_row, slot, K, chunk_offset + row, key_length)
    of_row = index_score + batch * s_batch + row_wide * s_row
    score = gl.load(of_row + slot, mask=slot < K, other=0.0)
    tiles = (gl.max(gl.where(counts, slot + 1, 0), 0) + 63) // 64
    r = softmax_of_scores(score, counts) + eps
    q = gl.allocate_shared_memory(dtype, [HEADS, D], SWIZZLED)
    keys = gl.allocate_shared_memory(dtype, [2, 64, D], SWIZZLED)
    places = gl.allocate_shared_memory(gl.int32, [K_PAD // 64, 64], FLAT)
    flat = reinterpret(places, gl.int32, [K_PAD], FLAT)
    flat.store(gl.where(counts, index, -1).to(gl.int32))
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, GATHER))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, GATHER))
    q_at = query + batch * q_batch + row_wide * q_row
    cp_async(q, (q_at + head.to(gl.int64) * q_head)[:, None] + d[None, :], mask=(head < N)[:, None])
    barrier()

    heads = gl.arange(0, HEADS, layout=gl.SliceLayout(0, P))
    if HAS_LSE:
        of_head = lse + batch * l_batch + row_wide * l_row + heads.to(gl.int64) * l_head
        row_lse = gl.load(of_head, mask=heads < N, other=0.0).to(gl.float32) * LOG2E
    else:
        row_lse = _log_sum_exps(q, keys, places, key, k_row, tiles, scale_log2, HEADS, D)
    row_lse = gl.where(row_lse == float("-inf"), 0.0, row_lse)
    # heads that are not there add nothing
    row_lse = gl.where(heads < N, row_lse, float("inf"))
    gather_rows(key, k_row, places.index(0), keys.index(0), D, False)
    for t in range(tiles):
        _arrive()
        s = gl.zeros([64, HEADS], gl.float32, layout=P)
        s = warpgroup_mma(keys.index(t % 2), q.permute((1, 0)), s, use_acc=False, is_async=True)
        if t + 1 < tiles:
            gather_rows(key, k_row, places.index(t + 1), keys.index((t + 1) % 2), D, False)
        place = places.index(t).load(gl.SliceLayout(1, P))
        p = gl.exp2(warpgroup_mma_wait(0, deps=[s]) * scale_log2 - row_lse[None, :])
        if HEADS > N:
            # the zeros of heads that are not there, times an infinite key, are NaN
            p = gl.where((heads < N)[None, :], p, 0.0)
        mass = gl.where(place >= 0, gl.sum(p, 1), -1.0)
        places.index(t).store(mass.to(gl.int32, bitcast=True))  # its places are done with
    async_copy.wait_group(0)
    barrier()
    left = flat.load(LINE)
    mass = left.to(gl.float32, bitcast=True)
    counts = (slot < tiles * 64) & ~(mass < 0)  # a NaN counts
    mass = gl.where(counts, mass, 0.0)
    gl.store(target + at + slot, mass, mask=slot < K)
    pi = normalised(mass) + eps
    term = pi * (gl.log(pi) - gl.log(r))
    gl.store(loss + batch * S + row, gl.sum(gl.where(counts, term, 0.0), 0))


def supports(
    query: Tensor,
    key: Tensor,
    query_rope: Tensor | None,
    softmax_lse: Tensor | None,
    K: int,
) -> bool:
    """Up to 128 heads (32 and fewer with their lse), and steps of 16 numbers, by which the compiler
    knows that rows are aligned."""
    N, D = query.shape[1], query.shape[-1]
    return (
        query_rope is None
        and (32 if softmax_lse is None else 0) < N <= 128
        and D in (64, 128, 256)
        and padded(N) * D <= 128 * 128
        and padded(K) <= 4096
        and key.shape[1] > 0
        and all(x.data_ptr() % 16 == 0 for x in (query, key))
        and all(step % 16 == 0 for x in (query, key) for step in x.stride()[:-1])
        and gpu.is_hopper(query.device)
    )


def launch(
    query: Tensor,
    key: Tensor,
    indices: Tensor,
    softmax_lse: Tensor | None,
    index_score: Tensor,
    target: Tensor,
    loss: Tensor,
    scaling: float,
    chunk_offset: int,
    eps: float,
) -> None:
    B, N, S, D = query.shape
    K = indices.shape[2]
    launches.kernel(_targets, B * S)(
        query,
        key,
        indices,
        softmax_lse,
        index_score,
        target,
        loss,
        scaling * LOG2E.value,
        chunk_offset,
        S,
        key.shape[1],
        K,
        eps,
        (
            *query.stride()[:3],
            *key.stride()[:2],
            *indices.stride()[:2],
            *((0, 0, 0) if softmax_lse is None else softmax_lse.stride()),
            *index_score.stride()[:2],
        ),
        N=N,
        HEADS=padded(N),
        D=D,
        K_PAD=max(64, padded(K)),
        HAS_LSE=softmax_lse is not None,
        num_warps=4,
    )
