# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_lightning_indexer_grad; shapes as in lightning_indexer.py.

`dy` [.., 1, K] is the gradient of the selected scores; an index that is negative, out of range or
hidden by the mask adds nothing.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...check import Checker, tensors
from ...op_spec import UNLIMITED
from ..common import gradients, layouts
from .lightning_indexer import inputs

SCHEMA = (
    "npu_lightning_indexer_grad(Tensor query, Tensor key, Tensor dy, Tensor sparse_indices,"
    " Tensor weights, Tensor? actual_seq_lengths_query=None,"
    ' Tensor? actual_seq_lengths_key=None, str? layout="BSND", SymInt? sparse_mode=3,'
    f" SymInt? pre_tokens={UNLIMITED}, SymInt? next_tokens={UNLIMITED}) -> (Tensor, Tensor, Tensor)"
)
GE = "LightningIndexerGrad"
FUNCTION = "backward"


class Arguments(layouts.OneLayout):
    query: Tensor
    key: Tensor
    dy: Tensor
    sparse_indices: Tensor
    weights: Tensor
    actual_seq_lengths_query: Tensor | None
    actual_seq_lengths_key: Tensor | None


def check(c: Checker, x: Arguments) -> None:
    query, dy, sparse_indices = x["query"], x["dy"], x["sparse_indices"]
    layout, rows, keys = layouts.layout(c, x["layout"])
    inputs(c, rows, keys, query, x["key"], x["weights"])
    c.same_device(**tensors(x))
    c.same_dtype(query=query, dy=dy)
    c.integers("sparse_indices", sparse_indices, f"{rows} 1 K")
    c.shape("dy", dy, f"{rows} 1 K")
    c.dense_rows(dy=dy, sparse_indices=sparse_indices)
    lengths = layouts.named(x, "actual_seq_lengths_query", "actual_seq_lengths_key")
    layouts.lengths(c, layout, layout, *lengths)
    layouts.options(c, x["sparse_mode"], x["pre_tokens"], x["next_tokens"])


def fake(**a: Any) -> tuple[Tensor, ...]:
    return gradients.empty(a, "query", "key", "weights")
