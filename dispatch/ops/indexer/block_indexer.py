# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_block_indexer: the blocks of keys that each head of a token chooses.

    query [T, N, D]   key [pages, P, 1, D]   select_idx int32 [N, T, top_k]
    values [N, T, top_k] float32 (float64 of float64), or [0] without return_value

A block's score is the largest product of the query with those of its keys that the token sees.
The first init_blocks and the last local_blocks in sight are always chosen, and count among the
top_k.  Ascending; behind them -1, whose value is 0.
"""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from torch import Tensor

from ...check import Checker, tensors
from ..common import packed

SCHEMA = (
    "npu_block_indexer(Tensor query, Tensor key, Tensor block_table, *,"
    " Tensor actual_seq_lengths, Tensor actual_seq_lengths_key, SymInt block_size=128,"
    " SymInt top_k=16, SymInt init_blocks=0, SymInt local_blocks=1, bool return_value=False)"
    " -> (Tensor, Tensor)"
)


class Arguments(TypedDict):
    query: Tensor
    key: Tensor
    block_table: Tensor
    actual_seq_lengths: Tensor
    actual_seq_lengths_key: Tensor
    block_size: int
    top_k: int
    init_blocks: int
    local_blocks: int
    return_value: bool


def check(c: Checker, x: Arguments) -> None:
    query, key = x["query"], x["key"]
    c.same_device(**tensors(x))
    c.floating("query", query)
    c.same_dtype(query=query, key=key)
    c.shape("query", query, "T N D")
    c.shape("key", key, "pages P 1 D")
    c.dense_rows(query=query, key=key)
    packed.lengths(c, x, "actual_seq_lengths", "actual_seq_lengths_key")
    c.at_least("block_size", x["block_size"], 1)
    c.count("top_k", x["top_k"])
    c.at_least("init_blocks", x["init_blocks"], 0)
    c.at_least("local_blocks", x["local_blocks"], 0)
    forced = x["init_blocks"] + x["local_blocks"]
    c.require(
        forced <= x["top_k"],
        f"`init_blocks` and `local_blocks` are {x['init_blocks']} and {x['local_blocks']}, "
        f"expected at most `top_k` = {x['top_k']} together: they count among the chosen ones.",
    )


def fake(query: Tensor, top_k: int, return_value: bool, **_: Any) -> tuple[Tensor, Tensor]:
    shape = [query.shape[1], query.shape[0], top_k]
    wide = torch.float64 if query.dtype is torch.float64 else torch.float32
    index = query.new_empty(shape, dtype=torch.int32)
    return index, query.new_empty(shape if return_value else [0], dtype=wide)
