# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Exact top-k of the indexer's scores, a block of query tokens and a block of keys at a time.

    score[t, p] = sum_n weights[t, n] relu(query[t, n] . key[p])

The scores, in float32, order the positions: the highest first, the lower position first on ties.
NaN and -inf count as the lowest number that there is, also as values.  The chosen ones come back in
ascending order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...common import layout, paged
from ...ops.indexer.lightning_indexer import Arguments, Selection
from ..common.precision import accumulator

# scores of one head held at a time: 64 MiB in float32
_BLOCK = 1 << 24


def forward(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor]:
    query = x["query"]
    indices, values = scored(**x)
    return indices, values.to(query.dtype) if x["return_value"] else query.new_empty([0])


def scored(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor]:
    """(indices, scores in the accumulator's dtype)"""

    def score(rows: Tensor, by: Tensor, slots: Tensor) -> Tensor:
        return scores(rows, layout.as_pages(x["key"]), by, slots)

    return select(x, x["query"], x["weights"], score)


def select(
    x: Selection,
    query: Tensor,
    weights: Tensor,
    score: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """(indices, values in the accumulator's dtype) of `score(query [t, N, D], weights [t, N],
    slots [p])`."""
    count, ratio = x["sparse_count"], x["cmp_ratio"]
    lengths = x["actual_seq_lengths_query"], x["actual_seq_lengths_key"]
    keys = layout.keys_of(x["key"], x["layout_key"], lengths[1], x["block_table"], ratio)
    rows = layout.rows_of(query, x["layout_query"], lengths[0], keys, x["sparse_mode"], ratio)
    shape = [*query.shape[:-2], 1, count]
    indices = torch.full(shape, -1, dtype=torch.int32, device=query.device)
    values = query.new_zeros(shape, dtype=accumulator(query))

    query, weights = query.flatten(0, -3), weights.flatten(0, -2)
    for request in range(keys.length.shape[0]):
        tokens = torch.nonzero((rows.request == request) & (rows.limit > 0)).flatten()
        if not len(tokens):
            continue
        # no key is visible beyond the last limit
        positions = torch.arange(int(rows.limit[tokens].max()), device=query.device)[None]
        slots = keys.slots(x["key"], tokens.new_full((1,), request), positions)[0]
        for block in tokens.split(max(1, _BLOCK // len(slots))):
            found = ranked(score(query[block], weights[block], slots))
            visible = (positions < rows.limit[block, None]) & (slots >= 0)
            picked = top(found, visible, count)
            indices.view(-1, count)[block] = picked.to(torch.int32)
            value = found.gather(1, picked.clamp(min=0)).masked_fill(picked < 0, 0)
            values.view(-1, count)[block] = value
    if not x["select_tail"]:
        return indices, values
    seen = layout.rows_of(x["query"], x["layout_query"], lengths[0], keys, x["sparse_mode"])
    open_ = layout.open_entries(seen.limit, ratio).view(shape[:-1])
    return layout.with_tail(indices, values, open_)


def scores(query: Tensor, pages: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
    """[t, p], of query [t, N, D], weights [t, N] and the keys of one request at `slots` [p]."""
    wide = accumulator(query)
    tokens, heads, size = query.shape
    query, weights = query.to(wide).view(-1, size), weights.to(wide)[:, None]
    out = query.new_empty([tokens, len(slots)])
    for start in range(0, len(slots), step := max(1, _BLOCK // (tokens * heads))):
        key = paged.gather(pages, slots[start : start + step], wide)
        each = (query @ key.mT).relu_().view(tokens, heads, -1)
        out[:, start : start + step] = (weights @ each)[:, 0]
    return out


def ranked(score: Tensor) -> Tensor:
    """NaN and -inf as the lowest number that there is."""
    lowest = torch.finfo(score.dtype).min
    return score.nan_to_num(nan=lowest, posinf=torch.inf, neginf=lowest)


def top(score: Tensor, visible: Tensor, count: int) -> Tensor:
    """The `count` best visible columns of every row, ascending, then -1; no score is NaN."""
    rank = ranked(score).masked_fill(~visible, -torch.inf)
    kept = min(count, score.shape[1])
    least = rank.topk(kept).values[:, -1:]
    above, tie = rank > least, (rank == least) & visible
    room = kept - above.sum(-1, keepdim=True)
    take = above | (tie & (tie.cumsum(-1) <= room))
    # column `count` is the bin for what is not taken
    place = torch.where(take, take.cumsum(-1) - 1, count)
    out = torch.full([len(score), count + 1], -1, device=score.device)
    column = torch.arange(score.shape[1], device=score.device).expand_as(place)
    return out.scatter_(1, place, column)[:, :count]
