# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""KL loss of the indexer, backward: one elementwise pass, a row a program.

    grad_score = grad_loss (softmax(index_score) - target / sum target), 0 at invalid slots

    condition    kernels
    any          _grad_kernel

H200, 2026-11: S 4096, K 2048, bfloat16 scores, int32 indices: 27.0 us, 87% of the bandwidth.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import memory
from ...dispatch.ops.indexer.indexer_loss_backward import Arguments
from ..common import rows
from ..common.loss import Sizes, normalised, padded, slots_of_row, softmax_of_scores
from ..runtime import launches


@triton.jit
def _grad_kernel(
    grad_loss,
    index_score,
    indices,
    target,
    grad,
    sizes,
    s_steps,
    i_steps,
    t_steps,
    K_PAD: tl.constexpr,
):
    batch, row, slot, _, counts = slots_of_row(indices, i_steps, sizes, K_PAD)
    row_wide = row.to(tl.int64)
    score = tl.load(index_score + batch * s_steps[0] + row_wide * s_steps[1] + slot, counts, 0.0)
    mass = tl.load(target + batch * t_steps[0] + row_wide * t_steps[1] + slot, counts, 0.0)
    upstream = tl.load(grad_loss + batch * sizes.S + row)
    out = upstream * (softmax_of_scores(score, counts) - normalised(mass))
    at = grad + (batch * sizes.S + row_wide) * sizes.K + slot
    tl.store(at, tl.where(counts, out, 0.0).to(grad.dtype.element_ty), mask=slot < sizes.K)


def unsupported(
    index_score: Tensor, target: Tensor, grad_loss: Tensor, key_length: int, **_: Any
) -> str | None:
    if torch.float64 in (index_score.dtype, target.dtype, grad_loss.dtype):
        return "an input is float64, supported are float32 and (index_score) float16, bfloat16"
    return rows.too_many(key_length, "keys")


def backward(**x: Unpack[Arguments]) -> Tensor:
    index_score, chunk_offset = x["index_score"], x["chunk_offset"]
    B, S, K = index_score.shape
    grad = memory.empty((B, S, K), index_score.dtype, index_score.device)
    if grad.numel() == 0:
        return grad
    chunk_offset = min(
        chunk_offset, x["key_length"]
    )  # with the row's number it stays within 32 bits
    launches.kernel(_grad_kernel, B * S)(
        x["grad_loss"],
        index_score,
        x["indices"],
        x["target"],
        grad,
        Sizes(chunk_offset, S, x["key_length"], K),
        index_score.stride()[:2],
        x["indices"].stride()[:2],
        x["target"].stride()[:2],
        K_PAD=padded(K),
        num_warps=4,
    )
    return grad
