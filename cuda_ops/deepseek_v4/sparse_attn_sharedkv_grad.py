# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Gradients of attention over window rows and entries.

    p = exp(z - log(exp(lse) + exp(sink)))    dp = d_out . k          (z as in the forward op)
    dz = scale (p (dp - sum_d d_out out) + exp(z - lse) d_lse)        d_q = dz k
    d_k = dz^T q + p^T d_out

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
from ...dispatch.common.sharedkv import scale_of
from ..common import gpu, scatter, sharedkv
from ..runtime import launches
from . import sparse_attn_sharedkv


class Constants(NamedTuple):
    HEADS: int
    D: int
    BLOCK_H: int
    BLOCK_N: int
    BLOCK_D: int
    MODE: int


@triton.jit
def _logadd(a, b):
    """Of floats that may be infinite."""
    top = tl.maximum(a, b)
    shift = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    return tl.where(top == float("inf"), top, shift + tl.log(tl.exp(a - shift) + tl.exp(b - shift)))


@triton.jit(do_not_specialize=["ori_pages", "cmp_pages", "ori_size", "cmp_size"])
def _gradients(
    q,
    ori,
    cmp,
    names,
    notes,
    d_out,
    out,
    lse,
    d_lse,
    sinks,
    d_q,
    d_ori,
    d_cmp,
    peaks,
    scale,
    ori_pages,
    cmp_pages,
    ori_size,
    cmp_size,
    query_steps,
    name_steps,
    key_steps,
    P: tl.constexpr,
    C: tl.constexpr,
):
    q_row, q_head, do_row, do_head, o_row, o_head = query_steps
    ori_o, ori_i, cmp_o, cmp_i, d_ori_o, d_cmp_o = key_steps
    HEAD_TILES: tl.constexpr = (C.HEADS + C.BLOCK_H - 1) // C.BLOCK_H
    row = (tl.program_id(0) // HEAD_TILES).to(tl.int64)
    note = sharedkv.noted(notes, row)
    pages, sizes = (ori_pages, cmp_pages), (ori_size, cmp_size)
    named = sharedkv.Named(names, name_steps, row, pages, sizes)
    head = (tl.program_id(0) % HEAD_TILES * C.BLOCK_H + tl.arange(0, C.BLOCK_H)).to(tl.int64)
    head_mask = head < C.HEADS
    d = tl.arange(0, C.BLOCK_D)
    whole = head_mask[:, None] & (d < C.D)[None, :]
    q_tile = tl.load(q + row * q_row + head[:, None] * q_head + d[None, :], mask=whole, other=0.0)
    do_rows = d_out + row * do_row + head[:, None] * do_head + d[None, :]
    do_tile = tl.load(do_rows, mask=whole, other=0.0)
    o_tile = tl.load(out + row * o_row + head[:, None] * o_head + d[None, :], mask=whole, other=0.0)
    delta = tl.sum(do_tile.to(tl.float32) * o_tile.to(tl.float32), 1)
    stat = row * C.HEADS + head
    own = tl.load(lse + stat, mask=head_mask, other=0.0)
    both = own
    if sinks is not None:
        both = _logadd(own, tl.load(sinks + head, mask=head_mask, other=0.0))
    dq = tl.full([C.BLOCK_H, C.BLOCK_D], 0.0, tl.float32)
    near, total = sharedkv.tiles_of(note, P, C.BLOCK_N)
    for tile in tl.range(0, total, num_stages=1):
        is_near = tile < near
        entry = (tile - tl.where(is_near, 0, near)) * C.BLOCK_N + tl.arange(0, C.BLOCK_N)
        outer, inner, valid = sharedkv.keys_of(entry, is_near, note, named, P)
        keys = ori
        sums = d_ori
        key_o = ori_o
        key_i = ori_i
        sum_o = d_ori_o
        peak = peaks
        if P.ENTRIES:
            keys = tl.where(is_near, ori, cmp)
            sums = tl.where(is_near, d_ori, d_cmp)
            key_o = tl.where(is_near, ori_o, cmp_o)
            key_i = tl.where(is_near, ori_i, cmp_i)
            sum_o = tl.where(is_near, d_ori_o, d_cmp_o)
            peak = peaks + tl.where(is_near, 0, 1)
        wide = valid[:, None] & (d < C.D)[None, :]
        k_rows = keys + (outer * key_o + inner * key_i)[:, None] + d[None, :]
        k_tile = tl.load(k_rows, mask=wide, other=0.0)
        z = tl.dot(q_tile, k_tile.T, input_precision="ieee") * scale
        there = valid[None, :] & head_mask[:, None]
        p = tl.where(there, tl.exp(z - both[:, None]), 0.0)
        dz = p * (tl.dot(do_tile, k_tile.T, input_precision="ieee") - delta[:, None])
        if d_lse is not None:
            of_lse = tl.load(d_lse + stat, mask=head_mask, other=0.0)
            dz += tl.where(there, tl.exp(z - own[:, None]), 0.0) * of_lse[:, None]
        dz = (scale * dz).to(k_tile.dtype)
        dq = tl.dot(dz, k_tile, dq, input_precision="ieee")
        dk = tl.dot(dz.T, q_tile, input_precision="ieee")
        dk = tl.dot(p.to(k_tile.dtype).T, do_tile, dk, input_precision="ieee")
        to = (outer * sum_o + inner)[:, None] * C.D + d[None, :]
        scatter.add(sums, peak, to, dk, wide, C.MODE)
    to = d_q + stat[:, None] * C.D + d[None, :]
    tl.store(to, dq.to(d_q.dtype.element_ty), mask=whole)


def shared_bytes(tile: int, rank: int) -> int:
    """Of shared memory that a program of `tile` heads x `tile` keys takes, at most."""
    R = max(16, triton.next_power_of_2(rank))
    return 6 * tile * R + 64 * R


def tile_of(heads: int, rank: int, itemsize: int, device: torch.device) -> int | None:
    """Heads, and keys, of a program: 32 or 16, or None where neither fits into this GPU."""
    sizes = [16] if heads <= 16 or itemsize > 2 else [32, 16]
    limit = gpu.shared_memory(device)
    return next((size for size in sizes if shared_bytes(size, rank) <= limit), None)


def unsupported(q: Tensor, **arguments: Any) -> str | None:
    heads, size = q.shape[-2:]
    if size <= 512 and tile_of(heads, size, q.element_size(), q.device) is None:
        return gpu.too_small(q.device, N=heads, D=size)
    return sparse_attn_sharedkv.unsupported(q, **arguments)


def backward(
    d_out: Tensor,
    q: Tensor,
    ori_kv: Tensor,
    cmp_kv: Tensor | None,
    out: Tensor,
    softmax_lse: Tensor,
    sinks: Tensor | None,
    d_softmax_lse: Tensor | None,
    softmax_scale: float | None,
    **arguments: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    heads, size = q.shape[-2:]

    def like(tensor: Tensor | None) -> Tensor:
        return memory.empty((0,) if tensor is None else tensor.shape, q.dtype, q.device)

    d_q, d_ori, d_cmp = like(q), like(ori_kv), like(cmp_kv)
    given = notes = None
    if q.numel():
        given = sharedkv.keys(
            q, ori_kv, cmp_kv, ori_block_table=None, cmp_block_table=None, **arguments
        )
        notes = sharedkv.note(given, q.device)
    flat, do, o = (x.reshape(-1, heads, size) for x in (q, d_out, out))
    tile = tile_of(heads, size, q.element_size(), q.device)
    assert tile is not None

    def launch(mode: int, sums: Sequence[Tensor], peaks: Tensor) -> None:
        if given is not None:
            launches.kernel(_gradients, given.count * triton.cdiv(heads, tile))(
                flat,
                ori_kv,
                cmp_kv,
                d_out=do,
                out=o,
                lse=softmax_lse,
                d_lse=d_softmax_lse,
                sinks=sinks,
                d_q=d_q,
                d_ori=sums[0],
                d_cmp=sums[1],
                peaks=peaks,
                scale=scale_of(softmax_scale, size),
                notes=notes,
                **given.arguments,
                query_steps=tuple(step for x in (flat, do, o) for step in x.stride()[:2]),
                name_steps=given.strides,
                key_steps=(
                    *sharedkv.steps(ori_kv),
                    *sharedkv.steps(cmp_kv),
                    *(x.shape[1] if x is not None and x.ndim == 4 else 0 for x in (ori_kv, cmp_kv)),
                ),
                P=given.places,
                C=Constants(
                    HEADS=heads,
                    D=size,
                    BLOCK_H=tile,
                    BLOCK_N=tile,
                    BLOCK_D=max(16, triton.next_power_of_2(size)),
                    MODE=mode,
                ),
                num_warps=8,
            )

    scatter.run(launch, [d_ori, d_cmp])
    return d_q, d_ori, d_cmp
