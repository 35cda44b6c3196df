# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Ragged requests for the indexer of 8 bits, and a loop in float64 that scores them."""

from __future__ import annotations

import torch
from torch import Tensor

import custom

from .calls import runs_once
from .kernels import INTERPRETED
from .ragged import limits, moved

D = 128
OP = "npu_quant_lightning_indexer"
# (query tokens, keys) of each request
RAGGED = [(3, 70), (1, 5), (2, 0), (4, 2), (0, 9), (2, 33)]


class Problem:
    """Ragged requests; values and scales of queries and keys, and where the keys lie."""

    def __init__(self, kind, heads=5, requests=RAGGED, scale=None, weights=torch.bfloat16):
        self.kind, self.heads = kind, heads
        self.rows, self.keys = zip(*requests, strict=True)
        total, most = sum(self.rows), sum(self.keys)
        self.q, _, self.q_scale = custom.quantize_index_query(
            torch.randn(total, heads, D), torch.ones(total, heads), kind=kind, fold=False
        )
        keys, _, by = custom.quantize_index_query(
            torch.randn(most, 1, D), torch.ones(most, 1), kind=kind, fold=False
        )
        self.k, self.k_scale = keys[:, 0], by[:, 0]
        self.weights = torch.randn(total, heads).to(weights)
        if scale is not None:
            self.q_scale, self.k_scale = self.q_scale.to(scale), self.k_scale.to(scale)

    def scores(self, request: int, row: int, sizes: bool = False) -> Tensor:
        """In float64, of one query over all keys of its request; head by head.  sizes: of the
        magnitudes of all factors."""
        of = torch.abs if sizes else torch.clone
        t, first = sum(self.rows[:request]) + row, sum(self.keys[:request])
        k = self.k[first : first + self.keys[request]].float().double()
        out = torch.zeros(len(k)).double()
        for head in range(self.heads):
            dot = of(k * self.q[t, head].float().double()).sum(-1)
            out += of(self.weights[t, head].double()) * self.q_scale[t, head].double() * dot.relu()
        return out * self.k_scale[first : first + len(k)].double()

    def packed(self, **more) -> dict:
        """TND"""
        sums = lambda counts: torch.tensor(counts).cumsum(0).to(torch.int32)  # noqa: E731
        return (
            dict(
                query=self.q,
                key=self.k[:, None],
                weights=self.weights,
                query_dequant_scale=self.q_scale,
                key_dequant_scale=self.k_scale[:, None],
                query_quant_mode=0,
                key_quant_mode=0,
                actual_seq_lengths_query=sums(self.rows),
                actual_seq_lengths_key=sums(self.keys),
                layout_query="TND",
                layout_key="TND",
                sparse_count=8,
            )
            | more
        )

    def paged(self, page: int, between: int = 0, **more) -> dict:
        """TND queries over pages in random order, as an engine packs them (fp8) or in two tensors;
        `between` bytes behind each page."""
        count = [-(-n // page) for n in self.keys]
        total = sum(count) + 2
        order = torch.randperm(total).tolist()
        table = torch.full((len(count), max(count) + 1), -1, dtype=torch.int32)
        if self.kind == "fp8":
            step = page * 132 + between
            bytes_ = torch.full((total * step,), 0x7F, dtype=torch.uint8)  # NaN where it is e4m3
            pages = bytes_.as_strided((total, page, 132), (step, 132, 1))
            values, scales = custom.index_cache_views(pages, "fp8")
        else:
            values = torch.full((total, page, 1, D), 99, dtype=torch.int8)
            scales = torch.full((total, page, 1), torch.nan, dtype=self.k_scale.dtype)
        at = 0
        for request, n in enumerate(self.keys):
            for i in range(count[request]):
                number = order.pop()
                table[request, i] = number
                here = min(page, n - i * page)
                values[number, :here, 0] = self.k[at : at + here]
                scales[number, :here, 0] = self.k_scale[at : at + here]
                at += here
        lengths = torch.tensor(self.keys, dtype=torch.int32)
        return (
            self.packed(
                key=values,
                key_dequant_scale=scales,
                block_table=table,
                layout_key="PA_BSND",
                actual_seq_lengths_key=lengths,
            )
            | more
        )

    def check(self, arguments: dict, device, backend) -> None:
        mode, count = arguments.get("sparse_mode", 3), arguments["sparse_count"]
        given = {n: moved(x, device) for n, x in arguments.items()}
        # wgmma cuts the sum of 32 products of e4m3 to 14 bits
        wgmma = self.kind == "fp8" and backend == "cuda" and not INTERPRETED
        with runs_once(f"{OP}_scores", backend):
            indices, values = custom.npu_quant_lightning_indexer_scores(**given)
        assert torch.equal(indices, custom.npu_quant_lightning_indexer(**given))
        assert values.dtype is torch.float32
        every, of_all = custom.npu_quant_lightning_indexer_scores(
            **given | dict(sparse_count=max(self.keys))
        )
        t = 0
        for request, (rows, keys) in enumerate(zip(self.rows, self.keys, strict=True)):
            for row, limit in enumerate(limits(rows, keys, mode)):
                exact, seen = self.scores(request, row)[:limit], every[t, 0, :limit].cpu()
                assert seen.tolist() == list(range(limit)) and (every[t, 0, limit:] == -1).all()
                score = of_all[t, 0, :limit].cpu()
                size = 1e-6 * D * self.heads * (exact.abs().max() if limit else 0)
                if wgmma:
                    size = size + 2**-12 * self.scores(request, row, sizes=True)[:limit]
                assert ((score - exact).abs() <= size).all()
                # of the scores that this backend found: the highest, the lower position on ties
                order = sorted(range(limit), key=lambda p: (-score[p].item(), p))[:count]
                want = sorted(order) + [-1] * (count - min(count, limit))
                assert indices[t, 0].tolist() == want
                assert torch.equal(values[t, 0, : min(count, limit)].cpu(), score[sorted(order)])
                assert (values[t, 0, min(count, limit) :] == 0).all()
                t += 1
        assert (indices[t:] == -1).all()
