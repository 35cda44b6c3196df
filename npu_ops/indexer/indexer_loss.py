# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The KL divergence of the indexer's distribution from the attention's, in four kernels.

gather     vector cores    the selected keys -> dense [T, K, D], two rows a copy
log_sums   cube + vector   log-sum-exp of every head, unless it is given
head_sums  cube + vector   the target: probabilities summed over a tile of heads
row_loss   vector cores    both distributions of a row and the loss
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory
from ..common import cores, entry, ragged, tiling, tune, tuples
from ..common.cores import tiled
from ..common.front_end import get_element
from ..sparse_attention.sparse_flash_attention import pair, put


@triton.jit
def usable(position, last):
    """1.0 where a slot counts; as floats, which the vector unit compares best."""
    x = position.to(tl.float32)
    return tl.where(x >= 0, tl.where(x <= last.to(tl.float32), 1.0, 0.0), 0.0)


@entry.jit(
    do_not_specialize=[
        "first", "rows", "count", "wide", "length", "keys", "offset", "key_batch", "key_row",
        "rope_batch", "rope_row", "i_batch", "i_row",
    ]
)  # fmt: skip
def gather(
    key,
    key_rope,
    indices,
    dense,
    dense_rope,
    first,
    rows,
    count,
    wide,
    length,
    keys,
    offset,
    key_batch,
    key_row,
    rope_batch,
    rope_row,
    i_batch,
    i_row,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A slot that does not count is a copy of the first key."""
    r = tl.arange(0, ROWS)
    pieces = wide // ROWS
    for work in range(tl.program_id(0), rows * pieces, tl.num_programs(0)):
        row = work // pieces
        start = work % pieces * ROWS
        batch = ((first + row) // length).to(tl.int64)
        i = (first + row) % length
        last = tl.minimum(offset + i, keys - 1)
        at = indices + batch * i_batch + i.to(tl.int64) * i_row + start
        position = tl.load(at + r, mask=r < count - start, other=-1)
        position = tl.where(usable(position, last) > 0, position, 0)
        of_key = key + batch * key_batch
        of_rope = key_rope + batch * rope_batch
        to = row.to(tl.int64) * wide + start
        for n in range(0, ROWS, 2):
            one = get_element(position, (n,)).to(tl.int64)
            other = get_element(position, (n + 1,)).to(tl.int64)
            put(dense, to + n, pair(of_key, key_row, one, other, DIM), DIM)
            if ROPE > 0:
                put(dense_rope, to + n, pair(of_rope, rope_row, one, other, ROPE), ROPE)


@entry.jit(
    do_not_specialize=[
        "first", "rows", "count", "wide", "length", "keys", "offset", "heads", "lse_row", "scale",
        "q_batch",
        "q_head", "q_row", "r_batch", "r_head", "r_row", "i_batch", "i_row",
    ]
)  # fmt: skip
def log_sums(
    query,
    query_rope,
    dense,
    dense_rope,
    indices,
    lse,
    first,
    rows,
    count,
    wide,
    length,
    keys,
    offset,
    heads,
    lse_row,
    scale,
    q_batch,
    q_head,
    q_row,
    r_batch,
    r_head,
    r_row,
    i_batch,
    i_row,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
):
    """lse [T, lse_row], rows of whole tiles: a masked store keeps the vector units from sharing
    the tile.  A token without a slot gets something finite."""
    d = tl.arange(0, DIM)
    j = tl.arange(0, KEY_TILE)
    tiles = (heads + HEAD_TILE - 1) // HEAD_TILE
    for work in range(tl.program_id(0), rows * tiles, tl.num_programs(0)):
        row = work // tiles
        h = work % tiles * HEAD_TILE + tl.arange(0, HEAD_TILE)
        there = (h < heads)[:, None]
        batch = ((first + row) // length).to(tl.int64)
        i = (first + row) % length
        last = tl.minimum(offset + i, keys - 1)
        of_q = query + batch * q_batch + i.to(tl.int64) * q_row
        q = tl.load(of_q + h[:, None] * q_head + d[None], mask=there, other=0.0)
        if ROPE > 0:
            e = tl.arange(0, ROPE)
            of_r = query_rope + batch * r_batch + i.to(tl.int64) * r_row
            q_rope = tl.load(of_r + h[:, None] * r_head + e[None], mask=there, other=0.0)
        selected = indices + batch * i_batch + i.to(tl.int64) * i_row
        row_max = tl.full((HEAD_TILE,), -1e30, tl.float32)
        total = tl.zeros((HEAD_TILE,), tl.float32)
        for start in range(0, count, KEY_TILE):
            at = (row.to(tl.int64) * wide + start + j)[:, None]
            k = tl.load(dense + at * DIM + d[None])
            z = tl.dot(q, tl.trans(k))
            if ROPE > 0:
                k_rope = tl.load(dense_rope + at * ROPE + e[None])
                z = tl.dot(q_rope, tl.trans(k_rope), z)
            position = tl.load(selected + start + j, mask=j < count - start, other=-1)
            ok = usable(position, last)
            z = z * scale + tl.where(ok > 0, 0.0, float("-inf"))[None]
            new_max = tl.maximum(row_max, tl.max(z, 1))
            p = tl.exp(z - new_max[:, None])
            total = total * tl.exp(row_max - new_max) + tl.sum(p, 1)
            row_max = new_max
        sums = row_max + tl.log(tl.where(total > 0, total, 1.0))
        tl.store(lse + (first + row).to(tl.int64) * lse_row + h, sums)


@entry.jit(
    do_not_specialize=[
        "tokens", "first", "rows", "count", "wide", "length", "keys", "offset", "heads", "lse_row",
        "scale", "q_batch", "q_head", "q_row", "r_batch", "r_head", "r_row", "i_batch", "i_row",
    ]
)  # fmt: skip
def head_sums(
    query,
    query_rope,
    dense,
    dense_rope,
    indices,
    lse,
    target,
    tokens,
    first,
    rows,
    count,
    wide,
    length,
    keys,
    offset,
    heads,
    lse_row,
    scale,
    q_batch,
    q_head,
    q_row,
    r_batch,
    r_head,
    r_row,
    i_batch,
    i_row,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
):
    """target [tiles of heads, tokens, K]: the queries of a tile stay in L1."""
    d = tl.arange(0, DIM)
    j = tl.arange(0, KEY_TILE)
    head, tiles = tiled(heads, HEAD_TILE)
    for work in range(tl.program_id(0), rows * tiles, tl.num_programs(0)):
        row = work // tiles
        h = work % tiles * HEAD_TILE + head
        batch = ((first + row) // length).to(tl.int64)
        i = (first + row) % length
        last = tl.minimum(offset + i, keys - 1)
        of_q = query + batch * q_batch + i.to(tl.int64) * q_row
        token = (first + row).to(tl.int64)
        to = target + ((work % tiles).to(tl.int64) * tokens + token) * count
        of_row = indices + batch * i_batch + i.to(tl.int64) * i_row
        there = (h < heads)[:, None]
        q = tl.load(of_q + h[:, None] * q_head + d[None], mask=there, other=0.0)
        if ROPE > 0:
            e = tl.arange(0, ROPE)
            of_r = query_rope + batch * r_batch + i.to(tl.int64) * r_row
            q_rope = tl.load(of_r + h[:, None] * r_head + e[None], mask=there, other=0.0)
        sums = tl.load(lse + token * lse_row + h, mask=h < heads, other=0.0)
        sums = tl.where(sums > float("-inf"), sums, 0.0)
        for start in range(0, count, KEY_TILE):
            at = (row.to(tl.int64) * wide + start + j)[:, None]
            k = tl.load(dense + at * DIM + d[None])
            z = tl.dot(q, tl.trans(k))
            if ROPE > 0:
                k_rope = tl.load(dense_rope + at * ROPE + e[None])
                z = tl.dot(q_rope, tl.trans(k_rope), z)
            # the zeros of heads that are not there, times an infinite key, are NaN
            p = tl.where(there, tl.exp(z * scale - sums[:, None]), 0.0)
            acc = tl.sum(p, 0)
            position = tl.load(of_row + start + j, mask=j < count - start, other=-1)
            acc = tl.where(usable(position, last) > 0, acc, 0.0)
            tl.store(to + start + j, acc, mask=j < count - start)


@triton.jit
def distributions(target, score, ok):
    """(target / sum target, softmax of the scores) over the usable slots, 0 elsewhere."""
    target = tl.where(ok > 0, target, 0.0)
    total = tl.sum(target, 0)
    score = tl.where(ok > 0, score, float("-inf"))
    e = tl.exp(score - tl.maximum(tl.max(score, 0), -1e30))
    total_e = tl.sum(e, 0)
    return target / tl.where(total > 0, total, 1.0), e / tl.where(total_e > 0, total_e, 1.0)


class Chunk(NamedTuple):
    """Queries of a request, its keys, and which of these the first query sees last."""

    length: int
    keys: int
    offset: int


class Strides(NamedTuple):
    batch: int
    row: int


@triton.jit
def at_token(token, length, batch_stride, row_stride):
    """Where the row of a token lies."""
    batch = (token // length).to(tl.int64)
    return batch * batch_stride + (token % length).to(tl.int64) * row_stride


@triton.jit
def scored(score, indices, token, j, count, length, keys, offset):
    """(a row's scores, 1.0 where they count): `score` and `indices` are the row's."""
    last = tl.minimum(offset + token % length, keys - 1)
    ok = usable(tl.load(indices + j, mask=j < count, other=-1), last)
    return tl.load(score + j, mask=j < count, other=0.0).to(tl.float32), ok


@tuples.jit(["tokens", "count", "eps"])
def row_loss(
    score,
    indices,
    target,
    loss,
    tokens,
    count,
    eps,
    of: Chunk,
    s_stride: Strides,
    i_stride: Strides,
    WIDTH: tl.constexpr,
):
    j = tl.arange(0, WIDTH)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        of_indices = indices + at_token(token, of.length, *i_stride)
        of_score = score + at_token(token, of.length, *s_stride)
        x, ok = scored(of_score, of_indices, token, j, count, *of)
        p = tl.load(target + token.to(tl.int64) * count + j, mask=j < count, other=0.0)
        p, r = distributions(p, x, ok)
        terms = (p + eps) * (tl.log(p + eps) - tl.log(r + eps))
        tl.store(loss + token, tl.sum(tl.where(ok > 0, terms, 0.0), 0))


def not_in_16s(size: int, rope: int) -> str | None:
    """Why heads are not multiplied, or None."""
    if size % 16 or rope % 16:
        return f"head sizes {size} and {rope}, the cube unit takes multiples of 16"
    return None


def unsupported(
    query: Tensor,
    key: Tensor,
    index_score: Tensor,
    query_rope: Tensor | None,
    **_: Any,
) -> str | None:
    if reason := tiling.not_multiplied(query=query):
        return reason
    size, rope = query.shape[-1], 0 if query_rope is None else query_rope.shape[-1]
    if reason := not_in_16s(size, rope):
        return reason
    if key.shape[1] > ragged.LONGEST:
        return f"{key.shape[1]} keys, the kernel reaches {ragged.LONGEST}"
    return too_wide(index_score) or tiling.matmul_overflow(64, 128, size + rope)


def too_wide(index_score: Tensor) -> str | None:
    """Why a row of scores does not fit, or is not a float of the vector unit; or None."""
    widest = tune.TABLE["indexer_loss.row_loss"][-1].tiles["WIDTH"]
    if index_score.dtype is torch.float64:
        return "`index_score` is torch.float64, the vector unit computes in float32"
    if index_score.shape[-1] > widest:
        return f"{index_score.shape[-1]} slots a row, the kernel takes {widest} at most"
    return None


def forward(
    query: Tensor,
    key: Tensor,
    index_score: Tensor,
    indices: Tensor,
    scaling: float,
    chunk_offset: int,
    eps: float,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    softmax_lse: Tensor | None,
) -> tuple[Tensor, Tensor]:
    batch, heads, length, size = query.shape
    count, keys = index_score.shape[-1], key.shape[1]
    loss = memory.empty([batch, length], torch.float32, query.device)
    target = memory.empty([batch, length, count], torch.float32, query.device)
    if target.numel() == 0 or keys == 0:
        return loss.zero_(), target.zero_()
    indices = ragged.int32(indices)
    # without the rotary part its arguments are there, but not read
    q_rope, k_rope = (query, key) if query_rope is None else (query_rope, key_rope)
    assert k_rope is not None
    rope = 0 if query_rope is None else query_rope.shape[-1]
    sums = tune.at_least("indexer_loss.head_sums", "HEAD_TILE", heads, size, rope)
    logs = tune.at_least("indexer_loss.log_sums", "HEAD_TILE", heads, size, rope)
    wide = tiling.up(count, max(x.tiles["KEY_TILE"] for x in (sums, logs)))
    tokens = batch * length
    parts = triton.cdiv(heads, sums.tiles["HEAD_TILE"])
    shares = target
    if parts > 1:
        shares = memory.empty([parts, *target.shape], torch.float32, query.device)
    offset = min(chunk_offset, keys)  # with the row's number it stays within 32 bits
    at_once = tiling.at_once(tokens, wide * (size + rope) * 2)
    if cores.cube() < at_once < tokens:
        at_once -= at_once % cores.cube()  # every core has as many tokens
    dense = memory.empty([at_once, wide, size], key.dtype, key.device)
    dense_rope = memory.empty([at_once, wide, rope], key.dtype, key.device)
    if softmax_lse is None:
        whole_heads = tiling.up(heads, logs.tiles["HEAD_TILE"])
        lse = memory.empty([batch, length, whole_heads], torch.float32, query.device)
    else:
        lse = softmax_lse.transpose(1, 2).to(torch.float32).contiguous()
    for first in range(0, tokens, at_once):
        shape = (first, min(at_once, tokens - first), count, wide, length, keys, offset)
        gather[(cores.vector(),)](
            key,
            k_rope,
            indices,
            dense,
            dense_rope,
            *shape,
            *key.stride()[:2],
            *k_rope.stride()[:2],
            *indices.stride()[:2],
            DIM=size,
            ROPE=rope,
            **tune.only("indexer_loss.gather").keywords,
        )
        scalars = (
            *shape,
            heads,
            lse.shape[-1],
            scaling,
            *query.stride()[:3],
            *q_rope.stride()[:3],
            *indices.stride()[:2],
        )
        if softmax_lse is None:
            log_sums[(cores.cube(),)](
                query,
                q_rope,
                dense,
                dense_rope,
                indices,
                lse,
                *scalars,
                DIM=size,
                ROPE=rope,
                **logs.keywords,
            )
        head_sums[(cores.cube(),)](
            query,
            q_rope,
            dense,
            dense_rope,
            indices,
            lse,
            shares,
            tokens,
            *scalars,
            DIM=size,
            ROPE=rope,
            **sums.keywords,
        )
    if parts > 1:
        torch.sum(shares, 0, out=target)
    row_loss[(min(tokens, cores.vector()),)](
        index_score,
        indices,
        target,
        loss,
        tokens,
        count,
        eps,
        length,
        keys,
        offset,
        *index_score.stride()[:2],
        *indices.stride()[:2],
        **tune.at_least("indexer_loss.row_loss", "WIDTH", count).keywords,
    )
    return loss, target
