# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Fused attention, forward: o = softmax(sm_scale q k^T) v and lse = log sum exp, natural, fp32.

    q [B, H, N_q, D], k [B, G, N_k, D], v [B, G, N_k, V]; G divides H.  Packed: [T, H, D] and so on.
    o [B, H, N_q, V], lse [B, H, N_q].  Packed: [T, H, V], [T, H].

A program holds a tile of queries and walks over the keys they see, in exp2 with log2(e) folded
into the scale; only tiles that some query sees in part are masked.  With few queries the heads of a
group share a tile; with few programs each takes a part of the keys, which _combine_kernel combines.

    condition                                         kernels
    over 2047 keys, programs of 128 queries for at    _forward_kernel then _combine_kernel
      most half of the chip
    Hopper, over 64 queries, heads above 16, a        hopper/fused_attention.py
      positive scale, one dtype, rows that TMA can
      describe
    else                                              _forward_kernel
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from typing_extensions import Unpack

from ...dispatch.common import memory
from ...dispatch.ops.attention.fused_attention import Arguments
from ..common import gpu, rows, supported
from ..common.attention_tiles import (
    Sizes,
    is_far,
    keys_of,
    locate,
    padded_size,
    plan,
    row_strides,
    rows_of,
    steps,
    strides,
    visible,
)
from ..common.log2 import LEAST, LN2, LOG2E
from ..runtime import launches
from .hopper import fused_attention as hopper


class Constants(NamedTuple):
    """Of the kernel; D_PAD and V_PAD are the head sizes' next powers of two, SIGN is the scale's:
    with 0 the queries count as 0."""

    D: int
    V: int
    D_PAD: int
    V_PAD: int
    GROUP: int
    PACK: int
    CAUSAL: bool
    WINDOW: bool
    VARLEN: bool
    SPLIT: bool
    SIGN: int
    BLOCK_M: int
    BLOCK_N: int
    STAGES: int
    FAR: bool


@triton.jit
def _over_keys(state, q_tile, keys, low, high, seen, MASKED: tl.constexpr, C: tl.constexpr):
    """Adds keys [low, high) to (acc, row_max, row_sum); row_max and row_sum in base 2."""
    acc, row_max, row_sum = state
    k, v, k_row, v_row = keys
    columns, position, scale_log2, window = seen
    d = tl.arange(0, C.D_PAD)
    e = tl.arange(0, C.V_PAD)
    n = tl.arange(0, C.BLOCK_N)
    k_offset = steps(C.BLOCK_N, C.FAR)[None, :] * k_row + d[:, None]  # [D, BLOCK_N]
    v_offset = steps(C.BLOCK_N, C.FAR)[:, None] * v_row + e[None, :]  # [BLOCK_N, V]
    for start in tl.range(low, high, C.BLOCK_N, num_stages=C.STAGES):
        column = start + n
        k_at = k + tl.cast(start, tl.int64) * k_row + k_offset
        v_at = v + tl.cast(start, tl.int64) * v_row + v_offset
        if MASKED:
            k_tile = tl.load(k_at, (column < columns)[None, :] & (d < C.D)[:, None], 0.0)
        elif C.D_PAD == C.D:
            k_tile = tl.load(k_at)
        else:
            k_tile = tl.load(k_at, (d < C.D)[:, None], 0.0)
        score = tl.dot(q_tile, k_tile)
        if MASKED:
            keep = visible(position[:, None], column[None, :], columns, window, C.CAUSAL, C.WINDOW)
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
        v_tile = rows_of(v_at, column < columns, e, C.V, C.V_PAD, MASKED)
        acc = tl.dot(p.to(q_tile.dtype), v_tile.to(q_tile.dtype), acc * alpha[:, None])
    return acc, row_max, row_sum


@triton.jit(
    do_not_specialize=[
        "scale_log2", "window", "tiles", "n_q", "n_k", "heads", "splits",
        "lse_batch", "lse_head", "lse_row",
    ]
)  # fmt: skip
def _forward_kernel(
    q,
    k,
    v,
    o,
    lse,
    plan,
    scale_log2,
    window,
    tiles,
    n_q,
    n_k,
    heads,
    splits,
    strides,
    lse_batch,
    lse_head,
    lse_row,
    partial_o,
    partial_lse,
    C: tl.constexpr,
):
    """One tile of BLOCK_M rows; PACK heads of a group share it, row r = query r // PACK, head r %
    PACK.  With SPLIT the program takes one of `splits` of the keys and leaves (o, lse in base 2)
    there."""
    q_by, k_by, v_by, o_by = strides[0:3], strides[3:6], strides[6:9], strides[9:12]
    program = tl.program_id(0)
    split_index = program % splits
    program = program // splits
    # a tile's neighbours are tiles of the same head: they find its keys in L2
    outer = program // tiles
    head = outer % heads
    batch, first_q, n_q, first_k, n_k, tile, _ = locate(
        plan, program % tiles, tiles, outer // heads, n_q, n_k, C.VARLEN
    )
    if tile * C.BLOCK_M >= n_q * C.PACK:
        return
    row = tile * C.BLOCK_M + tl.arange(0, C.BLOCK_M)
    query = row // C.PACK
    keep_row = query < n_q
    q_head_index = head * C.PACK + row % C.PACK
    kv_head = head * C.PACK // C.GROUP
    position = query + (n_k - n_q)
    d = tl.arange(0, C.D_PAD)
    e = tl.arange(0, C.V_PAD)

    where_q = batch * q_by[0] + (first_q + query) * q_by[2] + q_head_index.to(tl.int64) * q_by[1]
    q_tile = tl.load(
        q + where_q[:, None] + d[None, :], keep_row[:, None] & (d < C.D)[None, :], 0.0
    )  # [BLOCK_M, D]
    if C.SIGN < 0:
        q_tile = -q_tile
    elif C.SIGN == 0:
        q_tile = q_tile * 0
    k += batch * k_by[0] + kv_head.to(tl.int64) * k_by[1] + first_k * k_by[2]
    v += batch * v_by[0] + kv_head.to(tl.int64) * v_by[1] + first_k * v_by[2]

    first = tile * C.BLOCK_M // C.PACK + (n_k - n_q)
    last = tl.minimum((tile * C.BLOCK_M + C.BLOCK_M - 1) // C.PACK, n_q - 1) + (n_k - n_q)
    low, high, full_low, full_high = keys_of(first, last, n_k, window, C.CAUSAL, C.WINDOW)
    low = low // C.BLOCK_N * C.BLOCK_N
    if C.SPLIT:
        each = (
            (tl.maximum(high - low, 0) + splits * C.BLOCK_N - 1) // (splits * C.BLOCK_N) * C.BLOCK_N
        )
        low = low + split_index * each
        high = tl.minimum(high, low + each)
    # the tiles of BLOCK_N in between need no mask
    full_low = tl.minimum(
        tl.maximum((full_low + C.BLOCK_N - 1) // C.BLOCK_N * C.BLOCK_N, low), tl.maximum(high, low)
    )
    full_high = tl.maximum(tl.minimum(full_high, high) // C.BLOCK_N * C.BLOCK_N, full_low)

    acc = tl.full([C.BLOCK_M, C.V_PAD], 0.0, tl.float32)
    row_max = tl.full([C.BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.full([C.BLOCK_M], 0.0, tl.float32)
    state = (acc, row_max, row_sum)
    keys = (k, v, k_by[2], v_by[2])
    seen = (n_k, position, scale_log2, window)
    if C.WINDOW:
        state = _over_keys(state, q_tile, keys, low, full_low, seen, True, C)
    state = _over_keys(state, q_tile, keys, full_low, full_high, seen, False, C)
    acc, row_max, row_sum = _over_keys(state, q_tile, keys, full_high, high, seen, True, C)

    valid = row_sum != 0  # a NaN is there, and stays one
    acc = acc / tl.where(valid, row_sum, 1.0)[:, None]
    row_lse = tl.where(valid, row_max + tl.log2(tl.where(valid, row_sum, 1.0)), float("-inf"))
    where_lse = batch * lse_batch + (first_q + query) * lse_row
    where_lse += q_head_index.to(tl.int64) * lse_head
    keep = keep_row[:, None] & (e < C.V)[None, :]
    if C.SPLIT:
        # lse is contiguous: its offsets number the rows of the parts, too
        where_partial = where_lse * splits + split_index
        tl.store(partial_o + where_partial[:, None] * C.V + e[None, :], acc, keep)
        tl.store(partial_lse + where_partial, row_lse, keep_row)
    else:
        where_o = batch * o_by[0] + (first_q + query) * o_by[2]
        where_o += q_head_index.to(tl.int64) * o_by[1]
        tl.store(o + where_o[:, None] + e[None, :], acc.to(o.dtype.element_ty), keep)
        tl.store(lse + where_lse, row_lse * LN2, keep_row)


@triton.jit(do_not_specialize=["splits"])
def _combine_kernel(
    partial_o,
    partial_lse,
    o,
    lse,
    splits,
    SPLITS: tl.constexpr,
    C: tl.constexpr,
):
    """One row: o = sum of 2^(lse_p - max) o_p over the parts, normalised."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, C.V_PAD)
    split_index = tl.arange(0, SPLITS)
    each = tl.load(partial_lse + row * splits + split_index, split_index < splits, float("-inf"))
    top = tl.max(each, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(each - top)
    total = tl.sum(weight, 0)
    at = partial_o + (row * splits + split_index)[:, None] * C.V + e[None, :]
    acc = tl.load(at, (split_index < splits)[:, None] & (e < C.V)[None, :], 0.0)
    valid = total != 0
    total = tl.where(valid, total, 1.0)
    merged = tl.sum(acc * weight[:, None], 0) / total
    tl.store(o + row * C.V + e, merged.to(o.dtype.element_ty), e < C.V)
    tl.store(lse + row, tl.where(valid, (top + tl.log2(total)) * LN2, float("-inf")))


@dataclass(frozen=True)
class Tiling:
    """How the plain kernel cuts one call."""

    queries: int  # rows of a tile, BLOCK_M
    keys: int  # BLOCK_N
    warps: int
    stages: int
    pack: int  # heads of a group that share a tile
    splits: int  # programs among which the keys of a tile are split


def tiling(sizes: Sizes, size: int, num_sms: int, shared: int) -> Tiling:
    """`size` is the larger head size, padded to a power of two; `shared` a program's memory."""
    if sizes.rows * sizes.group <= 64:
        # few queries: what counts is that every byte of k and v is in flight once
        tile = max(16, triton.next_power_of_2(sizes.rows * sizes.group))
        block, stages = (64, 3) if size <= 128 else (32, 2)
        programs = max(1, sizes.batch * sizes.key_heads)
        # three waves of programs, and at least four blocks of keys for each
        splits = max(1, min(3 * num_sms // programs, sizes.keys // (4 * block), 128))
        return Tiling(tile, block, 4, stages, sizes.group, splits)
    tile = 128 if sizes.rows > 64 else 64
    block, warps, stages = (64, 4, 3) if size <= 64 else (64, 8, 3) if size <= 128 else (32, 8, 2)
    if size > 128 and shared < 104 * 1024:  # what 128 queries take
        tile, warps = 64, 4
    splits = 1
    if sizes.is_narrow(num_sms):
        programs = max(1, sizes.batch * sizes.heads * triton.cdiv(sizes.rows, tile))
        splits = max(1, min(2 * num_sms // programs, sizes.keys // (8 * block), 32))
    return Tiling(tile, block, warps, stages, 1, splits)


def unsupported(q: torch.Tensor, v: torch.Tensor, **_: Any) -> str | None:
    if reason := supported.half_precision("q", q):
        return reason
    for name, size in (("q", q.shape[-1]), ("v", v.shape[-1])):
        if size > 256:
            return f"head size of {name} is {size}, supported up to 256"
    for name, each in (("q", q), ("v", v)):
        reason = rows.too_many(each.shape[0 if each.ndim == 3 else 2], "rows")
        if reason:
            return f"{name} has {reason}"
    if v.dtype is torch.float8_e4m3fn and v.is_cuda and not gpu.converts_fp8(v.device):
        capability = gpu.capability(v.device)
        return f"v is float8_e4m3fn, which compute capability {capability} cannot convert"
    return None


def forward(**x: Unpack[Arguments]) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, cu_seqlens_q = x["q"], x["k"], x["v"], x["cu_seqlens_q"]
    o = memory.empty((*q.shape[:-1], v.shape[-1]), q.dtype, q.device)
    lse = memory.empty(q.shape[:-1], torch.float32, q.device)
    if lse.numel() == 0:
        return o, lse
    scale = q.shape[-1] ** -0.5 if x["sm_scale"] is None else x["sm_scale"]
    sizes = Sizes.of(q, k, cu_seqlens_q)
    split = sizes.keys >= 2048 and sizes.is_narrow(gpu.num_sms(q.device))
    # heads of 16 would be padded to 64: causal, B 4, H 16, 4096 tokens, H200, 2026-11, 264 us by
    # the plain kernel and 327 by the other (heads of 32: 310 and 308)
    plain = sizes.rows <= 64 or split or max(q.shape[-1], v.shape[-1]) <= 16
    launch = hopper.launch if not plain and hopper.supports(q, k, v, scale, o) else _plain
    launch(x, sizes, scale, o, lse)
    return o, lse


def _plain(x: Arguments, sizes: Sizes, scale: float, o: torch.Tensor, lse: torch.Tensor) -> None:
    q, k, v, window = x["q"], x["k"], x["v"], x["window"]
    size, v_size = q.shape[-1], v.shape[-1]
    padded, v_padded = padded_size(size), padded_size(v_size)
    if gpu.is_hopper(q.device):  # tiles of narrower values: docs/sanitizer.md, a fault of ptxas
        v_padded = max(v_padded, min(padded, 64))
    t = tiling(sizes, max(padded, v_padded), gpu.num_sms(q.device), gpu.shared_memory(q.device))
    packed = (x["cu_seqlens_q"], x["cu_seqlens_k"])
    listed, tiles = plan(*packed, sizes.n_q, sizes.n_k, t.queries, t.pack)
    split = t.splits > 1
    partial_o = (
        memory.empty((lse.numel(), t.splits, v_size), torch.float32, q.device) if split else o
    )
    partial_lse = memory.empty((lse.numel(), t.splits), torch.float32, q.device) if split else lse
    heads = sizes.heads // t.pack
    scale_log2 = abs(scale) * LOG2E.value
    sign = 0 if scale_log2 < LEAST else 1 if scale > 0 else -1
    C = Constants(
        D=size,
        V=v_size,
        D_PAD=padded,
        V_PAD=v_padded,
        GROUP=sizes.group,
        PACK=t.pack,
        CAUSAL=x["causal"],
        WINDOW=window is not None,
        VARLEN=sizes.varlen,
        SPLIT=split,
        SIGN=sign,
        BLOCK_M=t.queries,
        BLOCK_N=t.keys,
        STAGES=t.stages,
        FAR=is_far(k, v),
    )
    launches.kernel(_forward_kernel, t.splits * tiles * sizes.outer * heads)(
        q,
        k,
        v,
        o,
        lse,
        listed,
        scale_log2 if sign else 1.0,
        min(window or 0, 2**30),
        tiles,
        sizes.n_q,
        sizes.n_k,
        heads,
        t.splits,
        (*strides(q), *strides(k), *strides(v), *strides(o)),
        *row_strides(lse),
        partial_o,
        partial_lse,
        C=C,
        num_warps=t.warps,
    )
    if split:
        launches.kernel(_combine_kernel, lse.numel())(
            partial_o,
            partial_lse,
            o,
            lse,
            t.splits,
            SPLITS=triton.next_power_of_2(t.splits),
            C=C,
            num_warps=4,
        )
