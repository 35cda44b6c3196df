# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Gradients of the sparse latent attention.

    p = exp(s - softmax_max) / softmax_sum       dp = d_out . value       (s as in the forward op)
    ds = scale p (dp - sum_r d_out out + d_softmax_sum softmax_sum)          d_query = ds key
    d_key = ds^T query (+ p^T d_out where value is None)       d_value = p^T d_out

One program a query row and BLOCK_H heads; what belongs to keys is added up as scatter.py says.

    condition    kernels
    any          _gradients
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory
from ..common import gpu, rows, scatter
from ..common.selection import selected
from ..runtime import launches
from . import sparse_flash_attention


class Constants(NamedTuple):
    HEADS: int
    R: int
    D: int
    SPARSE_BLOCK: int
    SHARED: bool
    BLOCK_H: int
    BLOCK_N: int
    BLOCK_R: int
    BLOCK_D: int
    MODE: int


@triton.jit
def _heads_tile(base, row, head, r_stride, h_stride, d, HEADS: tl.constexpr, D: tl.constexpr):
    at = base + row * r_stride + head[:, None] * h_stride + d[None, :]
    return tl.load(at, mask=(head < HEADS)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _keys_tile(base, outer, inner, valid, o_stride, i_stride, d, D: tl.constexpr):
    at = base + (outer * o_stride + inner * i_stride)[:, None] + d[None, :]
    return tl.load(at, mask=valid[:, None] & (d < D)[None, :], other=0.0)


@triton.jit(
    do_not_specialize=["tokens", "requests", "max_kv_len", "entries", "table_stride", "pages"]
)
def _gradients(
    q, q_rope, key, key_rope, value, indices, d_out, out, softmax_max, softmax_sum,
    d_softmax_sum, seqlens_q, seqlens_k, table, d_q, d_q_rope, d_key, d_key_rope, d_value, peaks,
    scale, tokens, requests, max_kv_len, table_stride, pages, entries, strides,
    LAYOUT: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    (
        q_row, q_head, qr_row, qr_head, do_row, do_head, o_row, o_head,
        key_o, key_i, rope_o, rope_i, value_o, value_i, index_row, out_o,
    ) = strides  # fmt: skip
    of = rows.Requests(
        seqlens_q, seqlens_k, table, tokens, requests, max_kv_len, table_stride, pages
    )
    HEAD_TILES: tl.constexpr = (C.HEADS + C.BLOCK_H - 1) // C.BLOCK_H
    row = (tl.program_id(0) // HEAD_TILES).to(tl.int64)
    request, start, kv_len = rows.locate(row, of, LAYOUT)
    head = (tl.program_id(0) % HEAD_TILES * C.BLOCK_H + tl.arange(0, C.BLOCK_H)).to(tl.int64)
    head_mask = head < C.HEADS
    d = tl.arange(0, C.BLOCK_R)
    r = tl.arange(0, C.BLOCK_D)
    q_tile = _heads_tile(q, row, head, q_row, q_head, d, C.HEADS, C.R)
    do_tile = _heads_tile(d_out, row, head, do_row, do_head, d, C.HEADS, C.R)
    o_tile = _heads_tile(out, row, head, o_row, o_head, d, C.HEADS, C.R)
    delta = tl.sum(do_tile.to(tl.float32) * o_tile.to(tl.float32), 1)
    stat = row * C.HEADS + head
    row_max = tl.load(softmax_max + stat, mask=head_mask, other=0.0)
    row_sum = tl.load(softmax_sum + stat, mask=head_mask, other=1.0)
    seeing = row_sum != 0  # a row that sees no key has max -inf and sum 0
    row_max = tl.where(seeing, row_max, 0.0)
    inverse = 1.0 / tl.where(seeing, row_sum, 1.0)
    if d_softmax_sum is not None:
        of_sum = tl.load(d_softmax_sum + stat, mask=head_mask, other=0.0)
        delta -= tl.where(seeing, of_sum * row_sum, 0.0)
    dq = tl.full([C.BLOCK_H, C.BLOCK_R], 0.0, tl.float32)
    if C.D > 0:
        qr_tile = _heads_tile(q_rope, row, head, qr_row, qr_head, r, C.HEADS, C.D)
        dqr = tl.full([C.BLOCK_H, C.BLOCK_D], 0.0, tl.float32)
    for n in tl.range(0, tl.where(kv_len > 0, entries, 0), C.BLOCK_N):
        outer, inner, valid = selected(
            n + tl.arange(0, C.BLOCK_N), entries, indices + row * index_row, kv_len, request, start,
            of, C.SPARSE_BLOCK, LAYOUT,
        )  # fmt: skip
        k_tile = _keys_tile(key, outer, inner, valid, key_o, key_i, d, C.R)
        s = tl.dot(q_tile, k_tile.T, input_precision="ieee")
        if C.D > 0:
            kr_tile = _keys_tile(key_rope, outer, inner, valid, rope_o, rope_i, r, C.D)
            s = tl.dot(qr_tile, kr_tile.T, s, input_precision="ieee")
        p = tl.exp(s * scale - row_max[:, None]) * inverse[:, None]
        p = tl.where(valid[None, :] & head_mask[:, None], p, 0.0)
        if C.SHARED:
            dp = tl.dot(do_tile, k_tile.T, input_precision="ieee")
        else:
            v_tile = _keys_tile(value, outer, inner, valid, value_o, value_i, d, C.R)
            dp = tl.dot(do_tile, v_tile.T, input_precision="ieee")
        ds = (scale * p * (dp - delta[:, None])).to(k_tile.dtype)
        dq = tl.dot(ds, k_tile, dq, input_precision="ieee")
        dk = tl.dot(ds.T, q_tile, input_precision="ieee")
        slot = (outer * out_o + inner)[:, None]
        wide = valid[:, None] & (d < C.R)[None, :]
        p = p.to(k_tile.dtype)
        if C.SHARED:
            dk = tl.dot(p.T, do_tile, dk, input_precision="ieee")
        else:
            dv = tl.dot(p.T, do_tile, input_precision="ieee")
            scatter.add(d_value, peaks + 2, slot * C.R + d[None, :], dv, wide, C.MODE)
        scatter.add(d_key, peaks, slot * C.R + d[None, :], dk, wide, C.MODE)
        if C.D > 0:
            dqr = tl.dot(ds, kr_tile, dqr, input_precision="ieee")
            dkr = tl.dot(ds.T, qr_tile, input_precision="ieee")
            wide = valid[:, None] & (r < C.D)[None, :]
            scatter.add(d_key_rope, peaks + 1, slot * C.D + r[None, :], dkr, wide, C.MODE)
    to = d_q + stat[:, None] * C.R + d[None, :]
    tl.store(to, dq.to(d_q.dtype.element_ty), mask=head_mask[:, None] & (d < C.R)[None, :])
    if C.D > 0:
        to = d_q_rope + stat[:, None] * C.D + r[None, :]
        tl.store(to, dqr.to(d_q.dtype.element_ty), mask=head_mask[:, None] & (r < C.D)[None, :])


def shared_bytes(tile: int, rank: int, rope: int) -> int:
    """Of shared memory that a program of `tile` heads x `tile` keys takes, at most."""
    R = max(16, triton.next_power_of_2(rank))
    D = max(16, triton.next_power_of_2(rope)) if rope else 0
    return 2 * tile * (3 * R + 2 * D) + 64 * R


def tile_of(heads: int, rank: int, rope: int, itemsize: int, device: torch.device) -> int | None:
    """Heads, and keys, of a program: 32 or 16, or None where neither fits into this GPU."""
    sizes = [16] if heads <= 16 or itemsize > 2 else [32, 16]
    limit = gpu.shared_memory(device)
    return next((size for size in sizes if shared_bytes(size, rank, rope) <= limit), None)


def unsupported(**arguments: Any) -> str | None:
    query, query_rope = arguments["query"], arguments["query_rope"]
    heads, dim = query.shape[-2:]
    if dim > 512:
        return f"head_dim={dim}, supported up to 512 (split the rotary part off)"
    rope = 0 if query_rope is None else query_rope.shape[-1]
    if tile_of(heads, dim, rope, query.element_size(), query.device) is None:
        return gpu.too_small(query.device, N=heads, D=dim, Dr=rope)
    return sparse_flash_attention.unsupported(**arguments)


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    d_out: Tensor,
    out: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    scale_value: float,
    sparse_block_size: int,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    actual_seq_qlen: Tensor | None,
    actual_seq_kvlen: Tensor | None,
    layout: str | None,
    sparse_mode: int | None,
    d_softmax_sum: Tensor | None,
    **_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    layout = layout or "BSND"
    heads, rank = query.shape[-2:]

    def like(tensor: Tensor | None) -> Tensor:
        shape = (0,) if tensor is None else tensor.shape
        return memory.empty(shape, query.dtype, query.device)

    d_query, d_query_rope = like(query), like(query_rope)
    d_key, d_key_rope, d_value = like(key), like(key_rope), like(value)
    plan = rows.plan(
        query, key, actual_seq_qlen, actual_seq_kvlen, None, layout, layout,
        3 if sparse_mode is None else sparse_mode,
    )  # fmt: skip
    q, do, o = (x.reshape(plan.rows, heads, rank) for x in (query, d_out, out))
    rope = 0 if query_rope is None else query_rope.shape[-1]
    qr = q if query_rope is None else query_rope.reshape(plan.rows, heads, rope)
    kr = key if key_rope is None else key_rope
    v = key if value is None else value
    index = sparse_indices.reshape(plan.rows, sparse_indices.shape[-1])
    tile = tile_of(heads, rank, rope, query.element_size(), query.device)
    assert tile is not None

    def launch(mode: int, sums: Sequence[Tensor], peaks: Tensor) -> None:
        if query.numel():
            launches.kernel(_gradients, plan.rows * triton.cdiv(heads, tile))(
                q, qr, key, kr, v, index, do, o, softmax_max, softmax_sum, d_softmax_sum,
                d_q=d_query, d_q_rope=d_query_rope, d_key=sums[0], d_key_rope=sums[1],
                d_value=sums[2], peaks=peaks, scale=scale_value,
                entries=index.shape[1] * sparse_block_size,
                **plan.arguments,
                strides=(
                    *(step for x in (q, qr, do, o) for step in x.stride()[:2]),
                    *rows.strides(layout, key, kr, v), index.stride(0),
                    0 if layout == "TND" else key.shape[1],
                ),
                LAYOUT=plan.layout,
                C=Constants(
                    HEADS=heads, R=rank, D=rope, SPARSE_BLOCK=sparse_block_size,
                    SHARED=value is None,
                    BLOCK_H=tile, BLOCK_N=tile, BLOCK_R=max(16, triton.next_power_of_2(rank)),
                    BLOCK_D=max(16, triton.next_power_of_2(rope)), MODE=mode,
                ),
                num_warps=8,
            )  # fmt: skip

    scatter.run(launch, [d_key, d_key_rope, d_value])
    return d_query, d_key, d_value, d_query_rope, d_key_rope
