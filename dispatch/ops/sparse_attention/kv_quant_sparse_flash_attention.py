# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and output of npu_kv_quant_sparse_flash_attention; rows as in common/quantized.py.

    query [.., N, 512 + Dr]   key, value [.., 1, 528 + 2 Dr] of 8 bits   sparse_indices [.., 1, K]
    out [.., N, 512]          Dr = rope_head_dim, 64 or 0

As npu_sparse_flash_attention, on the cache that the rows stand for: a value times its tile's
scale, rounded once to the query's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...check import Checker
from ...common import quantized
from ...op_spec import UNLIMITED, Variant
from ..common import quantization
from . import sparse_flash_attention

ARGUMENTS = (
    "(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, float scale_value,"
    " SymInt key_quant_mode, SymInt value_quant_mode, *, Tensor? key_dequant_scale=None,"
    " Tensor? value_dequant_scale=None, Tensor? block_table=None,"
    " Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_kv=None,"
    ' SymInt sparse_block_size=1, str layout_query="BSND", str layout_kv="BSND",'
    f" SymInt sparse_mode=3, SymInt pre_tokens={UNLIMITED}, SymInt next_tokens={UNLIMITED},"
    " SymInt attention_mode=0, SymInt quant_scale_repo_mode=1, SymInt tile_size=128,"
    " SymInt rope_head_dim=64, int? key_dtype=None, int? value_dtype=None, Tensor? sinks=None,"
    f' str row_layout="{quantized.NOPE_ROPE_SCALE}")'
)
SCHEMA = f"npu_kv_quant_sparse_flash_attention{ARGUMENTS} -> Tensor"
GE = "KvQuantSparseFlashAttention"


class Arguments(sparse_flash_attention.Selected):
    query: Tensor
    key: Tensor
    value: Tensor
    sparse_indices: Tensor
    key_quant_mode: int
    value_quant_mode: int
    key_dequant_scale: Tensor | None
    value_dequant_scale: Tensor | None
    quant_scale_repo_mode: int
    tile_size: int
    rope_head_dim: int
    key_dtype: int | None
    value_dtype: int | None
    row_layout: str


# the only value of each, and what it means
_MODES = {
    "key_quant_mode": (2, "a scale for each token and tile"),
    "value_quant_mode": (2, "a scale for each token and tile"),
    "quant_scale_repo_mode": (1, "scales in the rows"),
    "tile_size": (quantized.TILE, "the values that share a scale"),
}


def check(c: Checker, x: Arguments) -> None:
    """For the op and its variant."""
    query, sparse_indices = x["query"], x["sparse_indices"]
    rows, keys = sparse_flash_attention.letters(c, x)
    caches = dict(key=(x["key"], x["key_dtype"]), value=(x["value"], x["value_dtype"]))
    scales = {name: x[name] for name in ("key_dequant_scale", "value_dequant_scale")}
    c.same_device(
        query=query,
        key=x["key"],
        value=x["value"],
        sparse_indices=sparse_indices,
        **scales,
        block_table=x["block_table"],
        actual_seq_lengths_query=x["actual_seq_lengths_query"],
        actual_seq_lengths_kv=x["actual_seq_lengths_kv"],
        sinks=x["sinks"],
    )
    c.floating("query", query)
    c.integer("sparse_indices", sparse_indices)
    kinds = {
        name: quantization.values(c, name, cache, number, f"{name}_dtype")
        for name, (cache, number) in caches.items()
    }
    if kinds["key"] != kinds["value"]:
        c.fail(
            f"`key` is {kinds['key']} and `value` {kinds['value']}, expected one kind.", TypeError
        )
    rotary = x["rope_head_dim"]
    quantization.rope_head_dim(c, rotary)
    c.shape("query", query, f"{rows} N {quantized.LATENT + rotary}")
    for name, (cache, _) in caches.items():
        c.shape(name, cache, f"{keys} 1 {quantized.row_bytes(rotary)}")
        quantization.rows(c, name, cache, x["row_layout"])
    c.shape("sparse_indices", sparse_indices, f"{rows} 1 K")
    c.dense_rows(query=query, sparse_indices=sparse_indices)
    given: Mapping[str, object] = x
    for name, (only, meaning) in _MODES.items():
        c.require(given[name] == only, f"`{name}` is {given[name]}, expected {only} ({meaning}).")
    for name, scale in scales.items():
        c.require(scale is None, f"`{name}` is given, expected None: the scales are in the rows.")
    sparse_flash_attention.options(c, query, x)


def fake(query: Tensor, **_: Any) -> Tensor:
    return query.new_empty([*query.shape[:-1], quantized.LATENT])


def with_statistics(query: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    shape = sparse_flash_attention.statistics_shape(query)
    dtype = sparse_flash_attention.statistics(query)
    return (
        fake(query),
        query.new_empty(shape, dtype=dtype),
        query.new_empty(shape, dtype=dtype),
    )


_LSE = "npu_kv_quant_sparse_flash_attention_lse"
VARIANTS = (
    # and softmax_max, softmax_sum [B, 1, S, N] or [1, T, N], natural logarithm, without the sinks;
    # of a query that sees nothing out 0, -inf and 0
    Variant(
        f"{_LSE}{ARGUMENTS} -> (Tensor, Tensor, Tensor)",
        check,
        with_statistics,
        "with_statistics",
    ),
)
