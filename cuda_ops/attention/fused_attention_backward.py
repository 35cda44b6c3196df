# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Gradients of fused attention, from its log-sum-exp.

    delta = sum_v grad_o o - grad_lse     P = exp(S - lse)     dS = P (grad_o v^T - delta)
    grad_q = sm_scale dS k     grad_k = sm_scale dS^T q     grad_v = P^T grad_o

The plain path is deterministic: one kernel owns a tile of keys and walks over the queries (of all
heads of the group) that see it, another owns a tile of queries and walks over its keys; no sum is
shared.

    condition                                       kernels
    Hopper, over 64 queries, rows that TMA can      _statistics_kernel then
      describe; heads to 128 to be deterministic    hopper/fused_attention_backward.py
    the same, deterministic, heads above 128        _statistics_kernel then
                                                    hopper/fused_attention_backward.py then
                                                    _queries_kernel
    else                                            _statistics_kernel then _keys_kernel then
                                                    _queries_kernel
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from typing_extensions import Unpack

from ...dispatch.common import memory
from ...dispatch.ops.attention.fused_attention_backward import Arguments
from ..common import gpu
from ..common.attention_tiles import (
    Sizes,
    is_far,
    keys_of,
    locate,
    padded_first,
    padded_rows,
    padded_size,
    plan,
    queries_of,
    row_strides,
    rows_of,
    steps,
    strides,
    visible,
)
from ..common.log2 import LOG2E
from ..runtime import launches
from . import fused_attention
from .hopper import fused_attention_backward as hopper


@triton.jit(
    do_not_specialize=[
        "scale", "tiles", "n_q", "heads", "padded",
        "l_batch", "l_head", "l_row", "gl_batch", "gl_head", "gl_row",
    ]
)  # fmt: skip
def _statistics_kernel(
    o,
    grad_o,
    lse,
    grad_lse,
    lse2,
    delta,
    sums,
    turns,
    plan,
    scale,
    tiles,
    n_q,
    heads,
    padded,
    o_strides,
    g_strides,
    l_batch,
    l_head,
    l_row,
    gl_batch,
    gl_head,
    gl_row,
    V: tl.constexpr,
    V_PAD: tl.constexpr,
    SUMS: tl.constexpr,
    TURNS: tl.constexpr,
    GRAD_LSE: tl.constexpr,
    VARLEN: tl.constexpr,
    STARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """delta, and lse in base 2 with +inf for a row that saw nothing (so that its P is 0), of whole
    blocks of BLOCK_M queries; STARTS: what sums of products begin at instead, -delta, and -lse /
    scale with -inf for such a row.  Clears SUMS numbers a row where grad_q will be summed, and the
    turns."""
    o_batch, o_head, o_row = o_strides
    g_batch, g_head, g_row = g_strides
    program = tl.program_id(0)
    outer = program // tiles
    if TURNS:
        tl.store(turns, 0, program == 0)
    batch, first, rows, _, _, tile, piece = locate(
        plan, program % tiles, tiles, outer // heads, n_q, n_q, VARLEN
    )
    if tile * BLOCK_M >= rows:
        return
    head = (outer % heads).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    row = tile * BLOCK_M + m
    keep = row < rows
    e = tl.arange(0, V_PAD)
    both = keep[:, None] & (e < V)[None, :]
    at = batch * o_batch + head * o_head + (first + row) * o_row
    product = tl.load(o + at[:, None] + e[None, :], both, 0.0).to(tl.float32)
    at = batch * g_batch + head * g_head + (first + row) * g_row
    product *= tl.load(grad_o + at[:, None] + e[None, :], both, 0.0).to(tl.float32)
    total = tl.sum(product, 1)
    if GRAD_LSE:
        at = batch * gl_batch + head * gl_head + (first + row) * gl_row
        total -= tl.load(grad_lse + at, keep, 0.0)
    at = batch * l_batch + head * l_head + (first + row) * l_row
    value = tl.load(lse + at, keep, float("-inf"))
    if STARTS:
        value = tl.where(value == float("-inf"), float("-inf"), -value / scale)
        total = -total
    else:
        value = tl.where(value == float("-inf"), float("inf"), value * LOG2E)
    out = (batch * heads + head) * padded + padded_first(first, piece) + row
    tl.store(lse2 + out, value)
    tl.store(delta + out, total)
    if SUMS:
        for at_column in tl.static_range(0, SUMS, 64):
            d = at_column + tl.arange(0, 64)
            tl.store(sums + out[:, None] * SUMS + d[None, :], tl.zeros([BLOCK_M, 64], tl.float32))
    if TURNS:
        place = (batch * heads + head) * padded + padded_first(first, piece)
        tl.store(turns + 1 + place // BLOCK_M + tile, 0)


class Constants(NamedTuple):
    """Of the two kernels behind it; D_PAD and V_PAD are the head sizes' next powers of two."""

    D: int
    V: int
    D_PAD: int
    V_PAD: int
    GROUP: int
    CAUSAL: bool
    WINDOW: bool
    VARLEN: bool
    FAR: bool
    BLOCK_M: int
    BLOCK_N: int
    STAGES: int


@triton.jit
def _settled(x):
    """x.  Two sums that wgmma is still adding to where a loop ends make ptxas wait behind every one
    of the loop's products: a bit cast has Triton wait for both in the same step."""
    return x.to(tl.int32, bitcast=True).to(tl.float32, bitcast=True)


@triton.jit
def _over_queries(sums, tiles, queries, low, high, seen, MASKED: tl.constexpr, C: tl.constexpr):
    """Adds what queries [low, high) of one head give to the keys of a tile."""
    grad_k, grad_v = sums
    k_tile, v_tile = tiles
    q, grad_o, lse2, delta, q_row, g_row = queries
    rows, shift, column, columns, scale_log2, window = seen
    d = tl.arange(0, C.D_PAD)
    e = tl.arange(0, C.V_PAD)
    m = tl.arange(0, C.BLOCK_M)
    step = steps(C.BLOCK_M, C.FAR)
    for start in tl.range(low, high, C.BLOCK_M, num_stages=C.STAGES):
        query = start + m
        q_at = q + tl.cast(start, tl.int64) * q_row + (step * q_row)[:, None] + d[None, :]
        g_at = grad_o + tl.cast(start, tl.int64) * g_row + (step * g_row)[:, None] + e[None, :]
        q_tile = rows_of(q_at, query < rows, d, C.D, C.D_PAD, MASKED)
        g_tile = rows_of(g_at, query < rows, e, C.V, C.V_PAD, MASKED)
        if MASKED:
            row_lse = tl.load(lse2 + query, query < rows, float("inf"))
            row_delta = tl.load(delta + query, query < rows, 0.0)
        else:
            row_lse = tl.load(lse2 + query)
            row_delta = tl.load(delta + query)
        score = tl.dot(k_tile, tl.trans(q_tile))  # [BLOCK_N, BLOCK_M]
        grad_p = tl.dot(v_tile, tl.trans(g_tile))
        p = tl.exp2(score * scale_log2 - row_lse[None, :])
        if MASKED:
            keep = visible(
                (query + shift)[None, :], column[:, None], columns, window, C.CAUSAL, C.WINDOW
            )
            p = tl.where(keep, p, 0.0)
        grad_s = p * (grad_p - row_delta[None, :])
        grad_v = _settled(tl.dot(p.to(g_tile.dtype), g_tile, grad_v))
        grad_k = _settled(tl.dot(grad_s.to(q_tile.dtype), q_tile, grad_k))
    return grad_k, grad_v


@triton.jit(do_not_specialize=["scale", "window", "tiles", "n_q", "n_k", "heads", "padded"])
def _keys_kernel(
    q,
    k,
    v,
    grad_o,
    lse2,
    delta,
    grad_k,
    grad_v,
    plan,
    scale,
    window,
    tiles,
    n_q,
    n_k,
    heads,
    padded,
    strides,
    C: tl.constexpr,
):
    """grad_k and grad_v of a tile of BLOCK_N keys of one key head (`heads` are key heads here)."""
    q_by, k_by, v_by, g_by = strides[0:3], strides[3:6], strides[6:9], strides[9:12]
    gk_by, gv_by = strides[12:15], strides[15:18]
    program = tl.program_id(0)
    outer = program // tiles
    kv_head = outer % heads
    batch, first_k, n_k, first_q, n_q, tile, piece = locate(
        plan, tiles - 1 - program % tiles, tiles, outer // heads, n_k, n_q, C.VARLEN
    )
    if tile * C.BLOCK_N >= n_k:
        return
    column = tile * C.BLOCK_N + tl.arange(0, C.BLOCK_N)
    keep = column < n_k
    d = tl.arange(0, C.D_PAD)
    e = tl.arange(0, C.V_PAD)
    at = batch * k_by[0] + kv_head.to(tl.int64) * k_by[1] + (first_k + column) * k_by[2]
    k_tile = tl.load(k + at[:, None] + d[None, :], keep[:, None] & (d < C.D)[None, :], 0.0)
    at = batch * v_by[0] + kv_head.to(tl.int64) * v_by[1] + (first_k + column) * v_by[2]
    v_tile = tl.load(v + at[:, None] + e[None, :], keep[:, None] & (e < C.V)[None, :], 0.0)

    shift = n_k - n_q
    last = tl.minimum(tile * C.BLOCK_N + C.BLOCK_N, n_k) - 1
    low, high, full_low, full_high = queries_of(
        tile * C.BLOCK_N, last, n_q, shift, window, C.CAUSAL, C.WINDOW
    )
    low = low // C.BLOCK_M * C.BLOCK_M
    high = tl.maximum(high, low)
    if tile * C.BLOCK_N + C.BLOCK_N > n_k:
        full_low = high  # the last tile is not whole: all of it is masked
    full_low = tl.minimum(
        tl.maximum((full_low + C.BLOCK_M - 1) // C.BLOCK_M * C.BLOCK_M, low), high
    )
    full_high = tl.maximum(tl.minimum(full_high, high) // C.BLOCK_M * C.BLOCK_M, full_low)
    scale_log2 = scale * LOG2E

    acc_k = tl.full([C.BLOCK_N, C.D_PAD], 0.0, tl.float32)
    acc_v = tl.full([C.BLOCK_N, C.V_PAD], 0.0, tl.float32)
    seen = (n_q, shift, column, n_k, scale_log2, window)
    for member in range(C.GROUP):
        head = (kv_head * C.GROUP + member).to(tl.int64)
        q_at = q + batch * q_by[0] + head * q_by[1] + first_q * q_by[2]
        g_at = grad_o + batch * g_by[0] + head * g_by[1] + first_q * g_by[2]
        stat = (batch * heads * C.GROUP + head) * padded + padded_first(first_q, piece)
        queries = (q_at, g_at, lse2 + stat, delta + stat, q_by[2], g_by[2])
        sums = (acc_k, acc_v)
        sums = _over_queries(sums, (k_tile, v_tile), queries, low, full_low, seen, True, C)
        sums = _over_queries(sums, (k_tile, v_tile), queries, full_low, full_high, seen, False, C)
        acc_k, acc_v = _over_queries(
            sums, (k_tile, v_tile), queries, full_high, high, seen, True, C
        )

    at = batch * gk_by[0] + kv_head.to(tl.int64) * gk_by[1] + (first_k + column) * gk_by[2]
    tl.store(
        grad_k + at[:, None] + d[None, :],
        (acc_k * scale).to(grad_k.dtype.element_ty),
        keep[:, None] & (d < C.D)[None, :],
    )
    at = batch * gv_by[0] + kv_head.to(tl.int64) * gv_by[1] + (first_k + column) * gv_by[2]
    tl.store(
        grad_v + at[:, None] + e[None, :],
        acc_v.to(grad_v.dtype.element_ty),
        keep[:, None] & (e < C.V)[None, :],
    )


@triton.jit
def _over_keys(grad_q, tiles, keys, low, high, seen, MASKED: tl.constexpr, C: tl.constexpr):
    """Adds what keys [low, high) give to the queries of a tile."""
    q_tile, g_tile, row_lse, row_delta = tiles
    k, v, k_row, v_row = keys
    columns, position, scale_log2, window = seen
    d = tl.arange(0, C.D_PAD)
    e = tl.arange(0, C.V_PAD)
    n = tl.arange(0, C.BLOCK_N)
    step = steps(C.BLOCK_N, C.FAR)
    for start in tl.range(low, high, C.BLOCK_N, num_stages=C.STAGES):
        column = start + n
        k_at = k + tl.cast(start, tl.int64) * k_row + (step * k_row)[:, None] + d[None, :]
        v_at = v + tl.cast(start, tl.int64) * v_row + (step * v_row)[:, None] + e[None, :]
        k_tile = rows_of(k_at, column < columns, d, C.D, C.D_PAD, MASKED)
        v_tile = rows_of(v_at, column < columns, e, C.V, C.V_PAD, MASKED)
        score = tl.dot(q_tile, tl.trans(k_tile))
        p = tl.exp2(score * scale_log2 - row_lse[:, None])
        if MASKED:
            keep = visible(position[:, None], column[None, :], columns, window, C.CAUSAL, C.WINDOW)
            p = tl.where(keep, p, 0.0)
        grad_p = tl.dot(g_tile, tl.trans(v_tile))
        grad_s = p * (grad_p - row_delta[:, None])
        grad_q = tl.dot(grad_s.to(k_tile.dtype), k_tile, grad_q)
    return grad_q


@triton.jit(do_not_specialize=["scale", "window", "tiles", "n_q", "n_k", "heads", "padded"])
def _queries_kernel(
    q,
    k,
    v,
    grad_o,
    lse2,
    delta,
    grad_q,
    plan,
    scale,
    window,
    tiles,
    n_q,
    n_k,
    heads,
    padded,
    strides,
    C: tl.constexpr,
):
    """grad_q of a tile of BLOCK_M queries of one head."""
    q_by, k_by, v_by, g_by = strides[0:3], strides[3:6], strides[6:9], strides[9:12]
    gq_by = strides[12:15]
    program = tl.program_id(0)
    outer = program // tiles
    head = (outer % heads).to(tl.int64)
    batch, first_q, n_q, first_k, n_k, tile, piece = locate(
        plan, program % tiles, tiles, outer // heads, n_q, n_k, C.VARLEN
    )
    if tile * C.BLOCK_M >= n_q:
        return
    query = tile * C.BLOCK_M + tl.arange(0, C.BLOCK_M)
    keep = query < n_q
    d = tl.arange(0, C.D_PAD)
    e = tl.arange(0, C.V_PAD)
    at = batch * q_by[0] + head * q_by[1] + (first_q + query) * q_by[2]
    q_tile = tl.load(q + at[:, None] + d[None, :], keep[:, None] & (d < C.D)[None, :], 0.0)
    at = batch * g_by[0] + head * g_by[1] + (first_q + query) * g_by[2]
    g_tile = tl.load(grad_o + at[:, None] + e[None, :], keep[:, None] & (e < C.V)[None, :], 0.0)
    stat = (batch * heads + head) * padded + padded_first(first_q, piece) + query
    row_lse = tl.load(lse2 + stat, keep, float("inf"))
    row_delta = tl.load(delta + stat, keep, 0.0)
    k += batch * k_by[0] + head // C.GROUP * k_by[1] + first_k * k_by[2]
    v += batch * v_by[0] + head // C.GROUP * v_by[1] + first_k * v_by[2]

    shift = n_k - n_q
    position = query + shift
    last = tl.minimum(tile * C.BLOCK_M + C.BLOCK_M, n_q) - 1 + shift
    low, high, full_low, full_high = keys_of(
        tile * C.BLOCK_M + shift, last, n_k, window, C.CAUSAL, C.WINDOW
    )
    low = low // C.BLOCK_N * C.BLOCK_N
    high = tl.maximum(high, low)
    full_low = tl.minimum(
        tl.maximum((full_low + C.BLOCK_N - 1) // C.BLOCK_N * C.BLOCK_N, low), high
    )
    full_high = tl.maximum(tl.minimum(full_high, high) // C.BLOCK_N * C.BLOCK_N, full_low)
    scale_log2 = scale * LOG2E

    acc = tl.full([C.BLOCK_M, C.D_PAD], 0.0, tl.float32)
    held = (q_tile, g_tile, row_lse, row_delta)
    keys = (k, v, k_by[2], v_by[2])
    seen = (n_k, position, scale_log2, window)
    if C.WINDOW:
        acc = _over_keys(acc, held, keys, low, full_low, seen, True, C)
    acc = _over_keys(acc, held, keys, full_low, full_high, seen, False, C)
    acc = _over_keys(acc, held, keys, full_high, high, seen, True, C)
    at = batch * gq_by[0] + head * gq_by[1] + (first_q + query) * gq_by[2]
    tl.store(
        grad_q + at[:, None] + d[None, :],
        (acc * scale).to(grad_q.dtype.element_ty),
        keep[:, None] & (d < C.D)[None, :],
    )


@dataclass(frozen=True)
class Tiling:
    """How one of the plain kernels cuts a call."""

    queries: int
    keys: int
    warps: int
    stages: int


def tiling(size: int, shared: int, tensor_memory: bool) -> tuple[Tiling, Tiling]:
    """Of the keys and of the queries kernel; `size` is the larger head size, padded, `shared` the
    memory of a program.  Two sums of 64 keys x 256 are too many columns of tensor memory.

    The plain backward, causal, B 4, H 16, 4096 tokens, H200, 2026-11: D 64 1105 us, D 128 2023 us
    (keys of 64 x 64 2069), D 256 6890 us: keys 4951 (32 x 64 5192), queries 1870 (128 x 32 2002 in
    two stages, 64 x 32 2430)."""
    if size <= 64:
        return Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 3)
    if size <= 128:
        return Tiling(32, 64, 4, 3), Tiling(64, 64, 4, 2)
    if shared >= 200 * 1024 and not tensor_memory:
        return Tiling(64, 64, 8, 2), Tiling(128, 64, 8, 1)
    small = shared < 129 * 1024 or tensor_memory
    return Tiling(32, 32, 4, 1) if small else Tiling(32, 64, 8, 2), Tiling(64, 32, 4, 1)


def unsupported(q: torch.Tensor, v: torch.Tensor, **_: Any) -> str | None:
    return fused_attention.unsupported(q=q, v=v)


def backward(**a: Unpack[Arguments]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad_o, q, k, v, cu_seqlens_q = a["grad_o"], a["q"], a["k"], a["v"], a["cu_seqlens_q"]
    cu_seqlens_k, window, deterministic = a["cu_seqlens_k"], a["window"], a["deterministic"]
    grads = tuple(memory.empty(x.shape, x.dtype, x.device) for x in (q, k, v))
    if a["lse"].numel() == 0:
        return grads[0], grads[1].zero_(), grads[2].zero_()
    sizes = Sizes.of(q, k, cu_seqlens_q)
    size, v_size = q.shape[-1], v.shape[-1]
    padded, v_padded = padded_size(size), padded_size(v_size)
    scale = size**-0.5 if a["sm_scale"] is None else a["sm_scale"]
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    on_hopper = sizes.rows > 64 and hopper.supports(q, k, v, scale, grad_o, grads)
    widths = hopper.Widths.of(q, v)
    # additions in turn were seen right on an H200 with heads of up to 128
    adds = on_hopper and not (deterministic and widths.wide)
    lse2, delta, sums, turns = statistics(
        grad_o,
        a["o"],
        a["lse"],
        a["grad_lse"],
        sizes,
        cu_seqlens_q,
        widths.counted if adds else 0,
        adds and deterministic,
        scale if on_hopper and not widths.wide else None,
        widths.queries if on_hopper else 64,
    )
    if on_hopper:
        hopper.launch(
            grad_o,
            q,
            k,
            v,
            lse2,
            delta,
            sums,
            turns,
            grads,
            sizes,
            a["causal"],
            scale,
            cu_seqlens_q,
            cu_seqlens_k,
            window,
        )
        if adds:
            return grads[0], grads[1], grads[2]
    over_queries, over_keys = tiling(
        max(padded, v_padded), gpu.shared_memory(q.device), gpu.has_tensor_memory(q.device)
    )
    n_q, n_k, heads = sizes.n_q, sizes.n_k, sizes.heads
    queries_constants, keys_constants = (
        Constants(
            D=size,
            V=v_size,
            D_PAD=padded,
            V_PAD=v_padded,
            GROUP=sizes.group,
            CAUSAL=a["causal"],
            WINDOW=window is not None,
            VARLEN=sizes.varlen,
            FAR=is_far(q, k, v, grad_o),
            BLOCK_M=tile.queries,
            BLOCK_N=tile.keys,
            STAGES=tile.stages,
        )
        for tile in (over_queries, over_keys)
    )
    window = min(window or 0, 2**30)
    shared = (*strides(q), *strides(k), *strides(v), *strides(grad_o))

    if n_k and not on_hopper:
        listed, tiles = plan(cu_seqlens_k, cu_seqlens_q, n_k, n_q, over_queries.keys, down=False)
        launches.kernel(_keys_kernel, tiles * sizes.outer * sizes.key_heads)(
            q,
            k,
            v,
            grad_o,
            lse2,
            delta,
            grads[1],
            grads[2],
            listed,
            scale,
            window,
            tiles,
            n_q,
            n_k,
            sizes.key_heads,
            lse2.shape[-1],
            (*shared, *strides(grads[1]), *strides(grads[2])),
            C=queries_constants,
            num_warps=over_queries.warps,
        )

    listed, tiles = plan(cu_seqlens_q, cu_seqlens_k, n_q, n_k, over_keys.queries)
    launches.kernel(_queries_kernel, tiles * sizes.outer * heads)(
        q,
        k,
        v,
        grad_o,
        lse2,
        delta,
        grads[0],
        listed,
        scale,
        window,
        tiles,
        n_q,
        n_k,
        heads,
        lse2.shape[-1],
        (*shared, *strides(grads[0])),
        C=keys_constants,
        num_warps=over_keys.warps,
    )
    return grads[0], grads[1], grads[2]


def statistics(
    grad_o: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    grad_lse: torch.Tensor | None,
    sizes: Sizes,
    cu_seqlens_q: torch.Tensor | None,
    sums: int,
    in_turn: bool,
    starts_of: float | None,
    block: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(lse in base 2, delta) [B, H, padded rows] of whole blocks, or (-lse / starts_of, -delta);
    [B, H, padded rows, sums] or None, zeros unless additions are in turn; and None or zeros: one,
    then one a block.  B is 1 for packed sequences."""
    n_q, heads, batch = sizes.n_q, sizes.heads, sizes.outer
    padded = padded_rows(n_q, cu_seqlens_q)
    lse2, delta = memory.empty((2, batch, heads, padded), torch.float32, lse.device)
    kept = memory.empty((batch, heads, padded, sums), torch.float32, lse.device) if sums else None
    blocks = batch * heads * padded // block
    turns = memory.empty((1 + blocks,), torch.int32, lse.device) if in_turn else None
    listed, tiles = plan(cu_seqlens_q, cu_seqlens_q, n_q, n_q, block)
    v_size = o.shape[-1]
    launches.kernel(_statistics_kernel, tiles * batch * heads)(
        o,
        grad_o,
        lse,
        grad_lse,
        lse2,
        delta,
        kept,
        turns,
        listed,
        1.0 if starts_of is None else starts_of,
        tiles,
        n_q,
        heads,
        padded,
        strides(o),
        strides(grad_o),
        *row_strides(lse),
        *row_strides(lse if grad_lse is None else grad_lse),
        V=v_size,
        V_PAD=padded_size(v_size),
        SUMS=0 if in_turn else sums,
        TURNS=in_turn,
        GRAD_LSE=grad_lse is not None,
        VARLEN=sizes.varlen,
        STARTS=starts_of is not None,
        BLOCK_M=block,
        num_warps=8,
    )
    return lse2, delta, kept, turns
