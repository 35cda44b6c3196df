# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and output of npu_quant_lightning_indexer; layouts as in common/layout.py.

    query [.., N, D] and key [.., 1, D] of 8 bits   weights, query_dequant_scale [.., N]
    key_dequant_scale [.., 1]   sparse_indices int32 [.., 1, K]

As npu_lightning_indexer, on values whose scales stand beside them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...check import Checker
from ...op_spec import UNLIMITED, Variant
from ..common import quantization
from .lightning_indexer import RATIO, Selection, letters, options

ARGUMENTS = (
    "(Tensor query, Tensor key, Tensor weights, Tensor? query_dequant_scale,"
    " Tensor key_dequant_scale, SymInt query_quant_mode, SymInt key_quant_mode, *,"
    " Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None,"
    ' Tensor? block_table=None, str layout_query="BSND", str layout_key="BSND",'
    f" SymInt sparse_count=2048, SymInt sparse_mode=3, SymInt pre_tokens={UNLIMITED},"
    f" SymInt next_tokens={UNLIMITED}, int? query_dtype=None, int? key_dtype=None"
    f"{RATIO})"
)
SCHEMA = f"npu_quant_lightning_indexer{ARGUMENTS} -> Tensor"
GE = "QuantLightningIndexer"
ONNX = "QuantLightningIndexer"


class Arguments(Selection):
    query_dequant_scale: Tensor | None
    key_dequant_scale: Tensor
    query_quant_mode: int
    key_quant_mode: int
    query_dtype: int | None
    key_dtype: int | None


_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def check(c: Checker, x: Arguments) -> None:
    """For the op and its variant."""
    query, key, weights = x["query"], x["key"], x["weights"]
    query_dequant_scale = x["query_dequant_scale"]
    rows, keys = letters(c, x)
    scales = dict(query_dequant_scale=query_dequant_scale, key_dequant_scale=x["key_dequant_scale"])
    c.same_device(
        query=query,
        key=key,
        weights=weights,
        **scales,
        actual_seq_lengths_query=x["actual_seq_lengths_query"],
        actual_seq_lengths_key=x["actual_seq_lengths_key"],
        block_table=x["block_table"],
    )
    kinds = (
        quantization.values(c, "query", query, x["query_dtype"], "query_dtype"),
        quantization.values(c, "key", key, x["key_dtype"], "key_dtype"),
    )
    if kinds[0] != kinds[1]:
        c.fail(f"`query` is {kinds[0]} and `key` {kinds[1]}, expected the same kind.", TypeError)
    _scale_dtypes(c, kinds[0], weights, scales)
    c.shape("query", query, f"{rows} N D")
    c.shape("key", key, f"{keys} 1 D")
    c.shape("weights", weights, f"{rows} N")
    if query_dequant_scale is not None:
        c.shape("query_dequant_scale", query_dequant_scale, f"{rows} N")
    c.shape("key_dequant_scale", x["key_dequant_scale"], f"{keys} 1")
    c.dense_rows(query=query, key=key, weights=weights, query_dequant_scale=query_dequant_scale)
    for name, mode in (
        ("query_quant_mode", x["query_quant_mode"]),
        ("key_quant_mode", x["key_quant_mode"]),
    ):
        c.require(mode == 0, f"`{name}` is {mode}, expected 0: a scale for each token and head.")
    options(c, x)


def _scale_dtypes(c: Checker, kind: str, weights: Tensor, scales: dict[str, Tensor | None]) -> None:
    """int8: any float; fp8: all of them float16, or float32 scales beside other weights."""
    c.dtype("weights", weights, *_FLOATS)
    half = kind == "fp8" and weights.dtype is torch.float16
    for name, scale in scales.items():
        if scale is None:
            continue
        if kind == "int8":
            c.dtype(name, scale, *_FLOATS)
        else:
            c.dtype(name, scale, torch.float16 if half else torch.float32)


def fake(query: Tensor, sparse_count: int, select_tail: bool, **_: Any) -> Tensor:
    shape = [*query.shape[:-2], 1, sparse_count + int(select_tail)]
    return query.new_empty(shape, dtype=torch.int32)


def scored(query: Tensor, **x: Any) -> tuple[Tensor, Tensor]:
    indices = fake(query, **x)
    return indices, torch.empty_like(indices, dtype=torch.float32)


_SCORES = "npu_quant_lightning_indexer_scores"
VARIANTS = (
    # and their scores in float32; 0 past the number of visible keys
    Variant(
        f"{_SCORES}{ARGUMENTS} -> (Tensor, Tensor)",
        check,
        scored,
        "scored",
        onnx="QuantLightningIndexerScores",
    ),
)
