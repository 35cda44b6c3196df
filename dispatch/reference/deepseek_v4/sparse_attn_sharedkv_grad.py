# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Gradients of attention over window rows and entries, a block of query tokens at a time.

P = exp(z - log(exp(lse) + exp(sink)))
dz = scale (P (d_out k^T - rowsum(d_out out)) + exp(z - lse) d_lse)
d_q = dz k     d_k = dz^T q + P^T d_out, added up over the queries that see a row or an entry
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...common import layout, paged, sharedkv
from ..common import selection
from ..common.precision import accumulator
from . import rows_and_entries
from .sparse_attn_sharedkv import joined


class Block(NamedTuple):
    """Of a few tokens: P and dz [tokens, heads, slots]."""

    tokens: Tensor
    slots: list[Tensor]  # of rows, of entries
    k: Tensor
    p: Tensor
    dz: Tensor


def blocks(
    d_out: Tensor,
    q: Tensor,
    ori_kv: Tensor,
    cmp_kv: Tensor | None,
    out: Tensor,
    softmax_lse: Tensor,
    sinks: Tensor | None,
    d_softmax_lse: Tensor | None,
    softmax_scale: float | None,
    **arguments: Any,
) -> Iterator[Block]:
    call = rows_and_entries.Call(
        q, ori_kv, cmp_kv, ori_block_table=None, cmp_block_table=None, **arguments
    )
    scale, wide = sharedkv.scale_of(softmax_scale, q.shape[-1]), accumulator(q)
    heads, size = q.shape[-2:]
    flat, do = q.flatten(0, -3), d_out.flatten(0, -3)
    delta = (do.to(wide) * out.flatten(0, -3).to(wide)).sum(-1, keepdim=True)
    lse = softmax_lse.view(-1, heads, 1)
    whole = lse if sinks is None else torch.logaddexp(lse, sinks[:, None])
    d_lse = None if d_softmax_lse is None else d_softmax_lse.view(-1, heads, 1)

    def gather(kv: Tensor, slot: Tensor) -> Tensor:
        return paged.gather(layout.as_pages(kv), slot, wide)

    for tokens, *slots in call.slots(2 * size + 4 * heads):
        k, slot = joined(call, gather, slots)
        z = selection.logits(flat[tokens], k, scale, slot)
        absent = (slot < 0)[:, None]  # of a token without any key lse is -inf as well
        p = torch.exp(z - whole[tokens]).masked_fill(absent, 0)
        dz = p * (do[tokens].to(wide) @ k.mT - delta[tokens])
        if d_lse is not None:
            dz = dz + torch.exp(z - lse[tokens]).masked_fill(absent, 0) * d_lse[tokens]
        yield Block(tokens, slots, k, p, dz * scale)


def backward(
    d_out: Tensor, q: Tensor, ori_kv: Tensor, cmp_kv: Tensor | None, **arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    wide = accumulator(q)
    flat, do = q.flatten(0, -3), d_out.flatten(0, -3)
    d_q = torch.zeros_like(flat, memory_format=torch.contiguous_format)
    d_ori = selection.Sums(ori_kv, wide)
    d_cmp = None if cmp_kv is None else selection.Sums(cmp_kv, wide)
    for each in blocks(d_out, q, ori_kv, cmp_kv, **arguments):
        tokens, (near, far), dz = each.tokens, each.slots, each.dz
        d_q[tokens] = (dz @ each.k).to(d_q.dtype)
        d_k = dz.mT @ flat[tokens].to(wide) + each.p.mT @ do[tokens].to(wide)
        d_ori.add(near, d_k[:, : near.shape[1]])
        if d_cmp is not None:
            d_cmp.add(far, d_k[:, near.shape[1] :])
    none = q.new_empty([0]) if d_cmp is None else d_cmp.rounded()
    return d_q.view(q.shape), d_ori.rounded(), none
