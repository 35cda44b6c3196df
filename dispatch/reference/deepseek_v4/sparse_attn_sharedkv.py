# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Attention over window rows and compressed entries, keys and values in one.

z = scale q . k over both   lse = log sum exp(z)   out = sum exp(z) k / (exp(lse) + exp(sink))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from ...common import layout, paged, sharedkv
from ..common import selection
from ..common.precision import accumulator
from . import rows_and_entries

Gather = Callable[[Tensor, Tensor], Tensor]
_NAMES = {field.name for field in fields(rows_and_entries.Call)}


def forward(
    q: Tensor,
    softmax_scale: float | None,
    sinks: Tensor | None,
    return_softmax_lse: bool,
    **arguments: Any,
) -> tuple[Tensor, Tensor]:
    wide = accumulator(q)

    def gather(kv: Tensor, slot: Tensor) -> Tensor:
        return paged.gather(layout.as_pages(kv), slot, wide)

    return attend(q, gather, softmax_scale, sinks, return_softmax_lse, **arguments)


def attend(
    q: Tensor,
    gather: Gather,
    softmax_scale: float | None,
    sinks: Tensor | None,
    return_softmax_lse: bool,
    **arguments: Any,
) -> tuple[Tensor, Tensor]:
    """(out, lse) over the rows that `gather` gives of a cache at slots."""
    call = rows_and_entries.Call(q, **{name: arguments[name] for name in _NAMES - {"q"}})
    scale = sharedkv.scale_of(softmax_scale, q.shape[-1])
    *batch, length, heads, size = q.shape
    out = q.new_zeros(q.shape)
    lse = q.new_full([*batch, 1, length, heads], -torch.inf, dtype=accumulator(q))
    flat, o, e = q.flatten(0, -3), out.flatten(0, -3), lse.flatten(0, -2)
    for tokens, *slots in call.slots(2 * size + 2 * heads):
        k, slot = joined(call, gather, slots)
        if slot.shape[1]:
            z = selection.logits(flat[tokens], k, scale, slot)
            seen, top, total = selection.attended(z, k, sinks)
            o[tokens], e[tokens] = seen.to(out.dtype), top + total.log()
    return out, lse if return_softmax_lse else lse.new_empty([0])


def joined(
    call: rows_and_entries.Call, gather: Gather, slots: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """(rows and entries [tokens, slots, D], their slots)"""
    near, far = slots
    k = gather(call.ori_kv, near)
    if call.cmp_kv is not None:
        k = torch.cat([k, gather(call.cmp_kv, far)], 1)
    return k, torch.cat([near, far], 1)
