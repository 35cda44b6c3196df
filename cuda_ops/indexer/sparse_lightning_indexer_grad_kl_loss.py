# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The indexer's KL loss over the selected keys, and its gradients, from the attention's statistics.

    target[j] = sum_h exp(scale query[h] . key[j] - softmax_max[h]) / softmax_sum[h]
    score[j] = sum_n weights[n] relu(query_index[n] . key_index[j])
    d = softmax(score) - target / sum target     loss = KL(target / sum target || softmax(score))

_scores_kernel gathers each row's keys once, for the target and the scores; _loss_kernel turns a
row into its loss and d; lightning_indexer_grad.py takes d down to the indexer's inputs.

    condition                                kernels
    Hopper, up to 128 heads, D above 256,    _rows_kernel then hopper/indexer_loss.py then
      aligned rows, contiguous keys          _index_scores_kernel then _loss_kernel then
                                             lightning_indexer_grad.py
    else                                     _scores_kernel then _loss_kernel then
                                             lightning_indexer_grad.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import memory
from ...dispatch.ops.indexer.sparse_lightning_indexer_grad_kl_loss import Arguments
from ..common import gpu, rows, supported
from ..common.log2 import LOG2E
from ..common.loss import (
    LARGEST_D,
    Tiles,
    normalised,
    padded,
    parts,
    pieces,
    shared_bytes,
    softmax_of_scores,
)
from ..common.selection import selected, slot_of
from ..runtime import launches
from . import lightning_indexer_grad
from .hopper import indexer_loss as hopper

EPS = 1e-10
INDEX_KEYS, INDEX_STAGES, INDEX_WARPS = 128, 3, 4  # of a program that makes scores alone


class Constants(NamedTuple):
    """Columns of queries and keys come in parts: D0, D1 and the rotary DR, DI the indexer's; P0 ..
    are the sizes of their tiles."""

    N: int
    NI: int
    D0: int
    D1: int
    DR: int
    DI: int
    P0: int
    P1: int
    PR: int
    PI: int
    HEADS: int
    INDEX_HEADS: int
    BLOCK_N: int
    HAS_SINK: bool
    STAGES: int


@triton.jit
def _part(base, at, valid, columns, SIZE: tl.constexpr, PAD: tl.constexpr):
    """[rows, PAD]: SIZE columns of the rows that start at `at`; zeros if not `valid`."""
    mask = valid[:, None]
    if SIZE != PAD:
        mask = mask & (columns < SIZE)[None, :]
    return tl.load(base + at[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _found(ki, qi, weight, is_index, C: tl.constexpr):
    """The indexer's scores of a tile of keys."""
    s = tl.dot(ki, qi.T)
    s = tl.maximum(s, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
    if C.NI != C.INDEX_HEADS:
        s = tl.where(is_index[None, :], s, 0.0)
    return tl.sum(s, 1)


@triton.jit
def _lse(peaks, totals, sinks, row, h, is_head, C: tl.constexpr):
    """In base 2; infinite for heads that are not there, or saw nothing: they add nothing."""
    peak = tl.load(peaks + row * C.N + h, mask=is_head, other=0.0).to(tl.float32)
    total = tl.load(totals + row * C.N + h, mask=is_head, other=1.0).to(tl.float32)
    if C.HAS_SINK:
        sink = tl.load(sinks + h, mask=is_head, other=0.0).to(tl.float32)
        total += tl.exp(sink - peak)
    lse = peak * LOG2E + tl.log2(total)
    return tl.where(is_head & (lse != float("-inf")), lse, float("inf"))


@triton.jit(do_not_specialize=[*rows.NUMBERS, "entries"])
def _scores_kernel(
    query,
    key,
    query_rope,
    key_rope,
    query_index,
    key_index,
    weights,
    indices,
    peaks,
    totals,
    sinks,
    target,
    score,
    seqlens_q,
    seqlens_k,
    table,
    scale_log2,
    tokens,
    requests,
    max_kv_len,
    table_stride,
    pages,
    entries,
    strides,
    LAYOUT: tl.constexpr,
    C: tl.constexpr,
):
    (
        q_row,
        q_head,
        qr_row,
        qr_head,
        qi_row,
        qi_head,
        w_row,
        index_row,
        key_o,
        key_i,
        kr_o,
        kr_i,
        ki_o,
        ki_i,
    ) = strides
    of = rows.Requests(
        seqlens_q, seqlens_k, table, tokens, requests, max_kv_len, table_stride, pages
    )
    row = tl.program_id(0).to(tl.int64)
    request, start, kv_len = rows.locate(row, of, LAYOUT)
    c0 = tl.arange(0, C.P0)
    c1 = tl.arange(0, C.P1)
    cr = tl.arange(0, C.PR)
    ci = tl.arange(0, C.PI)
    n = tl.arange(0, C.INDEX_HEADS).to(tl.int64)
    is_index = n < C.NI
    qi = _part(query_index + row * qi_row, n * qi_head, is_index, ci, C.DI, C.PI)
    weight = tl.load(weights + row * w_row + n, mask=is_index, other=0.0).to(tl.float32)
    end = tl.where(kv_len > 0, entries, 0)
    for first in range(0, C.N, C.HEADS):
        h = (first + tl.arange(0, C.HEADS)).to(tl.int64)
        is_head = h < C.N
        q0 = _part(query + row * q_row, h * q_head, is_head, c0, C.D0, C.P0)
        if C.D1 > 0:
            q1 = _part(query + row * q_row + C.D0, h * q_head, is_head, c1, C.D1, C.P1)
        if C.DR > 0:
            qr = _part(query_rope + row * qr_row, h * qr_head, is_head, cr, C.DR, C.PR)
        lse = _lse(peaks, totals, sinks, row, h, is_head, C)
        for at in tl.range(0, end, C.BLOCK_N, num_stages=C.STAGES):
            entry = at + tl.arange(0, C.BLOCK_N)
            outer, inner, valid = selected(
                entry, entries, indices + row * index_row, kv_len, request, start, of, 1, LAYOUT
            )
            k_at = outer * key_o + inner * key_i
            z = tl.dot(_part(key, k_at, valid, c0, C.D0, C.P0), q0.T)
            if C.D1 > 0:
                z = tl.dot(_part(key + C.D0, k_at, valid, c1, C.D1, C.P1), q1.T, z)
            if C.DR > 0:
                kr = _part(key_rope, outer * kr_o + inner * kr_i, valid, cr, C.DR, C.PR)
                z = tl.dot(kr, qr.T, z)
            p = tl.exp2(z * scale_log2 - lse[None, :])
            if C.N % C.HEADS != 0:
                # the zeros of heads that are not there, times an infinite key, are NaN
                p = tl.where(is_head[None, :], p, 0.0)
            mass = tl.where(valid, tl.sum(p, 1), 0.0)
            to = row * entries + entry
            mask = entry < entries
            if C.N > C.HEADS:  # noqa: SIM102 (a constexpr, decided before the rest is compiled)
                if first > 0:
                    mass += tl.load(target + to, mask=mask, other=0.0)
            tl.store(target + to, mass, mask=mask)
            if first == 0:
                ki = _part(key_index, outer * ki_o + inner * ki_i, valid, ci, C.DI, C.PI)
                found = _found(ki, qi, weight, is_index, C)
                # absent slots are told apart by their score in the second kernel
                tl.store(score + to, tl.where(valid, found, float("-inf")), mask=mask)
    # a row that sees nothing
    for at in range(end, entries, C.BLOCK_N):
        entry = at + tl.arange(0, C.BLOCK_N)
        absent = tl.full([C.BLOCK_N], float("-inf"), tl.float32)
        tl.store(score + row * entries + entry, absent, mask=entry < entries)


@triton.jit(do_not_specialize=[*rows.NUMBERS, "entries"])
def _rows_kernel(
    indices,
    peaks,
    totals,
    sinks,
    slots,
    ends,
    lse,
    seqlens_q,
    seqlens_k,
    table,
    tokens,
    requests,
    max_kv_len,
    table_stride,
    pages,
    entries,
    index_row,
    LAYOUT: tl.constexpr,
    C: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """A row as hopper/indexer_loss.py takes it: where its keys lie, -1 for none, the end of those
    that count, and its heads' log-sum-exp."""
    of = rows.Requests(
        seqlens_q, seqlens_k, table, tokens, requests, max_kv_len, table_stride, pages
    )
    row = tl.program_id(0).to(tl.int64)
    request, start, kv_len = rows.locate(row, of, LAYOUT)
    entry = tl.arange(0, ENTRIES)
    outer, inner, valid = selected(
        entry, entries, indices + row * index_row, kv_len, request, start, of, 1, LAYOUT
    )
    slot = slot_of(outer, inner, valid, max_kv_len, LAYOUT)
    tl.store(slots + row * entries + entry, slot, mask=entry < entries)
    tl.store(ends + row, tl.max(tl.where(valid, entry + 1, 0), 0))
    h = tl.arange(0, C.HEADS)
    of_heads = _lse(peaks, totals, sinks, row, h, h < C.N, C)
    tl.store(lse + row * C.N + h, of_heads / LOG2E, mask=h < C.N)


@triton.jit(do_not_specialize=["entries"])
def _index_scores_kernel(
    query_index,
    key_index,
    weights,
    slots,
    score,
    entries,
    qi_row,
    qi_head,
    w_row,
    ki_row,
    C: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    ci = tl.arange(0, C.PI)
    n = tl.arange(0, C.INDEX_HEADS).to(tl.int64)
    is_index = n < C.NI
    qi = _part(query_index + row * qi_row, n * qi_head, is_index, ci, C.DI, C.PI)
    weight = tl.load(weights + row * w_row + n, mask=is_index, other=0.0).to(tl.float32)
    for at in tl.range(0, entries, C.BLOCK_N, num_stages=C.STAGES):
        entry = at + tl.arange(0, C.BLOCK_N)
        slot = tl.load(slots + row * entries + entry, mask=entry < entries, other=-1)
        valid = slot >= 0
        ki = _part(key_index, slot.to(tl.int64) * ki_row, valid, ci, C.DI, C.PI)
        found = tl.where(valid, _found(ki, qi, weight, is_index, C), float("-inf"))
        tl.store(score + row * entries + entry, found, mask=entry < entries)


@triton.jit(do_not_specialize=["entries"])
def _loss_kernel(target, score, loss, entries, eps, ENTRIES: tl.constexpr):
    """The row's loss; d replaces the scores."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, ENTRIES)
    at = row * entries + slot
    found = tl.load(score + at, mask=slot < entries, other=float("-inf"))
    counts = found != float("-inf")
    pi = normalised(tl.load(target + at, mask=counts, other=0.0))
    r = softmax_of_scores(found, counts)
    term = (pi + eps) * (tl.log(pi + eps) - tl.log(r + eps))
    tl.store(loss + row, tl.sum(tl.where(counts, term, 0.0), 0))
    tl.store(score + at, tl.where(counts, r - pi, 0.0), mask=slot < entries)


def tiles(N: int, columns: Sequence[int], NI: int, DI: int, device: torch.device) -> Tiles | None:
    """The first that fits into this GPU beside the indexer's query and keys."""
    heads = min(128, padded(N))
    if sum(columns) > 256:
        tiers = [Tiles(heads, 64, 1, 8), Tiles(min(64, heads), 64, 1, 8)]
    else:
        tiers = [Tiles(heads, 64, 2, 4)]
    tiers += [Tiles(min(32, heads), 32, 1, 4)]
    wgmma = gpu.reads_shared(device)

    def needed(tile: Tiles) -> int:
        indexer = padded(NI) + (tile.stages * tile.keys if tile.stages > 1 else 0)
        return shared_bytes(tile, columns, wgmma) + 2 * indexer * padded(DI)

    return next((tile for tile in tiers if needed(tile) <= gpu.shared_memory(device)), None)


def unsupported(
    query: Tensor, key: Tensor, query_index: Tensor, query_rope: Tensor | None, **_: Any
) -> str | None:
    DR = 0 if query_rope is None else query_rope.shape[-1]
    D = query.shape[-1] + DR
    reason = supported.half_precision("query", query) or supported.up_to(LARGEST_D, D=D)
    if reason:
        return reason
    if max(query_index.shape[-2:]) > 256:
        return f"index heads and size are {tuple(query_index.shape[-2:])}, supported up to 256"
    N, (Ni, Di) = query.shape[-2], query_index.shape[-2:]
    if tiles(N, pieces(D - DR, DR), Ni, Di, query.device) is None:
        return gpu.too_small(query.device, N=N, D=D - DR, Dr=DR, Ni=Ni, Di=Di)
    return rows.too_many_positions(key, None)


def forward(**a: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, key, query_index, key_index = a["query"], a["key"], a["query_index"], a["key_index"]
    sparse_indices, query_rope, key_rope = a["sparse_indices"], a["query_rope"], a["key_rope"]
    layout = a["layout"]
    layout, device = layout or "BSND", query.device
    mode = 3 if a["sparse_mode"] is None else a["sparse_mode"]
    seqlens_q, seqlens_k = (
        None if x is None else torch.tensor(x, dtype=torch.int32, device=device)
        for x in (a["actual_seq_qlen"], a["actual_seq_klen"])
    )
    plan = rows.plan(query, key, seqlens_q, seqlens_k, None, layout, layout, mode)
    (N, D), (NI, DI) = query.shape[-2:], query_index.shape[-2:]
    entries = sparse_indices.shape[-1]
    target = memory.empty((plan.rows, entries), torch.float32, device)
    score = memory.empty((plan.rows, entries), torch.float32, device)
    loss = memory.empty((plan.rows,), torch.float32, device)
    q, qi = query.reshape(plan.rows, N, D), query_index.reshape(plan.rows, NI, DI)
    DR = 0 if query_rope is None else query_rope.shape[-1]
    qr = None if query_rope is None else query_rope.reshape(plan.rows, N, DR)
    w = a["weights"].reshape(plan.rows, NI)
    index = sparse_indices.reshape(plan.rows, entries)
    D0, D1 = parts(D)
    tile = tiles(N, pieces(D, DR), NI, DI, device)
    assert tile is not None
    constants = Constants(
        N=N,
        D0=D0,
        D1=D1,
        DR=DR,
        NI=NI,
        DI=DI,
        P0=padded(D0),
        P1=padded(D1),
        PR=padded(DR),
        PI=padded(DI),
        HEADS=tile.heads,
        INDEX_HEADS=padded(NI),
        BLOCK_N=tile.keys,
        HAS_SINK=a["sinks"] is not None,
        STAGES=tile.stages,
    )
    statistics = a["softmax_max"], a["softmax_sum"], a["sinks"]
    if plan.rows == 0 or entries == 0 or key.numel() == 0:
        loss.zero_()
        score.zero_()
    else:
        of_keys = [x for x in (key, key_rope, key_index) if x is not None]
        lse = memory.empty((1, plan.rows, N), torch.float32, device)
        given = None
        if all(x.is_contiguous() for x in of_keys):
            # one batch of all rows, whose keys lie one behind the other
            given = (
                q.transpose(0, 1)[None],
                key.flatten(0, -2)[None],
                None if qr is None else qr.transpose(0, 1)[None],
                None if key_rope is None else key_rope.flatten(0, -2)[None],
            )
        if given and hopper.supports(*given, lse):
            slots = memory.empty((1, plan.rows, entries), torch.int32, device)
            ends = memory.empty((1, plan.rows), torch.int32, device)
            launches.kernel(_rows_kernel, plan.rows)(
                index,
                *statistics,
                slots,
                ends,
                lse,
                entries=entries,
                index_row=index.stride(0),
                **plan.arguments,
                LAYOUT=plan.layout,
                C=constants._replace(HEADS=padded(N)),
                ENTRIES=padded(entries),
                num_warps=4,
            )
            of_heads, scale = lse.transpose(1, 2), a["scale_value"]
            hopper.launch(*given, slots, ends, of_heads, target.zero_()[None], scale)
            launches.kernel(_index_scores_kernel, plan.rows)(
                qi,
                key_index,
                w,
                slots,
                score,
                entries,
                *qi.stride()[:2],
                w.stride(0),
                DI,
                C=constants._replace(BLOCK_N=INDEX_KEYS, STAGES=INDEX_STAGES),
                num_warps=INDEX_WARPS,
            )
        else:
            launches.kernel(_scores_kernel, plan.rows)(
                q,
                key,
                qr,
                key_rope,
                qi,
                key_index,
                w,
                index,
                *statistics,
                target,
                score,
                scale_log2=a["scale_value"] * LOG2E.value,
                entries=entries,
                strides=(
                    *q.stride()[:2],
                    *((0, 0) if qr is None else qr.stride()[:2]),
                    *qi.stride()[:2],
                    w.stride(0),
                    index.stride(0),
                    *rows.strides(layout, key),
                    *((0, 0) if key_rope is None else rows.strides(layout, key_rope)),
                    *rows.strides(layout, key_index),
                ),
                **plan.arguments,
                LAYOUT=plan.layout,
                C=constants,
                num_warps=tile.warps,
            )
        launches.kernel(_loss_kernel, plan.rows)(
            target, score, loss, entries, EPS, ENTRIES=padded(entries), num_warps=4
        )
    grads = lightning_indexer_grad.backward(
        query=query_index,
        key=key_index,
        dy=score,
        sparse_indices=sparse_indices,
        weights=a["weights"],
        actual_seq_lengths_query=seqlens_q,
        actual_seq_lengths_key=seqlens_k,
        layout=layout,
        sparse_mode=mode,
        pre_tokens=a["pre_tokens"],
        next_tokens=a["next_tokens"],
    )
    return *grads, loss.sum().reshape(1)
