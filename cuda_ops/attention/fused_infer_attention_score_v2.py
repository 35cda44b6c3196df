# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Dense attention over paged latents that all heads share, keys and values at once.

    s[h, p] = scale * (q[h] . key[p] + q_rope[h] . key_rope[p])
    out[h]  = sum_p exp(s[h, p] - m[h]) key[p] / (l[h] + exp(sink[h] - m[h]))     lse = m + log l

Row m of a request is head m % N of its token m // N, so that a tile of rows has heads of several
tokens; a tile of keys is read once, where the block table says, for the scores and for the sum.
Few rows: a tile's keys are split into parts of equal length, whose number follows from shapes
alone, and _merge puts the parts together in order.  On Hopper the keys of several requests are cut
evenly over the SMs, by their lengths on the device, and _merge_cut puts the pieces together.

    condition                                  kernels
    Hopper, R 512, rope 64 or none, queries    hopper/fused_infer_attention_score_v2.py
      in whole 16 bytes, keys that TMA can
      describe, scale above 0
    else                                       _attend

Either is followed by another one where there are fewer tiles of rows than half of the SMs, and keys
for two parts or more; Hopper's, of several requests, also with 4 tiles an SM or fewer, of up to 128
tokens a request:

    condition                                  kernels
    Hopper, several requests                   _merge_cut
    else                                       _merge
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from typing_extensions import Unpack

from ...dispatch.common import memory
from ...dispatch.ops.attention.fused_infer_attention_score_v2 import (
    Arguments,
    is_packed,
    pages_of,
    shapes,
    sizes,
    with_heads,
)
from ..common import gpu, rows, softmax
from ..common.combine import Parts, is_chained
from ..common.log2 import LN2, LOG2E
from ..common.tiling import cdiv, power_of_two
from ..runtime import launches
from .hopper import fused_infer_attention_score_v2 as hopper

LOWEST = tl.constexpr(-1e30)  # below any score: keeps exp2(-inf - LOWEST) = 0 free of NaN
WIDEST_ROPE = 128
_LEAST = 256  # keys of a part
_MOST_PARTS = 128


class Constants(NamedTuple):
    """PIECES is a power of two above the number of requests, whose tokens are packed (else 0):
    tokens of no request are a piece behind them.  ONE_PAGE: a tile of keys lies in one page.
    On Hopper alone: CUT: all keys are cut evenly over the programs, of which GROUP side by side
    take the same keys for as many tiles of a request's rows; REQUESTS: as PIECES, for CUT whether
    packed or not; ALONE: no other tile of rows reads a request's keys, as a rule."""

    HEADS: int
    R: int
    D: int
    PAGE: int
    PIECES: int
    HAS_Q: bool
    CAUSAL: bool
    WINDOW: bool
    HAS_SINK: bool
    STATS: bool
    ONE_PAGE: bool
    SPLITS: int
    CUT: bool
    GROUP: int
    ALONE: bool
    REQUESTS: int
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_R: int
    BLOCK_D: int
    STAGES: int
    BRANCH: bool
    CHAINED: bool


@triton.jit
def _later(a, b):
    return tl.maximum(a, b)


@triton.jit
def _tile(item, seqlens_q, tokens, requests, C: tl.constexpr):
    """(request, its first row of the query, its tokens, those of them that see keys, tile): what
    tile `item` holds; no tokens where there is no such tile."""
    if C.PIECES > 0:
        r = tl.arange(0, C.PIECES)
        end = rows.within(tl.load(seqlens_q + r, mask=r < requests, other=0), tokens)
        begin = rows.within(
            tl.load(seqlens_q + r - 1, mask=(r > 0) & (r <= requests), other=0), tokens
        )
        end = tl.associative_scan(tl.where(r < requests, end, tokens), 0, _later)
        begin = tl.where(r > requests, tokens, tl.associative_scan(begin, 0, _later))
        tiles = tl.cumsum(((end - begin) * C.HEADS + C.BLOCK_M - 1) // C.BLOCK_M, 0)
        request = tl.sum((tiles <= item).to(tl.int32), 0)
        here = r == request
        first = tl.sum(tl.where(here, begin, 0), 0)
        length = tl.sum(tl.where(here, end - begin, 0), 0)
        used = tl.where(request < requests, length, 0)
        tile = item - tl.max(tl.where(r < request, tiles, 0), 0)
    else:
        each = (tokens * C.HEADS + C.BLOCK_M - 1) // C.BLOCK_M
        request = item // each
        first = request * tokens
        length = tokens
        used = tokens
        if C.HAS_Q:
            used = rows.within(tl.load(seqlens_q + request), tokens)
        tile = item % each
    return request, first, length, used, tile


@triton.jit(
    do_not_specialize=[*rows.NUMBERS, "items", "window", "out_head", "lse_request", "lse_head"]
)
def _attend(
    q,
    q_rope,
    key,
    key_rope,
    seqlens_q,
    seqlens_k,
    table,
    sinks,
    out,
    lse,
    partial,
    partial_max,
    partial_sum,
    scale_log2,
    items,
    tokens,
    requests,
    max_kv_len,
    table_stride,
    pages,
    window,
    out_row,
    out_head,
    lse_request,
    lse_row,
    lse_head,
    strides,
    C: tl.constexpr,
):
    q_row, q_head, qr_row, qr_head, key_page, key_row, rope_page, rope_row = strides
    program = tl.program_id(0)
    # tiles of one request and part are neighbours, and share its keys in L2; the last come first
    item = items - 1 - program % items
    split = program // items
    request, first, length, used, tile = _tile(item, seqlens_q, tokens, requests, C)
    inside = request < requests
    kv_len = rows.within(tl.load(seqlens_k + request, mask=inside, other=0), max_kv_len)

    m = tile * C.BLOCK_M + tl.arange(0, C.BLOCK_M)
    exists = m < length * C.HEADS
    token = m // C.HEADS
    head = (m % C.HEADS).to(tl.int64)
    row = (first + token).to(tl.int64)
    # positions low[m] .. high[m] - 1 are seen
    high = rows.sees(token, used, kv_len, C.CAUSAL)
    high = tl.where(exists, high, 0)
    low = high * 0
    if C.WINDOW:
        low = tl.maximum(high - 1 - window, 0)
    stop = tl.max(high, 0)
    start = tl.min(tl.where(high > 0, low, stop), 0)
    begin = start // C.BLOCK_N * C.BLOCK_N
    part = ((stop - begin + C.SPLITS - 1) // C.SPLITS + C.BLOCK_N - 1) // C.BLOCK_N * C.BLOCK_N
    lo = begin + split * part
    hi = tl.minimum(lo + part, stop)

    d = tl.arange(0, C.BLOCK_R)
    r = tl.arange(0, C.BLOCK_D)
    i = tl.arange(0, C.BLOCK_N)
    columns = (d < C.R)[None, :]
    q_rows = q + (row * q_row + head * q_head)[:, None]
    q_tile = tl.load(q_rows + d[None, :], mask=exists[:, None] & columns, other=0.0)
    if C.D > 0:
        qr_rows = q_rope + (row * qr_row + head * qr_head)[:, None]
        qr_mask = exists[:, None] & (r < C.D)[None, :]
        qr_tile = tl.load(qr_rows + r[None, :], mask=qr_mask, other=0.0)
    row_max = tl.full([C.BLOCK_M], LOWEST, tl.float32)
    row_sum = tl.full([C.BLOCK_M], 0.0, tl.float32)
    acc = tl.full([C.BLOCK_M, C.BLOCK_R], 0.0, tl.float32)
    of_request = table + request.to(tl.int64) * table_stride
    for n in tl.range(lo, hi, C.BLOCK_N, num_stages=C.STAGES):
        position = n + i
        if C.ONE_PAGE:
            page = tl.load(of_request + n // C.PAGE).to(tl.int64)
            slot = (n % C.PAGE + i).to(tl.int64)
        else:
            page = tl.load(of_request + position // C.PAGE, mask=position < hi, other=-1)
            page = page.to(tl.int64)
            slot = (position % C.PAGE).to(tl.int64)
        valid = (position >= start) & (position < hi) & (page >= 0) & (page < pages)
        k_rows = key + (page * key_page + slot * key_row)[:, None] + d[None, :]
        if C.R == C.BLOCK_R:
            k_tile = tl.load(k_rows, mask=valid[:, None], other=0.0)
        else:
            k_tile = tl.load(k_rows, mask=valid[:, None] & columns, other=0.0)
        if C.D > 0:
            kr_rows = key_rope + (page * rope_page + slot * rope_row)[:, None]
            kr_mask = valid[:, None] & (r < C.D)[None, :]
            kr_tile = tl.load(kr_rows + r[None, :], mask=kr_mask, other=0.0)
        p = tl.broadcast_to(row_max[:, None], [C.BLOCK_M, C.BLOCK_N]).to(k_tile.dtype)
        alpha = row_max
        # in a branch the product for the scores is not seen to feed the next one, for which each of
        # two warpgroups would compute all of it
        if not C.BRANCH or n < hi:
            s = tl.dot(q_tile, k_tile.T, input_precision="ieee")
            if C.BRANCH and C.D > 0:  # scaled first, or one product becomes the other's accumulator
                rope = tl.dot(qr_tile, kr_tile.T, input_precision="ieee") * scale_log2
                s = s * scale_log2 + rope
            else:
                if C.D > 0:
                    s = tl.dot(qr_tile, kr_tile.T, s, input_precision="ieee")
                s *= scale_log2
            seen = valid[None, :] & (position[None, :] < high[:, None])
            if C.WINDOW:
                seen = seen & (position[None, :] >= low[:, None])
            s = tl.where(seen, s, float("-inf"))
            weight, alpha, row_sum, row_max = softmax.step(s, row_max, row_sum)
            p = weight.to(k_tile.dtype)
        acc = tl.dot(p, k_tile, acc * alpha[:, None], input_precision="ieee")
    if C.CHAINED:
        gdc_launch_dependents()
    there = row_sum != 0  # a NaN is there, and stays one
    total = row_sum
    if C.SPLITS == 1:
        if C.HAS_SINK:
            sink = tl.load(sinks + head, mask=exists, other=0.0).to(tl.float32)
            total += tl.exp2(sink * LOG2E - row_max)
        if C.STATS:
            if C.PIECES > 0:
                to = row * lse_row + head * lse_head
            else:
                to = request.to(tl.int64) * lse_request + token * lse_row + head * lse_head
            value = tl.where(there, row_max * LN2 + tl.log(row_sum), float("-inf"))
            tl.store(lse + to, value, mask=exists)
        to = out + (row * out_row + head * out_head)[:, None]
        stored = exists
    else:
        piece = (row * C.SPLITS + split) * C.HEADS + head
        tl.store(partial_max + piece, row_max, mask=exists)
        tl.store(partial_sum + piece, row_sum, mask=exists)
        to = partial + piece[:, None] * C.R
        stored = exists & there  # others are not read
    inverse = tl.where(there, 1.0 / tl.where(there, total, 1.0), 0.0)
    o = (acc * inverse[:, None]).to(to.dtype.element_ty)
    tl.store(to + d[None, :], o, mask=stored[:, None] & columns)


@triton.jit(
    do_not_specialize=["tokens", "out_row", "out_head", "lse_request", "lse_row", "lse_head"]
)
def _merge(
    partial,
    partial_max,
    partial_sum,
    sinks,
    out,
    lse,
    tokens,
    out_row,
    out_head,
    lse_request,
    lse_row,
    lse_head,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
):
    """out of one row and head, WIDTH columns, from its parts, always in the same order."""
    program = tl.program_id(0).to(tl.int64)
    row = program // C.HEADS
    head = program % C.HEADS
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    piece = (row * C.SPLITS + tl.arange(0, C.SPLITS)) * C.HEADS + head
    if C.CHAINED:
        gdc_wait()
    top = tl.load(partial_max + piece)
    weight = tl.load(partial_sum + piece)
    mask = (weight != 0)[:, None] & (d < C.R)[None, :]
    o = tl.load(partial + piece[:, None] * C.R + d[None, :], mask=mask, other=0.0)
    weight, row_sum, total, row_max = softmax.merged(top, weight, sinks, head, C.HAS_SINK)
    there = row_sum != 0  # a NaN is there, and stays one
    o = tl.sum(o * weight[:, None], 0)
    o = tl.where(there, o / tl.where(there, total, 1.0), 0.0)
    to = out + row * out_row + head * out_head
    tl.store(to + d, o.to(out.dtype.element_ty), mask=d < C.R)
    if C.STATS:
        at = row // tokens * lse_request + row % tokens * lse_row + head * lse_head
        value = tl.where(there, row_max * LN2 + tl.log(row_sum), float("-inf"))
        tl.store(lse + at, value, mask=tl.program_id(1) == 0)


@triton.jit(
    do_not_specialize=[
        "every",
        "tokens",
        "out_row",
        "out_head",
        "lse_request",
        "lse_row",
        "lse_head",
    ]
)
def _merge_cut(
    partial,
    partial_max,
    partial_sum,
    cuts,
    sinks,
    out,
    lse,
    every,
    tokens,
    out_row,
    out_head,
    lse_request,
    lse_row,
    lse_head,
    ROWS: tl.constexpr,
    PIECES: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
):
    """out of ROWS rows and heads, WIDTH columns, whose tiles of rows were cut: of a tile's pieces,
    PIECES at a time, the first one is where `cuts` says, and the others are what programs from the
    next one on had first: two pieces of 64 rows for each of C.GROUP programs further."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = (m // C.HEADS).to(tl.int64)
    head = m % C.HEADS
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    if C.CHAINED:
        gdc_wait()
    cut = tl.load(cuts + m, mask=m < every, other=0)
    count = cut % 1024
    begin = cut // 1024
    row_max = tl.full([ROWS], LOWEST, tl.float32)
    row_sum = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.full([ROWS, WIDTH], 0.0, tl.float32)
    for n in range(0, tl.max(count, 0), PIECES):
        i = n + tl.arange(0, PIECES)
        there = i[None, :] < count[:, None]
        at = begin[:, None] + tl.where(i == 0, 0, i * C.GROUP * 128 - 64)[None, :]
        top = tl.load(partial_max + at, mask=there, other=LOWEST)
        weight = tl.load(partial_sum + at, mask=there, other=0.0)
        mask = (weight != 0)[:, :, None]
        o = tl.load(partial + at[:, :, None] * 512 + d[None, None, :], mask=mask, other=0.0)
        new = tl.maximum(row_max, tl.max(top, 1))
        weight = weight * tl.exp2(top - new[:, None])
        factor = tl.exp2(row_max - new)
        row_sum = row_sum * factor + tl.sum(weight, 1)
        acc = acc * factor[:, None] + tl.sum(o * weight[:, :, None], 1)
        row_max = new
    total = row_sum
    stored = count > 0
    if C.HAS_SINK:
        sink = tl.load(sinks + head, mask=stored, other=0.0).to(tl.float32)
        total += tl.exp2(sink * LOG2E - row_max)
    there = row_sum != 0  # a NaN is there, and stays one
    o = tl.where(there[:, None], acc / tl.where(there, total, 1.0)[:, None], 0.0)
    to = out + row * out_row + head * out_head
    tl.store(to[:, None] + d[None, :], o.to(out.dtype.element_ty), mask=stored[:, None])
    if C.STATS:
        at = row // tokens * lse_request + row % tokens * lse_row + head * lse_head
        value = tl.where(there, row_max * LN2 + tl.log(row_sum), float("-inf"))
        tl.store(lse + at, value, mask=stored & (tl.program_id(1) == 0))


@dataclass(frozen=True)
class Tiles:
    rows: int
    keys: int
    warps: int
    stages: int
    width: int
    splits: int = 1


def shared_bytes(tile: Tiles, rank: int, rope: int, wgmma: bool) -> int:
    """Of shared memory that a program takes, at most: its queries, the tiles of keys that are on
    their way (one more where wgmma reads them), the probabilities, and the scores once more where
    rows of keys are padded."""
    turned = max(16, power_of_two(rope)) if rope else 0
    held = max(tile.stages - 1, 1) + (1 if wgmma and tile.rows == 64 else 0)
    wide, scores = tile.width + turned, tile.rows * tile.keys
    padded = 0 if (rank, rope) == (tile.width, turned) else 4 * scores
    return 2 * (tile.rows * wide + tile.keys * held * wide + scores) + padded + 1024


def tiles(
    requests: int, each: int, reach: int, rank: int, rope: int, device: torch.device
) -> Tiles | None:
    """For requests of `each` rows (tokens times heads, their mean when packed) and up to `reach`
    keys, the first tile that fits into this GPU."""
    width = max(16, power_of_two(rank))
    tiers: list[Tiles] = []
    # tensor memory has no place for both products: 345 KB of shared memory instead
    if each > 32 and not gpu.has_tensor_memory(device):
        tiers.append(Tiles(64, 64, 8, 2, width))
    if each > 16:
        tiers.append(Tiles(32, 32, 4, 2, width))
    tiers += [Tiles(16, 64, 4, stages, width) for stages in (3, 2)]
    tiers += [Tiles(16, keys, 4, 1, width) for keys in (32, 16)]
    limit, wgmma = gpu.shared_memory(device), gpu.reads_shared(device)
    tile = next((t for t in tiers if shared_bytes(t, rank, rope, wgmma) <= limit), None)
    if tile is None:
        return None
    return in_parts(tile, requests, each, reach, device)


def in_parts(tile: Tiles, requests: int, each: int, reach: int, device: torch.device) -> Tiles:
    """As many as multiprocessors have room for."""
    room = gpu.num_sms(device) * (1 if tile.rows == 64 else 2)
    items, splits = max(1, requests * cdiv(each, tile.rows)), 1
    while 2 * splits * items <= room and 2 * splits * _LEAST <= reach and 2 * splits <= _MOST_PARTS:
        splits *= 2
    return replace(tile, splits=splits)


def _work(x: Arguments) -> tuple[int, int, int]:
    """(requests, rows of heads of each, keys that one can have)."""
    requests, tokens, heads, _, _ = sizes(x)
    table = x["block_table"]
    assert table is not None
    if is_packed(x["input_layout"]):
        tokens = cdiv(tokens, max(requests, 1))
    return requests, tokens * heads, table.shape[1] * pages_of(x["key"]).shape[1]


def _chosen(x: Arguments) -> Tiles | None:
    _, _, _, rank, rope = sizes(x)
    return tiles(*_work(x), rank, rope, x["query"].device)


def unsupported(**x: Unpack[Arguments]) -> str | None:
    query, table, key = x["query"], x["block_table"], pages_of(x["key"])
    if query.is_cuda and query.dtype not in (torch.float16, torch.bfloat16):
        return f"query is {query.dtype}, supported float16 and bfloat16"
    requests, tokens, heads, rank, rope = sizes(x)
    if rope > WIDEST_ROPE:
        return f"key_rope has {rope} channels, supported up to {WIDEST_ROPE}"
    if _chosen(x) is None:
        return gpu.too_small(query.device, R=rank, Dr=rope)
    count = tokens * heads * (1 if is_packed(x["input_layout"]) else requests)
    return rows.too_many(count, "rows times heads") or rows.too_many_positions(key, table)


def forward(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor]:
    layout, device = x["input_layout"], x["query"].device
    requests, tokens, heads, rank, rope = sizes(x)
    packed, table, sink = is_packed(layout), x["block_table"], x["learnable_sink"]
    assert table is not None
    shape, lse_shape = shapes(x["query"], layout, heads)
    out = memory.empty(shape, x["query"].dtype, device)
    returned = x["return_softmax_lse"]
    lse = memory.empty(lse_shape if returned else (0,), torch.float32, device)
    if out.numel() == 0:
        return out, lse
    count = tokens * (1 if packed else requests)
    q = with_heads(x["query"], layout, heads).reshape(count, heads, rank)
    key = kr = pages_of(x["key"])
    qr = q
    if x["query_rope"] is not None and x["key_rope"] is not None:
        qr = with_heads(x["query_rope"], layout, heads).reshape(count, heads, rope)
        kr = pages_of(x["key_rope"])
    pages, page = key.shape[:2]
    scale_log2 = x["softmax_scale"] * LOG2E.value
    on_hopper = hopper.supports(q, qr, key, kr, rope, scale_log2)
    tile = Tiles(64, 64, 4, 2, rank) if on_hopper else _chosen(x)
    assert tile is not None
    if on_hopper and requests == 1:
        tile = in_parts(tile, *_work(x), device)
    parts = Parts.of(tile.splits, count * heads, rank, lse)
    turned = layout in ("TND_NTD", "BSND_NBSD")
    places = dict(
        out_row=rank if turned else heads * rank,
        out_head=count * rank if turned else rank,
        lse_request=0 if packed else heads * tokens,
        lse_row=heads if packed else 1,
        lse_head=1 if packed else tokens,
    )
    if packed:
        items = count * heads // tile.rows + requests + 1
    else:
        items = requests * cdiv(tokens * heads, tile.rows)
    mean = cdiv(tokens, max(requests, 1)) if packed else tokens
    processors, cuts = gpu.num_sms(device), lse
    few = 2 * items <= processors or (items <= 4 * processors and mean <= 128)
    cut = on_hopper and requests > 1 and few
    if cut:
        parts = Parts.of(2 * processors, 64, rank, lse)
        cuts = memory.empty((count * heads,), torch.int32, device)
    lengths = x["actual_seq_qlen"]
    constants = Constants(
        HEADS=heads,
        R=rank,
        D=rope,
        PAGE=page,
        PIECES=triton.next_power_of_2(requests + 1) if packed else 0,
        HAS_Q=lengths is not None,
        CAUSAL=x["sparse_mode"] != 0,
        WINDOW=x["sparse_mode"] == 4,
        HAS_SINK=sink is not None,
        STATS=returned,
        ONE_PAGE=page % tile.keys == 0,
        SPLITS=tile.splits,
        CUT=cut,
        GROUP=min(4, cdiv((1 if packed else tokens) * heads, 64)) if cut else 1,
        ALONE=on_hopper and mean * heads <= 64,
        REQUESTS=triton.next_power_of_2(requests + 1) if packed or cut else 0,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.keys,
        BLOCK_R=tile.width,
        BLOCK_D=max(16, power_of_two(rope)),
        STAGES=tile.stages,
        BRANCH=tile.rows == 64 and gpu.reads_shared(device),
        CHAINED=is_chained(device, parts.splits),
    )
    sinks = lse if sink is None else sink
    common = dict(
        seqlens_q=q if lengths is None else lengths,
        seqlens_k=x["actual_seq_kvlen"],
        table=table,
        sinks=sinks,
        out=out,
        lse=lse,
        **parts.arguments,
        scale_log2=scale_log2,
        items=items,
        tokens=tokens,
        requests=requests,
        max_kv_len=table.shape[1] * page,
        table_stride=table.stride(0),
        pages=pages,
        window=min(x["pre_tokens"], rows.MOST),
        **places,
        strides=(*q.stride()[:2], *qr.stride()[:2], *key.stride()[:2], *kr.stride()[:2]),
        C=constants,
    )
    if on_hopper:
        hopper.launch(q, qr, key, kr, cuts=cuts, **common)
        if cut:
            merged, pieces, width = (1, 64, 128) if count * heads <= 1024 else (4, 4, 512)
            launches.kernel(_merge_cut, cdiv(count * heads, merged), 512 // width)(
                **parts.arguments,
                cuts=cuts,
                sinks=sinks,
                out=out,
                lse=lse,
                every=count * heads,
                tokens=tokens,
                **places,
                ROWS=merged,
                PIECES=pieces,
                WIDTH=width,
                C=constants,
                num_warps=4,
                **({"launch_pdl": True} if constants.CHAINED else {}),
            )
    else:
        launches.kernel(_attend, items * tile.splits)(
            q, qr, key, kr, **common, num_warps=tile.warps
        )
    if tile.splits > 1:
        width = min(128 if tile.splits > 8 else 512, triton.next_power_of_2(rank))
        launches.kernel(_merge, count * heads, cdiv(rank, width))(
            **parts.arguments,
            sinks=sinks,
            out=out,
            lse=lse,
            tokens=tokens,
            **places,
            WIDTH=width,
            C=constants,
            num_warps=4,
            **({"launch_pdl": True} if constants.CHAINED else {}),
        )
    return out, lse
