# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Latent attention over each query's own selection, a block of query tokens at a time.

z = scale ([query, query_rope] . [key, key_rope])   m = max z   l = sum exp(z - m)
out = sum exp(z - m) value / (l + exp(sink - m))
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...common import layout
from ..common import selection
from ..common.precision import accumulator


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    block_table: Tensor | None,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_kv: Tensor | None,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    sparse_block_size: int,
    layout_query: str,
    layout_kv: str,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    attention_mode: int,
    return_softmax_lse: bool,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    # the rotary part is only more dims of the logits
    q = query if query_rope is None else torch.cat([query, query_rope], dim=-1)
    wide = accumulator(query)

    def gathered(slot: Tensor) -> tuple[Tensor, Tensor]:
        k = selection.gather(key, slot, wide)
        v = k if value is None else selection.gather(value, slot, wide)
        if key_rope is not None:
            k = torch.cat([k, selection.gather(key_rope, slot, wide)], dim=-1)
        return k, v

    out, *statistics = attend(
        q,
        key,
        query.shape[-1],
        gathered,
        sparse_indices,
        scale_value,
        block_table,
        actual_seq_lengths_query,
        actual_seq_lengths_kv,
        sparse_block_size,
        layout_query,
        layout_kv,
        sparse_mode,
        sinks,
    )
    if not return_softmax_lse:
        statistics = [each.new_empty([0]) for each in statistics]
    return out, statistics[0], statistics[1]


def attend(
    query: Tensor,
    key: Tensor,
    size: int,
    gathered: Callable[[Tensor], tuple[Tensor, Tensor]],
    sparse_indices: Tensor,
    scale: float,
    block_table: Tensor | None,
    lengths_query: Tensor | None,
    lengths_key: Tensor | None,
    block_size: int,
    layout_query: str,
    layout_key: str,
    sparse_mode: int,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out [.., N, size], softmax_max, softmax_sum) over the keys and values `gathered` at
    slots [t, K]; `key` says where they lie."""
    keys = layout.keys_of(key, layout_key, lengths_key, block_table)
    rows = layout.rows_of(query, layout_query, lengths_query, keys, sparse_mode)
    *batch, length, heads, whole = query.shape
    out = query.new_zeros([*batch, length, heads, size])
    softmax_max = query.new_full([*batch, 1, length, heads], -torch.inf, dtype=accumulator(query))
    softmax_sum = torch.zeros_like(softmax_max)

    # all of one view: [T, N, ...]
    q, o = query.flatten(0, -3), out.flatten(0, -3)
    top, total = softmax_max.flatten(0, -2), softmax_sum.flatten(0, -2)
    numbers = whole + 2 * heads + size
    for tokens, slot in selection.slots(key, sparse_indices, block_size, rows, keys, numbers):
        k, v = gathered(slot)
        z = selection.logits(q[tokens], k, scale, slot)
        seen, top[tokens], total[tokens] = selection.attended(z, v, sinks)
        o[tokens] = seen.to(out.dtype)
    return out, softmax_max, softmax_sum
