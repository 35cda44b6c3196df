# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Queries of attention over one shared key-value row, the rows themselves, and what the indexer
asks with; rnd rounds to the dtype of x, RoPE turns the last Dr dims where they stand.

    c = rnd(RMSNorm(rnd(x W_dq)))    query[h] = rnd(RoPE(RMSNorm(rnd(c W_uq)[h], no gain)))
    ori_kv = rnd(RoPE(RMSNorm(rnd(x W_kv))))
    query_index[h] = rnd(RoPE(rnd(c W_idx_qb)[h]))   weights = rnd(x W_idx_proj)

    prolog/product  cube           all products of x, in parts of the depth
    of_tokens       vector cores   norms, the window's rows, the head weights
    prolog/product  cube           both products of c
    of_heads        vector cores   norms and rotations of the heads, in place

A token that is not there gives zeros and writes nothing.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory, nz
from ..common import cores, entry, quantise, tiling, tune
from ..common.cores import turn
from ..prolog import product
from ..prolog.rows import _summed, _summed_to
from .last_rotation import angles, not_turned, standing, turned


@triton.jit
def _query_norms(
    x,
    gamma,
    out,
    act_seqs,
    seqused,
    rows,
    steps,
    x_row,
    parts,
    part,
    size,
    epsilon,
    USED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    d = tl.arange(0, WIDTH)
    dtype = out.dtype.element_ty
    g = tl.load(gamma + d, mask=d < size, other=0.0).to(tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        _, position = standing(act_seqs, seqused, row, steps, USED)
        v = _summed_to(x + row.to(tl.int64) * x_row, d, size, parts, part)
        v = v.to(dtype).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(v * v, 0) / size + epsilon)
        normed = tl.where(position >= 0, v * scale * g, 0.0)
        tl.store(out + row.to(tl.int64) * size + d, normed.to(dtype), mask=d < size)


@triton.jit
def _window_rows(
    x,
    gamma,
    sin,
    cos,
    table,
    act_seqs,
    seqused,
    cache,
    first,
    rows,
    steps,
    x_row,
    parts,
    part,
    columns,
    pages,
    page,
    page_step,
    epsilon,
    SIZE: tl.constexpr,
    ROTARY: tl.constexpr,
    USED: tl.constexpr,
):
    """x [rows, SIZE]: normed and turned, to the page of the token's position."""
    PLAIN: tl.constexpr = SIZE - ROTARY
    r = tl.arange(0, ROTARY)
    dtype = cache.dtype.element_ty
    g0, g1 = tl.split(tl.load(gamma + PLAIN + r).reshape(ROTARY // 2, 2))
    g0 = g0.to(tl.float32)
    g1 = g1.to(tl.float32)
    if PLAIN > 0:
        p = tl.arange(0, PLAIN)
        g = tl.load(gamma + p).to(tl.float32)
    for row in range(turn(first), rows, tl.num_programs(0)):
        request, position = standing(act_seqs, seqused, row, steps, USED)
        column = tl.maximum(position, 0) // page
        inner = tl.maximum(position, 0) - column * page
        inside = (position >= 0) & (column < columns)
        column = tl.where(inside, column, 0)
        number = tl.load(table + request.to(tl.int64) * columns + column)
        there = inside & (number >= 0) & (number < pages)
        number = tl.where(there, number, 0).to(tl.int64)
        at = x + row.to(tl.int64) * x_row
        both = _summed(at + PLAIN, r, parts, part).to(dtype).to(tl.float32)
        left, right = tl.split(both.reshape(ROTARY // 2, 2))
        total = tl.sum(left * left, 0) + tl.sum(right * right, 0)
        if PLAIN > 0:
            rest = _summed(at, p, parts, part).to(dtype).to(tl.float32)
            total += tl.sum(rest * rest, 0)
        scale = 1.0 / tl.sqrt(total / SIZE + epsilon)
        s, c = angles(sin + row.to(tl.int64) * ROTARY, cos + row.to(tl.int64) * ROTARY, ROTARY)
        both = turned(left * scale * g0, right * scale * g1, s, c).reshape(ROTARY).to(dtype)
        to = cache + number * page_step + inner * SIZE
        tl.store(to + PLAIN + r, both, mask=r < tl.where(there, ROTARY, 0))
        if PLAIN > 0:
            tl.store(to + p, (rest * scale * g).to(dtype), mask=p < tl.where(there, PLAIN, 0))


@triton.jit
def _head_weights(
    x,
    out,
    act_seqs,
    seqused,
    first,
    rows,
    steps,
    x_row,
    parts,
    part,
    HEADS: tl.constexpr,
    USED: tl.constexpr,
):
    w = tl.arange(0, HEADS)
    for row in range(turn(first), rows, tl.num_programs(0)):
        _, position = standing(act_seqs, seqused, row, steps, USED)
        v = tl.where(position >= 0, _summed(x + row.to(tl.int64) * x_row, w, parts, part), 0.0)
        tl.store(out + row.to(tl.int64) * HEADS + w, v.to(out.dtype.element_ty))


@entry.jit(
    do_not_specialize=[
        "rows", "steps", "x_row", "parts", "rank", "columns", "pages", "page", "page_step",
        "epsilon",
    ]
)  # fmt: skip
def of_tokens(
    x,
    sin,
    cos,
    table,
    act_seqs,
    seqused,
    rows,
    steps,
    x_row,
    parts,
    rank,
    columns,
    pages,
    page,
    page_step,
    epsilon,
    gamma_cq,
    query_norm,
    gamma_kv,
    cache,
    weights,
    SIZE: tl.constexpr,
    ROTARY: tl.constexpr,
    HEADS: tl.constexpr,
    USED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """x [parts, rows, rank + SIZE + HEADS].  Each pass begins at the core where the one before it
    ended."""
    part = rows.to(tl.int64) * x_row
    _query_norms(
        x,
        gamma_cq,
        query_norm,
        act_seqs,
        seqused,
        rows,
        steps,
        x_row,
        parts,
        part,
        rank,
        epsilon,
        USED,
        WIDTH,
    )
    _window_rows(
        x + rank,
        gamma_kv,
        sin,
        cos,
        table,
        act_seqs,
        seqused,
        cache,
        rows % tl.num_programs(0),
        rows,
        steps,
        x_row,
        parts,
        part,
        columns,
        pages,
        page,
        page_step,
        epsilon,
        SIZE,
        ROTARY,
        USED,
    )
    if HEADS > 0:
        _head_weights(
            x + rank + SIZE,
            weights,
            act_seqs,
            seqused,
            2 * rows % tl.num_programs(0),
            rows,
            steps,
            x_row,
            parts,
            part,
            HEADS,
            USED,
        )


@triton.jit
def _turn_heads(
    x,
    out,
    sin,
    cos,
    act_seqs,
    seqused,
    first,
    rows,
    steps,
    heads,
    epsilon,
    SIZE: tl.constexpr,
    ROTARY: tl.constexpr,
    USED: tl.constexpr,
    NORM: tl.constexpr,
    HEAD_TILE: tl.constexpr,
):
    """x [rows, heads, SIZE], where they lie: `out` is `x` under another name, since build 1.0.0
    confuses a tile that is loaded as pairs and stored as rows.  The core where they end."""
    PLAIN: tl.constexpr = SIZE - ROTARY
    r = tl.arange(0, ROTARY)[None]
    tiles = (heads + HEAD_TILE - 1) // HEAD_TILE
    dtype = out.dtype.element_ty
    for work in range(turn(first), rows * tiles, tl.num_programs(0)):
        row = work // tiles
        h = (work - row * tiles) * HEAD_TILE + tl.arange(0, HEAD_TILE)
        at = row.to(tl.int64) * heads * SIZE + h[:, None] * SIZE
        _, position = standing(act_seqs, seqused, row, steps, USED)
        taken = (h < tl.where(position >= 0, heads, 0))[:, None]
        s, c = angles(sin + row.to(tl.int64) * ROTARY, cos + row.to(tl.int64) * ROTARY, ROTARY)
        s = tl.where(position >= 0, s, 0.0)
        c = tl.where(position >= 0, c, 0.0)
        both = tl.load(x + at + PLAIN + r, mask=taken, other=0.0)
        left, right = tl.split(both.reshape(HEAD_TILE, ROTARY // 2, 2))
        left = left.to(tl.float32)
        right = right.to(tl.float32)
        if NORM:
            total = tl.sum(left * left, 1) + tl.sum(right * right, 1)
            if PLAIN > 0:
                p = tl.arange(0, PLAIN)[None]
                rest = tl.load(x + at + p, mask=taken, other=0.0).to(tl.float32)
                total += tl.sum(rest * rest, 1)
            scale = 1.0 / tl.sqrt(total / SIZE + epsilon)
            scale = tl.where(position >= 0, scale, 0.0)[:, None]
            left *= scale
            right *= scale
            if PLAIN > 0:
                tl.store(out + at + p, (rest * scale).to(dtype), mask=(h < heads)[:, None])
        both = turned(left, right, s[None], c[None]).reshape(HEAD_TILE, ROTARY).to(dtype)
        tl.store(out + at + PLAIN + r, both, mask=(h < heads)[:, None])
    return (first + rows * tiles) % tl.num_programs(0)


@entry.jit(do_not_specialize=["rows", "steps", "heads", "index_heads", "epsilon"])
def of_heads(
    query,
    to_query,
    index,
    to_index,
    sin,
    cos,
    act_seqs,
    seqused,
    rows,
    steps,
    heads,
    index_heads,
    epsilon,
    SIZE: tl.constexpr,
    INDEX: tl.constexpr,
    ROTARY: tl.constexpr,
    USED: tl.constexpr,
    HEAD_TILE: tl.constexpr,
):
    """The dims of an index head that do not turn stay, zeros where there is no token: its query
    latent is zeros."""
    first = _turn_heads(
        query,
        to_query,
        sin,
        cos,
        act_seqs,
        seqused,
        0,
        rows,
        steps,
        heads,
        epsilon,
        SIZE,
        ROTARY,
        USED,
        True,
        HEAD_TILE,
    )
    if INDEX > 0:
        _turn_heads(
            index,
            to_index,
            sin,
            cos,
            act_seqs,
            seqused,
            first,
            rows,
            steps,
            index_heads,
            epsilon,
            INDEX,
            ROTARY,
            USED,
            False,
            HEAD_TILE,
        )


def unsupported(
    token_x: Tensor,
    gamma_cq: Tensor,
    gamma_kv: Tensor,
    rope_sin: Tensor,
    w_idx_qb: Tensor | None,
    w_idx_proj: Tensor | None,
    kv_kind: str,
    weight_format: str,
    index_hadamard: bool,
    weight_quant_mode: int,
    **_: Any,
) -> str | None:
    if weight_quant_mode != 0:
        return f"weight_quant_mode {weight_quant_mode}, supported 0: its products are of 16 bits"
    if reason := tiling.not_multiplied(token_x=token_x):
        return reason
    if kv_kind != "none":
        return f"kv_kind={kv_kind!r}: the cube and vector units of A2 and A3 have int8 and no fp8"
    if reason := quantise.without_transform(index_hadamard):
        return reason
    most = tune.TABLE["sharedkv_prolog_pto.of_tokens"][-1].tiles["WIDTH"]
    rank, size, rotary = gamma_cq.shape[0], gamma_kv.shape[0], rope_sin.shape[-1]
    if rank > most:
        return f"a query latent of {rank} numbers does not fit into UB at once: supported {most}"
    reason = not_turned(size, rotary, "`ori_kv`")
    if reason is None and w_idx_qb is not None and w_idx_proj is not None:
        reason = not_turned(_index(w_idx_qb, w_idx_proj, weight_format)[1], rotary, "`w_idx_qb`")
    return reason


def _index(w_idx_qb: Tensor, w_idx_proj: Tensor, weight_format: str) -> tuple[int, int]:
    """Heads and their size."""
    heads = nz.columns_of(w_idx_proj, weight_format)
    return heads, nz.columns_of(w_idx_qb, weight_format) // heads


def forward(
    token_x: Tensor,
    w_dq: Tensor,
    w_uq: Tensor,
    w_kv: Tensor,
    gamma_cq: Tensor,
    gamma_kv: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    ori_kv: Tensor,
    ori_block_table: Tensor,
    act_seqs: Tensor,
    seqused: Tensor | None,
    w_idx_qb: Tensor | None,
    w_idx_proj: Tensor | None,
    rms_norm_eps: float,
    weight_format: str,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    requests, steps, hidden = token_x.shape
    rows, dtype, device = requests * steps, token_x.dtype, token_x.device
    rank, size, rotary = gamma_cq.shape[0], gamma_kv.shape[0], rope_sin.shape[-1]
    heads = nz.columns_of(w_uq, weight_format) // size
    index_heads = index_size = 0
    of_x, index_shape = [(w_dq, rank), (w_kv, size)], [[0], [0]]
    if w_idx_qb is not None and w_idx_proj is not None:
        index_heads, index_size = _index(w_idx_qb, w_idx_proj, weight_format)
        of_x.append((w_idx_proj, index_heads))
        index_shape = [[requests, steps, index_heads, index_size], [requests, steps, index_heads]]
    query = memory.empty((requests, steps, heads, size), dtype, device)
    query_norm = memory.empty((requests, steps, rank), dtype, device)
    query_index, weights = (memory.empty(shape, dtype, device) for shape in index_shape)
    if rows == 0:
        return query, query_norm, query_index, weights
    sums = product.in_parts(token_x.view(rows, hidden), of_x, weight_format)
    given = dict(
        sin=rope_sin,
        cos=rope_cos,
        act_seqs=act_seqs,
        seqused=act_seqs if seqused is None else seqused,
        rows=rows,
        steps=steps,
        epsilon=rms_norm_eps,
        SIZE=size,
        ROTARY=rotary,
        USED=seqused is not None,
    )
    columns = ori_block_table.shape[1]
    passes = 3 if index_heads else 2
    of_tokens[(min(passes * rows, cores.vector()),)](
        sums,
        table=ori_block_table if columns else act_seqs,
        x_row=sums.shape[2],
        parts=sums.shape[0],
        rank=rank,
        columns=columns,
        pages=ori_kv.shape[0],
        page=ori_kv.shape[1],
        page_step=ori_kv.stride(0),
        gamma_cq=gamma_cq,
        query_norm=query_norm,
        gamma_kv=gamma_kv,
        cache=ori_kv,
        weights=weights,
        HEADS=index_heads,
        **given,
        **tune.only("sharedkv_prolog_pto.of_tokens", size).keywords,
    )
    of_c = [(w_uq, query.view(rows, heads * size))]
    if w_idx_qb is not None:
        of_c.append((w_idx_qb, query_index.view(rows, index_heads * index_size)))
    product.weights(query_norm.view(rows, rank), of_c, weight_format)
    config = tune.only("sharedkv_prolog_pto.of_heads", size, index_size)
    tile = config.tiles["HEAD_TILE"]
    works = rows * (-(-heads // tile) + -(-index_heads // tile))
    of_heads[(min(works, cores.vector()),)](
        query,
        query,
        query_index,
        query_index,
        heads=heads,
        index_heads=index_heads,
        INDEX=index_size,
        **given,
        **config.keywords,
    )
    return query, query_norm, query_index, weights
