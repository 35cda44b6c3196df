# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_sparse_lightning_indexer_grad_kl_loss (torch_npu's schema).

    query [B, S, N, D]   key [B, S2, 1, D]   query_index [B, S, Ni, Di]   key_index [B, S2, 1, Di]
    weights [B, S, Ni]   sparse_indices [B, S, 1, K]   softmax_max, softmax_sum [B, 1, S, N]

TND: T for B, S and T2 for B, S2; the statistics are [1, T, N].  The lengths are numbers of the
host: of each request (BSND; None: all), or prefix sums (TND).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...check import Checker, tensors
from ...op_spec import UNLIMITED
from ..common import layouts
from .rope import check_rope

SCHEMA = (
    "npu_sparse_lightning_indexer_grad_kl_loss(Tensor query, Tensor key, Tensor query_index,"
    " Tensor key_index, Tensor weights, Tensor sparse_indices, Tensor softmax_max,"
    " Tensor softmax_sum, float scale_value, *, Tensor? query_rope=None,"
    " Tensor? key_rope=None, SymInt[]? actual_seq_qlen=None, SymInt[]? actual_seq_klen=None,"
    f' str? layout="BSND", SymInt? sparse_mode=3, SymInt? pre_tokens={UNLIMITED},'
    f" SymInt? next_tokens={UNLIMITED}, Tensor? sinks=None) -> (Tensor, Tensor, Tensor, Tensor)"
)
GE = "SparseLightningIndexerGradKLLoss"


class Arguments(layouts.OneLayout):
    query: Tensor
    key: Tensor
    query_index: Tensor
    key_index: Tensor
    weights: Tensor
    sparse_indices: Tensor
    softmax_max: Tensor
    softmax_sum: Tensor
    scale_value: float
    query_rope: Tensor | None
    key_rope: Tensor | None
    actual_seq_qlen: list[int] | None
    actual_seq_klen: list[int] | None
    sinks: Tensor | None


def check(c: Checker, x: Arguments) -> None:
    query, key, query_index, key_index = x["query"], x["key"], x["query_index"], x["key_index"]
    statistics = tensors(x, "softmax_max", "softmax_sum")
    c.same_device(**tensors(x))
    _, rows, keys = layouts.layout(c, x["layout"])
    layouts.options(c, x["sparse_mode"], x["pre_tokens"], x["next_tokens"])
    c.floating("query", query)
    c.same_dtype(**tensors(x, "query", "key", "query_rope", "key_rope"))
    c.same_dtype(query=query, query_index=query_index, key_index=key_index)
    c.floating("weights", x["weights"])
    c.integer("sparse_indices", x["sparse_indices"])
    c.shape("query", query, f"{rows} N D")
    c.shape("key", key, f"{keys} 1 D")
    c.shape("query_index", query_index, f"{rows} Ni Di")
    c.shape("key_index", key_index, f"{keys} 1 Di")
    c.shape("weights", x["weights"], f"{rows} Ni")
    c.shape("sparse_indices", x["sparse_indices"], f"{rows} 1 K")
    check_rope(c, x["query_rope"], x["key_rope"], (f"{rows} N Dr", f"{keys} 1 Dr"))
    for name, tensor in statistics.items():
        c.dtype(name, tensor, torch.float32, torch.float64)
        c.shape(name, tensor, "B 1 S N" if rows == "B S" else "1 T N")
    c.floats("sinks", x["sinks"], "N")
    _check_lengths(c, rows == "B S", x["actual_seq_qlen"], x["actual_seq_klen"])
    apart = {*statistics, "sinks"}
    c.dense_rows(**{name: each for name, each in tensors(x).items() if name not in apart})
    c.contiguous(**tensors(x, *statistics, "sinks"))


def _check_lengths(
    c: Checker, batched: bool, queries: Sequence[int] | None, keys: Sequence[int] | None
) -> None:
    reach_q, reach_k = (c.sizes[x] for x in (("S", "S2") if batched else ("T", "T2")))
    for name, lengths, reach in (
        ("actual_seq_qlen", queries, reach_q),
        ("actual_seq_klen", keys, reach_k),
    ):
        if lengths is None:
            c.require(batched, f"`{name}` is missing, and layout 'TND' needs it.")
            continue
        wanted = c.sizes["B"] if batched else len(queries or ())
        c.require(
            len(lengths) == wanted,
            f"`{name}` has {len(lengths)} numbers, expected {wanted}, one a request.",
        )
        layouts.in_reach(c, name, lengths, "BSND" if batched else "TND", reach)


def fake(
    query: Tensor, query_index: Tensor, key_index: Tensor, weights: Tensor, **_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    return (
        query_index.new_empty(query_index.shape),
        key_index.new_empty(key_index.shape),
        weights.new_empty(weights.shape),
        query.new_empty([1], dtype=dtype),
    )
