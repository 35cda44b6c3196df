# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Latent attention over each query's own selection, in three kernels.

    z = scale ([query, query_rope] . [key, key_rope])   m = max z   l = sum exp(z - m)
    out = sum exp(z - m) key / (l + exp(sink - m))

    resolve   vector cores   sparse_indices -> slots [T, K], -1 where absent; last slot of a token
    gather    vector cores   the selected rows -> dense [T, K, 512] and [T, K, 64], one bulk copy
                             a row; an absent row is a copy of one that the token did select
    attend    cube + vector  flash attention over the dense rows; the latent in two halves, since
                             L0C holds 64 x 512 floats at most; the key tile is the value tile too

The dense rows are written and read once, which is what gathering inside the attention would cost
as well (the compiler passes gathered tiles through global memory), and all head tiles share them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch.common import memory
from . import cores, entry, ragged, tiling, tune
from .ragged import PAGED, TND, visible


@triton.jit
def _pages(row, column, limit, page, PIECE: tl.constexpr):
    """The table's entries at `column`, looked up in UB: from global memory they come one by one.
    As floats, since the gather takes no integers; exact up to 2**24, and no cache has more."""
    p = tl.arange(0, PIECE)
    number = tl.full((PIECE,), -1.0, tl.float32)
    used = (limit + page - 1) // page
    for first in range(0, used, PIECE):
        entry = tl.load(row + first + p, mask=p < used - first, other=-1).to(tl.float32)
        at = column - first
        here = (at >= 0) & (at < PIECE)
        found = tl.gather(entry, tl.where(here, at, 0), 0)
        number = tl.where(here, found, number)
    return number.to(tl.int32)


@entry.jit(
    do_not_specialize=[
        "rows", "count", "wide", "indices_stride", "block", "requests", "tokens", "reach",
        "table_stride", "pages", "page", "page_rows",
    ]
)  # fmt: skip
def resolve(
    indices, table, query_lengths, key_lengths, slots, last,
    rows, count, wide, indices_stride, block, requests, tokens, reach, table_stride, pages, page,
    page_rows,
    Q_TND: tl.constexpr, Q_LENGTHS: tl.constexpr, KEYS: tl.constexpr, K_LENGTHS: tl.constexpr,
    CAUSAL: tl.constexpr, BLOCKS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        request, start, limit = visible(
            row, query_lengths, key_lengths, requests, tokens, reach,
            Q_TND, Q_LENGTHS, KEYS, K_LENGTHS, CAUSAL,
        )  # fmt: skip
        selected = indices + row.to(tl.int64) * indices_stride
        end = 0
        for first in range(0, wide, PIECE):
            j = first + tl.arange(0, PIECE)
            if BLOCKS:
                number = j // block
                at = tl.load(selected + tl.minimum(number, count - 1))
                # an absent block stays near, so that its positions fit in 32 bits
                at = tl.minimum(tl.maximum(at, -1), limit // block + 1)
                position = (at - number) * block + j
                exists = (j < count * block) & (position >= 0) & (position < limit)
            else:
                position = tl.load(selected + j, mask=j < count, other=-1)
                exists = (position >= 0) & (position < limit)
            if KEYS == PAGED:
                # not `position % page`: a remainder is a scalar loop
                column = tl.where(exists, position // page, 0)
                of_request = table + request.to(tl.int64) * table_stride
                number = _pages(of_request, column, limit, page, PIECE)
                exists = exists & (number >= 0) & (number < pages)
                slot = number * page_rows + position - column * page
            elif KEYS == TND:
                slot = start + position
            else:
                slot = request * page_rows + position
            slot = tl.where(exists, slot, -1)
            tl.store(slots + row.to(tl.int64) * wide + j, slot, mask=j < wide)
            reached = tl.max(tl.where(exists, (j + 1).to(tl.float32), 0.0), 0)
            end = tl.maximum(end, reached.to(tl.int32))
        tl.store(last + row, end)


@entry.jit(do_not_specialize=["first", "rows", "wide", "latent_stride", "rotary_stride"])
def gather(
    latent, rotary, slots, last, dense_latent, dense_rotary,
    first, rows, wide, latent_stride, rotary_stride,
    LATENT: tl.constexpr, ROTARY: tl.constexpr, ROWS: tl.constexpr, KEY_TILE: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, ROWS)
    d = tl.arange(0, LATENT)
    pieces = wide // ROWS
    for work in range(tl.program_id(0), rows * pieces, tl.num_programs(0)):
        row = work // pieces
        piece = work % pieces * ROWS
        end = tl.load(last + first + row)
        # a key tile is read as a whole
        if piece < (end + KEY_TILE - 1) // KEY_TILE * KEY_TILE:
            slot = tl.load(slots + (first + row).to(tl.int64) * wide + piece + r)
            top = tl.max(slot, 0)
            to = (row.to(tl.int64) * wide + piece + r)[:, None]
            if top >= 0:
                # a mask would not stop the read of an absent row, and 0 * NaN is NaN
                there = tl.where(slot >= 0, slot, top).to(tl.int64)[:, None]
                tile = tl.load(latent + there * latent_stride + d[None])
                tl.store(dense_latent + to * LATENT + d[None], tile)
                if ROTARY > 0:
                    e = tl.arange(0, ROTARY)
                    tail = tl.load(rotary + there * rotary_stride + e[None])
                    tl.store(dense_rotary + to * ROTARY + e[None], tail)
            else:
                nothing = tl.zeros((ROWS, LATENT), dense_latent.dtype.element_ty)
                tl.store(dense_latent + to * LATENT + d[None], nothing)
                if ROTARY > 0:
                    e = tl.arange(0, ROTARY)
                    nothing = tl.zeros((ROWS, ROTARY), dense_latent.dtype.element_ty)
                    tl.store(dense_rotary + to * ROTARY + e[None], nothing)


@entry.jit(
    do_not_specialize=[
        "first", "rows", "wide", "heads", "query_row", "query_head", "rope_row", "rope_head",
        "scale",
    ]
)  # fmt: skip
def attend(
    query, query_rope, dense_latent, dense_rotary, slots, last, sinks, out, out_max, out_sum,
    first, rows, wide, heads, query_row, query_head, rope_row, rope_head, scale,
    LATENT: tl.constexpr, ROTARY: tl.constexpr, SINKS: tl.constexpr, WHOLE: tl.constexpr,
    HEAD_TILE: tl.constexpr, KEY_TILE: tl.constexpr, set_workspace_multibuffer: tl.constexpr,
):  # fmt: skip
    """The statistics are stored even where nobody asks for them: without a store of its own, what
    a loop carries keeps the vector units from sharing the tile (compiler of January 2026)."""
    HALF: tl.constexpr = LATENT // 2
    d = tl.arange(0, HALF)
    j = tl.arange(0, KEY_TILE)
    tiles = (heads + HEAD_TILE - 1) // HEAD_TILE
    for work in range(tl.program_id(0), rows * tiles, tl.num_programs(0)):
        row = work // tiles
        token = (first + row).to(tl.int64)
        h = work % tiles * HEAD_TILE + tl.arange(0, HEAD_TILE)
        there = h[:, None] < heads
        from_query = query + token * query_row + h[:, None] * query_head + d[None]
        if WHOLE:
            q0 = tl.load(from_query)
            q1 = tl.load(from_query + HALF)
        else:
            q0 = tl.load(from_query, mask=there, other=0.0)
            q1 = tl.load(from_query + HALF, mask=there, other=0.0)
        if ROTARY > 0:
            e = tl.arange(0, ROTARY)
            from_rope = query_rope + token * rope_row + h[:, None] * rope_head + e[None]
            if WHOLE:
                qr = tl.load(from_rope)
            else:
                qr = tl.load(from_rope, mask=there, other=0.0)
        end = tl.load(last + first + row)
        # finite: a tile without a single key must not make NaN
        row_max = tl.full((HEAD_TILE,), -1e30, tl.float32)
        total = tl.zeros((HEAD_TILE,), tl.float32)
        acc0 = tl.zeros((HEAD_TILE, HALF), tl.float32)
        acc1 = tl.zeros((HEAD_TILE, HALF), tl.float32)
        for start in range(0, end, KEY_TILE):
            at = (row.to(tl.int64) * wide + start + j)[:, None]
            k0 = tl.load(dense_latent + at * LATENT + d[None])  # [KEY_TILE, HALF]
            k1 = tl.load(dense_latent + at * LATENT + HALF + d[None])
            z = tl.dot(q0, tl.trans(k0))
            z = tl.dot(q1, tl.trans(k1), z)
            if ROTARY > 0:
                kr = tl.load(dense_rotary + at * ROTARY + e[None])
                z = tl.dot(qr, tl.trans(kr), z)
            slot = tl.load(slots + token * wide + start + j)
            z = z * scale + tl.where(slot.to(tl.float32) >= 0, 0.0, float("-inf"))[None]
            new_max = tl.maximum(row_max, tl.max(z, 1))
            p = tl.exp(z - new_max[:, None])
            shrink = tl.exp(row_max - new_max)
            total = total * shrink + tl.sum(p, 1)
            p = p.to(k0.dtype)
            acc0 = acc0 * shrink[:, None] + tl.dot(p, k0)
            acc1 = acc1 * shrink[:, None] + tl.dot(p, k1)
            row_max = new_max
        denominator = total
        if SINKS:
            if WHOLE:
                sink = tl.load(sinks + h)
            else:
                sink = tl.load(sinks + h, mask=h < heads, other=0.0)
            denominator += tl.exp(sink - row_max)
        # without a key the sums are 0, and so is the result
        denominator = tl.where(denominator > 0, denominator, 1.0)[:, None]
        to = out + (token * heads + h[:, None]) * LATENT + d[None]
        row_max = tl.where(total > 0, row_max, float("-inf"))
        of_row = token * heads + h
        if WHOLE:
            tl.store(to, (acc0 / denominator).to(out.dtype.element_ty))
            tl.store(to + HALF, (acc1 / denominator).to(out.dtype.element_ty))
            tl.store(out_max + of_row, row_max)
            tl.store(out_sum + of_row, total)
        else:
            tl.store(to, (acc0 / denominator).to(out.dtype.element_ty), mask=there)
            tl.store(to + HALF, (acc1 / denominator).to(out.dtype.element_ty), mask=there)
            tl.store(out_max + of_row, row_max, mask=h < heads)
            tl.store(out_sum + of_row, total, mask=h < heads)


def _attention(heads: int, latent: int, rotary: int) -> tune.Config:
    """The largest tile that fits and divides the heads; where none does, the least one that
    covers them, or the largest."""
    kernel = "sparse_flash_attention.attend"
    fitting = [
        config
        for config in tune.TABLE[kernel]
        if not tiling.attend_overflow(
            config.tiles["HEAD_TILE"], config.tiles["KEY_TILE"], latent, rotary
        )
    ]
    whole = [config for config in fitting if heads % config.tiles["HEAD_TILE"] == 0]
    rest = [config for config in fitting if config not in whole]
    wanted = whole[::-1] + tune.ranked(rest, "HEAD_TILE", heads)
    return tune.choose(kernel, wanted, latent, rotary)


def resolved(
    indices: Tensor, key: Tensor, plan: ragged.Plan, wide: int, block: int = 1
) -> tuple[Tensor, Tensor]:
    """(slots [T, wide], last [T]) of int32 `indices` [T, .., K]: see `resolve`."""
    slots = memory.empty((plan.rows, wide), torch.int32, key.device)
    last = memory.empty((plan.rows,), torch.int32, key.device)
    resolve[(min(plan.rows, cores.vector()),)](
        indices, plan.table, slots=slots, last=last, **plan.arguments, **plan.flags,
        rows=plan.rows, count=indices.shape[-1], wide=wide, indices_stride=indices.stride(0),
        block=block, table_stride=plan.table.stride(0), pages=key.shape[0], page=key.shape[-3],
        page_rows=ragged.page_rows(key), BLOCKS=block > 1,
        **tune.only("sparse_flash_attention.resolve").keywords,
    )  # fmt: skip
    return slots, last


def unsupported(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    block_table: Tensor | None,
    sparse_indices: Tensor,
    sparse_block_size: int,
    **_: Any,
) -> str | None:
    if reason := tiling.not_multiplied(query=query):
        return reason
    latent = query.shape[-1]
    rotary = 0 if query_rope is None else query_rope.shape[-1]
    if latent % 32 or rotary % 16:
        return f"head sizes {latent} and {rotary}: half of the one and the other come in 16s"
    overflow = tiling.attend_overflow(16, 64, latent, rotary)
    if overflow:
        return overflow
    if value is not None and value.data_ptr() != key.data_ptr():
        return "`value` is another tensor than `key`; the kernel attends to the latent itself"
    reach = block_table.shape[1] * key.shape[1] if block_table is not None else key.shape[-3]
    if max(reach, sparse_indices.shape[-1] * sparse_block_size) > ragged.LONGEST:
        return f"contexts of up to {reach} positions, the kernel reaches {ragged.LONGEST}"
    if block_table is not None and key.shape[0] > ragged.LONGEST:
        return f"a cache of {key.shape[0]} pages, the kernel knows {ragged.LONGEST} apart"
    return ragged.uneven(key=key, key_rope=key_rope)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    block_table: Tensor | None,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_kv: Tensor | None,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    sparse_block_size: int,
    layout_query: str,
    layout_kv: str,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    attention_mode: int,
    return_softmax_lse: bool,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    plan = ragged.plan(
        query, key, actual_seq_lengths_query, actual_seq_lengths_kv, block_table,
        layout_query, layout_kv, sparse_mode,
    )  # fmt: skip
    copies = tune.only("sparse_flash_attention.gather")
    rotary = 0 if key_rope is None else key_rope.shape[-1]

    def copy(
        slots: Tensor, last: Tensor, dense_latent: Tensor, dense_rotary: Tensor, first: int,
        rows: int, key_tile: int,
    ) -> None:  # fmt: skip
        wide = slots.shape[1]
        gather[(min(rows * wide // copies.tiles["ROWS"], cores.vector()),)](
            key, key if key_rope is None else key_rope, slots, last, dense_latent, dense_rotary,
            first, rows, wide, ragged.row_stride(key),
            0 if key_rope is None else ragged.row_stride(key_rope),
            LATENT=query.shape[-1], ROTARY=rotary, KEY_TILE=key_tile, **copies.keywords,
        )  # fmt: skip

    out, *statistics = attended(
        query, query if query_rope is None else query_rope, key, rotary, sparse_indices,
        scale_value, sparse_block_size, sinks, plan, copy,
    )  # fmt: skip
    if not return_softmax_lse:
        statistics = [x.new_empty([0]) for x in statistics]
    return out, statistics[0], statistics[1]


def attended(
    query: Tensor,
    query_rope: Tensor,
    key: Tensor,
    rotary: int,
    sparse_indices: Tensor,
    scale: float,
    block: int,
    sinks: Tensor | None,
    plan: ragged.Plan,
    copy: Callable[..., None],
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, softmax_max, softmax_sum) over the rows that `copy(slots, last, dense_latent,
    dense_rotary, first, rows, key_tile)` lays out densely; `key` says where they lie."""
    *batch, length, heads, latent = query.shape
    device, dtype = query.device, query.dtype
    shape = [*batch, 1, length, heads]
    out = memory.empty(query.shape, dtype, device)
    out_max = memory.empty(shape, torch.float32, device)
    out_sum = memory.empty(shape, torch.float32, device)
    count = sparse_indices.shape[-1]
    if plan.rows * heads == 0 or count * plan.reach == 0 or key.numel() == 0:
        return out.zero_(), out_max.fill_(-torch.inf), out_sum.zero_()

    attention = _attention(heads, latent, rotary)
    key_tile, head_tile = attention.tiles["KEY_TILE"], attention.tiles["HEAD_TILE"]
    wide = tiling.up(count * block, key_tile)
    indices = ragged.int32(sparse_indices).flatten(0, -3)
    slots, last = resolved(indices, key, plan, wide, block)
    q, rope = query.flatten(0, -3), query_rope.flatten(0, -3)
    at_once = tiling.at_once(plan.rows, wide * (latent + rotary) * dtype.itemsize)
    dense_latent = memory.empty((at_once, wide, latent), dtype, device)
    dense_rotary = memory.empty((at_once, wide, rotary), dtype, device)
    for first in range(0, plan.rows, at_once):
        rows = min(at_once, plan.rows - first)
        copy(slots, last, dense_latent, dense_rotary, first, rows, key_tile)
        attend[(min(rows * -(-heads // head_tile), cores.cube()),)](
            q, rope, dense_latent, dense_rotary, slots, last, out if sinks is None else sinks,
            out, out_max, out_sum, first, rows, wide, heads, *q.stride()[:2], *rope.stride()[:2],
            scale, LATENT=latent, ROTARY=rotary, SINKS=sinks is not None,
            WHOLE=heads % head_tile == 0, **attention.keywords,
        )  # fmt: skip
    return out, out_max, out_sum
