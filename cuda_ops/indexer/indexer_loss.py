# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""KL loss of the indexer over the selected keys, forward.

    p[h] = softmax_j(scaling query[h] . key[index_j])     target = sum_h p[h]
    pi = target / sum_j target     r = softmax_j(index_score)
    loss = sum_j (pi_j + eps) (log(pi_j + eps) - log(r_j + eps))     over the valid slots

    query [B, N, S, D]   key [B, S2, D]   index_score, indices [B, S, K]   target [B, S, K]

A program owns a row: it gathers the selected keys once a pass, for all heads.  The first pass
takes each head's log-sum-exp, with heads as the rows of the product so that the sum over keys stays
within a warp; the second takes the sum over heads, with keys as its rows for the same reason.  A
given `softmax_lse` saves the first.  _loss_kernel normalises a row and takes its loss.

    condition                                        kernels
    Hopper, up to 128 heads (32 and fewer: with      hopper/indexer_loss_hdim256.py
      their lse), D 64, 128 or 256, no rope,
      K up to 4096, aligned rows
    Hopper, up to 128 heads (64 and fewer: with      _slots_kernel then hopper/indexer_loss.py then
      their lse), D above 256, aligned rows          _loss_kernel
    else                                             _target_kernel then _loss_kernel
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import memory
from ...dispatch.ops.indexer.indexer_loss import Arguments
from ..common import gpu, rows
from ..common.log2 import LOG2E
from ..common.loss import (
    LARGEST_D,
    Sizes,
    Tiles,
    normalised,
    padded,
    parts,
    pieces,
    shared_bytes,
    slots_of_row,
    softmax_of_scores,
    valid_slots,
)
from ..runtime import launches
from .hopper import indexer_loss as hopper
from .hopper import indexer_loss_hdim256 as hdim256


@triton.jit
def _part(base, at, row, valid, columns, SIZE: tl.constexpr, PAD: tl.constexpr):
    """Rows `at` of [*, row] and their first SIZE columns, padded to PAD; zeros if not `valid`."""
    if SIZE == PAD:
        return tl.load(base + at[:, None] * row + columns[None, :], valid[:, None], 0.0)
    mask = valid[:, None] & (columns < SIZE)[None, :]
    return tl.load(base + at[:, None] * row + columns[None, :], mask, 0.0)


@triton.jit
def _target_kernel(
    query,
    key,
    query_rope,
    key_rope,
    indices,
    lse,
    target,
    scale_log2,
    chunk_offset,
    S,
    key_length,
    K,
    strides,
    N: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    DR: tl.constexpr,
    P0: tl.constexpr,
    P1: tl.constexpr,
    PR: tl.constexpr,
    K_PAD: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    (
        q_batch,
        q_head,
        q_row,
        k_batch,
        k_row,
        qr_batch,
        qr_head,
        qr_row,
        kr_batch,
        kr_row,
        i_batch,
        i_row,
        l_batch,
        l_head,
        l_row,
    ) = strides
    # late rows see most keys: they start first
    row = S - 1 - tl.program_id(0) % S
    batch = (tl.program_id(0) // S).to(tl.int64)
    row_wide = row.to(tl.int64)
    query += batch * q_batch + row_wide * q_row
    key += batch * k_batch
    indices += batch * i_batch + row_wide * i_row
    target += (batch * S + row_wide) * K
    if DR > 0:
        query_rope += batch * qr_batch + row_wide * qr_row
        key_rope += batch * kr_batch
    position = chunk_offset + row

    every = tl.arange(0, K_PAD)
    _, counts = valid_slots(indices, every, K, position, key_length)
    # slots behind the last valid one are not visited
    last = tl.max(tl.where(counts, every + 1, 0), 0)
    tl.store(target + every, tl.zeros([K_PAD], tl.float32), mask=(every >= last) & (every < K))

    c0 = tl.arange(0, P0)
    c1 = tl.arange(0, P1)
    cr = tl.arange(0, PR)
    for first in range(0, N, HEADS):
        head = first + tl.arange(0, HEADS)
        is_head = head < N
        head_wide = head.to(tl.int64)
        q0 = _part(query, head_wide, q_head, is_head, c0, D0, P0)
        if D1 > 0:
            q1 = _part(query + D0, head_wide, q_head, is_head, c1, D1, P1)
        if DR > 0:
            qr = _part(query_rope, head_wide, qr_head, is_head, cr, DR, PR)

        if HAS_LSE:
            given = tl.load(
                lse + batch * l_batch + head_wide * l_head + row_wide * l_row, is_head, 0.0
            )
            row_lse = given.to(tl.float32) * LOG2E
        else:
            row_max = tl.full([HEADS], float("-inf"), tl.float32)
            row_sum = tl.zeros([HEADS], tl.float32)
            for start in tl.range(0, last, KEYS, num_stages=STAGES):
                slot = start + tl.arange(0, KEYS)
                index, valid = valid_slots(indices, slot, K, position, key_length)
                at = index.to(tl.int64)
                z = tl.dot(q0, _part(key, at, k_row, valid, c0, D0, P0).T)
                if D1 > 0:
                    z = tl.dot(q1, _part(key + D0, at, k_row, valid, c1, D1, P1).T, z)
                if DR > 0:
                    z = tl.dot(qr, _part(key_rope, at, kr_row, valid, cr, DR, PR).T, z)
                z = tl.where(valid[None, :], z * scale_log2, float("-inf"))
                new_max = tl.maximum(row_max, tl.max(z, 1))
                safe = tl.where(new_max == float("-inf"), 0.0, new_max)
                row_sum = row_sum * tl.exp2(row_max - safe)
                row_sum += tl.sum(tl.exp2(z - safe[:, None]), 1)
                row_max = new_max
            row_lse = tl.where(row_sum != 0, row_max + tl.log2(row_sum), 0.0)
        # heads that are not there add nothing
        row_lse = tl.where(is_head, row_lse, float("inf"))
        row_lse = tl.where(row_lse == float("-inf"), 0.0, row_lse)

        for start in tl.range(0, last, KEYS, num_stages=STAGES):
            slot = start + tl.arange(0, KEYS)
            index, valid = valid_slots(indices, slot, K, position, key_length)
            at = index.to(tl.int64)
            k0 = _part(key, at, k_row, valid, c0, D0, P0)
            z = tl.dot(k0, q0.T)
            if D1 > 0:
                z = tl.dot(_part(key + D0, at, k_row, valid, c1, D1, P1), q1.T, z)
            if DR > 0:
                z = tl.dot(_part(key_rope, at, kr_row, valid, cr, DR, PR), qr.T, z)
            p = tl.exp2(z * scale_log2 - row_lse[None, :])
            if N % HEADS != 0:
                # the zeros of heads that are not there, times an infinite key, are NaN
                p = tl.where(is_head[None, :], p, 0.0)
            mass = tl.where(valid, tl.sum(p, 1), 0.0)
            mask = slot < last
            if N > HEADS and first > 0:
                mass += tl.load(target + slot, mask=mask, other=0.0)
            tl.store(target + slot, mass, mask=mask)


@triton.jit
def _slots_kernel(indices, slots, ends, sizes, i_steps, K_PAD: tl.constexpr):
    """Indices as int32, -1 where they do not count, and the end of those that do."""
    batch, row, slot, index, counts = slots_of_row(indices, i_steps, sizes, K_PAD)
    at = (batch * sizes.S + row) * sizes.K + slot
    tl.store(slots + at, tl.where(counts, index, -1).to(tl.int32), mask=slot < sizes.K)
    tl.store(ends + batch * sizes.S + row, tl.max(tl.where(counts, slot + 1, 0), 0))


@triton.jit
def _loss_kernel(
    index_score, indices, target, loss, sizes, eps, s_steps, i_steps, K_PAD: tl.constexpr
):
    batch, row, slot, _, counts = slots_of_row(indices, i_steps, sizes, K_PAD)
    row_wide = row.to(tl.int64)
    score = tl.load(index_score + batch * s_steps[0] + row_wide * s_steps[1] + slot, counts, 0.0)
    mass = tl.load(target + (batch * sizes.S + row_wide) * sizes.K + slot, counts, 0.0)
    pi = normalised(mass)
    r = softmax_of_scores(score, counts)
    term = (pi + eps) * (tl.log(pi + eps) - tl.log(r + eps))
    tl.store(loss + batch * sizes.S + row, tl.sum(tl.where(counts, term, 0.0), 0))


def tiles(N: int, columns: Sequence[int], has_lse: bool, device: torch.device) -> Tiles | None:
    """The first that fits into this GPU."""
    heads = min(128, padded(N))
    if sum(columns) > 256:
        tiers = [Tiles(heads, 64, 1, 8), Tiles(min(64, heads), 64, 1, 8)]
    elif heads <= 16:
        tiers = [Tiles(heads, 64, 4, 2)]
    else:
        tiers = [Tiles(heads, 64, 3, 4) if has_lse else Tiles(heads, 128, 2, 4)]
    tiers += [Tiles(min(32, heads), 32, 1, 4)]
    limit, wgmma = gpu.shared_memory(device), gpu.reads_shared(device)
    fitting = (tile for tile in tiers if shared_bytes(tile, columns, wgmma) <= limit)
    return next(fitting, None)


def unsupported(
    query: Tensor,
    key: Tensor,
    index_score: Tensor,
    query_rope: Tensor | None,
    softmax_lse: Tensor | None = None,
    **_: Any,
) -> str | None:
    if torch.float64 in (query.dtype, index_score.dtype):
        return "inputs are float64, supported are float16, bfloat16 and (index_score) float32"
    if query.dtype is torch.float32:
        return "query is float32, supported are float16 and bfloat16"
    D, DR = query.shape[-1], 0 if query_rope is None else query_rope.shape[-1]
    if D + DR > LARGEST_D:
        return f"D={D + DR}, supported up to {LARGEST_D}"
    if tiles(query.shape[1], pieces(D, DR), softmax_lse is not None, query.device) is None:
        return gpu.too_small(query.device, N=query.shape[1], D=D, Dr=DR)
    return rows.too_many(key.shape[1], "keys")


def _on_hopper(
    query: Tensor,
    key: Tensor,
    indices: Tensor,
    scaling: float,
    chunk_offset: int,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    softmax_lse: Tensor | None,
    target: Tensor,
) -> None:
    B, S, K = indices.shape
    slots = memory.empty((B, S, K), torch.int32, query.device)
    ends = memory.empty((B, S), torch.int32, query.device)
    launches.kernel(_slots_kernel, B * S)(
        indices,
        slots,
        ends,
        Sizes(chunk_offset, S, key.shape[1], K),
        indices.stride()[:2],
        K_PAD=padded(K),
        num_warps=4,
    )
    hopper.launch(
        query, key, query_rope, key_rope, slots, ends, softmax_lse, target.zero_(), scaling
    )


def forward(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor]:
    query, key, indices, chunk_offset = x["query"], x["key"], x["indices"], x["chunk_offset"]
    query_rope, key_rope, softmax_lse = x["query_rope"], x["key_rope"], x["softmax_lse"]
    B, N, S, D = query.shape
    K, key_length = indices.shape[2], key.shape[1]
    chunk_offset = min(chunk_offset, key_length)  # with the row's number it stays within 32 bits
    loss = memory.empty((B, S), torch.float32, query.device)
    target = memory.empty((B, S, K), torch.float32, query.device)
    if target.numel() == 0:
        return loss.zero_(), target
    D0, D1 = parts(D)
    DR = 0 if query_rope is None else query_rope.shape[-1]
    if hdim256.supports(query, key, query_rope, softmax_lse, K):
        hdim256.launch(
            query,
            key,
            indices,
            softmax_lse,
            x["index_score"],
            target,
            loss,
            x["scaling"],
            chunk_offset,
            x["eps"],
        )
        return loss, target
    if hopper.supports(query, key, query_rope, key_rope, softmax_lse):
        _on_hopper(
            query,
            key,
            indices,
            x["scaling"],
            chunk_offset,
            query_rope,
            key_rope,
            softmax_lse,
            target,
        )
    else:
        tile = tiles(N, pieces(D, DR), softmax_lse is not None, query.device)
        assert tile is not None
        launches.kernel(_target_kernel, B * S)(
            query,
            key,
            query_rope,
            key_rope,
            indices,
            softmax_lse,
            target,
            x["scaling"] * LOG2E.value,
            chunk_offset,
            S,
            key_length,
            K,
            (
                *query.stride()[:3],
                *key.stride()[:2],
                *((0, 0, 0) if query_rope is None else query_rope.stride()[:3]),
                *((0, 0) if key_rope is None else key_rope.stride()[:2]),
                *indices.stride()[:2],
                *((0, 0, 0) if softmax_lse is None else softmax_lse.stride()),
            ),
            N=N,
            D0=D0,
            D1=D1,
            DR=DR,
            P0=padded(D0),
            P1=padded(D1),
            PR=padded(DR),
            K_PAD=padded(K),
            HEADS=tile.heads,
            KEYS=tile.keys,
            STAGES=tile.stages,
            HAS_LSE=softmax_lse is not None,
            num_warps=tile.warps,
        )
    launches.kernel(_loss_kernel, B * S)(
        x["index_score"],
        indices,
        target,
        loss,
        Sizes(chunk_offset, S, key_length, K),
        x["eps"],
        x["index_score"].stride()[:2],
        indices.stride()[:2],
        K_PAD=padded(K),
        num_warps=4,
    )
    return loss, target
