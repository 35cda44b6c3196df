# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_sparse_attention_score: blocks below, above and of the size of a page, in place if both are
whole runs, 8 to 40 query heads a head of keys, absent blocks and pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..case import Arguments, Case, Inputs, in_rounds
from ..controls import Control
from ..pages import shuffled

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
        table, order, total = shuffled(x, lengths, page, 2)
        cache = x.normal(total, 2, page, shared, size)
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
    return lambda x: x.normal(heads, dtype=torch.float32, scale=4.0)


def _counts(shared: int, tokens: int, k: int) -> Callable[[Inputs], torch.Tensor]:
    return lambda x: x.ints(torch.arange(shared * tokens).view(shared, tokens) % (k + 1))


CASES = (
    Case(OP, "MiniMax-M3, two heads of keys", paged([1, 1], [700, 130], 32, 2, 128, 128, 6)),
    Case(
        OP,
        "blocks of 256, pages of 128, counts, sinks",
        paged(
            [2, 0, 1],
            [700, 9, 300],
            24,
            2,
            64,
            256,
            3,
            spare=1,
            sinks=_sinks(24),
            select_num_idx=_counts(2, 4, 3),
        ),
    ),
    Case(
        OP,
        "40 heads of one list, several rounds",
        in_rounds(3 * 128 * 48 * 4, paged([2, 1], [300, 70], 40, 1, 32, 128, 3, own=False)),
    ),
    Case(
        OP,
        "8 heads, pages of 256",
        paged([1], [600], 16, 2, 128, 128, 9, page=256, own=False, sinks=_sinks(16)),
    ),
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
    Case(
        OP,
        "tokens without a key",
        paged(
            [2],
            [300],
            32,
            2,
            128,
            128,
            3,
            select_num_idx=lambda x: x.ints(torch.tensor([[3, 0], [0, 3]])),
        ),
    ),
    Case(OP, "144 heads of one key, blocks of 48", paged([2], [100], 144, 1, 32, 48, 3, page=16)),
)
# in place, all heads of keys at once; else three kernels a head
LAUNCHES = {"MiniMax-M3, two heads of keys": 3, "8 heads, pages of 256": 3, "Qwen4-Exp": 6}
_IN_PLACE, _LAID_OUT = "MiniMax-M3, two heads of keys", "blocks of 48, pages of 16, counts, sinks"
CONTROLS = tuple(
    Control(title, OP[4:], old, new, case)
    for title, old, new, case in (
        (
            "values of the first head of keys, laid out",
            "value[:, :, g : g + 1]",
            "value[:, :, :1]",
            _LAID_OUT,
        ),
        (
            "blocks of the first head of keys, laid out",
            "chosen[min(g, len(chosen) - 1)]",
            "chosen[0]",
            _LAID_OUT,
        ),
        (
            "a block more than the count",
            "device=index.device) < count[",
            "device=index.device) < 1 + count[",
            _LAID_OUT,
        ),
        (
            "the sinks of the first heads, laid out",
            "else sinks[of]",
            "else sinks[:group]",
            _LAID_OUT,
        ),
        (
            "keys as values",
            "(key, value, key)",
            "(key, key, key)",
            "Qwen4-Exp",
        ),
    )
) + tuple(
    Control(title, "blocks_in_place", old, new, case)
    for title, old, new, case in (
        ("keys of the first head", "key + g * of_key.head", "key", _IN_PLACE),
        ("values of the first head", "value + g * of_value.head", "value", _IN_PLACE),
        ("queries of the first heads", "(g * heads.group + h[:, None])", "h[:, None]", _IN_PLACE),
        (
            "blocks of the first head of keys",
            "(unit % lists * of.tokens + row)",
            "row",
            _IN_PLACE,
        ),
        ("what a token does not see", "tl.minimum(limit - position, RUN)", "RUN", _IN_PLACE),
        (
            "an open run",
            "(limit + RUN - 1) // RUN",
            "limit // RUN",
            "blocks of 256, pages of 128, counts, sinks",
        ),
        (
            "the sinks of the first heads",
            "sinks + g * heads.group + h, mask",
            "sinks + h, mask",
            "blocks of 256, pages of 128, counts, sinks",
        ),
        (
            "the sinks of the first heads, whole tiles",
            "sinks + g * heads.group + h)",
            "sinks + h)",
            "8 heads, pages of 256",
        ),
    )
)
