# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""grad_score = grad_loss (softmax(index_score) - target / sum target), 0 at invalid slots."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from ...ops.indexer.indexer_loss_backward import Arguments
from .indexer_loss import normalised, softmax, valid


def backward(**x: Unpack[Arguments]) -> Tensor:
    target = x["target"]
    usable = valid(x["indices"], x["key_length"], x["chunk_offset"])
    target = target.masked_fill(~usable, 0.0)
    r = softmax(x["index_score"].to(target.dtype), usable)
    grad = (r - normalised(target)) * x["grad_loss"][..., None]
    return grad.masked_fill_(~usable, 0.0).to(x["index_score"].dtype)
