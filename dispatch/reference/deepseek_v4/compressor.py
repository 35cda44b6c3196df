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
from torch.nn.functional import layer_norm
from typing_extensions import Unpack

from ...common import compressed, paged, quantized
from ...common.compressed import RING, Windows
from ...ops.deepseek_v4.compressor import Arguments
from ..common import quantizers
from . import compression


def forward(**a: Unpack[Arguments]) -> Tensor:
    x, state_cache, cmp_ratio = a["x"], a["state_cache"], a["cmp_ratio"]
    state_block_table, coff = a["state_block_table"], a["coff"]
    assert state_block_table is not None  # the check said so
    tokens = compressed.tokens_of(x, a["cu_seqlens"], a["seqused"], a["start_pos"])
    shape = compressed.rows(x, a["cu_seqlens"], cmp_ratio)
    closed, windows = compression.closing(tokens, shape, cmp_ratio)
    kv, z = compression.projected(x, a["wkv"], a["wgate"], a["ape"], tokens)
    gated = a["wgate"] is not None
    if a["ln_weight"] is not None:
        kv = layer_norm(kv, [kv.shape[-1]], a["ln_weight"], a["ln_bias"], a["ln_eps"])
    pages, page = state_cache.shape[:2]
    ring = a["cache_mode"] == RING

    position = compression.members(windows, cmp_ratio, coff)
    own = compression.own(tokens, windows, position)
    before = position.masked_fill(own >= 0, -1)
    slots = compressed.state_slots(state_block_table, windows.request, before, pages, page, ring)
    past, there = (slots >= 0)[..., None], (own >= 0) | (slots >= 0)
    state = paged.gather(state_cache[:, :, None], slots, kv.dtype)
    old = state.chunk(2, -1) if gated else (state, torch.zeros_like(state))
    values, logits = (
        compression.halves(rows, coff).where(past, compression.taken(new, own, coff))
        for rows, new in zip(old, (kv, z), strict=True)
    )
    pooled = (compression.shares(logits, there) * values).sum(1)
    entries = compression.finished(pooled, closed, a, a["rope_slice"])

    kept = tokens.position >= 0
    if ring and len(tokens.start):
        end = (tokens.start + tokens.count)[tokens.request]
        kept &= tokens.position >= end - state_block_table.shape[1] * page
    slots = compressed.state_slots(
        state_block_table, tokens.request, tokens.position[:, None], pages, page, ring
    )[:, 0].masked_fill(~kept, -1)
    state = torch.cat([kv, z], -1) if gated else kv
    quantizers.write(state_cache, slots, state.to(state_cache.dtype))
    if a["cmp_cache"] is not None and a["cmp_block_table"] is not None:
        _store(
            entries,
            windows,
            a["cmp_cache"],
            a["cmp_scale_cache"],
            a["cmp_block_table"],
            a["kind"],
            a["hadamard"],
            a["hadamard_round"],
        )
    if not a["return_cmp_kv"]:
        return x.new_empty([0])
    return compression.placed(entries, closed, shape, a["hadamard"], x.dtype)


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
    if kind == "none" or size == quantized.V4_WIDTH:
        if hadamard:
            entries = quantizers.hadamard(entries, size**-0.5)
        if kind == "none":
            quantizers.write(cache[:, :, 0], slots, entries.to(cache.dtype))
        else:
            quantizers.write_v4_rows(cache, slots, entries)
        return
    if scales is None:
        cache, scales = quantized.index_cache_views(cache, kind)
    new, scale = quantizers.of_floats(
        quantizers.rotated(entries, hadamard, hadamard_round), kind, "ue8m0"
    )
    quantizers.write(cache.view(quantized.VALUES[kind])[:, :, 0], slots, new)
    quantizers.write(scales, slots, quantizers.stored(scale, scales.dtype)[:, None])
