# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Dense attention over paged latents: ragged inputs, and their solution one query token at a
time."""

from __future__ import annotations

import torch
from torch import Tensor

from .ragged import PAGE, Packed, limits
from .selected import DR, RAGGED, SCALE, D, attend

WITHIN = {"BSH": "BSND", "BSND": "BSND", "BSND_NBSD": "BSND", "TND": "TND", "TND_NTD": "TND"}


class Problem:
    """Ragged requests, drawn once; what no request owns is NaN."""

    def __init__(self, requests=RAGGED, heads=4, size=D, rope=DR, sink=False):
        self.rows, self.keys = zip(*requests, strict=True)
        self.heads, self.size = heads, size
        self.query, self.query_rope = (
            [torch.randn(r, heads, width).double() for r in self.rows] for width in (size, rope)
        )
        self.key, self.key_rope = (
            [torch.randn(k, width).double() for k in self.keys] for width in (size, rope)
        )
        self.rope = rope > 0
        self.sink = torch.randn(heads) if sink else None

    def rounded_to(self, dtype):
        for name in ("query", "query_rope", "key", "key_rope"):
            setattr(self, name, [part.to(dtype).double() for part in getattr(self, name)])
        return self

    def arguments(self, layout, device, dtype, mode=3, window=None) -> dict:
        packed = Packed((WITHIN[layout], "PA_BSND"), self.rows, self.keys, device)
        self.packed = packed

        def rows(parts):
            out = packed.rows([part.to(dtype) for part in parts])
            return out.flatten(-2) if layout == "BSH" else out

        def keys(parts):
            return packed.keys([part.to(dtype) for part in parts])

        key = keys(self.key)
        ropes = {}
        if self.rope:
            ropes = dict(query_rope=rows(self.query_rope), key_rope=keys(self.key_rope))
        if mode == 4:
            ropes |= dict(pre_tokens=window, next_tokens=0)
        sink = self.sink
        if sink is not None:
            sink = sink.to(device, torch.float64 if dtype is torch.float64 else torch.float32)
        return ropes | dict(
            query=rows(self.query),
            key=key,
            value=key,
            actual_seq_qlen=packed.lengths_query,
            actual_seq_kvlen=packed.lengths_key,
            block_table=packed.block_table,
            learnable_sink=sink,
            num_query_heads=self.heads,
            num_key_value_heads=1,
            softmax_scale=SCALE,
            input_layout=layout,
            sparse_mode=mode,
            block_size=PAGE,
        )

    def unpacked(self, out: Tensor, lse: Tensor, layout: str):
        """[Lq, N, D] and [Lq, N] of every request, and the padding of both."""
        if layout in ("TND_NTD", "BSND_NBSD"):
            out = out.movedim(0, -2)
        if layout == "BSH":
            out = out.unflatten(-1, (self.heads, self.size))
        if WITHIN[layout] == "BSND":
            lse = lse.transpose(1, 2)
        return self.packed.unpack(out), self.packed.unpack(lse.squeeze(-1))

    def terms(self) -> float:
        """The largest sum of a logit's terms without their signs, and of what a GPU's adder has
        after every 16 of them: it cuts off instead of rounding."""
        most = 0.0
        for i in range(len(self.rows)):
            q, k = self.query[i], self.key[i]
            if self.rope:
                q = torch.cat([q, self.query_rope[i]], -1)
                k = torch.cat([k, self.key_rope[i]], -1)
            each = q[..., None, :] * k  # of every key
            sums = each.cumsum(-1)[..., 15::16].abs().sum(-1) + each.abs().sum(-1)
            most = max(most, float(sums.max()) if sums.numel() else 0.0)
        return SCALE * most

    def solved(self, mode: int, window: int | None, dtype: torch.dtype):
        """(out [rows, N, D], lse [rows, N]) of all requests, evaluated in `dtype`."""
        found = []
        for i, (rows, keys) in enumerate(zip(self.rows, self.keys, strict=True)):
            for j, limit in enumerate(limits(rows, keys, 3 if mode == 4 else mode)):
                first = max(0, limit - 1 - window) if mode == 4 else 0
                key = self.key[i].to(dtype)
                out, top, total = attend(
                    self.query[i][j].to(dtype),
                    self.query_rope[i][j].to(dtype) if self.rope else None,
                    key,
                    self.key_rope[i].to(dtype),
                    key,
                    [*range(first, limit)],
                    SCALE,
                    self.sink,
                )
                found.append((out, top + total.log()))
        return [torch.stack(parts) for parts in zip(*found, strict=True)]
