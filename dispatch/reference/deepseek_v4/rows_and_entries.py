# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Which window rows and which entries a query token sees, a block of tokens at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...common import layout
from ..common import selection


@dataclass(frozen=True)
class Call:
    """What says which slots a token sees, by the names of the op's arguments."""

    q: Tensor
    ori_kv: Tensor
    cmp_kv: Tensor | None
    ori_sparse_indices: Tensor | None
    cmp_sparse_indices: Tensor | None
    ori_block_table: Tensor | None
    cmp_block_table: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_ori_kv: Tensor | None
    cu_seqlens_cmp_kv: Tensor | None
    seqused_q: Tensor | None
    seqused_kv: Tensor | None
    cmp_ratio: int
    ori_win_left: int
    layout_q: str
    layout_kv: str
    indices_are_slots: bool
    ori_topk_length: Tensor | None
    cmp_topk_length: Tensor | None

    def slots(self, numbers: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(tokens, slots of `ori_kv` [tokens, .], slots of `cmp_kv`), -1 where absent; tokens that
        see nothing are left out.  A slot's `numbers` numbers fit into a block of memory."""
        request, left = self._tokens()
        if self.indices_are_slots:
            yield from self._given(left, numbers)
        else:
            yield from self._seen(request, left, numbers)

    def _tokens(self) -> tuple[Tensor, Tensor]:
        """Of every token its request, and how many of the request's tokens are left, itself
        included; 0 where it is none of a request."""
        q, used = self.q, self.seqused_q
        token = torch.arange(q.shape[:-2].numel(), device=q.device)
        if self.layout_q == "BSND":
            size = max(q.shape[1], 1)
            request = torch.div(token, size, rounding_mode="floor")
            end = torch.full_like(token, q.shape[1])
            if used is not None and len(token):
                end = used.long().clamp(0, q.shape[1])[request]
            return request, (end - token % size).clamp(min=0)
        if self.cu_seqlens_q is None:
            return torch.zeros_like(token), torch.ones_like(token)
        # how many sums it has passed, in whatever order they are
        bounds = self.cu_seqlens_q.long().clamp(0, len(token)).sort().values
        passed = torch.searchsorted(bounds, token, right=True)
        inside = (passed > 0) & (passed < len(bounds))
        request = torch.where(inside, passed - 1, 0)
        first, end = bounds[request], bounds[passed.clamp(max=len(bounds) - 1)]
        if used is not None and len(used):
            end = torch.minimum(end, first + used.long()[request])
        return request, (end - token).clamp(min=0).masked_fill(~inside, 0)

    def _keys(self) -> layout.Keys:
        """The window rows of every request: how many, and where."""
        kv = self.ori_kv
        keys = _keys(kv, self.layout_kv, self.cu_seqlens_ori_kv, self.ori_block_table)
        if self.seqused_kv is None:
            return keys
        length = torch.minimum(self.seqused_kv.long().clamp(min=0), keys.length)
        return layout.Keys(keys.layout, length, keys.start, keys.block_table)

    def _seen(
        self, request: Tensor, left: Tensor, numbers: int
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        rows = self._keys()
        limit = torch.zeros_like(left)  # the position of a token, plus 1
        if len(rows.length):
            limit = (rows.length[request] - left + 1).clamp(min=0).masked_fill(left == 0, 0)
        most = int(limit.max()) if len(limit) else 0
        window = torch.arange(min(self.ori_win_left + 1, most), device=limit.device)
        cmp, picked, closed = self.cmp_kv, limit[:, None][:, :0], limit
        if cmp is not None:
            entries = _keys(cmp, self.layout_kv, self.cu_seqlens_cmp_kv, self.cmp_block_table)
            closed = torch.div(limit, self.cmp_ratio, rounding_mode="floor")
            every = torch.arange(most // self.cmp_ratio, device=limit.device)
            picked = every.expand(len(limit), -1)
            if self.cmp_sparse_indices is not None:
                picked = self.cmp_sparse_indices.flatten(0, -3).squeeze(-2)
        for tokens in _blocks(limit, len(window) + picked.shape[1], numbers):
            of, end = request[tokens], closed[tokens, None]
            far = picked[tokens]
            if cmp is not None:
                # no product of an index that is out of range, which could overflow into it
                entry = far.long().clamp(min=-1).minimum(end)
                far = entries.slots(cmp, of, entry).masked_fill(entry >= end, -1)
            first = limit[tokens, None] - len(window)
            yield tokens, rows.slots(self.ori_kv, of, first + window), far

    def _given(self, left: Tensor, numbers: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        near = _cut(self.ori_kv, self.ori_sparse_indices, self.ori_topk_length)
        far = near[:, :0]
        if self.cmp_kv is not None:
            far = _cut(self.cmp_kv, self.cmp_sparse_indices, self.cmp_topk_length)
        for tokens in _blocks(left, near.shape[1] + far.shape[1], numbers):
            yield tokens, near[tokens], far[tokens]


def _blocks(seeing: Tensor, width: int, numbers: int) -> Sequence[Tensor]:
    """The tokens that see something, as many at a time as fit."""
    step = max(1, selection.BLOCK // (max(1, width) * numbers))
    return torch.nonzero(seeing).flatten().split(step) if len(seeing) else ()


def _keys(kv: Tensor, kind: str, bounds: Tensor | None, table: Tensor | None) -> layout.Keys:
    if kind == "TND":
        assert bounds is not None  # the check said so
        ends = bounds.long().clamp(0, kv.shape[0])
        return layout.Keys(kind, (ends[1:] - ends[:-1]).clamp(min=0), ends[:-1], None)
    requests, reach = kv.shape[0], kv.shape[1]
    if table is not None:
        requests, reach = table.shape[0], reach * table.shape[1]
    length = torch.full((requests,), reach, device=kv.device)
    return layout.Keys(kind, length, torch.zeros_like(length), table)


def _cut(kv: Tensor, indices: Tensor | None, length: Tensor | None) -> Tensor:
    """The slots that are there, of those that `length` counts; -1 elsewhere."""
    assert indices is not None  # the check said so
    pages, page = layout.as_pages(kv).shape[:2]
    slot = indices.flatten(0, -3).squeeze(-2).long()
    there = (slot >= 0) & (slot < pages * page)
    if length is not None:
        there &= torch.arange(slot.shape[1], device=slot.device) < length[:, None]
    return torch.where(there, slot, -1)
