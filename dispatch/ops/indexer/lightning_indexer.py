# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments, outputs and autograd of npu_lightning_indexer; layouts as in common/layout.py.

    query [.., N, D]   key [.., 1, D]   weights [.., N]
    sparse_indices int32 [.., 1, K]     sparse_values [.., 1, K], or [0] without return_value

Entries past the number of visible keys are -1, and their value is 0.  With select_tail K is
sparse_count + 1: behind the chosen entries stands the open one, whose value is 0, too.
"""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from torch import Tensor

from ...check import Checker
from ...common import layout
from ...op_spec import UNLIMITED, Variant
from ..common import layouts

ARGUMENTS = (
    "(Tensor query, Tensor key, Tensor weights, *,"
    " Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None,"
    ' Tensor? block_table=None, str layout_query="BSND", str layout_key="BSND",'
    f" SymInt sparse_count=2048, SymInt sparse_mode=3, SymInt pre_tokens={UNLIMITED},"
    f" SymInt next_tokens={UNLIMITED}"
)
RATIO = ", SymInt cmp_ratio=1, bool select_tail=False"
SCHEMA = f"npu_lightning_indexer{ARGUMENTS}, bool return_value=False{RATIO}) -> (Tensor, Tensor)"
GE = "LightningIndexer"
ONNX = "LightningIndexer"


class Selection(TypedDict):
    """What both indexers take."""

    query: Tensor
    key: Tensor
    weights: Tensor
    actual_seq_lengths_query: Tensor | None
    actual_seq_lengths_key: Tensor | None
    block_table: Tensor | None
    layout_query: str
    layout_key: str
    sparse_count: int
    sparse_mode: int
    pre_tokens: int
    next_tokens: int
    cmp_ratio: int
    select_tail: bool


class Arguments(Selection):
    return_value: bool


def check(c: Checker, x: Selection) -> None:
    """For the op and its variant."""
    rows, keys = letters(c, x)
    inputs(c, rows, keys, x["query"], x["key"], x["weights"])
    c.same_device(
        query=x["query"],
        actual_seq_lengths_query=x["actual_seq_lengths_query"],
        actual_seq_lengths_key=x["actual_seq_lengths_key"],
        block_table=x["block_table"],
    )
    options(c, x)


def letters(c: Checker, x: Selection) -> tuple[str, str]:
    """Of either indexer."""
    c.count("cmp_ratio", x["cmp_ratio"])
    names = ("layout_query", x["layout_query"]), ("layout_key", x["layout_key"])
    return layouts.letters(c, *names)


def options(c: Checker, x: Selection) -> None:
    """Lengths and options of either indexer."""
    layouts.lengths(
        c,
        x["layout_query"],
        x["layout_key"],
        ("actual_seq_lengths_query", x["actual_seq_lengths_query"]),
        ("actual_seq_lengths_key", x["actual_seq_lengths_key"]),
        x["block_table"],
        x["cmp_ratio"],
    )
    layouts.options(c, x["sparse_mode"], x["pre_tokens"], x["next_tokens"])
    c.count("sparse_count", x["sparse_count"])
    c.require(
        not x["select_tail"] or x["cmp_ratio"] > 1,
        "`select_tail` is True and `cmp_ratio` 1, expected at least 2: an entry of one token is "
        "never open. Leave it out.",
    )


def inputs(c: Checker, rows: str, keys: str, query: Tensor, key: Tensor, weights: Tensor) -> None:
    """What the op and its gradient ask of the three tensors that they share."""
    c.same_device(query=query, key=key, weights=weights)
    c.floating("query", query)
    c.same_dtype(query=query, key=key, weights=weights)
    c.shape("query", query, f"{rows} N D")
    c.shape("key", key, f"{keys} 1 D")
    c.shape("weights", weights, f"{rows} N")
    c.dense_rows(query=query, key=key, weights=weights)
    c.require(
        c.sizes["N"] > 0 and c.sizes["D"] > 0,
        f"`query` has {c.sizes['N']} heads of {c.sizes['D']} channels, expected at least 1 of 1.",
    )


def fake(
    query: Tensor, sparse_count: int, return_value: bool, select_tail: bool, **_: Any
) -> tuple[Tensor, Tensor]:
    shape = [*query.shape[:-2], 1, sparse_count + int(select_tail)]
    indices = query.new_empty(shape, dtype=torch.int32)
    return indices, query.new_empty(shape if return_value else [0])


def setup_context(ctx: Any, x: dict[str, Any], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    if not x["return_value"]:
        return  # indices alone carry no gradient
    layouts.refuse_paged_gradient("npu_lightning_indexer", x["layout_key"])
    lengths = x["actual_seq_lengths_query"], x["actual_seq_lengths_key"]
    mode = x["sparse_mode"]
    if x["cmp_ratio"] > 1:  # nothing was chosen that is not seen: all keys may be
        lengths, mode = (lengths[0], None), 0
    indices = output[0]
    if x["select_tail"]:
        indices = _closed(indices, x)
    ctx.save_for_backward(x["query"], x["key"], x["weights"], indices, *lengths)
    ctx.options = x["layout_query"], mode


def _closed(indices: Tensor, x: Any) -> Tensor:
    """Without the open entry, whose value is a constant."""
    lengths, ratio = x["actual_seq_lengths_key"], x["cmp_ratio"]
    keys = layout.keys_of(x["key"], x["layout_key"], lengths, x["block_table"], ratio)
    lengths = x["actual_seq_lengths_query"]
    rows = layout.rows_of(x["query"], x["layout_query"], lengths, keys, x["sparse_mode"], ratio)
    limit = rows.limit
    return indices.masked_fill(indices >= limit.view([*indices.shape[:-1], 1]), -1)


def backward(ctx: Any, _: None, grad_values: Tensor | None) -> dict[str, Any]:
    saved = ctx.saved_tensors  # once: torch.utils.checkpoint gives them one time
    if grad_values is None or not saved:
        return {}
    query, key, weights, indices, lengths_query, lengths_key = saved
    grads = torch.ops.custom.npu_lightning_indexer_grad(
        query,
        key,
        # an expanded gradient (of a sum, say) has no dense rows
        grad_values.contiguous(),
        indices,
        weights,
        lengths_query,
        lengths_key,
        *ctx.options,
    )
    return dict(zip(("query", "key", "weights"), grads, strict=True))


def scored(query: Tensor, sparse_count: int, select_tail: bool, **_: Any) -> tuple[Tensor, Tensor]:
    shape = [*query.shape[:-2], 1, sparse_count + int(select_tail)]
    wide = torch.float64 if query.dtype is torch.float64 else torch.float32
    return query.new_empty(shape, dtype=torch.int32), query.new_empty(shape, dtype=wide)


_SCORES = "npu_lightning_indexer_scores"
VARIANTS = (
    # and their scores in float32 (float64 of float64); 0 past the number of visible keys
    Variant(
        f"{_SCORES}{ARGUMENTS}{RATIO}) -> (Tensor, Tensor)",
        check,
        scored,
        "scored",
        onnx="LightningIndexerScores",
    ),
)
