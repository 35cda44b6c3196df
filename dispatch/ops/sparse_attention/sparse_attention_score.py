# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_sparse_attention_score, grouped-query attention to chosen blocks.

    query [T, N, D]   key, value [pages, P, Nk, D]   select_idx [Nk | 1, T, K] of logical blocks
    select_num_idx [Nk | 1, T]   out [T, N, D]   lse [T, N], without the sinks; [0] unless asked for

Block w holds the positions w * block_size .. of its request, of which a token sees those up to its
own.  An index that is negative or names nothing in sight is absent, and equal ones are separate.
A token that sees nothing, or is none of a request, gets out 0 and lse -inf.
"""

from __future__ import annotations

from typing import Any, TypedDict

from torch import Tensor

from ...check import Checker, tensors
from ...values import known
from ..common import layouts, packed
from .sparse_flash_attention import statistics

SCHEMA = (
    "npu_sparse_attention_score(Tensor query, Tensor key, Tensor value, Tensor select_idx,"
    " Tensor block_table, Tensor? select_num_idx=None, Tensor? q_dequant_scale=None,"
    " Tensor? k_dequant_scale=None, Tensor? v_dequant_scale=None,"
    " Tensor? actual_seq_lengths=None, Tensor? actual_seq_lengths_kv=None,"
    " SymInt num_key_value_heads=1, float scale_value=1.0, SymInt block_size=128,"
    " SymInt top_k=16, int inner_precise=0, *, Tensor? sinks=None,"
    " bool return_softmax_lse=False) -> (Tensor, Tensor)"
)
MOST_D = 256


class Arguments(TypedDict):
    query: Tensor
    key: Tensor
    value: Tensor
    select_idx: Tensor
    block_table: Tensor
    select_num_idx: Tensor | None
    q_dequant_scale: Tensor | None
    k_dequant_scale: Tensor | None
    v_dequant_scale: Tensor | None
    actual_seq_lengths: Tensor | None
    actual_seq_lengths_kv: Tensor | None
    num_key_value_heads: int
    scale_value: float
    block_size: int
    top_k: int
    inner_precise: int
    sinks: Tensor | None
    return_softmax_lse: bool


def check(c: Checker, x: Arguments) -> None:
    query, key, value, sinks = x["query"], x["key"], x["value"], x["sinks"]
    for name, scale in (
        ("q_dequant_scale", x["q_dequant_scale"]),
        ("k_dequant_scale", x["k_dequant_scale"]),
        ("v_dequant_scale", x["v_dequant_scale"]),
    ):
        c.require(
            scale is None,
            f"`{name}` is given, expected None: queries, keys and values are floats here. Multiply "
            "what it belongs to by it before the call.",
        )
    c.same_device(**tensors(x))
    c.floating("query", query)
    c.same_dtype(**tensors(x, "query", "key", "value"))
    c.shape("query", query, "T N D")
    c.shape("key", key, "pages P Nk D")
    c.shape("value", value, "pages P Nk D")
    c.dense_rows(**tensors(x, "query", "key", "value"))
    heads, shared, size = query.shape[1], key.shape[2], query.shape[2]
    c.require(
        1 <= size <= MOST_D,
        f"the head dim is {size}, expected 1 to {MOST_D} (from `query`).",
    )
    c.at_least("num_key_value_heads", x["num_key_value_heads"], 1)
    c.require(
        x["num_key_value_heads"] == shared,
        f"`num_key_value_heads` is {x['num_key_value_heads']}, expected {shared}, the heads of "
        "`key`.",
    )
    c.require(
        heads % shared == 0,
        f"`query` has {heads} heads, expected a multiple of the {shared} of `key`.",
    )
    _selection(c, shared, x)
    packed.lengths(c, x, "actual_seq_lengths", "actual_seq_lengths_kv")
    c.at_least("block_size", x["block_size"], 1)
    c.one_of("inner_precise", x["inner_precise"], 0, 4)
    if sinks is not None:
        c.dtype("sinks", sinks, statistics(query))
        c.shape("sinks", sinks, "N")
        c.contiguous(sinks=sinks)


def _selection(c: Checker, shared: Any, x: Arguments) -> None:
    index, count = x["select_idx"], x["select_num_idx"]
    c.integers("select_idx", index, "index_heads T K")
    _one_or_all(c, "select_idx", index, shared)
    c.dense_rows(select_idx=index)
    c.require(
        x["top_k"] == index.shape[2],
        f"`top_k` is {x['top_k']}, expected {index.shape[2]}, the indices of a token (from "
        "`select_idx`).",
    )
    if count is None:
        return
    c.integers("select_num_idx", count, "count_heads T")
    _one_or_all(c, "select_num_idx", count, shared)
    c.dense_rows(select_num_idx=count)
    if known(count):
        layouts.in_reach(c, "select_num_idx", count.flatten().tolist(), "BSND", x["top_k"])


def _one_or_all(c: Checker, name: str, tensor: Tensor, shared: Any) -> None:
    c.require(
        tensor.shape[0] == 1 or tensor.shape[0] == shared,
        f"`{name}` has {tensor.shape[0]} heads, expected 1 (all share it) or {shared}, as `key`.",
    )


def fake(query: Tensor, return_softmax_lse: bool, **_: Any) -> tuple[Tensor, Tensor]:
    shape = query.shape[:2] if return_softmax_lse else [0]
    out = query.new_empty(query.shape)
    return out, query.new_empty(shape, dtype=statistics(query))
