# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Grouped-query attention to chosen blocks, a head of keys at a time.

z = scale q . k   lse = log sum exp(z)   out = sum exp(z) v / (exp(lse) + exp(sink))
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...common import packed
from ...ops.sparse_attention.sparse_attention_score import Arguments
from ..common import selection
from ..common.precision import accumulator


def forward(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor]:
    query, key, value, sinks = x["query"], x["key"], x["value"], x["sinks"]
    lengths, key_lengths = x["actual_seq_lengths"], x["actual_seq_lengths_kv"]
    assert lengths is not None and key_lengths is not None  # the check said so
    rows, keys = packed.rows_of(query, key, lengths, key_lengths, x["block_table"])
    tokens, heads, size = query.shape
    shared, wide = key.shape[2], accumulator(query)
    group = heads // shared
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.full((tokens, heads), -torch.inf, dtype=wide, device=query.device)
    for g in range(shared):
        of = slice(g * group, (g + 1) * group)
        index = _chosen(x, g)[:, None]
        numbers = 2 * (size + group)
        for at, slot in selection.slots(key, index, x["block_size"], rows, keys, numbers):
            k, v = (selection.gather(each[:, :, g : g + 1], slot, wide) for each in (key, value))
            z = selection.logits(query[at, of], k, x["scale_value"], slot)
            seen, top, total = selection.attended(z, v, None if sinks is None else sinks[of])
            out[at, of], lse[at, of] = seen.to(out.dtype), top + total.log()
    return out, lse if x["return_softmax_lse"] else lse.new_empty([0])


def _chosen(x: Arguments, head: int) -> Tensor:
    """[T, K] of a head of keys, -1 behind its count."""
    index, count = x["select_idx"], x["select_num_idx"]
    index = index[min(head, len(index) - 1)]
    if count is None:
        return index
    there = torch.arange(index.shape[1], device=index.device)
    return index.masked_fill(there >= count[min(head, len(count) - 1), :, None], -1)
