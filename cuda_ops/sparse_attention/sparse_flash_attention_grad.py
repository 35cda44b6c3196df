# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Gradients of the sparse latent attention.

    p = exp(s - softmax_max) / softmax_sum       dp = d_out . value       (s as in the forward op)
    ds = scale p (dp - sum_r d_out out + d_softmax_sum softmax_sum)          d_query = ds key
    d_key = ds^T query (+ p^T d_out where value is None)       d_value = p^T d_out

    kernel        what it makes                                        a program
    _deltas       what is subtracted from dp                           a row, 16 heads
    _slots        where the keys of every entry lie                    a row, a block of entries
    _weights      p and ds of every entry and head, as operands        a row, heads, entries
    _queries      d_query                                              a row, heads, columns
    _entries      what every entry adds to its key, of all heads       a row, columns
    inverted.py   d_key, d_value: sums in order of the rows            a key

In all of them entries and columns are the long sides of the products, and heads the short one, so
that few heads fill tensor cores as well.  What lies between kernels is of a section of the rows, at
most SECTION bytes.  The same bits every time.

    condition                                  kernels
    Hopper, R 512, rope 64, values in keys,    _deltas then _slots then
      33 to 128 heads in eights, aligned       hopper/sparse_flash_attention_grad.py
    else                                       _deltas, _slots, _weights, _queries, _entries
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import memory
from ...dispatch.common import rope as rotary
from ...dispatch.ops.sparse_attention.sparse_flash_attention_grad import Arguments
from ..common import gpu, inverted, rows
from ..common.selection import selected, slot_of
from ..runtime import launches
from . import sparse_flash_attention
from .hopper import sparse_flash_attention_grad as hopper

SECTION = 2**31


class Tile(NamedTuple):
    """Of a kernel: entries, columns, warps, and stages of its loads."""

    entries: int
    columns: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """`heads` are those of a program of the first two kernels, `padded` all of them."""

    heads: int
    padded: int
    weights: Tile
    queries: Tile
    entries: Tile


# the first that fits (docs/design/sparse_flash_attention_grad.md)
WEIGHTS = Tile(128, 64, 8, 3), Tile(128, 32, 8, 3), Tile(64, 32, 4, 2), Tile(16, 16, 4, 1)
QUERIES = Tile(64, 128, 8, 5), Tile(64, 128, 8, 3), Tile(32, 64, 4, 2), Tile(16, 16, 4, 1)
ENTRIES = (
    Tile(64, 128, 8, 3),
    Tile(64, 128, 8, 2),
    Tile(64, 64, 4, 1),
    Tile(32, 32, 4, 1),
    Tile(16, 16, 4, 1),
)


class Constants(NamedTuple):
    """EVEN: keys are evenly spaced, also from one request to the next."""

    HEADS: int
    WIDTH: int
    EVEN: bool
    BLOCK_H: int
    BLOCK_N: int
    BLOCK_C: int
    STAGES: int


@triton.jit
def _place(slot, size, o_stride, i_stride, EVEN: tl.constexpr):
    if EVEN:
        at = slot.to(tl.int64) * i_stride
    else:
        at = (slot // size).to(tl.int64) * o_stride + (slot % size).to(tl.int64) * i_stride
    return at


@triton.jit
def _deltas(
    d_out,
    out,
    softmax_sum,
    d_softmax_sum,
    deltas,
    strides,
    C: tl.constexpr,
):
    do_row, do_head, o_row, o_head = strides
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * C.BLOCK_H + tl.arange(0, C.BLOCK_H)).to(tl.int64)
    mask = head < C.HEADS
    acc = tl.full([C.BLOCK_H, C.BLOCK_C], 0.0, tl.float32)
    for first in range(0, C.WIDTH, C.BLOCK_C):
        c = first + tl.arange(0, C.BLOCK_C)
        wide = mask[:, None] & (c < C.WIDTH)[None, :]
        x = tl.load(d_out + row * do_row + head[:, None] * do_head + c, mask=wide, other=0.0)
        y = tl.load(out + row * o_row + head[:, None] * o_head + c, mask=wide, other=0.0)
        acc += x.to(tl.float32) * y.to(tl.float32)
    delta = tl.sum(acc, 1)
    stat = row * C.HEADS + head
    if d_softmax_sum is not None:
        total = tl.load(softmax_sum + stat, mask=mask, other=0.0)
        of_sum = tl.load(d_softmax_sum + stat, mask=mask, other=0.0)
        delta -= tl.where(total != 0, of_sum * total, 0.0)
    tl.store(deltas + stat, delta, mask=mask)


@triton.jit(
    do_not_specialize=[*rows.NUMBERS, "first", "entries", "keys"]
)  # fmt: skip
def _slots(
    indices,
    slots,
    seqlens_q,
    seqlens_k,
    table,
    first,
    tokens,
    requests,
    max_kv_len,
    table_stride,
    pages,
    entries,
    keys,
    index_stride,
    SPARSE_BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The number of the key of each entry, or `keys` where it has none."""
    of = rows.Requests(
        seqlens_q, seqlens_k, table, tokens, requests, max_kv_len, table_stride, pages
    )
    local = tl.program_id(0).to(tl.int64)
    row = first + local
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    request, start, kv_len = rows.locate(row, of, LAYOUT)
    outer, inner, valid = selected(
        entry,
        entries,
        indices + row * index_stride,
        kv_len,
        request,
        start,
        of,
        SPARSE_BLOCK,
        LAYOUT,
    )
    slot = slot_of(outer, inner, valid, max_kv_len, LAYOUT)
    tl.store(slots + local * entries + entry, tl.where(valid, slot, keys), mask=entry < entries)


@triton.jit
def _scores(
    s,
    dp,
    q,
    key,
    do,
    value,
    head,
    h_ok,
    valid,
    strides,
    WIDTH: tl.constexpr,
    DP: tl.constexpr,
    SHARED: tl.constexpr,
    C: tl.constexpr,
):
    """s += key . q and dp += value . do over WIDTH columns; `key`, `value` point to rows."""
    q_head, do_head = strides
    for first in tl.range(0, WIDTH, C.BLOCK_C, num_stages=C.STAGES):
        c = (first + tl.arange(0, C.BLOCK_C))[None, :]
        of_key, of_head = valid[:, None], h_ok[:, None]
        if WIDTH % C.BLOCK_C != 0:
            of_key, of_head = of_key & (c < WIDTH), of_head & (c < WIDTH)
        k = tl.load(key[:, None] + c, mask=of_key, other=0.0)
        x = tl.load(q + head[:, None] * q_head + c, mask=of_head, other=0.0)
        s = tl.dot(k, x.T, s, input_precision="ieee")
        if DP:
            y = tl.load(do + head[:, None] * do_head + c, mask=of_head, other=0.0)
            if not SHARED:
                k = tl.load(value[:, None] + c, mask=of_key, other=0.0)
            dp = tl.dot(k, y.T, dp, input_precision="ieee")
    return s, dp


@triton.jit(do_not_specialize=["first", "entries", "keys", "size"])
def _weights(
    q,
    q_rope,
    key,
    key_rope,
    value,
    d_out,
    slots,
    softmax_max,
    softmax_sum,
    deltas,
    weights,
    scale,
    first,
    entries,
    keys,
    size,
    strides,
    ROPE: tl.constexpr,
    SHARED: tl.constexpr,
    C: tl.constexpr,
):
    (
        q_row,
        q_head,
        qr_row,
        qr_head,
        do_row,
        do_head,
        key_o,
        key_i,
        rope_o,
        rope_i,
        value_o,
        value_i,
    ) = strides
    TILES: tl.constexpr = (C.HEADS + C.BLOCK_H - 1) // C.BLOCK_H
    blocks = (entries + C.BLOCK_N - 1) // C.BLOCK_N
    tile = tl.program_id(0) // TILES
    local = (tile // blocks).to(tl.int64)
    row = first + local
    head = (tl.program_id(0) % TILES * C.BLOCK_H + tl.arange(0, C.BLOCK_H)).to(tl.int64)
    h_ok = head < C.HEADS
    entry = tile % blocks * C.BLOCK_N + tl.arange(0, C.BLOCK_N)
    slot = tl.load(slots + local * entries + entry, mask=entry < entries, other=keys)
    valid = slot < keys
    if tl.max(valid.to(tl.int32), 0) > 0:
        slot = tl.where(valid, slot, 0)
        k = key + _place(slot, size, key_o, key_i, C.EVEN)
        v = value + _place(slot, size, value_o, value_i, C.EVEN)
        s = tl.full([C.BLOCK_N, C.BLOCK_H], 0.0, tl.float32)
        dp = tl.full([C.BLOCK_N, C.BLOCK_H], 0.0, tl.float32)
        s, dp = _scores(
            s,
            dp,
            q + row * q_row,
            k,
            d_out + row * do_row,
            v,
            head,
            h_ok,
            valid,
            (q_head, do_head),
            C.WIDTH,
            True,
            SHARED,
            C,
        )
        if ROPE > 0:
            k = key_rope + _place(slot, size, rope_o, rope_i, C.EVEN)
            s, dp = _scores(
                s,
                dp,
                q_rope + row * qr_row,
                k,
                d_out,
                k,
                head,
                h_ok,
                valid,
                (qr_head, do_head),
                ROPE,
                False,
                SHARED,
                C,
            )
        stat = row * C.HEADS + head
        row_max = tl.load(softmax_max + stat, mask=h_ok, other=0.0)
        row_sum = tl.load(softmax_sum + stat, mask=h_ok, other=1.0)
        delta = tl.load(deltas + stat, mask=h_ok, other=0.0)
        seeing = row_sum != 0  # a row that sees no key has max -inf and sum 0
        row_max = tl.where(seeing, row_max, 0.0)
        inverse = 1.0 / tl.where(seeing, row_sum, 1.0)
        weight = tl.exp(s * scale - row_max[None, :]) * inverse[None, :]
        weight = tl.where(valid[:, None] & h_ok[None, :], weight, 0.0)
        at = weights + (local * entries + entry)[:, None] * (2 * C.HEADS) + head[None, :]
        mask = (entry < entries)[:, None] & h_ok[None, :]
        tl.store(at + C.HEADS, weight.to(weights.dtype.element_ty), mask=mask)
        weight = scale * weight * (dp - delta[None, :])
        tl.store(at, weight.to(weights.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first", "entries", "keys", "size"])
def _queries(
    key,
    slots,
    weights,
    d_q,
    first,
    entries,
    keys,
    size,
    strides,
    C: tl.constexpr,
):
    """d_query = ds key, turned: columns by heads.  Entries without a key may be poison."""
    key_o, key_i = strides
    COLUMNS: tl.constexpr = (C.WIDTH + C.BLOCK_C - 1) // C.BLOCK_C
    local = (tl.program_id(0) // COLUMNS).to(tl.int64)
    c = tl.program_id(0) % COLUMNS * C.BLOCK_C + tl.arange(0, C.BLOCK_C)
    head = tl.program_id(1) * C.BLOCK_H + tl.arange(0, C.BLOCK_H)
    h_ok = head < C.HEADS
    slots += local * entries
    weights += local * entries * (2 * C.HEADS)
    acc = tl.full([C.BLOCK_C, C.BLOCK_H], 0.0, tl.float32)
    for n in tl.range(0, entries, C.BLOCK_N, num_stages=C.STAGES):
        entry = n + tl.arange(0, C.BLOCK_N)
        slot = tl.load(slots + entry, mask=entry < entries, other=keys)
        valid = slot < keys
        at = _place(tl.where(valid, slot, 0), size, key_o, key_i, C.EVEN)
        of_key = valid[:, None]
        if C.WIDTH % C.BLOCK_C != 0:
            of_key = of_key & (c < C.WIDTH)[None, :]
        k = tl.load(key + at[:, None] + c[None, :], mask=of_key, other=0.0)
        of_entry = valid[:, None] & h_ok[None, :]
        at = entry.to(tl.int64)[:, None] * (2 * C.HEADS) + head[None, :]
        x = tl.load(weights + at, mask=of_entry, other=0.0)
        acc = tl.dot(k.T, x, acc, input_precision="ieee")
    at = ((first + local) * C.HEADS + head)[None, :] * C.WIDTH + c[:, None]
    mask = h_ok[None, :] & (c < C.WIDTH)[:, None]
    tl.store(d_q + at, acc.to(d_q.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first", "entries"])
def _entries(
    weights,
    q,
    d_out,
    out,
    first,
    entries,
    strides,
    ROW: tl.constexpr,
    COLUMN: tl.constexpr,
    OF_DS: tl.constexpr,
    OF_P: tl.constexpr,
    C: tl.constexpr,
):
    """out[entry, COLUMN ..] = ds q, p d_out or both in one product, over all heads."""
    q_row, q_head, do_row, do_head = strides
    COLUMNS: tl.constexpr = (C.WIDTH + C.BLOCK_C - 1) // C.BLOCK_C
    DEPTH: tl.constexpr = C.BLOCK_H * (2 if OF_DS and OF_P else 1)
    local = (tl.program_id(0) // COLUMNS).to(tl.int64)
    c = tl.program_id(0) % COLUMNS * C.BLOCK_C + tl.arange(0, C.BLOCK_C)
    row = first + local
    depth = tl.arange(0, DEPTH)
    head = depth % C.BLOCK_H
    h_ok = head < C.HEADS
    c_ok = (c < C.WIDTH)[None, :]
    of_head = head.to(tl.int64)[:, None]
    of_ds = (depth < (C.BLOCK_H if OF_DS else 0)) & h_ok
    of_p = (depth >= (C.BLOCK_H if OF_DS else 0)) & h_ok
    if OF_DS:
        at = q + row * q_row + of_head * q_head + c[None, :]
        both = tl.load(at, mask=of_ds[:, None] & c_ok, other=0.0)
    if OF_P:
        at = d_out + row * do_row + of_head * do_head + c[None, :]
        of_value = tl.load(at, mask=of_p[:, None] & c_ok, other=0.0)
        if OF_DS:
            both = tl.where(of_p[:, None], of_value, both)
        else:
            both = of_value
    from_p = depth >= C.BLOCK_H if OF_DS else depth >= 0
    at_head = head + tl.where(from_p, C.HEADS, 0) if OF_P else head
    for n in tl.range(0, entries, C.BLOCK_N, num_stages=C.STAGES):
        entry = n + tl.arange(0, C.BLOCK_N)
        inside = (entry < entries)[:, None]
        place = (local * entries + entry)[:, None]
        x = tl.load(
            weights + place * (2 * C.HEADS) + at_head[None, :],
            mask=inside & h_ok[None, :],
            other=0.0,
        )
        acc = tl.dot(x, both, input_precision="ieee")
        to = out + place * ROW + COLUMN + c[None, :]
        tl.store(to, acc.to(out.dtype.element_ty), mask=inside & c_ok)


def choose(heads: int, rank: int, itemsize: int, apart: bool, device: torch.device) -> Tiles | None:
    """The largest tiles that fit into this GPU's shared memory, or None."""
    padded = max(16, triton.next_power_of_2(heads))
    widest = max(16, triton.next_power_of_2(rank))
    h, limit = min(padded, 128), gpu.shared_memory(device) // itemsize

    def weights(tile: Tile) -> int:
        return tile.stages * tile.columns * ((2 if apart else 1) * tile.entries + 2 * h)

    def queries(tile: Tile) -> int:
        return tile.stages * tile.entries * (tile.columns + h)

    def entries(tile: Tile) -> int:
        depth = 2 * padded
        return depth * (tile.columns + tile.stages * tile.entries) + tile.entries * tile.columns

    def first(sizes: Sequence[Tile], numbers: Callable[[Tile], int]) -> Tile | None:
        if itemsize > 2:  # no tensor cores
            sizes = sizes[-1:]
        cut = (tile._replace(columns=min(tile.columns, widest)) for tile in sizes)
        return next((tile for tile in cut if numbers(tile) <= limit), None)

    found = first(WEIGHTS, weights), first(QUERIES, queries), first(ENTRIES, entries)
    if found[0] is None or found[1] is None or found[2] is None:
        return None
    return Tiles(h, padded, found[0], found[1], found[2])


def row_of_entry(
    query: Tensor, query_rope: Tensor | None, value: Tensor | None
) -> tuple[int, torch.dtype]:
    """Columns, and their dtype, of what an entry adds to its key.  A float16 row of small gradients
    would lose what their sum keeps."""
    rank, rope = query.shape[-1], 0 if query_rope is None else query_rope.shape[-1]
    wide = torch.bfloat16 if query.dtype == torch.bfloat16 else torch.float32
    return rank + rope + (0 if value is None else rank), wide


def bytes_of_entry(query: Tensor, query_rope: Tensor | None, value: Tensor | None) -> int:
    """Of work space: its row, two operands of all heads, its slot, and the sort's four numbers."""
    width, wide = row_of_entry(query, query_rope, value)
    return width * wide.itemsize + 2 * query.shape[-2] * query.element_size() + 28


def unsupported(**arguments: Any) -> str | None:
    query, value = arguments["query"], arguments["value"]
    heads, dim = query.shape[-2:]
    if choose(heads, dim, query.element_size(), value is not None, query.device) is None:
        return gpu.too_small(query.device, N=heads, D=dim)
    return sparse_flash_attention.unsupported(**arguments)


def backward(**a: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    query, key, value, query_rope = a["query"], a["key"], a["value"], a["query_rope"]
    key_rope, layout = a["key_rope"], a["layout"]
    layout, device, dtype = layout or "BSND", query.device, query.dtype
    heads, rank = query.shape[-2:]

    def like(tensor: Tensor | None) -> Tensor:
        return memory.empty((0,) if tensor is None else tensor.shape, dtype, device)

    d_query, d_query_rope = like(query), like(query_rope)
    d_key, d_key_rope, d_value = like(key), like(key_rope), like(value)
    plan = rows.plan(
        query,
        key,
        a["actual_seq_qlen"],
        a["actual_seq_kvlen"],
        None,
        layout,
        layout,
        3 if a["sparse_mode"] is None else a["sparse_mode"],
    )
    index = a["sparse_indices"].reshape(plan.rows, a["sparse_indices"].shape[-1])
    entries, keys = index.shape[1] * a["sparse_block_size"], key.shape[:-2].numel()
    if not query.numel() or not entries or not keys:
        for each in (d_query, d_query_rope, d_key, d_key_rope, d_value):
            each.zero_()
        return d_query, d_key, d_value, d_query_rope, d_key_rope

    query_rope, key_rope = rotary.given(query_rope, key_rope)  # the gradients have their shapes
    rope = 0 if query_rope is None else query_rope.shape[-1]
    q, do, o = (x.reshape(plan.rows, heads, rank) for x in (query, a["d_out"], a["out"]))
    qr = q if query_rope is None else query_rope.reshape(plan.rows, heads, rope)
    kr = key if key_rope is None else key_rope
    v = key if value is None else value
    tiles = choose(heads, rank, query.element_size(), value is not None, device)
    assert tiles is not None
    size = key.shape[0] if layout == "TND" else key.shape[1]
    steps = rows.strides(layout, key, kr, v)
    even = all(o == i * size for o, i in zip(steps[::2], steps[1::2], strict=True))
    even = even or layout == "TND"

    def constants(tile: Tile, width: int, at_once: int = tiles.heads) -> dict[str, Any]:
        columns = min(tile.columns, max(16, triton.next_power_of_2(width)))
        C = Constants(heads, width, even, at_once, tile.entries, columns, tile.stages)
        return dict(C=C, num_warps=tile.warps)

    deltas = memory.empty((plan.rows, heads), torch.float32, device)
    launches.kernel(_deltas, plan.rows, triton.cdiv(heads, 16))(
        do,
        o,
        a["softmax_sum"],
        a["d_softmax_sum"],
        deltas,
        strides=(*do.stride()[:2], *o.stride()[:2]),
        C=Constants(heads, rank, even, 16, 16, min(512, max(16, triton.next_power_of_2(rank))), 1),
    )

    width, wide = row_of_entry(query, query_rope, value)
    most = max(1, SECTION // (entries * bytes_of_entry(query, query_rope, value)))
    sections = triton.cdiv(plan.rows, min(most, max(1, rows.MOST // entries)))
    count = triton.cdiv(plan.rows, sections)
    slots = memory.empty((count * entries,), torch.int32, device)
    weights = memory.empty((count * entries, 2, heads), dtype, device)  # ds, p
    added = memory.empty((count * entries, width), wide, device)
    # (of ds, of p, where it goes, its columns): what an entry adds to its key
    parts: list[tuple[Tensor | None, Tensor | None, Tensor, int]]
    parts = [(q, do if value is None else None, d_key, 0)]
    if rope:
        parts.append((qr, None, d_key_rope, rank))
    if value is not None:
        parts.append((None, do, d_value, rank + rope))
    sums = memory.empty((keys, width) if sections > 1 else (0,), torch.float32, device)
    statistics = a["softmax_max"], a["softmax_sum"], deltas
    on_hopper = hopper.supports(heads, value, even, q, qr, do, key, kr)
    for first in range(0, plan.rows, count):
        n = min(count, plan.rows - first)
        launches.kernel(_slots, n, triton.cdiv(entries, 1024))(
            index,
            slots,
            first=first,
            entries=entries,
            keys=keys,
            index_stride=index.stride(0),
            **plan.arguments,
            SPARSE_BLOCK=a["sparse_block_size"],
            LAYOUT=plan.layout,
            BLOCK=1024,
        )
        if on_hopper:
            hopper.launch(
                q,
                qr,
                key,
                kr,
                do,
                slots,
                *statistics,
                weights,
                added,
                d_query,
                d_query_rope,
                a["scale_value"],
                first,
                n,
                entries,
                keys,
            )
        else:
            blocks = triton.cdiv(entries, tiles.weights.entries) * triton.cdiv(heads, tiles.heads)
            launches.kernel(_weights, n * blocks)(
                q,
                qr,
                key,
                kr,
                v,
                do,
                slots,
                *statistics,
                weights,
                a["scale_value"],
                first,
                entries,
                keys,
                size,
                strides=(*(step for x in (q, qr, do) for step in x.stride()[:2]), *steps),
                ROPE=rope,
                SHARED=value is None,
                **constants(tiles.weights, rank),
            )
            of_queries = [(key, d_query, steps[:2]), (kr, d_query_rope, steps[2:4])]
            for k, to, strides in of_queries[: 2 if rope else 1]:
                more = constants(tiles.queries, to.shape[-1])
                columns = triton.cdiv(to.shape[-1], more["C"].BLOCK_C)
                launches.kernel(_queries, n * columns, triton.cdiv(heads, tiles.heads))(
                    k, slots, weights, to, first, entries, keys, size, strides=strides, **more
                )
            for of_ds, of_p, to, column in parts:
                more = constants(tiles.entries, to.shape[-1], tiles.padded)
                columns = triton.cdiv(to.shape[-1], more["C"].BLOCK_C)
                x, y = q if of_ds is None else of_ds, do if of_p is None else of_p
                launches.kernel(_entries, n * columns)(
                    weights,
                    x,
                    y,
                    added,
                    first,
                    entries,
                    strides=(*x.stride()[:2], *y.stride()[:2]),
                    ROW=width,
                    COLUMN=column,
                    OF_DS=of_ds is not None,
                    OF_P=of_p is not None,
                    **more,
                )
        by = inverted.invert(slots[: n * entries], keys)
        outs = [d_key, d_key_rope, d_value]
        inverted.add(added, by, sums, outs, first == 0, first + n == plan.rows)
    return d_query, d_key, d_value, d_query_rope, d_key_rope
