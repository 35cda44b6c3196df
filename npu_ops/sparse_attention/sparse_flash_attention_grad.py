# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Gradients of the sparse latent attention; every sum has one fixed order.

    p = exp(z - softmax_max) / softmax_sum       dp = d_out . key      (z as in the forward op)
    dz = scale p (dp - delta)                    d_query = dz key
                                                 d_key = dz^T query + p^T d_out

    row_sums     vector cores    log-sum-exp of a head's row, and
                                 delta = sum_d d_out out - d_softmax_sum softmax_sum
    grad_query   cube + vector   a token's heads, over its selected keys, laid out densely by the
                                 forward op's kernels
    grad_keys    cube + vector   a tile of keys, over the tokens of its request that see it and
                                 `counts` [T, reach], how often each token selected each key

The keys' gradient goes over positions, not over slots, so that a tile of it belongs to one core.
The latent part comes in two halves: with both accumulators L0C is full.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import memory, rope
from ...dispatch.ops.sparse_attention.sparse_flash_attention_grad import Arguments
from ..common import cores, ragged, tiling, tune, tuples
from ..common.ragged import Layout, Requests, Strides, among, key_rows, keys_of, tokens_of
from ..indexer.lightning_indexer_grad import spread_over, spread_width
from .sparse_flash_attention import gathered, resolved


@tuples.jit(["rows", "heads"])
def row_sums(
    d_out,
    out,
    peak,
    total,
    d_total,
    delta,
    lse,
    rows,
    heads,
    g_stride: Strides,
    o_stride: Strides,
    LATENT: tl.constexpr,
    HEAD_TILE: tl.constexpr,
):
    """A row that saw nothing gets the sum inf, so that its p is 0."""
    d = tl.arange(0, LATENT)
    tiles = (heads + HEAD_TILE - 1) // HEAD_TILE
    for work in range(tl.program_id(0), rows * tiles, tl.num_programs(0)):
        token = (work // tiles).to(tl.int64)
        h = work % tiles * HEAD_TILE + tl.arange(0, HEAD_TILE)
        there = (h < heads)[:, None]
        g = tl.load(
            d_out + token * g_stride.row + h[:, None] * g_stride.head + d[None],
            mask=there,
            other=0.0,
        )
        o = tl.load(
            out + token * o_stride.row + h[:, None] * o_stride.head + d[None], mask=there, other=0.0
        )
        at = token * heads + h
        products = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
        m = tl.load(peak + at, mask=h < heads, other=0.0)
        s = tl.load(total + at, mask=h < heads, other=0.0)
        if d_total is not None:
            of_total = tl.load(d_total + at, mask=h < heads, other=0.0)
            products -= tl.where(s > 0, of_total * s, 0.0)
        tl.store(delta + at, products, mask=h < heads)
        sums = tl.where(s > 0, m + tl.log(tl.where(s > 0, s, 1.0)), float("inf"))
        tl.store(lse + at, sums, mask=h < heads)


class Sizes(NamedTuple):
    LATENT: tl.constexpr
    ROTARY: tl.constexpr  # 0: there is no rotary part


@tuples.jit(["first", "rows", "wide", "heads", "scale"])
def grad_query(
    query,
    query_rope,
    d_out,
    dense,
    dense_rope,
    slots,
    last,
    delta,
    lse,
    d_query,
    d_query_rope,
    first,
    rows,
    wide,
    heads,
    q_stride: Strides,
    r_stride: Strides,
    g_stride: Strides,
    scale,
    C: Sizes,
    HEAD_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    set_workspace_multibuffer: tl.constexpr,
):
    HALF: tl.constexpr = C.LATENT // 2
    d = tl.arange(0, HALF)
    j = tl.arange(0, KEY_TILE)
    tiles = (heads + HEAD_TILE - 1) // HEAD_TILE
    for work in range(tl.program_id(0), rows * tiles, tl.num_programs(0)):
        row = work // tiles
        token = (first + row).to(tl.int64)
        h = work % tiles * HEAD_TILE + tl.arange(0, HEAD_TILE)
        there = (h < heads)[:, None]
        of_q = query + token * q_stride.row + h[:, None] * q_stride.head + d[None]
        q0 = tl.load(of_q, mask=there, other=0.0)
        q1 = tl.load(of_q + HALF, mask=there, other=0.0)
        of_g = d_out + token * g_stride.row + h[:, None] * g_stride.head + d[None]
        g0 = tl.load(of_g, mask=there, other=0.0)
        g1 = tl.load(of_g + HALF, mask=there, other=0.0)
        if C.ROTARY > 0:
            e = tl.arange(0, C.ROTARY)
            of_r = query_rope + token * r_stride.row + h[:, None] * r_stride.head + e[None]
            qr = tl.load(of_r, mask=there, other=0.0)
            acc_r = tl.zeros((HEAD_TILE, C.ROTARY), tl.float32)
        end = tl.load(last + first + row)
        acc0 = tl.zeros((HEAD_TILE, HALF), tl.float32)
        acc1 = tl.zeros((HEAD_TILE, HALF), tl.float32)
        for start in range(0, end, KEY_TILE):
            at = (row.to(tl.int64) * wide + start + j)[:, None]
            k0 = tl.load(dense + at * C.LATENT + d[None])  # [KEY_TILE, HALF]
            k1 = tl.load(dense + at * C.LATENT + HALF + d[None])
            z = tl.dot(k0, tl.trans(q0))  # [KEY_TILE, HEAD_TILE]
            z = tl.dot(k1, tl.trans(q1), z)
            if C.ROTARY > 0:
                kr = tl.load(dense_rope + at * C.ROTARY + e[None])
                z = tl.dot(kr, tl.trans(qr), z)
            dp = tl.dot(k0, tl.trans(g0))
            dp = tl.dot(k1, tl.trans(g1), dp)
            # here and keys by heads: else both vector units do the work of the whole tile
            sums = tl.load(lse + token * heads + h, mask=h < heads, other=float("inf"))
            of_delta = tl.load(delta + token * heads + h, mask=h < heads, other=0.0)
            slot = tl.load(slots + token * wide + start + j)
            p = tl.exp(z * scale - sums[None] + tl.where(slot >= 0, 0.0, float("-inf"))[:, None])
            dz = (p * (dp - of_delta[None]) * scale).to(k0.dtype)
            acc0 = tl.dot(tl.trans(dz), k0, acc0)
            acc1 = tl.dot(tl.trans(dz), k1, acc1)
            if C.ROTARY > 0:
                acc_r = tl.dot(tl.trans(dz), kr, acc_r)
        to = d_query + (token * heads + h[:, None]) * C.LATENT + d[None]
        tl.store(to, acc0.to(d_query.dtype.element_ty), mask=there)
        tl.store(to + HALF, acc1.to(d_query.dtype.element_ty), mask=there)
        if C.ROTARY > 0:
            to = d_query_rope + (token * heads + h[:, None]) * C.ROTARY + e[None]
            tl.store(to, acc_r.to(d_query.dtype.element_ty), mask=there)


class KeyStrides(NamedTuple):
    row: int
    rope_row: int
    page_rows: int  # of a page, in rows


@tuples.jit(["first", "rows", "wide", "heads", "scale"])
def grad_keys(
    query,
    query_rope,
    d_out,
    key,
    key_rope,
    counts,
    delta,
    lse,
    d_key,
    d_key_rope,
    first,
    rows,
    wide,
    heads,
    q_stride: Strides,
    r_stride: Strides,
    g_stride: Strides,
    k_stride: KeyStrides,
    scale,
    of: Requests,
    layout: Layout,
    C: Sizes,
    HEAD_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    set_workspace_multibuffer: tl.constexpr,
):
    """d_key [keys, LATENT] and d_key_rope, float32: what `rows` tokens from `first` on contribute.
    Added up over launches outside."""
    HALF: tl.constexpr = C.LATENT // 2
    j = tl.arange(0, KEY_TILE)
    d = tl.arange(0, HALF)
    turn = tl.program_id(0)
    turns = tl.num_programs(0)
    steps_of_token = (heads + HEAD_TILE - 1) // HEAD_TILE
    for request in range(0, of.requests):
        token, count = tokens_of(
            request, of.query_lengths, of.requests, of.tokens, layout.Q_TND, layout.Q_LENGTHS
        )
        start, keys = keys_of(request, of.key_lengths, of.reach, layout.KEYS, layout.K_LENGTHS)
        low, high = among(token, count, first, rows)
        tiles = tl.where(high > low, (keys + KEY_TILE - 1) // KEY_TILE, 0)
        for tile in range(turn, tiles, turns):
            position = tile * KEY_TILE
            row, to = key_rows(request, start, position, k_stride.page_rows, of.reach, layout.KEYS)
            there = (j < keys - position)[:, None]
            of_k = key + (row + j)[:, None] * k_stride.row + d[None]
            k0 = tl.load(of_k, mask=there, other=0.0)
            k1 = tl.load(of_k + HALF, mask=there, other=0.0)
            if C.ROTARY > 0:
                e = tl.arange(0, C.ROTARY)
                of_rope = key_rope + (row + j)[:, None] * k_stride.rope_row + e[None]
                kr = tl.load(of_rope, mask=there, other=0.0)
                acc_r = tl.zeros((KEY_TILE, C.ROTARY), tl.float32)
            begin = low
            if layout.CAUSAL:
                # earlier tokens see no key of this tile
                begin = tl.maximum(low, position - keys + count)
            acc0 = tl.zeros((KEY_TILE, HALF), tl.float32)
            acc1 = tl.zeros((KEY_TILE, HALF), tl.float32)
            for step in range(0, tl.maximum(high - begin, 0) * steps_of_token):
                i = (token + begin + step // steps_of_token).to(tl.int64)
                h = step % steps_of_token * HEAD_TILE + tl.arange(0, HEAD_TILE)
                known = (h < heads)[:, None]
                of_q = query + i * q_stride.row + h[:, None] * q_stride.head + d[None]
                q0 = tl.load(of_q, mask=known, other=0.0)
                q1 = tl.load(of_q + HALF, mask=known, other=0.0)
                of_g = d_out + i * g_stride.row + h[:, None] * g_stride.head + d[None]
                g0 = tl.load(of_g, mask=known, other=0.0)
                g1 = tl.load(of_g + HALF, mask=known, other=0.0)
                z = tl.dot(q0, tl.trans(k0))  # [HEAD_TILE, KEY_TILE]
                z = tl.dot(q1, tl.trans(k1), z)
                if C.ROTARY > 0:
                    of_r = query_rope + i * r_stride.row + h[:, None] * r_stride.head + e[None]
                    qr = tl.load(of_r, mask=known, other=0.0)
                    z = tl.dot(qr, tl.trans(kr), z)
                dp = tl.dot(g0, tl.trans(k0))
                dp = tl.dot(g1, tl.trans(k1), dp)
                sums = tl.load(lse + i * heads + h, mask=h < heads, other=float("inf"))
                of_delta = tl.load(delta + i * heads + h, mask=h < heads, other=0.0)
                times = tl.load(counts + (i - first) * wide + position + j)[None]
                # a key that was not selected may have any logit: inf * 0 is NaN
                p = tl.where(times > 0, tl.exp(z * scale - sums[:, None]), 0.0) * times
                dz = (p * (dp - of_delta[:, None]) * scale).to(q0.dtype)
                p = p.to(q0.dtype)
                acc0 = tl.dot(tl.trans(dz), q0, acc0)
                acc0 = tl.dot(tl.trans(p), g0, acc0)
                acc1 = tl.dot(tl.trans(dz), q1, acc1)
                acc1 = tl.dot(tl.trans(p), g1, acc1)
                if C.ROTARY > 0:
                    acc_r = tl.dot(tl.trans(dz), qr, acc_r)
            to = (to + j)[:, None]
            tl.store(d_key + to * C.LATENT + d[None], acc0, mask=there)
            tl.store(d_key + to * C.LATENT + HALF + d[None], acc1, mask=there)
            if C.ROTARY > 0:
                tl.store(d_key_rope + to * C.ROTARY + e[None], acc_r, mask=there)
        turn = ((turn - tiles) % turns + turns) % turns


def unsupported(**x: Unpack[Arguments]) -> str | None:
    query, key, query_rope = x["query"], x["key"], x["query_rope"]
    if reason := tiling.not_multiplied(query=query):
        return reason
    latent, rotary = query.shape[-1], 0 if query_rope is None else query_rope.shape[-1]
    if latent % 32 or rotary % 16:
        return f"head sizes {latent} and {rotary}: half of the one and the other come in 16s"
    if latent > 512 or rotary > 64:
        return f"head sizes {latent} and {rotary}, the kernel takes 512 and 64 at most"
    if x["value"] is not None:
        return "`value` is given; the kernel attends to the latent itself"
    if key.shape[-3] > ragged.LONGEST:
        return f"contexts of up to {key.shape[-3]} positions, the kernel reaches {ragged.LONGEST}"
    return ragged.uneven(key=key, key_rope=rope.given(query_rope, x["key_rope"])[1])


def _by_position(indices: Tensor, block: int) -> Tensor:
    """int32 [T, K * block]: every position of the selected blocks; absent ones stay negative."""
    rows = ragged.int32(indices).flatten(0, -2)
    if block == 1:
        return rows
    blocks = rows.masked_fill((rows < 0) | (rows > ragged.LONGEST // block), -1)
    each = blocks[..., None] * block + torch.arange(block, dtype=torch.int32, device=rows.device)
    return each.flatten(1)


def backward(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    query, key, sparse_indices, d_out = x["query"], x["key"], x["sparse_indices"], x["d_out"]
    query_rope, key_rope = x["query_rope"], x["key_rope"]
    layout = x["layout"] or "BSND"
    mode = 3 if x["sparse_mode"] is None else x["sparse_mode"]
    act_q, act_k = x["actual_seq_qlen"], x["actual_seq_kvlen"]
    plan = ragged.plan(query, key, act_q, act_k, None, layout, layout, mode)
    device, dtype, (heads, latent) = query.device, query.dtype, query.shape[-2:]
    of_query, of_key = rope.given(query_rope, key_rope)
    # without the rotary part its arguments are there, but not read
    q_rope, k_rope = (query if of_query is None else of_query), (key if of_key is None else of_key)
    rotary = 0 if of_query is None else of_query.shape[-1]
    d_query = memory.empty(query.shape, dtype, device)
    d_query_rope = memory.empty([0] if query_rope is None else query_rope.shape, dtype, device)
    # keys behind the lengths belong to no tile
    sums = [
        memory.empty([*key.shape[:-1], size], torch.float32, device).zero_()
        for size in (latent, rotary)
    ]
    if query.numel() == 0 or key.numel() == 0 or sparse_indices.numel() == 0:
        d_query.zero_()
        d_query_rope.zero_()
    else:
        q, r, g, o = (each.flatten(0, -3) for each in (query, q_rope, d_out, x["out"]))
        delta, lse = (memory.empty((plan.rows, heads), torch.float32, device) for _ in range(2))
        row_sums[(cores.vector(),)](
            g,
            o,
            x["softmax_max"],
            x["softmax_sum"],
            x["d_softmax_sum"],
            delta,
            lse,
            plan.rows,
            heads,
            *g.stride()[:2],
            *o.stride()[:2],
            LATENT=latent,
            **tune.only("sparse_flash_attention_grad.row_sums").keywords,
        )
        indices = _by_position(sparse_indices, x["sparse_block_size"])
        strides = (*q.stride()[:2], *r.stride()[:2], *g.stride()[:2])
        shared = dict(scale=x["scale_value"], LATENT=latent, ROTARY=rotary)
        _queries(
            (q, r, g),
            key,
            k_rope,
            indices,
            delta,
            lse,
            d_query,
            d_query_rope,
            plan,
            strides,
            shared,
        )
        _keys((q, r, g), key, k_rope, indices, delta, lse, sums, plan, strides, shared)
    d_key, d_key_rope = (each.to(dtype) for each in sums)
    none = torch.empty([0], dtype=dtype, device=device)
    return d_query, d_key, none, d_query_rope, none.clone() if key_rope is None else d_key_rope


def _queries(
    rows_of: tuple[Tensor, ...],
    key: Tensor,
    k_rope: Tensor,
    indices: Tensor,
    delta: Tensor,
    lse: Tensor,
    d_query: Tensor,
    d_query_rope: Tensor,
    plan: ragged.Plan,
    strides: tuple[int, ...],
    shared: dict[str, Any],
) -> None:
    heads, count = delta.shape[1], indices.shape[1]
    latent, rotary = shared["LATENT"], shared["ROTARY"]
    kernel = "sparse_flash_attention_grad.grad_query"
    products = tune.at_least(kernel, "HEAD_TILE", heads, latent, rotary)
    tile = products.tiles["KEY_TILE"]
    wide = tiling.up(count, tile)
    slots, last = resolved(indices, key, plan, wide)
    each = wide * (latent + rotary) * key.element_size()
    at_once = tiling.at_once(plan.rows, each)
    dense = memory.empty((at_once, wide, latent), key.dtype, key.device)
    dense_rope = memory.empty((at_once, wide, rotary), key.dtype, key.device)
    for first in range(0, plan.rows, at_once):
        rows = min(at_once, plan.rows - first)
        span = (first, rows, wide)
        gathered((key, k_rope), slots, last, (dense, dense_rope), span, tile)
        grad_query[(cores.cube(),)](
            *rows_of,
            dense,
            dense_rope,
            slots,
            last,
            delta,
            lse,
            d_query,
            d_query_rope,
            *span,
            heads,
            *strides,
            **shared,
            **products.keywords,
        )


def _keys(
    rows_of: tuple[Tensor, ...],
    key: Tensor,
    k_rope: Tensor,
    indices: Tensor,
    delta: Tensor,
    lse: Tensor,
    sums: list[Tensor],
    plan: ragged.Plan,
    strides: tuple[int, ...],
    shared: dict[str, Any],
) -> None:
    """Adds to `sums`."""
    heads, count = delta.shape[1], indices.shape[1]
    kernel = "sparse_flash_attention_grad.grad_keys"
    products = tune.at_least(kernel, "HEAD_TILE", heads, shared["LATENT"], shared["ROTARY"])
    wide = spread_width(plan)
    at_once = tiling.at_once(plan.rows, wide * 4)
    counts = memory.empty((at_once, wide), torch.float32, key.device)
    one = torch.ones(count, dtype=torch.float32, device=key.device)
    for first in range(0, plan.rows, at_once):
        rows = min(at_once, plan.rows - first)
        spread_over(one, 0, indices, counts, plan, first, rows)
        parts = sums if first == 0 else [torch.zeros_like(x) for x in sums]
        grad_keys[(cores.cube(),)](
            *rows_of,
            key,
            k_rope,
            counts,
            delta,
            lse,
            *parts,
            first,
            rows,
            wide,
            heads,
            *strides,
            ragged.row_stride(key),
            ragged.row_stride(k_rope),
            ragged.page_rows(key),
            **plan.requests,
            **plan.flags,
            **shared,
            **products.keywords,
        )
        if first > 0:
            for total, part in zip(sums, parts, strict=True):
                total += part
