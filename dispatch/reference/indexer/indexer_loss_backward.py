# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""grad_score = grad_loss (softmax(index_score) - target / sum target), 0 at invalid slots."""

from __future__ import annotations

from torch import Tensor

from .indexer_loss import normalised, softmax, valid


def backward(
    grad_loss: Tensor,
    index_score: Tensor,
    indices: Tensor,
    target: Tensor,
    key_length: int,
    chunk_offset: int,
) -> Tensor:
    usable = valid(indices, key_length, chunk_offset)
    target = target.masked_fill(~usable, 0.0)
    r = softmax(index_score.to(target.dtype), usable)
    grad = (r - normalised(target)) * grad_loss[..., None]
    return grad.masked_fill_(~usable, 0.0).to(index_score.dtype)
