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
from ..runtime import launches
from . import rows

_KEYS = {"BSND": rows.BSND, "TND": rows.TND, "PA_ND": rows.PAGED}
WIDTH = tl.constexpr(8)  # int32 of a row's note
FAR = tl.constexpr(1 << 30)  # behind any key of a row


class Places(NamedTuple):
    """What is known of both caches when a kernel is compiled; pages of unpaged ones are not."""

    KEYS: int
    ORI_PAGE: int
    CMP_PAGE: int
    SLOTS: bool
    PICKED: bool
    ENTRIES: bool


class Lengths(NamedTuple):
    """Prefix sums of tokens, rows and entries, how many of them count, and a row's own numbers of
    keys."""

    cu_q: Any
    used_q: Any
    used_kv: Any
    cu_ori: Any
    cu_cmp: Any
    ori_length: Any
    cmp_length: Any


class Source(NamedTuple):
    """What notes are made of."""

    lengths: Any
    tokens: Any
    requests: Any
    extents: Any  # window, ratio, most keys of a request, most keys named; of rows, of entries


class Note(NamedTuple):
    request: Any
    limit: Any
    near: Any
    far: Any
    closed: Any
    first_row: Any
    first_entry: Any


class Names(NamedTuple):
    """What names keys in both caches: indices of rows, tables of requests."""

    ori_index: Any
    cmp_index: Any
    ori_table: Any
    cmp_table: Any


class Named(NamedTuple):
    """What names the keys of `row` in both caches, and how large these are."""

    names: Any
    steps: Any  # `Names`: from row to row, or from request to request
    row: Any
    pages: Any
    sizes: Any


@triton.jit
def _span(bounds, request, inside, most):
    """(first, count) of a request by prefix sums from 0."""
    first = rows.within(tl.load(bounds + request, mask=inside, other=0), most)
    end = rows.within(tl.load(bounds + request + 1, mask=inside, other=0), most)
    return first, tl.maximum(end - first, 0)


@triton.jit
def sums_of(of):
    """The requests of query rows, whose sums begin with 0, for `request_of`."""
    if of.lengths.cu_q is None:
        sums = rows.Requests(0, 0, 0, of.tokens, 1, 0, 0, 0)
    else:
        sums = rows.Requests(of.lengths.cu_q, 0, 0, of.tokens, of.requests + 1, 0, 0, 0)
    return sums


@triton.jit
def note_of(row, passed, first, stop, of, P: tl.constexpr):
    """The note of a query row, of which `request_of` says `passed`, `first` and `stop`."""
    window, ratio = of.extents[0], of.extents[1]
    ori_reach, cmp_reach = of.extents[2], of.extents[3]
    ori_count, cmp_count = of.extents[4], of.extents[5]
    request = passed
    inside = row >= 0
    if of.lengths.cu_q is not None:
        inside = (passed > 0) & (passed <= of.requests)
        request = tl.where(inside, passed - 1, 0)
    end = stop - first
    if of.lengths.used_q is not None:
        used = tl.load(of.lengths.used_q + request, mask=inside, other=0)
        end = tl.minimum(rows.within(used, of.tokens), end)
    left = tl.where(inside, tl.maximum(end - (row - first).to(tl.int32), 0), 0)
    limit = left
    near = tl.where(left > 0, ori_count, 0)
    far = tl.where(left > 0, cmp_count, 0)
    closed = 0
    first_row = 0
    first_entry = 0
    if P.SLOTS:
        if of.lengths.ori_length is not None:
            near = tl.minimum(rows.within(tl.load(of.lengths.ori_length + row), ori_count), near)
        if of.lengths.cmp_length is not None:
            far = tl.minimum(rows.within(tl.load(of.lengths.cmp_length + row), cmp_count), far)
    else:
        keys = ori_reach
        closed = cmp_reach
        if P.KEYS == rows.TND:
            first_row, keys = _span(of.lengths.cu_ori, request, inside, ori_reach)
            if P.ENTRIES:
                first_entry, closed = _span(of.lengths.cu_cmp, request, inside, cmp_reach)
        if of.lengths.used_kv is not None:
            used = tl.load(of.lengths.used_kv + request, mask=inside, other=0)
            keys = tl.minimum(rows.within(used, ori_reach), keys)
        limit = tl.where(left > 0, tl.maximum(keys - left + 1, 0), 0)
        near = tl.minimum(limit, window)
        if P.ENTRIES:
            closed = tl.minimum(limit // ratio, closed)
        far = tl.where(limit > 0, cmp_count, 0) if P.PICKED else closed
    return Note(request, limit, near, far, closed, first_row, first_entry)


@triton.jit(
    do_not_specialize=[
        "tokens", "requests", "window", "ratio", "ori_reach", "cmp_reach", "ori_count", "cmp_count",
    ]
)  # fmt: skip
def _note(
    notes,
    lengths,
    tokens,
    requests,
    window,
    ratio,
    ori_reach,
    cmp_reach,
    ori_count,
    cmp_count,
    LAYOUT: tl.constexpr,
    P: tl.constexpr,
):
    extents = (window, ratio, ori_reach, cmp_reach, ori_count, cmp_count)
    of = Source(lengths, tokens, requests, extents)
    row = tl.program_id(0).to(tl.int64)
    passed, first, stop = rows.request_of(row, sums_of(of), LAYOUT)
    note = note_of(row, passed, first, stop, of, P)
    to = notes + row * WIDTH
    tl.store(to, note.request)
    tl.store(to + 1, note.limit)
    tl.store(to + 2, note.near)
    tl.store(to + 3, note.far)
    tl.store(to + 4, note.closed)
    tl.store(to + 5, note.first_row)
    tl.store(to + 6, note.first_entry)


@triton.jit
def noted(notes, row):
    at = notes + row * WIDTH
    return Note(
        tl.load(at),
        tl.load(at + 1),
        tl.load(at + 2),
        tl.load(at + 3),
        tl.load(at + 4),
        tl.load(at + 5),
        tl.load(at + 6),
    )


@triton.jit
def tiles_of(note, P: tl.constexpr, BLOCK: tl.constexpr):
    """(tiles of window rows, of rows and entries) of a row."""
    near = (note.near + BLOCK - 1) // BLOCK
    total = near
    if P.ENTRIES:
        total += (note.far + BLOCK - 1) // BLOCK
    return near, total


@triton.jit
def _of_slot(slot, valid, pages, size):
    valid = valid & (slot >= 0) & (slot < pages * size)
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
def near_index(entry, note, index, P: tl.constexpr):
    """What the call names for window rows `entry` of a row: slots, or nothing."""
    number = entry
    if P.SLOTS:
        number = tl.load(index + entry, mask=entry < note.near, other=-1)
    return number


@triton.jit
def near_place(entry, number, note, table, pages, size, P: tl.constexpr):
    """(outer, inner, valid) of window rows, by what `near_index` says."""
    valid = entry < note.near
    if P.SLOTS:
        outer, inner, valid = _of_slot(number, valid, pages, size)
    else:
        pos = note.limit - note.near + entry
        outer, inner, valid = _place(
            pos, valid, note.request, note.first_row, table, pages, P.ORI_PAGE, P.KEYS
        )
    return outer, inner, valid


@triton.jit
def far_index(entry, note, index, P: tl.constexpr):
    """What the call names for entries `entry` of a row: slots, numbers of entries, or nothing."""
    number = entry
    if P.SLOTS or P.PICKED:
        number = tl.load(index + entry, mask=entry < note.far, other=-1)
    return number


@triton.jit
def far_place(entry, number, note, table, pages, size, P: tl.constexpr):
    """(outer, inner, valid) of entries, by what `far_index` says."""
    valid = entry < note.far
    if P.SLOTS:
        outer, inner, valid = _of_slot(number, valid, pages, size)
    else:
        pos = entry
        if P.PICKED:
            valid = valid & (number >= 0) & (number < note.closed)
            pos = tl.where(valid, number, 0).to(tl.int32)
        outer, inner, valid = _place(
            pos, valid, note.request, note.first_entry, table, pages, P.CMP_PAGE, P.KEYS
        )
    return outer, inner, valid


@triton.jit
def _near_keys(entry, note, of, P: tl.constexpr):
    """(outer, inner, valid) of window rows."""
    index = of_row(of.names.ori_index, of.row, of.steps.ori_index)
    table = of_row(of.names.ori_table, note.request, of.steps.ori_table)
    number = near_index(entry, note, index, P)
    return near_place(entry, number, note, table, of.pages[0], of.sizes[0], P)


@triton.jit
def _far_keys(entry, note, of, P: tl.constexpr):
    """(outer, inner, valid) of entries."""
    index = of_row(of.names.cmp_index, of.row, of.steps.cmp_index)
    table = of_row(of.names.cmp_table, note.request, of.steps.cmp_table)
    number = far_index(entry, note, index, P)
    return far_place(entry, number, note, table, of.pages[1], of.sizes[1], P)


@triton.jit
def keys_of(entry, is_near, note, of, P: tl.constexpr):
    """(outer, inner, valid) of keys `entry` of one source of a row."""
    if P.ENTRIES:
        if is_near:
            outer, inner, valid = _near_keys(entry, note, of, P)
        else:
            outer, inner, valid = _far_keys(entry, note, of, P)
    else:
        outer, inner, valid = _near_keys(entry, note, of, P)
    return outer, inner, valid


@triton.jit
def slots_of(entry, first, note, of, P: tl.constexpr):
    """Where keys of a row lie in their caches, negative where absent: window rows, and from
    `first` on entries."""
    outer, inner, valid = _near_keys(entry, note, of, P)
    slot = tl.where(valid, inner if P.KEYS == rows.TND else outer * of.sizes[0] + inner, -1)
    if P.ENTRIES:
        far = tl.where(entry < first, FAR, entry - first)
        outer, inner, valid = _far_keys(far, note, of, P)
        of_far = tl.where(valid, inner if P.KEYS == rows.TND else outer * of.sizes[1] + inner, -1)
        slot = tl.where(entry < first, slot, of_far)
    return slot.to(tl.int32)


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
    """A call's keys as kernels take them: `arguments` by name, `strides` to go with them, the most
    rows and entries that one query row can see, and what its note is made of."""

    count: int
    near: int
    far: int
    arguments: dict[str, Any]
    strides: Names
    places: Places
    source: dict[str, Any]
    layout: rows.Layout

    @property
    def extents(self) -> tuple[int, ...]:
        """Numbers of a deployment, as one argument: `Source.extents`, pages and their sizes."""
        names = ("window", "ratio", "ori_reach", "cmp_reach", "ori_count", "cmp_count")
        sizes = ("ori_pages", "cmp_pages", "ori_size", "cmp_size")
        return (*(self.source[x] for x in names), *(self.arguments[x] for x in sizes))

    @property
    def others(self) -> dict[str, Any]:
        """What else kernels take of `source` and `arguments`."""
        given = self.source | self.arguments
        return {name: given[name] for name in ("names", "lengths", "tokens", "requests")}


class Attention(NamedTuple):
    """A call as its launchers take it: q [rows, N, D]; `keys` says what a row reads of both caches;
    `lse` is written where not empty."""

    q: Tensor
    ori: Tensor
    cmp: Tensor | None
    keys: Keys
    sinks: Tensor | None
    out: Tensor
    lse: Tensor
    scale_log2: float


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
    """`q` has rows."""
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
    names = Names(ori_index, cmp_index, ori_block_table, cmp_block_table)
    window = min(ori_win_left + 1, max(ori_reach, 1))
    layout = rows.Layout(
        PAGE=1,
        Q_TND=cu_seqlens_q is not None,
        KEYS=0,
        CAUSAL=True,
        HAS_Q=False,
        HAS_K=False,
        REQUESTS=triton.next_power_of_2(requests + 1) if cu_seqlens_q is not None else 1,
    )
    return Keys(
        count=count,
        near=ori_count if slots else window,
        far=cmp_count if places.PICKED else cmp_reach,
        arguments=dict(
            names=names,
            ori_pages=ori_pages,
            cmp_pages=cmp_pages,
            ori_size=ori_size,
            cmp_size=cmp_size,
        ),
        strides=Names(*(0 if x is None else x.stride(0) for x in names)),
        places=places,
        source=dict(
            lengths=Lengths(
                cu_seqlens_q,
                seqused_q,
                seqused_kv,
                cu_seqlens_ori_kv,
                cu_seqlens_cmp_kv,
                ori_topk_length,
                cmp_topk_length,
            ),
            tokens=tokens,
            requests=requests,
            window=window,
            ratio=max(cmp_ratio, 1),
            ori_reach=ori_reach,
            cmp_reach=cmp_reach,
            ori_count=ori_count,
            cmp_count=cmp_count,
        ),
        layout=layout,
    )


def note(keys: Keys, device: torch.device) -> Tensor:
    """The first kernel's notes of all rows."""
    notes = memory.empty((keys.count, WIDTH.value), torch.int32, device)
    launches.kernel(_note, keys.count)(
        notes, **keys.source, LAYOUT=keys.layout, P=keys.places, num_warps=1
    )
    return notes


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
