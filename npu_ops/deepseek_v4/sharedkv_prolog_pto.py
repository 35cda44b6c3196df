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
from typing_extensions import Unpack

from ...dispatch.common import memory, nz
from ...dispatch.ops.deepseek_v4.sharedkv_prolog_pto import Arguments
from ..common import cores, entry, quantize, tiling, tune
from ..common.cores import turn
from ..prolog import product
from ..prolog.rows import _summed, _summed_to
from .last_rotation import angles, not_turned, standing, turned

_IN_UB = 16 * 512  # numbers of a tile of heads, twice


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
        there = tl.where(position >= 0, size, 0)
        v = _summed_to(x + row.to(tl.int64) * x_row, d, there, parts, part)
        v = v.to(dtype).to(tl.float32)
        least = tl.where(position >= 0, epsilon, 1.0)
        scale = 1.0 / tl.sqrt(tl.sum(v * v, 0) / size + least)
        tl.store(out + row.to(tl.int64) * size + d, (v * scale * g).to(dtype), mask=d < size)


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
        there = tl.where(position >= 0, HEADS, 0)
        v = _summed_to(x + row.to(tl.int64) * x_row, w, there, parts, part)
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
    confuses a tile that is loaded as pairs and stored as rows.  A core's works are neighbours, and
    a row's angles are taken apart once.  The core where they end."""
    PLAIN: tl.constexpr = SIZE - ROTARY
    r = tl.arange(0, ROTARY)[None]
    tiles = (heads + HEAD_TILE - 1) // HEAD_TILE
    dtype = out.dtype.element_ty
    each = (rows * tiles + tl.num_programs(0) - 1) // tl.num_programs(0)
    begin = turn(first) * each
    end = tl.minimum(begin + each, rows * tiles)
    for row in range(begin // tiles, (end + tiles - 1) // tiles):
        _, position = standing(act_seqs, seqused, row, steps, USED)
        s, c = angles(sin + row.to(tl.int64) * ROTARY, cos + row.to(tl.int64) * ROTARY, ROTARY)
        s = tl.where(position >= 0, s, 0.0)
        c = tl.where(position >= 0, c, 0.0)
        start = row * tiles
        for work in range(tl.maximum(begin - start, 0), tl.minimum(end - start, tiles)):
            h = work * HEAD_TILE + tl.arange(0, HEAD_TILE)
            at = row.to(tl.int64) * heads * SIZE + h[:, None] * SIZE
            taken = (h < tl.where(position >= 0, heads, 0))[:, None]
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
    return (first + (rows * tiles + each - 1) // each) % tl.num_programs(0)


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
    if reason := quantize.without_transform(index_hadamard):
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


class Call:
    """Of a prolog: its outputs, and what each launch takes besides its tiles."""

    def __init__(self, **x: Unpack[Arguments]) -> None:
        token_x, weight_format, cache = x["token_x"], x["weight_format"], x["ori_kv"]
        w_idx_qb, w_idx_proj, act_seqs = x["w_idx_qb"], x["w_idx_proj"], x["act_seqs"]
        requests, steps, hidden = token_x.shape
        dtype, device = token_x.dtype, token_x.device
        self.rows = rows = requests * steps
        self._gamma_cq = x["gamma_cq"]
        self.rank, self.size = x["gamma_cq"].shape[0], x["gamma_kv"].shape[0]
        self.heads = nz.columns_of(x["w_uq"], weight_format) // self.size
        self.index_heads = self.index_size = 0
        self.x, self.weight_format = token_x.view(rows, hidden), weight_format
        self.of_x, index_shape = [(x["w_dq"], self.rank), (x["w_kv"], self.size)], [[0], [0]]
        if w_idx_qb is not None and w_idx_proj is not None:
            self.index_heads, self.index_size = _index(w_idx_qb, w_idx_proj, weight_format)
            self.of_x.append((w_idx_proj, self.index_heads))
            front = [requests, steps, self.index_heads]
            index_shape = [[*front, self.index_size], front]
        self.query = memory.empty((requests, steps, self.heads, self.size), dtype, device)
        self.query_norm = memory.empty((requests, steps, self.rank), dtype, device)
        self.query_index, self.weights = (memory.empty(each, dtype, device) for each in index_shape)
        self.of_c = [(x["w_uq"], self.query.view(rows, self.heads * self.size))]
        if w_idx_qb is not None:
            width = self.index_heads * self.index_size
            self.of_c.append((w_idx_qb, self.query_index.view(rows, width)))
        self._given = dict(
            sin=x["rope_sin"],
            cos=x["rope_cos"],
            act_seqs=act_seqs,
            seqused=act_seqs if x["seqused"] is None else x["seqused"],
            rows=rows,
            steps=steps,
            epsilon=x["rms_norm_eps"],
            SIZE=self.size,
            ROTARY=x["rope_sin"].shape[-1],
            USED=x["seqused"] is not None,
        )
        columns = x["ori_block_table"].shape[1]
        self._window = dict(
            table=x["ori_block_table"] if columns else act_seqs,
            columns=columns,
            pages=cache.shape[0],
            page=cache.shape[1],
            page_step=cache.stride(0),
            gamma_kv=x["gamma_kv"],
            cache=cache,
        )

    @property
    def outputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.query, self.query_norm, self.query_index, self.weights

    @property
    def passes(self) -> int:
        return 3 if self.index_heads else 2

    def of_tokens(self, sums: Tensor) -> dict[str, Any]:
        """`sums` [parts, rows, columns of all]."""
        own = dict(
            x=sums,
            x_row=sums.shape[2],
            parts=sums.shape[0],
            rank=self.rank,
            gamma_cq=self._gamma_cq,
            query_norm=self.query_norm,
            weights=self.weights,
            HEADS=self.index_heads,
        )
        return self._given | self._window | own

    def multiply(self) -> None:
        """The query latents."""
        latents = self.query_norm.view(self.rows, self.rank)
        product.weights(latents, self.of_c, self.weight_format)

    def of_heads(self) -> dict[str, Any]:
        return self._given | dict(
            query=self.query,
            to_query=self.query,
            index=self.query_index,
            to_index=self.query_index,
            heads=self.heads,
            index_heads=self.index_heads,
            INDEX=self.index_size,
        )

    def head_tile(self) -> tune.Config:
        """Of the tiles that UB holds the larger one, unless it covers more heads that are not
        there."""

        def covered(config: tune.Config) -> int:
            tile = config.tiles["HEAD_TILE"]
            return tiling.up(self.heads, tile) + tiling.up(self.index_heads, tile)

        kernel = "sharedkv_prolog_pto.of_heads"
        found = [x for x in tune.TABLE[kernel] if x.tiles["HEAD_TILE"] * self.size <= _IN_UB]
        return tune.choose(kernel, sorted(found, key=covered), self.size, self.index_size)

    def head_tiles(self, config: tune.Config) -> int:
        tile = config.tiles["HEAD_TILE"]
        return self.rows * (-(-self.heads // tile) + -(-self.index_heads // tile))


def forward(**arguments: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = Call(**arguments)
    if call.rows == 0:
        return call.outputs
    sums = product.in_parts(call.x, call.of_x, call.weight_format)
    of_tokens[(min(call.passes * call.rows, cores.vector()),)](
        **call.of_tokens(sums), **tune.only("sharedkv_prolog_pto.of_tokens", call.size).keywords
    )
    call.multiply()
    config = call.head_tile()
    of_heads[(min(call.head_tiles(config), cores.vector()),)](**call.of_heads(), **config.keywords)
    return call.outputs
