# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Rows for what merges parts: partial attentions of a decode step, candidates of ranks, positions
that lie on one; beside plain PyTorch, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..dispatch.reference.merging import localize_indices as localize_reference
from ..dispatch.reference.merging import merge_states as states_reference
from ..dispatch.reference.merging import merge_topk as topk_reference
from . import in_torch
from .case import Arguments, Case, Draw, Outputs
from .sparse_attention import indexer_case

BF16 = 2


def _whole(arguments: Arguments) -> tuple[Arguments, Callable[[Outputs], Outputs]]:
    return arguments, lambda outputs: outputs


def states_case(parts: int, rows: int, n: int, d: int) -> Case:
    def make(draw: Draw) -> Arguments:
        return dict(
            outs=draw.normal(parts, rows, n, d),
            lses=draw.normal(parts, rows, n, dtype=torch.float32),
        )

    def by_torch(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        return states_reference.forward(outs, lses, None)

    return Case(
        "npu_merge_states",
        f"{parts} parts, {rows} rows, H{n} D{d}",
        make,
        _whole,
        bytes=float(rows * n * (parts + 1) * (BF16 * d + 4)),
        flops=2.0 * rows * n * parts * d,
        shape=dict(parts=parts, rows=rows, n=n, d=d),
        peers=in_torch.peers(by_torch),
    )


def topk_case(parts: int, rows: int, k: int) -> Case:
    def make(draw: Draw) -> Arguments:
        own = draw.chosen(parts * rows, k, 32 * k).view(parts, rows, k)
        # dealt out in turn
        rank = torch.arange(parts, device=draw.device, dtype=torch.int32)[:, None, None]
        return dict(
            values=draw.normal(parts, rows, k, dtype=torch.float32),
            positions=own * parts + rank,
            k=k,
        )

    return Case(
        "npu_merge_topk",
        f"{parts} x {k} candidates, {rows} rows",
        make,
        _whole,
        bytes=float(rows * k * 8 * (parts + 1)),
        flops=float(rows * k * parts),
        shape=dict(parts=parts, rows=rows, k=k),
        peers=in_torch.peers(topk_reference.forward),
    )


def localize_case(rows: int, k: int, size: int) -> Case:
    def make(draw: Draw) -> Arguments:
        return dict(indices=draw.chosen(rows, k, 32 * k), rank=1, size=size, interleave=64)

    return Case(
        "npu_localize_indices",
        f"{rows} rows, top {k}, {size} ranks",
        make,
        _whole,
        bytes=float(rows * k * 8),
        flops=float(rows * k),
        shape=dict(rows=rows, k=k, size=size),
        peers=in_torch.peers(localize_reference.forward),
    )


def _states(small: bool) -> list[Case]:
    if small:
        return [states_case(2, 8, 4, 64)]
    return [
        states_case(*sizes) for sizes in ((2, 32, 64, 512), (8, 32, 16, 512), (2, 4096, 64, 512))
    ]


def _topk(small: bool) -> list[Case]:
    if small:
        return [topk_case(2, 4, 64)]
    return [topk_case(*sizes) for sizes in ((2, 32, 2048), (8, 32, 2048), (2, 4096, 2048))]


def _localize(small: bool) -> list[Case]:
    if small:
        return [localize_case(4, 64, 2)]
    return [localize_case(*sizes) for sizes in ((32, 2048, 2), (4096, 2048, 2))]


def _scores(small: bool) -> list[Case]:
    cases = [indexer_case(1, 1, 512, 64)] if small else [indexer_case(32, 1, 65536)]
    return [_with_scores(case) for case in cases]


def _with_scores(case: Case) -> Case:
    def make(draw: Draw) -> Arguments:
        arguments = case.drawn(draw)
        del arguments["return_value"]
        return arguments

    return replace(case, op="npu_lightning_indexer_scores", drawn=make, peers={})


PRESETS = {
    "npu_lightning_indexer_scores": _scores,
    "npu_merge_states": _states,
    "npu_merge_topk": _topk,
    "npu_localize_indices": _localize,
}
