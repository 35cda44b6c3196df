# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Gradients of the sparse latent attention, a block of query tokens at a time.

P = exp(z - max) / sum    dz = P (d_out value^T - rowsum(d_out out) + d_sum sum) scale
d_query = dz key          d_key = dz^T query, d_value = P^T d_out, added up over the queries
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...common import layout as layouts
from ...ops.sparse_attention.sparse_flash_attention_grad import Arguments
from ..common import selection
from ..common.precision import accumulator


def backward(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    query, key, value, layout = x["query"], x["key"], x["value"], x["layout"]
    layout = layout or "BSND"
    keys = layouts.keys_of(key, layout, x["actual_seq_kvlen"], None)
    rows = layouts.rows_of(query, layout, x["actual_seq_qlen"], keys, x["sparse_mode"])
    wide = accumulator(query)
    heads, size = query.shape[-2:]
    # one joint head [D + Dr]: the rotary part is only more dims of the logits
    q, k_all = _joined(query, x["query_rope"]), _joined(key, x["key_rope"])
    q, do = q.flatten(0, -3), x["d_out"].flatten(0, -3)
    delta = (do.to(wide) * x["out"].flatten(0, -3).to(wide)).sum(-1, keepdim=True)
    top, total = x["softmax_max"].view(-1, heads, 1), x["softmax_sum"].view(-1, heads, 1)
    if x["d_softmax_sum"] is not None:
        delta = delta - torch.where(total > 0, x["d_softmax_sum"].view(-1, heads, 1) * total, 0)
    # a row that sees nothing: exp(-inf - 0) / 1
    shift, total = top.masked_fill(top == -torch.inf, 0), total.masked_fill(total == 0, 1)

    dq = torch.zeros_like(q)
    d_key = selection.Sums(k_all, wide)
    d_value = d_key if value is None else selection.Sums(value, wide)
    numbers = k_all.shape[-1] + size + 2 * heads
    for tokens, slot in selection.slots(
        key, x["sparse_indices"], x["sparse_block_size"], rows, keys, numbers
    ):
        k = selection.gather(k_all, slot, wide)
        v = k[..., :size] if value is None else selection.gather(value, slot, wide)
        grad = do[tokens].to(wide)
        z = selection.logits(q[tokens], k, x["scale_value"], slot)
        p = torch.exp(z - shift[tokens]) / total[tokens]
        dz = p * (grad @ v.mT - delta[tokens]) * x["scale_value"]
        dq[tokens] = (dz @ k).to(dq.dtype)
        d_key.add(slot, dz.mT @ q[tokens].to(wide))
        d_value.add(slot, p.mT @ grad)

    none = query.new_empty([0])
    dq, dk = dq.view(*query.shape[:-1], q.shape[-1]), d_key.rounded()
    own = partial(torch.clone, memory_format=torch.contiguous_format)  # no two share memory
    return (
        own(dq[..., :size]),
        own(dk[..., :size]),
        none if value is None else d_value.rounded(),
        none.clone() if x["query_rope"] is None else own(dq[..., size:]),
        none.clone() if x["key_rope"] is None else own(dk[..., size:]),
    )


def _joined(x: Tensor, rope: Tensor | None) -> Tensor:
    return x if rope is None else torch.cat([x, rope], dim=-1)
