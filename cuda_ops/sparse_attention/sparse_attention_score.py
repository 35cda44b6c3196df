# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Grouped-query attention of packed tokens to the blocks of positions that they chose.

    z[h, j] = scale q[h] . k[j]    out[h] = sum_j exp(z[h, j]) v[j] / (exp(lse[h]) + exp(sink[h]))

A program holds the query heads of one token that share a head of keys, and walks over the positions
of its blocks, tile by tile.  Where blocks and pages are whole tiles, a tile is named by one number
of the list and one of the table; else each of its keys by its own.

    condition                         kernels
    Hopper, D 64, 128 or 256,         hopper/sparse_attention_score.py
      rows of whole 32 bytes
    else                              _attend

Few tokens: the positions are split over programs, whose parts common/combine.py puts together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import memory
from ...dispatch.common.packed import block_within
from ...dispatch.ops.sparse_attention.sparse_attention_score import Arguments
from ..common import gpu, packed, rows, softmax
from ..common.combine import Parts, combine, is_chained
from ..common.log2 import LOG2E
from ..common.tiling import cdiv, power_of_two
from ..runtime import launches
from .hopper import sparse_attention_score as hopper
from .sparse_flash_attention import LOWEST


class Constants(NamedTuple):
    HEADS: int
    SHARED: int
    D: int
    BLOCK: int
    PAGE: int
    REQUESTS: int
    HAS_SINK: bool
    STATS: bool
    SPLITS: int
    BLOCK_H: int
    BLOCK_N: int
    BLOCK_D: int
    WHOLE: bool
    STAGES: int
    CHAINED: bool


@triton.jit
def _places(entry, end, listed, limit, table, pages, C: tl.constexpr):
    """(page, slot in it, whether it is there) of the entries; WHOLE: they lie on one page."""
    if C.WHOLE:
        first = tl.min(entry, 0)
        index = tl.load(listed + first // C.BLOCK)
        valid = (index >= 0) & (index < (limit + C.BLOCK - 1) // C.BLOCK)
        begin = tl.where(valid, index, 0).to(tl.int32) * C.BLOCK + first % C.BLOCK
        valid = valid & (begin < limit)
        page = tl.load(table + begin // C.PAGE, mask=valid, other=-1).to(tl.int64)
        slot = begin % C.PAGE + entry - first
        valid = valid & (begin + entry - first < limit)
    else:
        index = tl.load(listed + entry // C.BLOCK, mask=entry < end, other=-1)
        valid = (index >= 0) & (index < (limit + C.BLOCK - 1) // C.BLOCK)
        position = tl.where(valid, index, 0).to(tl.int32) * C.BLOCK + entry % C.BLOCK
        valid = valid & (position < limit)
        page = tl.load(table + position // C.PAGE, mask=valid, other=-1).to(tl.int64)
        slot = position % C.PAGE
    return page, slot.to(tl.int64), valid & (page >= 0) & (page < pages)


@triton.jit(do_not_specialize=[*packed.NUMBERS, "chosen", "per_split"])
def _attend(
    q,
    key,
    value,
    index,
    counts,
    lengths,
    key_lengths,
    table,
    sinks,
    results,
    lse,
    scale_log2,
    tokens,
    requests,
    reach,
    table_stride,
    pages,
    chosen,
    per_split,
    strides,
    C: tl.constexpr,
):
    (
        q_row,
        q_head,
        key_page,
        key_slot,
        key_head,
        value_page,
        value_slot,
        value_head,
        index_head,
        index_row,
        count_head,
        count_row,
    ) = strides
    of = packed.Requests(lengths, key_lengths, table, tokens, requests, reach, table_stride, pages)
    GROUP: tl.constexpr = C.HEADS // C.SHARED
    HEAD_TILES: tl.constexpr = (GROUP + C.BLOCK_H - 1) // C.BLOCK_H
    program = tl.program_id(0)
    tile = program % HEAD_TILES
    split = program // HEAD_TILES % C.SPLITS
    # neighbours read the same head of keys, of which L2 holds more than of all
    row = (program // (HEAD_TILES * C.SPLITS) % tokens).to(tl.int64)
    shared = (program // (HEAD_TILES * C.SPLITS) // tokens).to(tl.int64)
    request, limit = packed.locate(row, of, C.REQUESTS)
    of_request = table + request.to(tl.int64) * table_stride
    listed = index + shared * index_head + row * index_row
    entries = chosen
    if counts is not None:
        entries = rows.within(tl.load(counts + shared * count_head + row * count_row), chosen)
    entries *= C.BLOCK
    lo = split * per_split
    hi = tl.minimum(lo + per_split, tl.where(limit > 0, entries, 0))
    of_group = tile * C.BLOCK_H + tl.arange(0, C.BLOCK_H)
    head_mask = of_group < GROUP
    head = shared * GROUP + of_group
    d = tl.arange(0, C.BLOCK_D)
    q_rows = q + row * q_row + (head * q_head)[:, None] + d[None, :]
    q_tile = tl.load(q_rows, mask=head_mask[:, None] & (d < C.D)[None, :], other=0.0)
    heads = (row, split, head, head_mask)
    row_max = tl.full([C.BLOCK_H], LOWEST, tl.float32)
    row_sum = tl.full([C.BLOCK_H], 0.0, tl.float32)
    acc = tl.full([C.BLOCK_H, C.BLOCK_D], 0.0, tl.float32)
    key += shared * key_head
    value += shared * value_head
    for n in tl.range(lo, hi, C.BLOCK_N, num_stages=C.STAGES):
        entry = n + tl.arange(0, C.BLOCK_N)
        page, slot, valid = _places(entry, hi, listed, limit, of_request, pages, C)
        k_row = page * key_page + slot * key_slot
        v_row = page * value_page + slot * value_slot
        there = valid[:, None] & (d < C.D)[None, :]
        k_tile = tl.load(key + k_row[:, None] + d[None, :], mask=there, other=0.0)
        v_tile = tl.load(value + v_row[:, None] + d[None, :], mask=there, other=0.0)
        s = tl.dot(q_tile, k_tile.T, input_precision="ieee") * scale_log2
        s = tl.where(valid[None, :], s, float("-inf"))
        weight, alpha, row_sum, row_max = softmax.step(s, row_max, row_sum)
        acc = tl.dot(weight.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision="ieee")
    softmax.store(acc, row_max, row_sum, heads, sinks, results, lse, d, C.D, C)


@dataclass(frozen=True)
class Tiles:
    heads: int
    keys: int
    stages: int
    splits: int = 1


def shared_bytes(tile: Tiles, size: int) -> int:
    """Of shared memory that a program takes, at most: queries, the tiles of keys and values that
    are on their way, probabilities."""
    wide = max(16, power_of_two(size))
    under_way = 2 * tile.stages * tile.keys * wide
    return 2 * (tile.heads * wide + under_way + tile.heads * tile.keys) + 1024


def tiles(count: int, group: int, entries: int, size: int, device: torch.device) -> Tiles | None:
    """For `count` tokens times heads of keys, the first that fits into this GPU."""
    heads = _heads(group)
    limit = gpu.shared_memory(device)
    tiers = [Tiles(heads, 64, 3 if size <= 128 else 2)]
    tiers += [Tiles(heads, 32, stages) for stages in (2, 1)]
    tiers += [Tiles(16, keys, 1) for keys in (32, 16)]
    tile = next((each for each in tiers if shared_bytes(each, size) <= limit), None)
    if tile is None:
        return None
    return _in_parts(tile, count, group, entries // 128, device)


def hopper_tiles(count: int, group: int, entries: int, size: int, device: torch.device) -> Tiles:
    """For hopper/sparse_attention_score.py, whose products have 64 keys.  Four programs a processor
    hide that a tile of keys is on its way; of heads of 256 there is room for two, with two each."""
    tile = Tiles(_heads(group), 64, 2 if size == 256 else 1)
    return _in_parts(tile, count, group, power_of_two(cdiv(entries, 64)), device)


def _heads(group: int) -> int:
    return min(64, max(16, power_of_two(group)))


def _in_parts(tile: Tiles, count: int, group: int, most: int, device: torch.device) -> Tiles:
    """Two programs a processor, in up to `most` parts."""
    items, splits = count * cdiv(group, tile.heads), 1
    while splits * items <= gpu.num_sms(device) and 2 * splits <= most:
        splits *= 2
    return replace(tile, splits=splits)


def _tiles(query: Tensor, key: Tensor, top_k: int, block: int) -> Tiles | None:
    tokens, heads, size = query.shape
    shared = key.shape[2]
    return tiles(tokens * shared, heads // shared, top_k * block, size, query.device)


def unsupported(
    query: Tensor, key: Tensor, block_table: Tensor, block_size: int, top_k: int, **_: object
) -> str | None:
    if query.is_cuda and query.dtype not in (torch.float16, torch.bfloat16):
        return f"query is {query.dtype}, supported float16 and bfloat16"
    block = block_within(block_size, block_table.shape[1] * key.shape[1])
    if _tiles(query, key, top_k, block) is None:
        return gpu.too_small(query.device, N=query.shape[1], D=query.shape[2])
    reach = block_table.shape[1] * key.shape[1]
    positions = max(reach, key.shape[0] * key.shape[1], block * top_k)
    return rows.too_many(positions, "positions")


def _plain(programs: int, C: Constants, **x: Any) -> None:
    launches.kernel(_attend, programs)(**x, C=C, num_warps=4)


def forward(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor]:
    query, key, value, index = x["query"], x["key"], x["value"], x["select_idx"]
    counts, sinks = x["select_num_idx"], x["sinks"]
    lengths, key_lengths = x["actual_seq_lengths"], x["actual_seq_lengths_kv"]
    assert lengths is not None and key_lengths is not None  # the check said so
    device, (tokens, heads, size), shared = query.device, query.shape, key.shape[2]
    out = memory.empty(query.shape, query.dtype, device)
    shape = (tokens, heads) if x["return_softmax_lse"] else (0,)
    lse = memory.empty(shape, torch.float32, device)
    if out.numel() == 0:
        return out, lse
    requests = packed.arguments(query, key, lengths, key_lengths, x["block_table"])
    block, chosen = block_within(x["block_size"], requests["reach"]), x["top_k"]
    group, entries = heads // shared, chosen * block
    on_hopper = hopper.supports(query, key, value)
    cut = hopper_tiles if on_hopper else tiles
    tile = cut(tokens * shared, group, entries, size, device)
    assert tile is not None
    parts = Parts.of(tile.splits, tokens * heads, size, lse)
    C = Constants(
        HEADS=heads,
        SHARED=shared,
        D=size,
        BLOCK=block,
        PAGE=key.shape[1],
        REQUESTS=packed.room(lengths),
        HAS_SINK=sinks is not None,
        STATS=x["return_softmax_lse"],
        SPLITS=tile.splits,
        BLOCK_H=tile.heads,
        BLOCK_N=tile.keys,
        BLOCK_D=max(16, power_of_two(size)),
        WHOLE=block % tile.keys == 0 and key.shape[1] % tile.keys == 0,
        STAGES=tile.stages,
        CHAINED=is_chained(device, tile.splits),
    )
    programs = tokens * shared * tile.splits * cdiv(group, tile.heads)
    launch = hopper.launch if on_hopper else _plain
    launch(
        programs,
        C,
        q=query,
        key=key,
        value=value,
        index=index,
        counts=counts,
        sinks=lse if sinks is None else sinks,
        results=parts.results(out),
        lse=lse,
        scale_log2=x["scale_value"] * LOG2E.value,
        chosen=chosen,
        per_split=cdiv(cdiv(entries, tile.splits), tile.keys) * tile.keys,
        **requests,
        strides=(
            *query.stride()[:2],
            *key.stride()[:3],
            *value.stride()[:3],
            *_steps(index),
            *_steps(counts),
        ),
    )
    if tile.splits > 1:
        combine(parts, sinks, out, lse, None)
    return out, lse


def _steps(of: Tensor | None) -> tuple[Any, ...]:
    """(from head to head, from token to token); 0 where all heads share one."""
    if of is None:
        return 0, 0
    return 0 if of.shape[0] == 1 else of.stride(0), of.stride(1)
