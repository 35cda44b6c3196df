# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments, outputs and autograd of npu_indexer_loss.

    query [B, N, S, D]   key [B, S2, D]   query_rope [B, N, S, Dr]   key_rope [B, S2, Dr]
    index_score, indices [B, S, K]   softmax_lse [B, N, S]
    loss [B, S]   target [B, S, K]

Slot j of row i is valid iff 0 <= index <= chunk_offset + i and index < S2.
"""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from torch import Tensor

from ...check import Checker, tensors
from .rope import check_rope

SCHEMA = (
    "npu_indexer_loss(Tensor query, Tensor key, Tensor index_score, Tensor indices,"
    " float scaling, SymInt chunk_offset=0, *, float eps=1e-10, Tensor? query_rope=None,"
    " Tensor? key_rope=None, Tensor? softmax_lse=None) -> (Tensor, Tensor)"
)
ONNX = "IndexerLoss"


class Arguments(TypedDict):
    query: Tensor
    key: Tensor
    index_score: Tensor
    indices: Tensor
    scaling: float
    chunk_offset: int
    eps: float
    query_rope: Tensor | None
    key_rope: Tensor | None
    softmax_lse: Tensor | None


def check(c: Checker, x: Arguments) -> None:
    query, key, index_score, indices = x["query"], x["key"], x["index_score"], x["indices"]
    softmax_lse = x["softmax_lse"]
    c.same_device(**tensors(x))
    c.floating("query", query)
    c.same_dtype(**tensors(x, "query", "key", "query_rope", "key_rope"))
    c.floating("index_score", index_score)
    c.integer("indices", indices)
    c.shape("query", query, "B N S D")
    c.shape("key", key, "B S2 D")
    c.at_least("heads of `query`", c.sizes["N"], 1)
    c.shape("index_score", index_score, "B S K")
    c.shape("indices", indices, "B S K")
    check_rope(c, x["query_rope"], x["key_rope"], ("B N S Dr", "B S2 Dr"))
    if softmax_lse is not None:
        c.dtype("softmax_lse", softmax_lse, torch.float32, torch.float64)
        c.shape("softmax_lse", softmax_lse, "B N S")
    c.require(x["eps"] > 0, f"`eps` is {x['eps']}, expected a positive number.")
    c.at_least("chunk_offset", x["chunk_offset"], 0)
    c.dense_rows(**{name: each for name, each in tensors(x).items() if name != "softmax_lse"})


def fake(query: Tensor, index_score: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    wide = torch.float64 in (query.dtype, index_score.dtype)
    dtype = torch.float64 if wide else torch.float32
    shape = index_score.shape
    return query.new_empty(shape[:2], dtype=dtype), query.new_empty(shape, dtype=dtype)


def setup_context(ctx: Any, x: dict[str, Any], output: tuple[Tensor, Tensor]) -> None:
    target = output[1]
    # what the indexer should learn is not to be learned itself
    ctx.mark_non_differentiable(target)
    ctx.save_for_backward(x["index_score"], x["indices"], target)
    ctx.key_length, ctx.chunk_offset = x["key"].shape[1], x["chunk_offset"]


def backward(ctx: Any, grad_loss: Tensor, _: Any) -> dict[str, Any]:
    index_score, indices, target = ctx.saved_tensors
    grad = torch.ops.custom.npu_indexer_loss_backward(
        # an expanded gradient (of loss.sum(), say) has no strides of its own
        grad_loss.contiguous(),
        index_score,
        indices,
        target,
        ctx.key_length,
        ctx.chunk_offset,
    )
    return {"index_score": grad}
