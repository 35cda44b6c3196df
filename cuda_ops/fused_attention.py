# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Fused attention, forward: o = softmax(sm_scale q k^T) v and lse = log sum exp, natural, fp32.

    q [B, H, N_q, D], k [B, G, N_k, D], v [B, G, N_k, V]; G divides H.  Packed: [T, H, D] and so on.
    o [B, H, N_q, V], lse [B, H, N_q].  Packed: [T, H, V], [T, H].

A program holds a tile of queries and walks over the keys they see, in exp2 with log2(e) folded
into the scale; only tiles that some query sees in part are masked.  With few queries the heads of a
group share a tile and the keys are split over programs, whose parts a second kernel merges.  On
Hopper the common shapes go to fused_attention_hopper.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..dispatch.common import memory
from .fused_attention_tiles import LN_2, LOG2_E, keys_of, locate, plan, row_strides, strides, visible

_FP8 = (torch.float8_e5m2, torch.float8_e4m3fn)


@triton.jit
def _over_keys(
    acc, row_max, row_sum, q_tile, k, v, k_row, v_row, low, high, columns, position,
    scale_log2, window, start_d, D, V,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    BN: tl.constexpr, D_PAD: tl.constexpr, V_PAD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Adds keys [low, high) to (acc, row_max, row_sum); row_max and row_sum in base 2."""
    d = tl.arange(0, D_PAD)
    e = tl.arange(0, V_PAD)
    n = tl.arange(0, BN)
    k_offset = n[None, :] * k_row + d[:, None]  # [D, BN]
    v_offset = n[:, None] * v_row + e[None, :]  # [BN, V]
    for start in tl.range(low, high, BN, num_stages=STAGES):
        column = start + n
        k_at = k + start.to(tl.int64) * k_row + k_offset
        v_at = v + start.to(tl.int64) * v_row + v_offset
        if MASKED:
            k_tile = tl.load(k_at, (column < columns)[None, :] & (d < D)[:, None], 0.0)
        elif D_PAD == D:
            k_tile = tl.load(k_at)
        else:
            k_tile = tl.load(k_at, (d < D)[:, None], 0.0)
        score = tl.dot(q_tile, k_tile)
        if MASKED:
            keep = visible(position[:, None], column[None, :], columns, window, CAUSAL, WINDOW)
            score = tl.where(keep, score, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(score, 1) * scale_log2)
        if MASKED:
            # a row that has seen nothing yet keeps -inf, and -inf - -inf is no number
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        else:
            shift = new_max
        p = tl.exp2(score * scale_log2 - shift[:, None])
        alpha = tl.exp2(row_max - shift)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        row_max = new_max
        if MASKED:
            v_tile = tl.load(v_at, (column < columns)[:, None] & (e < V)[None, :], 0.0)
        elif V_PAD == V:
            v_tile = tl.load(v_at)
        else:
            v_tile = tl.load(v_at, (e < V)[None, :], 0.0)
        acc = tl.dot(p.to(q_tile.dtype), v_tile.to(q_tile.dtype), acc * alpha[:, None])
    return acc, row_max, row_sum


@triton.jit(
    do_not_specialize=["tiles", "n_q", "n_k", "window", "parts", "scale_log2"],
)
def _forward_kernel(
    q, k, v, o, lse, plan, scale_log2, window, tiles, n_q, n_k, heads, parts,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    o_batch, o_head, o_row, lse_batch, lse_head, lse_row, part_o, part_lse,
    D: tl.constexpr, V: tl.constexpr, D_PAD: tl.constexpr, V_PAD: tl.constexpr,
    GROUP: tl.constexpr, PACK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    VARLEN: tl.constexpr, SPLIT: tl.constexpr, NEGATIVE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of BM rows; PACK heads of a group share it, row r = query r // PACK, head r % PACK.
    With SPLIT the program takes one of `parts` of the keys and leaves (o, lse in base 2) there."""
    program = tl.program_id(0)
    part = program % parts
    program = program // parts
    # a tile's neighbours are tiles of the same head: they find its keys in L2
    flat = program % tiles
    head = program // tiles
    batch, first_q, n_q, first_k, n_k, tile = locate_row(plan, flat, head, heads, n_q, n_k, VARLEN)
    head = head % heads
    if tile * BM >= n_q * PACK:
        return
    row = tile * BM + tl.arange(0, BM)
    query = row // PACK
    keep_row = query < n_q
    q_head_index = head * PACK + row % PACK
    kv_head = head * PACK // GROUP
    position = query + (n_k - n_q)
    d = tl.arange(0, D_PAD)
    e = tl.arange(0, V_PAD)

    where_q = batch.to(tl.int64) * q_batch + (first_q + query).to(tl.int64) * q_row
    where_q += q_head_index.to(tl.int64) * q_head
    q_tile = tl.load(
        q + where_q[:, None] + d[None, :], keep_row[:, None] & (d < D)[None, :], 0.0
    )  # [BM, D]
    if NEGATIVE:
        q_tile = -q_tile
    k += batch.to(tl.int64) * k_batch + kv_head.to(tl.int64) * k_head
    k += first_k.to(tl.int64) * k_row
    v += batch.to(tl.int64) * v_batch + kv_head.to(tl.int64) * v_head
    v += first_k.to(tl.int64) * v_row

    first = tile * BM // PACK + (n_k - n_q)
    last = tl.minimum((tile * BM + BM - 1) // PACK, n_q - 1) + (n_k - n_q)
    low, high, full_low, full_high = keys_of(first, last, n_k, window, CAUSAL, WINDOW)
    low = low // BN * BN
    if SPLIT:
        each = (tl.maximum(high - low, 0) + parts * BN - 1) // (parts * BN) * BN
        low = low + part * each
        high = tl.minimum(high, low + each)
    # the tiles of BN in between need no mask
    full_low = tl.minimum(tl.maximum((full_low + BN - 1) // BN * BN, low), tl.maximum(high, low))
    full_high = tl.maximum(tl.minimum(full_high, high) // BN * BN, full_low)

    acc = tl.zeros([BM, V_PAD], tl.float32)
    row_max = tl.full([BM], float("-inf"), tl.float32)
    row_sum = tl.zeros([BM], tl.float32)
    if WINDOW:
        acc, row_max, row_sum = _over_keys(
            acc, row_max, row_sum, q_tile, k, v, k_row, v_row, low, full_low, n_k, position,
            scale_log2, window, 0, D, V, True, CAUSAL, WINDOW, BN, D_PAD, V_PAD, STAGES,
        )  # fmt: skip
    acc, row_max, row_sum = _over_keys(
        acc, row_max, row_sum, q_tile, k, v, k_row, v_row, full_low, full_high, n_k, position,
        scale_log2, window, 0, D, V, False, CAUSAL, WINDOW, BN, D_PAD, V_PAD, STAGES,
    )  # fmt: skip
    acc, row_max, row_sum = _over_keys(
        acc, row_max, row_sum, q_tile, k, v, k_row, v_row, full_high, high, n_k, position,
        scale_log2, window, 0, D, V, True, CAUSAL, WINDOW, BN, D_PAD, V_PAD, STAGES,
    )  # fmt: skip

    seen = row_sum > 0
    acc = acc / tl.where(seen, row_sum, 1.0)[:, None]
    row_lse = tl.where(seen, row_max + tl.log2(tl.where(seen, row_sum, 1.0)), float("-inf"))
    where_lse = batch.to(tl.int64) * lse_batch + (first_q + query).to(tl.int64) * lse_row
    where_lse += q_head_index.to(tl.int64) * lse_head
    keep = keep_row[:, None] & (e < V)[None, :]
    if SPLIT:
        # lse is contiguous: its offset numbers the rows of the parts, too
        where_part = where_lse * parts + part
        tl.store(part_o + where_part[:, None] * V + e[None, :], acc, keep)
        tl.store(part_lse + where_part, row_lse, keep_row)
    else:
        where_o = batch.to(tl.int64) * o_batch + (first_q + query).to(tl.int64) * o_row
        where_o += q_head_index.to(tl.int64) * o_head
        tl.store(o + where_o[:, None] + e[None, :], acc.to(o.dtype.element_ty), keep)
        tl.store(lse + where_lse, row_lse * 0.6931471805599453, keep_row)


@triton.jit
def locate_row(plan, flat, outer, heads, n_q, n_k, VARLEN: tl.constexpr):
    """`locate`, for a grid whose outer number is (batch, head) and inner one the tile."""
    if VARLEN:
        found = locate(plan, flat, 1, n_q, n_k, VARLEN)
    else:
        tiles = tl.num_programs(0)
        found = (outer // heads, 0, n_q, 0, n_k, flat)
    return found
