# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Gradients of the indexer's selected scores, a block of query tokens at a time.

s = query . key    d_weights = sum_k dy relu(s)    ds = dy weights [s > 0]
d_query = ds key   d_key = ds^T query, added up over the queries that chose the key
"""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from ...common import layout as layouts
from ...ops.indexer.lightning_indexer_grad import Arguments
from ..common import selection
from ..common.precision import accumulator


def backward(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor]:
    query, key, weights, layout = x["query"], x["key"], x["weights"], x["layout"]
    layout = layout or "BSND"
    keys = layouts.keys_of(key, layout, x["actual_seq_lengths_key"], None)
    rows = layouts.rows_of(query, layout, x["actual_seq_lengths_query"], keys, x["sparse_mode"])
    wide = accumulator(query)
    d_query, d_weights = query.new_zeros(query.shape), weights.new_zeros(weights.shape)
    d_key = selection.Sums(key, wide)

    # all of one view: [T, N, D], [T, N], [T, K]
    heads, size = query.shape[-2:]
    q, w, g = query.flatten(0, -3), weights.flatten(0, -2), x["dy"].flatten(0, -3).squeeze(-2)
    dq, dw = d_query.view(-1, heads, size), d_weights.view(-1, heads)
    for tokens, slot in selection.slots(key, x["sparse_indices"], 1, rows, keys, size + heads):
        k = selection.gather(key, slot, wide)
        # 0 at absent slots, whatever dy holds there
        grad = g[tokens].to(wide).masked_fill(slot < 0, 0)[:, None]
        s = (q[tokens].to(wide) @ k.mT).relu_()
        dw[tokens] = (s @ grad.mT)[..., 0].to(dw.dtype)
        ds = (grad * w[tokens].to(wide)[..., None]).masked_fill_(s <= 0, 0)
        dq[tokens] = (ds @ k).to(dq.dtype)
        d_key.add(slot, ds.mT @ q[tokens].to(wide))
    return d_query, d_key.rounded(), d_weights
