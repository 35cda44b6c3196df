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
from typing_extensions import Unpack

from ...common import layout
from ...ops.sparse_attention.sparse_flash_attention import Arguments, Selected
from ..common import selection
from ..common.precision import accumulator


def forward(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor]:
    query = x["query"]
    # the rotary part is only more dims of the logits
    q = query if x["query_rope"] is None else torch.cat([query, x["query_rope"]], dim=-1)
    wide = accumulator(query)

    def gathered(slot: Tensor) -> tuple[Tensor, Tensor]:
        k = selection.gather(x["key"], slot, wide)
        v = k if x["value"] is None else selection.gather(x["value"], slot, wide)
        if x["key_rope"] is not None:
            k = torch.cat([k, selection.gather(x["key_rope"], slot, wide)], dim=-1)
        return k, v

    out, *statistics = attend(x, q, x["key"], query.shape[-1], gathered, x["sparse_indices"])
    if not x["return_softmax_lse"]:
        statistics = [each.new_empty([0]) for each in statistics]
    return out, statistics[0], statistics[1]


def attend(
    x: Selected,
    query: Tensor,
    key: Tensor,
    size: int,
    gathered: Callable[[Tensor], tuple[Tensor, Tensor]],
    sparse_indices: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out [.., N, size], softmax_max, softmax_sum) over the keys and values `gathered` at
    slots [t, K]; `key` says where they lie."""
    lengths = x["actual_seq_lengths_query"], x["actual_seq_lengths_kv"]
    keys = layout.keys_of(key, x["layout_kv"], lengths[1], x["block_table"])
    rows = layout.rows_of(query, x["layout_query"], lengths[0], keys, x["sparse_mode"])
    *batch, length, heads, whole = query.shape
    out = query.new_zeros([*batch, length, heads, size])
    softmax_max = query.new_full([*batch, 1, length, heads], -torch.inf, dtype=accumulator(query))
    softmax_sum = torch.zeros_like(softmax_max)

    # all of one view: [T, N, ...]
    q, o = query.flatten(0, -3), out.flatten(0, -3)
    top, total = softmax_max.flatten(0, -2), softmax_sum.flatten(0, -2)
    numbers = whole + 2 * heads + size
    block_size = x["sparse_block_size"]
    for tokens, slot in selection.slots(key, sparse_indices, block_size, rows, keys, numbers):
        k, v = gathered(slot)
        z = selection.logits(q[tokens], k, x["scale_value"], slot)
        seen, top[tokens], total[tokens] = selection.attended(z, v, x["sinks"])
        o[tokens] = seen.to(out.dtype)
    return out, softmax_max, softmax_sum
