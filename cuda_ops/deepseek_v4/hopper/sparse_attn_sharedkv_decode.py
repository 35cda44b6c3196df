# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The attention of sparse_attn_sharedkv.py for a row or two, where latencies add up: a program
takes 16 heads of a row and one tile of its keys, as in sparse_attention's kernel for few rows, and
finds out by itself where that tile lies.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_wait

from ....dispatch.common import quantized
from ...common import gpu, sharedkv
from ...common.gluon_names import cp_async
from ...common.hopper.rows import request_of
from ...runtime import launches
from ...sparse_attention.hopper.mla_parts import ask, combine, part, parts_of, tiles_of
from . import packed_rows
from .places import steps, unit


@gluon.jit
def _unpack(words, places, offsets, left, right, UNIT: gl.constexpr, WARPS: gl.constexpr):
    """A tile of keys, of what their words stand for."""
    PIECE: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [WARPS, 1], [1, 0])
    ROTARY: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    place = places.load(gl.SliceLayout(1, PIECE))
    offset = offsets.load(gl.SliceLayout(1, PIECE))
    low = packed_rows.ask_scales(words, place, offset, 0)
    high = packed_rows.ask_scales(words, place, offset, 1)
    for c in gl.static_range(4):
        piece = packed_rows.ask_words(words, place, UNIT, 16 * c, 16, PIECE)
        packed_rows.put(piece, low, left, c)
    for c in gl.static_range(3):
        piece = packed_rows.ask_words(words, place, UNIT, 64 + 16 * c, 16, PIECE)
        packed_rows.put(piece, high, right, c)
    place = places.load(gl.SliceLayout(1, ROTARY))
    packed_rows.put_rotary(packed_rows.ask_words(words, place, UNIT, 112, 32, ROTARY), right)


@gluon.jit(do_not_specialize=["tokens", "requests"])
def _attend(
    q,
    ori,
    cmp,
    names,
    parts,
    lengths,
    scale_log2,
    tokens,
    requests,
    extents,
    q_steps,
    name_steps,
    key_steps,
    LAYOUT: gl.constexpr,
    P: gl.constexpr,
    UNIT: gl.constexpr,
    HEADS: gl.constexpr,
    SPLITS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PACKED: gl.constexpr,
    WARPS: gl.constexpr,
):
    """PACKED: rows of 584 bytes, as words."""
    gdc_wait()
    of = sharedkv.Source(lengths, tokens, requests, extents)
    ori_o, ori_i, cmp_o, cmp_i, ori_page, cmp_page = key_steps
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])  # one entry a thread
    QUERY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    GATHER: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    program = gl.program_id(0)
    TILES: gl.constexpr = (HEADS + 15) // 16
    head = program % TILES * 16
    split = program // TILES % SPLITS
    row = (program // (TILES * SPLITS)).to(gl.int64)
    # the longest chain first: length, index, page, key
    passed, first, stop = request_of(row, sharedkv.sums_of(of), LAYOUT, LINE)
    note = sharedkv.note_of(row, passed, first, stop, of, P)
    near, _total = sharedkv.tiles_of(note, P, BLOCK_N)
    tiles = tiles_of(q.dtype.element_ty, BLOCK_N, 0)
    h = (head + gl.arange(0, 16, layout=gl.SliceLayout(1, QUERY))).to(gl.int64)
    d = gl.arange(0, 512, layout=gl.SliceLayout(0, QUERY))
    at = (q + row * q_steps[0] + h * q_steps[1])[:, None] + d[None, :]
    cp_async(tiles.queries, at, mask=(h < HEADS)[:, None])
    is_near = split < near
    entry = split * BLOCK_N + gl.arange(0, BLOCK_N, layout=LINE)
    base = ori
    outer_step = ori_o
    inner_step = ori_i
    if P.ENTRIES:
        entry -= gl.where(is_near, 0, near) * BLOCK_N
        if split >= near:
            base = cmp
            outer_step = cmp_o
            inner_step = cmp_i
    pages, sizes = (extents[6], extents[7]), (extents[8], extents[9])
    named = sharedkv.Named(names, name_steps, row, pages, sizes)
    outer, inner, valid = sharedkv.keys_of(entry, is_near, note, named, P)
    tiles.places.store(gl.where(valid, outer * outer_step + inner * inner_step, -1).to(gl.int32))
    if PACKED:
        page = gl.where(is_near, ori_page, cmp_page)
        size = gl.where(is_near, extents[8], extents[9])
        offsets = gl.allocate_shared_memory(gl.int64, [BLOCK_N], FLAT)
        offsets.store(gl.where(valid, outer * page + size * 144 + inner * 2, -1).to(gl.int64))
        _unpack(base, tiles.places, offsets, tiles.left, tiles.right, UNIT, WARPS)
        async_copy.commit_group()
        async_copy.commit_group()
    else:
        place = tiles.places.load(gl.SliceLayout(1, GATHER))
        ask(base, place, UNIT, tiles.left, tiles.right, GATHER)
    part(tiles, scale_log2, parts, row, split, head, HEADS, SPLITS, 0, WARPS)


def _splits(keys: sharedkv.Keys, tile: int) -> int:
    """Tiles of the longest row that there can be."""
    return triton.cdiv(keys.near, tile) + triton.cdiv(keys.far, tile)


def _tile(keys: sharedkv.Keys, heads: int, processors: int) -> int:
    """Keys a program, 0 where the other kernel is faster.  Measured on one GPU, 2026-11, tiles of
    32 / 64 / 128 and the other kernel: 64 heads and 640 keys, 1 row 6.1 / 6.9 / 7.7 / 14.7 us, 2
    rows 8.6 / 7.4 / 7.9 / 14.8, 8 rows 21.3 / 16.3 / 14.9 / 16.6; 128 heads and 1152 keys, 1 row
    11.4 / 9.1 / 8.7 / 16.5, 2 rows 22.6 / 16.1 / 14.6 / 17.3, 4 rows - / 24.4 / 21.1 / 18.1."""
    for tile, waves in ((32, 1), (64, 1), (128, 2)):
        splits = _splits(keys, tile)
        programs = keys.count * splits * triton.cdiv(heads, 16)
        if splits <= 64 and programs <= processors * waves:
            return tile
    return 0


def supports(keys: sharedkv.Keys, heads: int, device: torch.device) -> bool:
    """Of calls that the kernel of many rows supports, those of so few that it would be slower."""
    return _tile(keys, heads, gpu.num_sms(device)) > 0


def launch(call: sharedkv.Attention) -> None:
    """Keys of the dtype of `q`, or rows of 584 bytes."""
    q, ori, cmp, keys = call.q, call.ori, call.cmp, call.keys
    count, heads, _ = q.shape
    packed = ori.dtype is not q.dtype
    keys_at: tuple[int, ...]
    if packed:
        by, keys_at = packed_rows.unit(ori, cmp), packed_rows.steps(ori, cmp)
        ori = quantized.seen_as(ori, torch.int32)
        cmp = cmp if cmp is None else quantized.seen_as(cmp, torch.int32)
    else:
        by, keys_at = unit(ori, cmp), (*steps(ori, cmp), 0, 0)
    tile = _tile(keys, heads, gpu.num_sms(q.device))
    splits = _splits(keys, tile)
    parts = parts_of(count * heads, splits, q.device)
    warps = 8 if tile == 128 else 4
    launches.kernel(_attend, count * splits * triton.cdiv(heads, 16))(
        q,
        ori,
        cmp,
        parts=parts,
        scale_log2=call.scale_log2,
        **keys.others,
        extents=keys.extents,
        q_steps=q.stride()[:2],
        name_steps=keys.strides,
        key_steps=keys_at,
        LAYOUT=keys.layout,
        P=keys.places,
        UNIT=by,
        HEADS=heads,
        SPLITS=splits,
        BLOCK_N=tile,
        PACKED=packed,
        WARPS=warps,
        num_warps=warps,
        launch_pdl=True,
    )
    combine(parts, splits, call.sinks, call.out, call.lse, None)
