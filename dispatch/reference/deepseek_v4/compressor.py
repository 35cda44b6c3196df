# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Entries of closed windows, and the state of the tokens whose windows are open, see
compressed.py.

History is read before anything is written: a ring may be shorter than the call.  A token without a
page has no weight.  Everything is in float32 until it is stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...common import compressed, paged, quantised
from ...common.compressed import RING, Windows
from ..common import quantizers
from . import compression


def forward(
    x: Tensor,
    wkv: Tensor,
    wgate: Tensor,
    state_cache: Tensor,
    ape: Tensor,
    norm_weight: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    rope_head_dim: int,
    cmp_ratio: int,
    state_block_table: Tensor,
    cu_seqlens: Tensor | None,
    seqused: Tensor | None,
    start_pos: Tensor | None,
    coff: int,
    norm_eps: float,
    rotary_mode: int,
    cache_mode: int,
    cmp_cache: Tensor | None,
    cmp_scale_cache: Tensor | None,
    cmp_block_table: Tensor | None,
    kind: str,
    hadamard: bool,
    hadamard_round: str,
    return_cmp_kv: bool,
) -> Tensor:
    tokens = compressed.tokens_of(x, cu_seqlens, seqused, start_pos)
    shape = compressed.rows(x, cu_seqlens, cmp_ratio)
    closed, windows = compression.closing(tokens, shape, cmp_ratio)
    kv, z = compression.projected(x, wkv, wgate, ape, tokens)
    pages, page = state_cache.shape[:2]
    ring = cache_mode == RING

    position = compression.members(windows, cmp_ratio, coff)
    own = compression.own(tokens, windows, position)
    before = position.masked_fill(own >= 0, -1)
    slots = compressed.state_slots(state_block_table, windows.request, before, pages, page, ring)
    past, there = (slots >= 0)[..., None], (own >= 0) | (slots >= 0)
    old = paged.gather(state_cache[:, :, None], slots, kv.dtype).chunk(2, -1)
    values, logits = (
        compression.halves(state, coff).where(past, compression.taken(new, own, coff))
        for state, new in zip(old, (kv, z), strict=True)
    )
    pooled = (compression.shares(logits, there) * values).sum(1)
    entries = compression.finished(
        pooled, closed, norm_weight, rope_sin, rope_cos, rope_head_dim, norm_eps, rotary_mode
    )

    kept = tokens.position >= 0
    if ring and len(tokens.start):
        end = (tokens.start + tokens.count)[tokens.request]
        kept &= tokens.position >= end - state_block_table.shape[1] * page
    slots = compressed.state_slots(
        state_block_table, tokens.request, tokens.position[:, None], pages, page, ring
    )[:, 0].masked_fill(~kept, -1)
    quantizers.write(state_cache, slots, torch.cat([kv, z], -1).to(state_cache.dtype))
    if cmp_cache is not None and cmp_block_table is not None:
        _store(
            entries,
            windows,
            cmp_cache,
            cmp_scale_cache,
            cmp_block_table,
            kind,
            hadamard,
            hadamard_round,
        )
    if not return_cmp_kv:
        return x.new_empty([0])
    return compression.placed(entries, closed, shape, hadamard, x.dtype)


def _store(
    entries: Tensor,
    windows: Windows,
    cache: Tensor,
    scales: Tensor | None,
    table: Tensor,
    kind: str,
    hadamard: bool,
    hadamard_round: str,
) -> None:
    """Each entry into its slot; in 8 bits from what is not rounded."""
    slots = paged.slots(table, windows.request, windows.number[:, None], *cache.shape[:2])[:, 0]
    size = entries.shape[-1]
    if kind == "none" or size == quantised.V4_WIDTH:
        if hadamard:
            entries = quantizers.hadamard(entries, size**-0.5)
        if kind == "none":
            quantizers.write(cache[:, :, 0], slots, entries.to(cache.dtype))
        else:
            quantizers.write_v4_rows(cache, slots, entries)
        return
    if scales is None:
        cache, scales = quantised.index_cache_views(cache, kind)
    new, scale = quantizers.of_floats(
        quantizers.rotated(entries, hadamard, hadamard_round), kind, "ue8m0"
    )
    quantizers.write(cache.view(quantised.VALUES[kind])[:, :, 0], slots, new)
    quantizers.write(scales, slots, quantizers.stored(scale, scales.dtype)[:, None])
