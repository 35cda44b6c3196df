# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Rows for the gradients of sparse attention, of the indexer, and of the indexer's KL loss, over
dense keys at DeepSeek-V3.2's sizes, beside cuDNN front end's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .case import Arguments, Case, Draw, Outputs
from .peers import cudnn_attention_grad, cudnn_indexer_grad, cudnn_loss_grad
from .sparse_attention import BF16, DEEPSEEK, DI, DR, R

FLOAT, INT = 4, 4  # bytes
_ROWS = 16  # that the check is of
Part = Callable[[Arguments], tuple[Arguments, Callable[[Outputs], Outputs]]]


def _attention(draw: Draw, s: int, n: int, context: int, k: int) -> Arguments:
    return dict(
        query=draw.normal(1, s, n, R),
        key=draw.normal(1, context, 1, R),
        sparse_indices=draw.chosen(s, k, context - s).view(1, s, 1, k),
        scale_value=DEEPSEEK.scale,
        query_rope=draw.normal(1, s, n, DR),
        key_rope=draw.normal(1, context, 1, DR),
    )


def _statistics(attention: Arguments) -> tuple[Any, Any, Any]:
    """(out, softmax_max, softmax_sum) of the forward."""
    out: tuple[Any, Any, Any] = torch.ops.custom.npu_sparse_flash_attention(
        value=None, return_softmax_lse=True, **attention
    )
    return out


def _last_rows(names: dict[str, int], others: dict[str, Any], by_row: tuple[int, ...]) -> Part:
    """The last query tokens, `names` along their dimensions; what is summed over all tokens is of
    these alone, since `others` says what makes the rest nothing.  Outputs `by_row` have rows."""

    def part(arguments: Arguments) -> tuple[Arguments, Callable[[Outputs], Outputs]]:
        for name, nothing in others.items():
            arguments[name][:, :-_ROWS] = nothing
        piece = arguments | {
            name: arguments[name].narrow(dim, -_ROWS, _ROWS).contiguous()
            for name, dim in names.items()
        }

        def select(outputs: Outputs) -> Outputs:
            return [out[:, -_ROWS:] if i in by_row else out for i, out in enumerate(outputs)]

        return piece, select

    return part


def attention_case(s: int, n: int, context: int, k: int = 2048) -> Case:
    def make(draw: Draw) -> Arguments:
        attention = _attention(draw, s, n, context, k)
        out, peak, total = _statistics(attention)
        return attention | dict(
            value=None,
            d_out=draw.normal(1, s, n, R),
            out=out,
            softmax_max=peak,
            softmax_sum=total,
            sparse_block_size=1,
        )

    rows = dict.fromkeys(("query", "query_rope", "sparse_indices", "d_out", "out"), 1)
    statistics = dict(softmax_max=2, softmax_sum=2)
    moved = s * n * (4 * R + 2 * DR) + 2 * context * (R + DR)
    return Case(
        "npu_sparse_flash_attention_grad",
        f"{n} heads, {s} queries, {context} keys, top {k}",
        make,
        _last_rows(rows | statistics, {"d_out": 0}, by_row=(0, 3)),
        bytes=float(BF16 * moved + s * (INT * k + 2 * FLOAT * n)),
        flops=2.0 * s * n * k * (5 * R + 3 * DR),
        shape=dict(s=s, n=n, context=context, k=k),
        peers={"cudnn": cudnn_attention_grad},
        reference=False,
    )


def indexer_case(s: int, context: int, k: int = 2048) -> Case:
    ni = DEEPSEEK.ni

    def make(draw: Draw) -> Arguments:
        return dict(
            query=draw.normal(1, s, ni, DI),
            key=draw.normal(1, context, 1, DI),
            dy=draw.normal(1, s, 1, k),
            sparse_indices=draw.chosen(s, k, context - s).view(1, s, 1, k),
            weights=draw.normal(1, s, ni),
        )

    rows = dict.fromkeys(("query", "dy", "sparse_indices", "weights"), 1)
    return Case(
        "npu_lightning_indexer_grad",
        f"{s} queries, {context} keys, top {k}",
        make,
        _last_rows(rows, {"dy": 0}, by_row=(0, 2)),
        bytes=float(2 * BF16 * (s * ni * (DI + 1) + context * DI) + s * k * (BF16 + INT)),
        flops=6.0 * s * k * ni * DI,
        shape=dict(s=s, context=context, k=k),
        peers={"cudnn": cudnn_indexer_grad},
        reference=False,
    )


def loss_case(s: int, n: int, context: int, k: int = 2048) -> Case:
    ni = DEEPSEEK.ni

    def make(draw: Draw) -> Arguments:
        attention = _attention(draw, s, n, context, k)
        _, peak, total = _statistics(attention)
        return attention | dict(
            query_index=draw.normal(1, s, ni, DI, std=DI**-0.5),
            key_index=draw.normal(1, context, 1, DI),
            weights=draw.normal(1, s, ni, std=ni**-0.5),
            softmax_max=peak,
            softmax_sum=total,
        )

    names = ("query", "query_rope", "sparse_indices", "query_index", "weights")
    rows = dict.fromkeys(names, 1) | dict(softmax_max=2, softmax_sum=2)
    moved = (s * n + context) * (R + DR) + 2 * (s * ni * (DI + 1) + context * DI)
    return Case(
        "npu_sparse_lightning_indexer_grad_kl_loss",
        f"{n} heads, {s} queries, {context} keys, top {k}",
        make,
        _last_rows(rows, {"sparse_indices": -1}, by_row=(0, 2)),
        bytes=float(BF16 * moved + s * (INT * k + 2 * FLOAT * n)),
        flops=2.0 * s * k * (n * (R + DR) + 3 * ni * DI),
        shape=dict(s=s, n=n, context=context, k=k),
        peers={"cudnn": cudnn_loss_grad},
        reference=False,
    )


def _attentions(small: bool) -> list[Case]:
    if small:
        return [attention_case(32, 16, 512, 64)]
    return [attention_case(4096, n, keys) for n, keys in ((128, 8192), (128, 65536), (16, 8192))]


def _indexers(small: bool) -> list[Case]:
    return [indexer_case(32, 512, 64)] if small else [indexer_case(4096, 8192)]


def _losses(small: bool) -> list[Case]:
    if small:
        return [loss_case(32, 16, 512, 64)]
    return [loss_case(4096, n, 8192) for n in (128, 16)]


PRESETS = {
    "npu_sparse_flash_attention_grad": _attentions,
    "npu_lightning_indexer_grad": _indexers,
    "npu_sparse_lightning_indexer_grad_kl_loss": _losses,
}
