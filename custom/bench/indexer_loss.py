# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Rows for the indexer's KL loss: causal, sorted indices, all valid from row K on; beside plain
PyTorch, eager and compiled, which holds the gathered keys and every head's probabilities."""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import in_torch
from .case import Arguments, Case, Draw, Outputs

BF16 = 2


def _indices(draw: Draw, s: int, s2: int, k: int) -> torch.Tensor:
    """Ascending positions below each row's limit; -1 behind them where fewer than `k` exist."""
    limit = torch.arange(s2 - s + 1, s2 + 1, device=draw.device)[:, None]
    slot = torch.arange(k, device=draw.device)[None]
    spread = torch.rand(s, k, device=draw.device, generator=draw.random)
    wide = ((slot + spread) * limit.clamp_min(k) / k).long()
    return torch.where(slot < limit, torch.where(limit > k, wide.minimum(limit - 1), slot), -1)[
        None
    ]


def loss_case(n: int, d: int, s: int, s2: int, k: int, lse: bool = False) -> Case:
    def make(draw: Draw) -> Arguments:
        arguments = dict(
            query=draw.normal(1, n, s, d),
            key=draw.normal(1, s2, d),
            index_score=draw.normal(1, s, k, dtype=torch.float32),
            indices=_indices(draw, s, s2, k).to(torch.int32),
            scaling=d**-0.5,
            chunk_offset=s2 - s,
        )
        if lse:
            arguments["softmax_lse"] = _lse(arguments)
        return arguments

    def part(arguments: Arguments) -> tuple[Arguments, Callable[[Outputs], Outputs]]:
        rows = slice(s - 16, s)
        piece = arguments | dict(
            query=arguments["query"][:, :, rows],
            index_score=arguments["index_score"][:, rows],
            indices=arguments["indices"][:, rows],
            chunk_offset=arguments["chunk_offset"] + s - 16,
        )
        if lse:
            piece["softmax_lse"] = arguments["softmax_lse"][:, :, rows]
        return piece, lambda outputs: [out[:, rows] for out in outputs]

    passes = 1 if lse else 2
    return Case(
        "npu_indexer_loss",
        f"H{n} D{d}, {s} x {s2}, top {k}{', lse given' if lse else ''}",
        make,
        part,
        bytes=float(BF16 * d * (n * s + s2) + s * k * 12),
        flops=2.0 * passes * n * s * k * d,
        shape=dict(n=n, d=d, s=s, s2=s2, k=k),
        peers=in_torch.peers(in_torch.loss),
    )


def _lse(arguments: Arguments) -> torch.Tensor:
    """Log-sum-exp of the attention's logits over each row's valid slots, a few rows at a time."""
    query, key, indices = (arguments[name] for name in ("query", "key", "indices"))
    rows = []
    for start in range(0, query.shape[2], 32):
        chosen = indices[0, start : start + 32].long()
        logits = torch.einsum(
            "hsd,skd->hsk", query[0, :, start : start + 32], key[0, chosen.clamp_min(0)]
        ).float()
        logits = (logits * arguments["scaling"]).masked_fill(chosen < 0, float("-inf"))
        rows.append(logits.logsumexp(-1))
    return torch.cat(rows, 1)[None].contiguous()


def backward_case(s: int, s2: int, k: int) -> Case:
    def make(draw: Draw) -> Arguments:
        return dict(
            grad_loss=draw.normal(1, s, dtype=torch.float32),
            index_score=draw.normal(1, s, k, dtype=torch.float32),
            indices=_indices(draw, s, s2, k).to(torch.int32),
            target=draw.normal(1, s, k, dtype=torch.float32).abs(),
            key_length=s2,
            chunk_offset=s2 - s,
        )

    def part(arguments: Arguments) -> tuple[Arguments, Callable[[Outputs], Outputs]]:
        names = ("grad_loss", "index_score", "indices", "target")
        piece = arguments | {name: arguments[name][:, :64] for name in names}
        return piece, lambda outputs: [out[:, :64] for out in outputs]

    return Case(
        "npu_indexer_loss_backward",
        f"{s} x {s2}, top {k}",
        make,
        part,
        bytes=float(s * k * 16),
        flops=10.0 * s * k,
        shape=dict(s=s, s2=s2, k=k),
        peers=in_torch.peers(in_torch.loss_backward),
    )


def _forward(small: bool) -> list[Case]:
    if small:
        return [loss_case(4, 64, 128, 256, 64)]
    return [
        loss_case(16, 128, 4096, 4096, 2048),
        loss_case(64, 128, 4096, 8192, 2048),
        loss_case(128, 576, 4096, 8192, 2048),
        loss_case(128, 576, 4096, 8192, 2048, lse=True),
        loss_case(64, 576, 4096, 8192, 2048, lse=True),  # GLM-5's heads
    ]


def _backward(small: bool) -> list[Case]:
    return [backward_case(128, 256, 64)] if small else [backward_case(4096, 8192, 2048)]


PRESETS = {"npu_indexer_loss": _forward, "npu_indexer_loss_backward": _backward}
