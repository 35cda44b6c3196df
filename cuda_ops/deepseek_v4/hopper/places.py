# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""common/sharedkv.py for Gluon: what a row sees, 128 keys of one or both of its caches at a time,
and where these lie, counted in units of elements from where their cache begins; on the host, how a
call is cut into programs."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common import gpu, sharedkv
from ...common.combine import Parts, combine
from ...common.hopper.layouts import LINE
from ...common.hopper.rows import request_of
from ...common.hopper.tma import aligned
from ...common.log2 import LEAST
from ...runtime import launches
from ...sparse_attention.hopper.mla_consumers import Constants, item, splits_of

FAR = gl.constexpr(1 << 30)  # behind any key of a row


class Caches(NamedTuple):
    """Both caches, what names their keys, and how large they are."""

    ori: Any
    cmp: Any
    names: Any
    extents: Any  # of a source, then pages of both and rows of a page


class Work(NamedTuple):
    """An item: its row, first head and note, tiles of window rows, its first tile, its steps."""

    row: Any
    head: Any
    note: Any
    near: Any
    lo: Any
    steps: Any


@gluon.jit
def begin(number, of, LAYOUT: gl.constexpr, P: gl.constexpr, C: gl.constexpr):
    """The `Work` of an item; one without keys takes a step as well."""
    row, split, head = item(number, C.HEADS, C.SPLITS)
    passed, first, stop = request_of(row, sharedkv.sums_of(of), LAYOUT, LINE)
    note = sharedkv.note_of(row, passed, first, stop, of, P)
    near, total = sharedkv.tiles_of(note, P, 64)
    whole = (total + 1) // 2
    each = (whole + C.SPLITS - 1) // C.SPLITS
    lo = split * each
    steps = gl.maximum(gl.minimum(each, whole - lo), 1)
    return Work(row, head, note, near, lo * 2, steps)


@gluon.jit
def _either(entry, tiles, P: gl.constexpr):
    """Keys of a row as window rows, and as entries."""
    near = entry
    far = entry
    if P.ENTRIES:
        near = gl.where(entry < tiles * 64, entry, FAR)
        far = gl.where(entry < tiles * 64, FAR, entry - tiles * 64)
    return near, far


@gluon.jit
def named(entry, tiles, row, note, caches, strides, P: gl.constexpr):
    """What the call names for keys of a row, in either of its caches."""
    near, far = _either(entry, tiles, P)
    index = sharedkv.of_row(caches.names.ori_index, row, strides[2])
    of_near = sharedkv.near_index(near, note, index, P)
    of_far = of_near
    if P.ENTRIES:
        index = sharedkv.of_row(caches.names.cmp_index, row, strides[3])
        of_far = sharedkv.far_index(far, note, index, P)
    return of_near, of_far


@gluon.jit
def keys_of(entry, tiles, of_near, of_far, note, caches, strides, P: gl.constexpr):
    """(outer, inner, valid) of keys of a row, each in its cache."""
    near, far = _either(entry, tiles, P)
    table = sharedkv.of_row(caches.names.ori_table, note.request, strides[4])
    outer, inner, valid = sharedkv.near_place(
        near, of_near, note, table, caches.extents[6], caches.extents[8], P
    )
    if P.ENTRIES:
        table = sharedkv.of_row(caches.names.cmp_table, note.request, strides[5])
        far_outer, far_inner, far_valid = sharedkv.far_place(
            far, of_far, note, table, caches.extents[7], caches.extents[9], P
        )
        outer = gl.where(valid, outer, far_outer)
        inner = gl.where(valid, inner, far_inner)
        valid = valid | far_valid
    return outer, inner, valid


@gluon.jit
def cache_of(tile, tiles, caches, P: gl.constexpr):
    """Of which all keys of a tile are."""
    base = caches.ori
    if P.ENTRIES:
        is_far = tile >= tiles
        if is_far:
            base = caches.cmp
    return base


@gluon.jit
def places_of(entry, tiles, outer, inner, valid, steps, P: gl.constexpr):
    """Where they lie, in units of their cache, negative where absent."""
    place = outer * steps[0] + inner * steps[1]
    if P.ENTRIES:
        place = gl.where(entry < tiles * 64, place, outer * steps[2] + inner * steps[3])
    return gl.where(valid, place, -1).to(gl.int32)


def steps_of(kv: Tensor | None) -> tuple[int, int]:
    """`sharedkv.steps`, 0 where there is no second one to go to."""
    outer, inner = sharedkv.steps(kv)
    if kv is None:
        return 0, 0
    return (outer if kv.ndim == 4 and kv.shape[0] > 1 else 0), (inner if kv.shape[-3] > 1 else 0)


def unit(*caches: Tensor | None) -> int:
    """What places are counted in, a power of two up to a row's width that divides every step from
    key to key; 0 where 32 bits do not number them."""
    most = 512
    for kv in caches:
        for step in steps_of(kv):
            while step % most:
                most //= 2
    for kv in caches:
        if kv is not None:
            outer, inner = steps_of(kv)
            last = (kv.shape[0] - 1) * outer + (kv.shape[-3] - 1) * inner
            if last // most >= 2**31:
                return 0
    return most


def steps(ori: Tensor, cmp: Tensor | None) -> tuple[int, ...]:
    """In units, (page, row) of both caches."""
    by = unit(ori, cmp)
    return tuple(step // by for kv in (ori, cmp) for step in steps_of(kv))


def fits(call: sharedkv.Attention) -> bool:
    """Queries of 512 numbers, tensors that begin at whole pieces of 16 bytes, and a scale that
    leaves the largest score the largest."""
    q, caches = call.q, [x for x in (call.ori, call.cmp) if x is not None]
    return (
        gpu.is_hopper(q.device)
        and call.scale_log2 >= LEAST
        and q.shape[-1] == 512
        and not any(step % 16 for step in q.stride()[:2])
        and aligned(q, *caches)
    )


def run(
    kernel: Any,
    call: sharedkv.Attention,
    caches: tuple[Tensor | None, ...],
    of_keys: tuple[int, ...],
    unit_of_keys: int,
) -> None:
    """`kernel` on both caches, then its parts together; `of_keys`: the steps of their places, in
    units of so many elements."""
    q, keys, sinks, lse = call.q, call.keys, call.sinks, call.lse
    count, heads, rank = q.shape
    processors = gpu.num_sms(q.device)
    splits = splits_of(count, heads, keys.near + keys.far, processors)
    parts = Parts.of(splits, count * heads, rank, lse)
    items = count * splits * triton.cdiv(heads, 64)
    launches.kernel(kernel, min(items, processors))(
        q,
        *caches,
        sinks=lse if sinks is None else sinks,
        results=parts.results(call.out),
        lse=lse,
        scale_log2=call.scale_log2,
        **keys.others,
        extents=keys.extents,
        strides=(*q.stride()[:2], *keys.strides, *of_keys),
        items=items,
        LAYOUT=keys.layout,
        P=keys.places,
        C=Constants(
            HEADS=heads,
            SPLITS=splits,
            SPARSE_BLOCK=1,
            HAS_SINK=sinks is not None,
            STATS=lse.numel() > 0,
            ROPE=0,
            COUNTED=True,
            LSE=True,
        ),
        UNIT=unit_of_keys,
        num_warps=4,
        launch_pdl=True,
    )
    if splits > 1:
        combine(parts, sinks, call.out, lse, None)
