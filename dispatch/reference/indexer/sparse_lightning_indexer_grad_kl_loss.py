# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The indexer's KL loss over the selected keys, and its gradients, a block of query tokens at a
time.

p[h] = exp(scale_value query[h] . key - softmax_max[h]) / softmax_sum[h]
pi = sum_h p[h] / sum_jh p[h]     s = relu(query_index . key_index)     r = softmax(weights . s)
loss = sum (pi + eps) (log(pi + eps) - log(r + eps))     d = r - pi, the scores' gradient
d_weights = sum_j d s     d_query_index = d weights [s > 0] key_index, and d_key_index likewise
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...common import layout as layouts
from ...ops.indexer.sparse_lightning_indexer_grad_kl_loss import Arguments
from ..common import selection
from ..common.precision import accumulator
from .indexer_loss import normalised, softmax

EPS = 1e-10


def forward(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, key, query_index, layout = x["query"], x["key"], x["query_index"], x["layout"]
    layout = layout or "BSND"
    keys = layouts.keys_of(key, layout, _tensor(x["actual_seq_klen"], key), None)
    mode = 3 if x["sparse_mode"] is None else x["sparse_mode"]
    rows = layouts.rows_of(query, layout, _tensor(x["actual_seq_qlen"], key), keys, mode)
    wide = accumulator(query)
    d_query, d_weights = torch.zeros_like(query_index), torch.zeros_like(x["weights"])
    d_query, d_weights = d_query.contiguous(), d_weights.contiguous()
    d_key, loss = selection.Sums(x["key_index"], wide), query.new_zeros(1, dtype=wide)

    # all of one view: [T, N, D], [T, N]
    heads, size = query_index.shape[-2:]
    q, qi, w = query.flatten(0, -3), query_index.flatten(0, -3), x["weights"].flatten(0, -2)
    q_rope = None if x["query_rope"] is None else x["query_rope"].flatten(0, -3)
    dq, dw = d_query.view(-1, heads, size), d_weights.view(-1, heads)
    peak, total = x["softmax_max"].flatten(0, -2).to(wide), x["softmax_sum"].flatten(0, -2).to(wide)
    if x["sinks"] is not None:
        total = total + torch.exp(x["sinks"].to(wide) - peak)
    numbers = query.shape[-1] + size + query.shape[-2] + heads
    for tokens, slot in selection.slots(key, x["sparse_indices"], 1, rows, keys, numbers):
        there = slot >= 0
        k = selection.gather(key, slot, wide)
        z = selection.logits(q[tokens], k, x["scale_value"], slot)
        if q_rope is not None and x["key_rope"] is not None:
            k_rope = selection.gather(x["key_rope"], slot, wide)
            z = z + q_rope[tokens].to(wide) @ k_rope.mT * x["scale_value"]
        p = torch.exp(z - peak[tokens, :, None]) / total[tokens, :, None]
        pi = normalised(p.masked_fill(~there[:, None], 0).sum(1))

        k = selection.gather(x["key_index"], slot, wide)
        s = (qi[tokens].to(wide) @ k.mT).relu_()
        weight = w[tokens].to(wide)[..., None]
        r = softmax((weight * s).sum(1), there)
        terms = (pi + EPS) * (torch.log(pi + EPS) - torch.log(r + EPS))
        loss += terms.masked_fill(~there, 0).sum()
        grad = (r - pi).masked_fill(~there, 0)[:, None]
        dw[tokens] = (s @ grad.mT)[..., 0].to(dw.dtype)
        ds = (grad * weight).masked_fill_(s <= 0, 0)
        dq[tokens] = (ds @ k).to(dq.dtype)
        d_key.add(slot, ds.mT @ qi[tokens].to(wide))
    return d_query, d_key.rounded(), d_weights, loss


def _tensor(lengths: Sequence[int] | None, like: Tensor) -> Tensor | None:
    return None if lengths is None else torch.tensor(lengths, device=like.device)
