# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Which window rows and entries a query row sees, and where they lie.

A first kernel notes of every row what depends on its request; what follows walks over the row's
keys tile by tile, the window rows first.

    note    request, limit (its position + 1; 0: absent), near and far (how many rows and entries to
            walk over), closed (entries below it are visible), first row and entry (TND)

    condition    kernels
    any          _note
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory
from ..common import rows
from ..runtime import launches

_KEYS = {"BSND": rows.BSND, "TND": rows.TND, "PA_ND": rows.PAGED}
WIDTH = tl.constexpr(8)  # int32 of a row's note


class Places(NamedTuple):
    """What is known of both caches when a kernel is compiled; pages of unpaged ones are not."""

    KEYS: int
    ORI_PAGE: int
    CMP_PAGE: int
    SLOTS: bool
    PICKED: bool
    ENTRIES: bool


class Note(NamedTuple):
    request: Any
    limit: Any
    near: Any
    far: Any
    closed: Any
    first_row: Any
    first_entry: Any


@triton.jit
def _span(bounds, request, inside, most):
    """(first, count) of a request by prefix sums from 0."""
    first = rows.within(tl.load(bounds + request, mask=inside, other=0), most)
    end = rows.within(tl.load(bounds + request + 1, mask=inside, other=0), most)
    return first, tl.maximum(end - first, 0)


@triton.jit(
    do_not_specialize=[
        "tokens", "requests", "window", "ratio", "ori_reach", "cmp_reach", "ori_count", "cmp_count",
    ]
)  # fmt: skip
def _note(
    notes, cu_q, used_q, used_kv, cu_ori, cu_cmp, ori_length, cmp_length, tokens, requests, window,
    ratio, ori_reach, cmp_reach, ori_count, cmp_count, LAYOUT: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if cu_q is not None:
        sums = rows.Requests(cu_q, cu_q, cu_q, tokens, requests + 1, 0, 0, 0)
        passed, first, stop = rows.request_of(row, sums, LAYOUT)
        inside = (passed > 0) & (passed <= requests)
        request = tl.where(inside, passed - 1, 0)
    else:
        # packed slots without sums are one request
        request = (row // tokens).to(tl.int32)
        first = request * tokens
        stop = first + tokens
        inside = row >= 0
    end = stop - first
    if used_q is not None:
        end = tl.minimum(rows.within(tl.load(used_q + request, mask=inside, other=0), tokens), end)
    left = tl.where(inside, tl.maximum(end - (row - first).to(tl.int32), 0), 0)
    limit = left
    near = tl.where(left > 0, ori_count, 0)
    far = tl.where(left > 0, cmp_count, 0)
    closed = 0
    first_row = 0
    first_entry = 0
    if P.SLOTS:
        if ori_length is not None:
            near = tl.minimum(rows.within(tl.load(ori_length + row), ori_count), near)
        if cmp_length is not None:
            far = tl.minimum(rows.within(tl.load(cmp_length + row), cmp_count), far)
    else:
        keys = ori_reach
        closed = cmp_reach
        if P.KEYS == rows.TND:
            first_row, keys = _span(cu_ori, request, inside, ori_reach)
            if P.ENTRIES:
                first_entry, closed = _span(cu_cmp, request, inside, cmp_reach)
        if used_kv is not None:
            used = rows.within(tl.load(used_kv + request, mask=inside, other=0), ori_reach)
            keys = tl.minimum(used, keys)
        limit = tl.where(left > 0, tl.maximum(keys - left + 1, 0), 0)
        near = tl.minimum(limit, window)
        if P.ENTRIES:
            closed = tl.minimum(limit // ratio, closed)
        far = tl.where(limit > 0, cmp_count, 0) if P.PICKED else closed
    to = notes + row * WIDTH
    tl.store(to, request)
    tl.store(to + 1, limit)
    tl.store(to + 2, near)
    tl.store(to + 3, far)
    tl.store(to + 4, closed)
    tl.store(to + 5, first_row)
    tl.store(to + 6, first_entry)


@triton.jit
def noted(notes, row):
    at = notes + row * WIDTH
    return Note(
        tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4),
        tl.load(at + 5), tl.load(at + 6),
    )  # fmt: skip


@triton.jit
def tiles_of(note, P: tl.constexpr, BLOCK: tl.constexpr):
    """(tiles of window rows, of rows and entries) of a row."""
    near = (note.near + BLOCK - 1) // BLOCK
    total = near
    if P.ENTRIES:
        total += (note.far + BLOCK - 1) // BLOCK
    return near, total


@triton.jit
def _slot(index, entry, valid, pages, size):
    slot = tl.load(index + entry, mask=valid, other=-1)
    valid = (slot >= 0) & (slot < pages * size)
    slot = tl.where(valid, slot, 0).to(tl.int32)
    return (slot // size).to(tl.int64), (slot % size).to(tl.int64), valid


@triton.jit
def _place(pos, valid, request, first, table, pages, PAGE: tl.constexpr, KEYS: tl.constexpr):
    if KEYS == rows.PAGED:
        outer = tl.load(table + pos // PAGE, mask=valid, other=-1).to(tl.int64)
        valid = valid & (outer >= 0) & (outer < pages)
        inner = (pos % PAGE).to(tl.int64)
    else:
        outer = (pos * 0 + request).to(tl.int64)
        inner = pos.to(tl.int64) + first
    return outer, inner, valid


@triton.jit
def _near(entry, note, index, table, pages, size, P: tl.constexpr):
    valid = entry < note.near
    if P.SLOTS:
        outer, inner, valid = _slot(index, entry, valid, pages, size)
    else:
        pos = note.limit - note.near + entry
        outer, inner, valid = _place(
            pos, valid, note.request, note.first_row, table, pages, P.ORI_PAGE, P.KEYS
        )
    return outer, inner, valid


@triton.jit
def _far(entry, note, index, table, pages, size, P: tl.constexpr):
    valid = entry < note.far
    if P.SLOTS:
        outer, inner, valid = _slot(index, entry, valid, pages, size)
    else:
        pos = entry
        if P.PICKED:
            picked = tl.load(index + entry, mask=valid, other=-1)
            valid = (picked >= 0) & (picked < note.closed)
            pos = tl.where(valid, picked, 0).to(tl.int32)
        outer, inner, valid = _place(
            pos, valid, note.request, note.first_entry, table, pages, P.CMP_PAGE, P.KEYS
        )
    return outer, inner, valid


@triton.jit
def keys_of(
    entry, is_near, note, ori_index, cmp_index, ori_table, cmp_table, ori_pages, cmp_pages,
    ori_size, cmp_size, P: tl.constexpr,
):  # fmt: skip
    """(outer, inner, valid) of keys `entry` of one source of a row, whose indices and tables these
    are."""
    if not P.ENTRIES:
        outer, inner, valid = _near(entry, note, ori_index, ori_table, ori_pages, ori_size, P)
    else:
        if is_near:
            outer, inner, valid = _near(entry, note, ori_index, ori_table, ori_pages, ori_size, P)
        else:
            outer, inner, valid = _far(entry, note, cmp_index, cmp_table, cmp_pages, cmp_size, P)
    return outer, inner, valid


@triton.jit
def of_row(base, row, stride):
    """Where a row of a tensor begins that a call may lack."""
    if base is None:
        at = base
    else:
        at = base + row.to(tl.int64) * stride
    return at


@dataclass(frozen=True)
class Keys:
    """A call's keys as kernels take them: `arguments` by name, `strides` to go with them, and the
    most rows and entries that one query row can see."""

    count: int
    most: int
    arguments: dict[str, Any]
    strides: tuple[int, ...]
    places: Places


def keys(
    q: Tensor,
    ori_kv: Tensor,
    cmp_kv: Tensor | None,
    ori_sparse_indices: Tensor | None,
    cmp_sparse_indices: Tensor | None,
    ori_block_table: Tensor | None,
    cmp_block_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_ori_kv: Tensor | None,
    cu_seqlens_cmp_kv: Tensor | None,
    seqused_q: Tensor | None,
    seqused_kv: Tensor | None,
    cmp_ratio: int,
    ori_win_left: int,
    layout_q: str,
    layout_kv: str,
    indices_are_slots: bool,
    ori_topk_length: Tensor | None,
    cmp_topk_length: Tensor | None,
    **_: Any,
) -> Keys:
    """Launches the first kernel; `q` has rows."""
    count = q.shape[:-2].numel()
    if layout_q == "TND":
        tokens = q.shape[0]
        requests = 0 if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    else:
        requests, tokens = q.shape[:2]
    paged, slots = layout_kv == "PA_ND", indices_are_slots
    if slots:
        ori_block_table = cmp_block_table = None
    ori_pages, ori_size, ori_reach = _extent(ori_kv, ori_block_table)
    cmp_pages, cmp_size, cmp_reach = _extent(cmp_kv, cmp_block_table)
    places = Places(
        KEYS=_KEYS[layout_kv].value,
        ORI_PAGE=ori_size if paged else 1,
        CMP_PAGE=cmp_size if paged else 1,
        SLOTS=slots,
        PICKED=cmp_sparse_indices is not None,
        ENTRIES=cmp_kv is not None,
    )
    ori_index, ori_count = _indices(ori_sparse_indices if slots else None, count)
    cmp_index, cmp_count = _indices(cmp_sparse_indices, count)
    window = min(ori_win_left + 1, max(ori_reach, 1))
    notes = memory.empty((count, WIDTH.value), torch.int32, q.device)
    layout = rows.Layout(
        PAGE=1, Q_TND=cu_seqlens_q is not None, KEYS=0, CAUSAL=True, HAS_Q=False, HAS_K=False,
        REQUESTS=triton.next_power_of_2(requests + 1) if cu_seqlens_q is not None else 1,
    )  # fmt: skip
    launches.kernel(_note, count)(
        notes, cu_seqlens_q, seqused_q, seqused_kv, cu_seqlens_ori_kv, cu_seqlens_cmp_kv,
        ori_topk_length, cmp_topk_length, tokens, requests, window, max(cmp_ratio, 1), ori_reach,
        cmp_reach, ori_count, cmp_count, LAYOUT=layout, P=places, num_warps=1,
    )  # fmt: skip
    near = ori_count if slots else window
    far = cmp_count if places.PICKED else cmp_reach
    return Keys(
        count,
        near + far,
        dict( ori_index=ori_index, cmp_index=cmp_index,
            ori_table=ori_block_table, cmp_table=cmp_block_table, notes=notes,
            ori_pages=ori_pages, cmp_pages=cmp_pages, ori_size=ori_size, cmp_size=cmp_size,
        ),
        tuple(
            0 if x is None else x.stride(0)
            for x in (ori_index, cmp_index, ori_block_table, cmp_block_table)
        ),
        places,
    )  # fmt: skip


def _extent(kv: Tensor | None, table: Tensor | None) -> tuple[int, int, int]:
    """(pages, rows of a page, the most rows of a request): a request of BSND is a page, and TND has
    one."""
    if kv is None:
        return 0, 1, 0
    pages, size = (1, kv.shape[0]) if kv.ndim == 3 else kv.shape[:2]
    return pages, size, size * (1 if table is None else table.shape[1])


def _indices(indices: Tensor | None, count: int) -> tuple[Tensor | None, int]:
    if indices is None:
        return None, 0
    return indices.reshape(count, indices.shape[-1]), indices.shape[-1]


def steps(kv: Tensor | None) -> tuple[int, int]:
    """(from page to page, from row to row)"""
    if kv is None:
        return 0, 0
    return (0, kv.stride(0)) if kv.ndim == 3 else (kv.stride(0), kv.stride(1))


def too_many(ori_kv: Tensor, cmp_kv: Tensor | None, x: dict[str, Any]) -> str | None:
    """Why 32 bits do not number the keys of a call, or None."""
    for kv, table, indices in (
        (ori_kv, x.get("ori_block_table"), x.get("ori_sparse_indices")),
        (cmp_kv, x.get("cmp_block_table"), x.get("cmp_sparse_indices")),
    ):
        entries = 0 if indices is None else indices.shape[-1]
        if kv is not None and (reason := rows.too_many_positions(kv, table, entries)):
            return reason
    return None
