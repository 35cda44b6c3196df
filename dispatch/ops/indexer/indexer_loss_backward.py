# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_indexer_loss_backward; shapes as in indexer_loss.py.

    grad_score = grad_loss (softmax(index_score) - target / sum target), 0 at invalid slots

The gradient of the limit eps -> 0; `target` may be a sum over tensor-parallel ranks.
"""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from torch import Tensor

from ...check import Checker, tensors

SCHEMA = (
    "npu_indexer_loss_backward(Tensor grad_loss, Tensor index_score, Tensor indices,"
    " Tensor target, SymInt key_length, SymInt chunk_offset=0) -> Tensor"
)
FUNCTION = "backward"


class Arguments(TypedDict):
    grad_loss: Tensor
    index_score: Tensor
    indices: Tensor
    target: Tensor
    key_length: int
    chunk_offset: int


def check(c: Checker, x: Arguments) -> None:
    index_score, indices = x["index_score"], x["indices"]
    c.same_device(**tensors(x, "index_score", "grad_loss", "indices", "target"))
    c.floating("index_score", index_score)
    c.integer("indices", indices)
    c.shape("index_score", index_score, "B S K")
    c.shape("indices", indices, "B S K")
    c.shape("target", x["target"], "B S K")
    c.shape("grad_loss", x["grad_loss"], "B S")
    for name, tensor in tensors(x, "target", "grad_loss").items():
        c.dtype(name, tensor, torch.float32, torch.float64)
    c.at_least("key_length", x["key_length"], 0)
    c.at_least("chunk_offset", x["chunk_offset"], 0)
    c.dense_rows(**tensors(x, "index_score", "indices", "target"))
    c.contiguous(grad_loss=x["grad_loss"])


def fake(index_score: Tensor, **_: Any) -> Tensor:
    return index_score.new_empty(index_score.shape)
