# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""grad_score = grad_loss (softmax(index_score) - target / sum target), a row at a time in UB."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ...dispatch.common import memory
from ..common import cores, ragged, tune, tuples
from .indexer_loss import Chunk, Strides, at_token, distributions, scored, too_wide


@tuples.jit(["tokens", "count"])
def row_grad(
    grad_loss,
    score,
    indices,
    target,
    grad,
    tokens,
    count,
    of: Chunk,
    s_stride: Strides,
    i_stride: Strides,
    t_stride: Strides,
    WIDTH: tl.constexpr,
):
    j = tl.arange(0, WIDTH)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        of_indices = indices + at_token(token, of.length, *i_stride)
        of_score = score + at_token(token, of.length, *s_stride)
        of_target = target + at_token(token, of.length, *t_stride)
        x, ok = scored(of_score, of_indices, token, j, count, *of)
        p = tl.load(of_target + j, mask=j < count, other=0.0)
        p, r = distributions(p, x, ok)
        g = (r - p) * tl.load(grad_loss + token)
        g = tl.where(ok > 0, g, 0.0).to(grad.dtype.element_ty)
        tl.store(grad + token.to(tl.int64) * count + j, g, mask=j < count)


def unsupported(
    index_score: Tensor, grad_loss: Tensor, target: Tensor, key_length: int, **_: Any
) -> str | None:
    if torch.float64 in (grad_loss.dtype, target.dtype):
        return "`target` or `grad_loss` is torch.float64, the vector unit computes in float32"
    if key_length > ragged.LONGEST:
        return f"{key_length} keys, the kernel reaches {ragged.LONGEST}"
    return too_wide(index_score)


def backward(
    grad_loss: Tensor,
    index_score: Tensor,
    indices: Tensor,
    target: Tensor,
    key_length: int,
    chunk_offset: int,
) -> Tensor:
    batch, length, count = index_score.shape
    grad = memory.empty(index_score.shape, index_score.dtype, index_score.device)
    if grad.numel() == 0:
        return grad
    indices = ragged.int32(indices)
    offset = min(chunk_offset, key_length)  # with the row's number it stays within 32 bits
    row_grad[(min(batch * length, cores.vector()),)](
        grad_loss,
        index_score,
        indices,
        target,
        grad,
        batch * length,
        count,
        length,
        key_length,
        offset,
        *index_score.stride()[:2],
        *indices.stride()[:2],
        *target.stride()[:2],
        **tune.at_least("indexer_loss_backward.row_grad", "WIDTH", count).keywords,
    )
    return grad
