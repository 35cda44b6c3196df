# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Grouped-query attention of packed tokens to chosen blocks: in place (blocks_in_place.py) where
blocks and pages are whole runs, else a head of keys at a time by the three kernels of
sparse_flash_attention.

    collect      chosen keys and values, dense [T, K * block, D] each, two rows in one copy
    weigh        scores of the keys, for the query heads that share them
    accumulate   exp(z - m) value over all of them

Blocks and pages may have any size; an open block is cut at the token.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import memory
from ...dispatch.common.packed import block_within, ends
from ...dispatch.ops.sparse_attention.sparse_attention_score import Arguments
from ..common import ragged, tiling
from . import blocks_in_place
from .blocks_in_place import RUN
from .sparse_flash_attention import in_passes


def unsupported(**x: Unpack[Arguments]) -> str | None:
    query, key, value, table = x["query"], x["key"], x["value"], x["block_table"]
    if reason := tiling.not_multiplied(query=query):
        return reason
    size = query.shape[2]
    if size % 32:
        return f"a head size of {size}, which comes in 32s"
    if overflow := tiling.weigh_overflow(16, 64, size, 0):
        return overflow
    reach = table.shape[1] * key.shape[1]
    if max(reach, x["top_k"] * block_within(x["block_size"], reach)) > ragged.LONGEST:
        return f"contexts of up to {reach} positions, the kernel reaches {ragged.LONGEST}"
    if key.shape[0] > ragged.LONGEST:
        return f"a cache of {key.shape[0]} pages, the kernel knows {ragged.LONGEST} apart"
    return ragged.uneven(key=key, value=value)


def forward(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor]:
    query, key, value, index = x["query"], x["key"], x["value"], x["select_idx"]
    lengths, key_lengths = x["actual_seq_lengths"], x["actual_seq_lengths_kv"]
    assert lengths is not None and key_lengths is not None  # the check said so
    (tokens, heads), shared, device = query.shape[:2], key.shape[2], query.device
    group, sinks = heads // shared, x["sinks"]
    out = memory.empty(query.shape, query.dtype, device)
    lse = memory.empty((tokens, heads), torch.float32, device)
    none = memory.empty((0,), torch.float32, device)
    if out.numel() == 0 or key.numel() == 0 or index.numel() == 0 or x["block_table"].numel() == 0:
        return out.zero_(), lse.fill_(-torch.inf) if x["return_softmax_lse"] else none
    sums = ends(lengths, tokens).to(torch.int32)
    plan = ragged.plan(query, key, sums, key_lengths, x["block_table"], "TND", "PA_BSND", 3)
    block, chosen = block_within(x["block_size"], plan.reach), _chosen(index, x["select_num_idx"])
    if block % RUN == 0 and key.shape[1] % RUN == 0:
        blocks_in_place.attend(
            query, key, value, chosen, x["scale_value"], block // RUN, sinks, out, lse, plan
        )
        return out, lse if x["return_softmax_lse"] else none
    for g in range(shared):
        of = slice(g * group, (g + 1) * group)
        found, top, total = _attended(
            query[:, of],
            key[:, :, g : g + 1],
            value[:, :, g : g + 1],
            chosen[min(g, len(chosen) - 1)],
            x["scale_value"],
            block,
            None if sinks is None else sinks[of],
            plan,
        )
        out[:, of] = found
        if x["return_softmax_lse"]:
            lse[:, of] = top + total.log()
    return out, lse if x["return_softmax_lse"] else none


def _chosen(index: Tensor, count: Tensor | None) -> Tensor:
    """[Nk | 1, T, K] int32, -1 behind a list's count."""
    index = ragged.int32(index)
    if count is None:
        return index.contiguous()
    there = torch.arange(index.shape[2], device=index.device) < count[:, :, None]
    return torch.where(there, index, -1)


def _attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: Tensor,
    scale: float,
    block: int,
    sinks: Tensor | None,
    plan: ragged.Plan,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out [T, N, D], max, sum [T, N]) of the heads that share a head of keys."""
    (tokens, heads, size), device, dtype = query.shape, query.device, query.dtype
    out = memory.empty((tokens, heads, size), dtype, device)
    top = memory.empty((tokens, heads), torch.float32, device)
    total = memory.empty((tokens, heads), torch.float32, device)
    in_passes(
        query,
        query,
        (key, value, key),
        index,
        scale,
        block,
        sinks,
        (out, top, total),
        plan,
        (size, size),
        VALUES=True,
    )
    return out, top, total
