# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The indexer's KL loss over the selected keys, and its gradients, from the attention's statistics.

    target[j] = sum_h exp(scale query[h] . key[j] - softmax_max[h]) / softmax_sum[h]
    score[j] = sum_n weights[n] relu(query_index[n] . key_index[j])
    d = softmax(score) - target / sum target     loss = KL(target / sum target || softmax(score))

The selected keys of both kinds are laid out densely by the first two kernels of sparse attention;
then

    targets    cube + vector   a tile of keys, over the heads
    scores     cube + vector   likewise, over the indexer's heads
    row_loss   vector cores    both distributions of a row, its loss, and d

and lightning_indexer_grad takes d down to the indexer's inputs.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import memory
from ...dispatch.ops.indexer.sparse_lightning_indexer_grad_kl_loss import Arguments
from ..common import cores, entry, ragged, tiling, tune
from ..common.cores import tiled
from ..sparse_attention.sparse_flash_attention import gathered, resolved
from . import lightning_indexer_grad
from .indexer_loss import distributions, not_in_16s, too_wide

EPS = 1e-10


@entry.jit(
    do_not_specialize=[
        "first", "rows", "wide", "heads", "q_row", "q_head", "r_row", "r_head", "scale",
    ]
)  # fmt: skip
def targets(
    query,
    query_rope,
    dense,
    dense_rope,
    last,
    lse,
    target,
    first,
    rows,
    wide,
    heads,
    q_row,
    q_head,
    r_row,
    r_head,
    scale,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
):
    """target [T, wide]; what lies behind a row's last slot is not written."""
    d = tl.arange(0, DIM)
    j, tiles = tiled(wide, KEY_TILE)
    for work in range(tl.program_id(0), rows * tiles, tl.num_programs(0)):
        row = work // tiles
        start = work % tiles * KEY_TILE
        token = (first + row).to(tl.int64)
        if start < tl.load(last + first + row):
            at = (row.to(tl.int64) * wide + start + j)[:, None]
            k = tl.load(dense + at * DIM + d[None])
            if ROPE > 0:
                e = tl.arange(0, ROPE)
                k_rope = tl.load(dense_rope + at * ROPE + e[None])
            acc = tl.zeros((KEY_TILE,), tl.float32)
            for head in range(0, heads, HEAD_TILE):
                h = head + tl.arange(0, HEAD_TILE)
                there = (h < heads)[:, None]
                of_q = query + token * q_row + h[:, None] * q_head + d[None]
                z = tl.dot(tl.load(of_q, mask=there, other=0.0), tl.trans(k))
                if ROPE > 0:
                    of_r = query_rope + token * r_row + h[:, None] * r_head + e[None]
                    z = tl.dot(tl.load(of_r, mask=there, other=0.0), tl.trans(k_rope), z)
                sums = tl.load(lse + token * heads + h, mask=h < heads, other=0.0)
                # the zeros of heads that are not there, times an infinite key, are NaN
                acc += tl.sum(tl.where(there, tl.exp(z * scale - sums[:, None]), 0.0), 0)
            tl.store(target + token * wide + start + j, acc)


@entry.jit(do_not_specialize=["first", "rows", "wide", "heads", "q_row", "q_head", "w_row"])
def scores(
    query,
    weights,
    dense,
    last,
    score,
    first,
    rows,
    wide,
    heads,
    q_row,
    q_head,
    w_row,
    DIM: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
):
    """score [T, wide], written like the target."""
    d = tl.arange(0, DIM)
    j, tiles = tiled(wide, KEY_TILE)
    for work in range(tl.program_id(0), rows * tiles, tl.num_programs(0)):
        row = work // tiles
        start = work % tiles * KEY_TILE
        token = (first + row).to(tl.int64)
        if start < tl.load(last + first + row):
            at = (row.to(tl.int64) * wide + start + j)[:, None]
            k = tl.load(dense + at * DIM + d[None])
            acc = tl.zeros((KEY_TILE,), tl.float32)
            for head in range(0, heads, HEAD_TILE):
                h = head + tl.arange(0, HEAD_TILE)
                of_q = query + token * q_row + h[:, None] * q_head + d[None]
                q = tl.load(of_q, mask=(h < heads)[:, None], other=0.0)
                w = tl.load(weights + token * w_row + h, mask=h < heads, other=0.0)
                s = tl.maximum(tl.dot(q, tl.trans(k)), 0.0, propagate_nan=tl.PropagateNan.ALL)
                s *= w.to(tl.float32)[:, None]
                acc += tl.sum(tl.where((h < heads)[:, None], s, 0.0), 0)
            tl.store(score + token * wide + start + j, acc)


@entry.jit(do_not_specialize=["rows", "count", "wide", "eps"])
def row_loss(target, score, slots, loss, d, rows, count, wide, eps, WIDTH: tl.constexpr):
    j = tl.arange(0, WIDTH)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        of_row = row.to(tl.int64) * wide
        slot = tl.load(slots + of_row + j, mask=j < count, other=-1)
        ok = tl.where(slot >= 0, 1.0, 0.0)
        p = tl.load(target + of_row + j, mask=j < count, other=0.0)
        x = tl.load(score + of_row + j, mask=j < count, other=0.0)
        p, r = distributions(p, x, ok)
        terms = (p + eps) * (tl.log(p + eps) - tl.log(r + eps))
        tl.store(loss + row, tl.sum(tl.where(ok > 0, terms, 0.0), 0))
        to = d + row.to(tl.int64) * count
        tl.store(to + j, tl.where(ok > 0, r - p, 0.0), mask=j < count)


def unsupported(**x: Unpack[Arguments]) -> str | None:
    query, query_rope, indices = x["query"], x["query_rope"], x["sparse_indices"]
    size, rope = query.shape[-1], 0 if query_rope is None else query_rope.shape[-1]
    return (
        tiling.not_multiplied(query=query)
        or not_in_16s(size, rope)
        or lightning_indexer_grad.unsupported(x["query_index"], x["key_index"], indices)
        or ragged.uneven(key=x["key"], key_rope=x["key_rope"], key_index=x["key_index"])
        or too_wide(indices)
        or tiling.matmul_overflow(64, 128, size + rope)
    )


def forward(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, key, indices = x["query"], x["key"], x["sparse_indices"]
    layout, device = x["layout"] or "BSND", query.device
    mode = 3 if x["sparse_mode"] is None else x["sparse_mode"]
    act_q, act_k = (
        None if sums is None else torch.tensor(sums, dtype=torch.int32, device=device)
        for sums in (x["actual_seq_qlen"], x["actual_seq_klen"])
    )
    plan = ragged.plan(query, key, act_q, act_k, None, layout, layout, mode)
    d = memory.empty(indices.shape, torch.float32, device)
    if plan.rows * indices.shape[-1] == 0 or key.numel() == 0:
        loss = memory.empty([1], torch.float32, device).zero_()
        d.zero_()
    else:
        loss = _losses(plan, d, **x)
    grads = lightning_indexer_grad.backward(
        x["query_index"],
        x["key_index"],
        d,
        indices,
        x["weights"],
        act_q,
        act_k,
        layout,
        mode,
        None,
        None,
    )
    return *grads, loss.sum().reshape(1)


def _log_sums(peak: Tensor, total: Tensor, sinks: Tensor | None) -> Tensor:
    """[T, N]; inf where a row saw nothing, so that it adds nothing."""
    peak, total = peak.to(torch.float32), total.to(torch.float32)
    if sinks is not None:
        total = total + torch.exp(sinks.to(torch.float32) - peak)
    lse = torch.where(peak > -torch.inf, peak + torch.log(total), torch.inf)
    return lse.view(-1, lse.shape[-1])


def _losses(plan: ragged.Plan, d: Tensor, **x: Unpack[Arguments]) -> Tensor:
    """The loss by token; writes d."""
    query, key, query_rope = x["query"], x["key"], x["query_rope"]
    query_index, key_index, indices = x["query_index"], x["key_index"], x["sparse_indices"]
    lse = _log_sums(x["softmax_max"], x["softmax_sum"], x["sinks"])
    (heads, size), (index_heads, index_size) = query.shape[-2:], query_index.shape[-2:]
    device, dtype, count = query.device, query.dtype, indices.shape[-1]
    # without the rotary part its arguments are there, but not read
    q_rope, k_rope = (query, key) if query_rope is None else (query_rope, x["key_rope"])
    assert k_rope is not None
    rope = 0 if query_rope is None else query_rope.shape[-1]
    kernel = "sparse_lightning_indexer_grad_kl_loss.targets"
    products = tune.at_least(kernel, "HEAD_TILE", heads, size, rope)
    tile = products.tiles["KEY_TILE"]
    wide = tiling.up(count, tile)
    slots, last = resolved(ragged.int32(indices).flatten(0, -3), key, plan, wide)
    target = memory.empty((plan.rows, wide), torch.float32, device)
    score = memory.empty((plan.rows, wide), torch.float32, device)
    loss = memory.empty((plan.rows,), torch.float32, device)
    row_bytes = wide * (size + rope + index_size) * dtype.itemsize
    at_once = tiling.at_once(plan.rows, row_bytes)
    dense = memory.empty((at_once, wide, size), dtype, device)
    dense_rope = memory.empty((at_once, wide, rope), dtype, device)
    dense_index = memory.empty((at_once, wide, index_size), dtype, device)
    q, qr, qi = (each.flatten(0, -3) for each in (query, q_rope, query_index))
    w = x["weights"].flatten(0, -2)
    for first in range(0, plan.rows, at_once):
        rows = min(at_once, plan.rows - first)
        span = (first, rows, wide)
        gathered((key, k_rope), slots, last, (dense, dense_rope), span, tile)
        gathered((key_index, None), slots, last, (dense_index, None), span, tile)
        targets[(cores.cube(),)](
            q,
            qr,
            dense,
            dense_rope,
            last,
            lse,
            target,
            *span,
            heads,
            *q.stride()[:2],
            *qr.stride()[:2],
            x["scale_value"],
            DIM=size,
            ROPE=rope,
            **products.keywords,
        )
        scores[(cores.cube(),)](
            qi,
            w,
            dense_index,
            last,
            score,
            *span,
            index_heads,
            *qi.stride()[:2],
            w.stride(0),
            DIM=index_size,
            **tune.at_least(
                "sparse_lightning_indexer_grad_kl_loss.scores", "HEAD_TILE", index_heads, index_size
            ).keywords,
        )
    row_loss[(min(plan.rows, cores.vector()),)](
        target,
        score,
        slots,
        loss,
        d,
        plan.rows,
        count,
        wide,
        EPS,
        **tune.at_least("sparse_lightning_indexer_grad_kl_loss.row_loss", "WIDTH", count).keywords,
    )
    return loss
