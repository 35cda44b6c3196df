# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_sparse_attention_score: blocks below, above and of the size of a page, 12 and 16 query heads
a head of keys, absent blocks and pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..case import Arguments, Case, Inputs
from ..controls import Control

OP = "npu_sparse_attention_score"
Make = Callable[[Inputs], Arguments]


def paged(
    rows: list[int],
    lengths: list[int],
    heads: int,
    shared: int,
    size: int,
    block: int,
    k: int,
    page: int = 128,
    own: bool = True,
    spare: int = 0,
    **options: Any,
) -> Make:
    """Keys and values are planes of one cache; pages that no request owns may not be touched."""

    def make(x: Inputs) -> Arguments:
        columns = [-(-n // page) for n in lengths]
        order = x.permutation(sum(columns) + 2).tolist()
        cache = x.normal(len(order), 2, page, shared, size)
        table = torch.full((len(lengths), max(columns) + 1), -1)
        for i, count in enumerate(columns):
            table[i, :count] = torch.tensor([order.pop() for _ in range(count)])
        x.forbid(cache, order)
        index = []
        for _ in range(shared if own else 1):
            for n, count in zip([*lengths, 1], [*rows, spare], strict=True):
                for _ in range(count):
                    chosen = x.permutation(max(-(-n // block), 1))[:k]
                    row = torch.full((k,), -1)
                    row[: len(chosen)] = chosen
                    if k > 3:
                        row[x.permutation(k)[: k // 8]] = -1
                        row[k // 2] = n // block + 7
                        row[k // 3] = 2**31 - 1
                        row[-1] = row[0]
                    index.append(row)
        tokens = sum(rows) + spare
        return dict(
            query=x.normal(tokens, heads, size),
            key=cache[:, 0],
            value=cache[:, 1],
            select_idx=x.ints(torch.stack(index).view(-1, tokens, k)),
            block_table=x.ints(table),
            actual_seq_lengths=x.ints(rows),
            actual_seq_lengths_kv=x.ints(lengths),
            num_key_value_heads=shared,
            scale_value=size**-0.5,
            block_size=block,
            top_k=k,
            return_softmax_lse=True,
        ) | {name: value(x) if callable(value) else value for name, value in options.items()}

    return make


def _sinks(heads: int) -> Callable[[Inputs], torch.Tensor]:
    return lambda x: x.normal(heads, dtype=torch.float32)


def _counts(shared: int, tokens: int, k: int) -> Callable[[Inputs], torch.Tensor]:
    return lambda x: x.ints(torch.arange(shared * tokens).view(shared, tokens) % (k + 1))


CASES = (
    Case(OP, "MiniMax-M3, two heads of keys", paged([1, 1], [700, 130], 32, 2, 128, 128, 6)),
    Case(OP, "Qwen4-Exp", paged([1], [300], 24, 2, 256, 4, 33, own=False)),
    Case(
        OP,
        "blocks of 48, pages of 16, counts, sinks",
        paged(
            [2, 0, 1],
            [100, 9, 40],
            8,
            2,
            64,
            48,
            4,
            page=16,
            spare=1,
            sinks=_sinks(8),
            select_num_idx=_counts(2, 4, 4),
        ),
    ),
    Case(OP, "blocks of 1", paged([2], [40], 4, 1, 32, 1, 9, page=16, return_softmax_lse=False)),
)
CONTROLS = tuple(
    Control(title, OP[4:], old, new, case)
    for title, old, new, case in (
        (
            "values of the first head of keys",
            "value[:, :, g : g + 1]",
            "value[:, :, :1]",
            "MiniMax-M3, two heads of keys",
        ),
        (
            "blocks of the first head of keys",
            "index[min(head, len(index) - 1)]",
            "index[0]",
            "MiniMax-M3, two heads of keys",
        ),
        (
            "a block more than the count",
            "there < count[",
            "there < 1 + count[",
            "blocks of 48, pages of 16, counts, sinks",
        ),
        (
            "the sinks of the first heads",
            "else sinks[of]",
            "else sinks[:group]",
            "blocks of 48, pages of 16, counts, sinks",
        ),
        (
            "keys as values",
            "            value,\n            key,\n            index,",
            "            key,\n            key,\n            index,",
            "Qwen4-Exp",
        ),
    )
)
