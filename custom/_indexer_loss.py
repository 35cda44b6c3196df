# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The loss that trains the lightning indexer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from ._keywords import worded
from ._op import op
from .dispatch.op_spec import UNLIMITED
from .dispatch.reference.indexer import indexer_loss as reference

if TYPE_CHECKING:
    from .parallel.collectives import Group

_REDUCTIONS = ("none", "sum", "mean", "batchmean")


@overload
def compute_index_loss_sparse(
    query: Tensor,
    key: Tensor,
    index_score: Tensor,
    indices: Tensor,
    scaling: float,
    chunk_offset: int = ...,
    *,
    eps: float = ...,
    reduction: Literal["none", "sum", "mean", "batchmean"] = ...,
    query_rope: Tensor | None = ...,
    key_rope: Tensor | None = ...,
    softmax_lse: Tensor | None = ...,
    return_target: Literal[False] = ...,
    group: Group | None = ...,
) -> Tensor: ...


@overload
def compute_index_loss_sparse(
    query: Tensor,
    key: Tensor,
    index_score: Tensor,
    indices: Tensor,
    scaling: float,
    chunk_offset: int = ...,
    *,
    eps: float = ...,
    reduction: Literal["none", "sum", "mean", "batchmean"] = ...,
    query_rope: Tensor | None = ...,
    key_rope: Tensor | None = ...,
    softmax_lse: Tensor | None = ...,
    return_target: Literal[True],
    group: Group | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def compute_index_loss_sparse(
    query: Tensor,
    key: Tensor,
    index_score: Tensor,
    indices: Tensor,
    scaling: float,
    chunk_offset: int = ...,
    *,
    eps: float = ...,
    reduction: Literal["none", "sum", "mean", "batchmean"] = ...,
    query_rope: Tensor | None = ...,
    key_rope: Tensor | None = ...,
    softmax_lse: Tensor | None = ...,
    return_target: bool,
    group: Group | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...


@worded
def compute_index_loss_sparse(
    query: Tensor,
    key: Tensor,
    index_score: Tensor,
    indices: Tensor,
    scaling: float,
    chunk_offset: int = 0,
    *,
    eps: float = 1e-10,
    reduction: Literal["none", "sum", "mean", "batchmean"] = "batchmean",
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    softmax_lse: Tensor | None = None,
    return_target: bool = False,
    group: Group | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """KL divergence of the indexer's distribution from the attention it should predict.

    Over the valid slots j of a row: p = softmax(scaling q_h . k_j) by head, target = sum_h p,
    pi = target / sum_j target, r = softmax(index_score),
    loss = sum_j (pi_j + eps) (log(pi_j + eps) - log(r_j + eps)).

    Differentiable in `index_score`; the target is detached.  A slot is valid iff
    0 <= index <= chunk_offset + row and index < S2; equal indices are separate slots.  The op
    `torch.ops.custom.npu_indexer_loss` returns the loss by row and the target.

    Formula: DeepSeek-V3.2-Exp (DeepSeek-AI, 2025), the indexer's sparse training stage.

    Args:
        query: [B, N, S, D].
        key: [B, S2, D], shared by the heads.
        index_score: [B, S, K], the indexer's scores of the selected keys.
        indices: [B, S, K] int32 or int64 positions.
        scaling: factor of the attention's logits.
        chunk_offset: position of the first query row.
        eps: keeps the logarithms finite; the gradient is that of eps = 0.
        reduction: "none" [B, S]; "sum"; "mean" (over B * S rows, those without a valid slot
            included); "batchmean" (sum / B).
        query_rope: [B, N, S, Dr], rotary part of `query`, where it is not joined.
        key_rope: [B, S2, Dr], of `key`.
        softmax_lse: [B, N, S] natural log-sum-exp of the logits over the same valid slots; saves
            one of two passes.
        return_target: also return the target.
        group: ProcessGroup or 1-D DeviceMesh whose ranks have the other heads: their targets are
            added up (one all_reduce) before they are normalised, so that every rank has the loss
            and the gradient of all heads.

    Returns:
        The loss, float32; with `return_target` the pair (loss, target), target float32 [B, S, K]
        summed over heads (of all ranks of `group`) and not normalised.
        A row with no valid slot has loss 0.

    Raises:
        ValueError: a shape, device or option does not fit.
        TypeError: a type or dtype does not fit.

    >>> import torch, custom
    >>> q, k = torch.randn(1, 2, 4, 16), torch.randn(1, 4, 16)
    >>> score = torch.randn(1, 4, 3, requires_grad=True)
    >>> index = torch.tensor([0, 1, 2]).expand(1, 4, 3)
    >>> custom.compute_index_loss_sparse(q, k, score, index, 0.25).backward()
    >>> score.grad.shape
    torch.Size([1, 4, 3])
    """
    if reduction not in _REDUCTIONS:
        raise ValueError(
            f"compute_index_loss_sparse: `reduction` is {reduction!r}, expected one of "
            f"{', '.join(map(repr, _REDUCTIONS))}."
        )
    rows, target = torch.ops.custom.npu_indexer_loss(
        query,
        key,
        index_score,
        indices,
        scaling,
        chunk_offset,
        eps=eps,
        query_rope=query_rope,
        key_rope=key_rope,
        softmax_lse=softmax_lse,
    )
    if group is not None:
        from .parallel import collectives  # torch without distributed has none

        target = collectives.all_reduce(target, collectives.ranks(group)[0])
        apply: Callable[..., Tensor] = _OfTarget.apply
        rows = apply(index_score, indices, target, key.shape[1], chunk_offset, eps)
    loss = _reduce(rows, reduction)
    return (loss, target) if return_target else loss


class _OfTarget(torch.autograd.Function):
    """The loss of each row from a target of more heads than are here, and the op's gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        index_score: Tensor,
        indices: Tensor,
        target: Tensor,
        key_length: int,
        chunk_offset: int,
        eps: float,
    ) -> Tensor:
        ctx.save_for_backward(index_score, indices, target)
        ctx.sizes = key_length, chunk_offset
        usable = reference.valid(indices, key_length, chunk_offset)
        return reference.divergence(target, index_score.to(target.dtype), usable, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradient = torch.ops.custom.npu_indexer_loss_backward
        found: Tensor = gradient(grad.contiguous(), *ctx.saved_tensors, *ctx.sizes)
        return found, None, None, None, None, None


def _reduce(rows: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return rows
    if reduction == "sum":
        return rows.sum()
    # an empty batch has loss 0, not 0 / 0
    count = rows.numel() if reduction == "mean" else rows.shape[0]
    return rows.sum() / max(count, 1)


@op
def npu_sparse_lightning_indexer_grad_kl_loss(
    query: Tensor,
    key: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    sparse_indices: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    scale_value: float,
    *,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_klen: list[int] | None = None,
    layout: str | None = "BSND",
    sparse_mode: int | None = 3,
    pre_tokens: int | None = UNLIMITED,
    next_tokens: int | None = UNLIMITED,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The indexer's KL loss and its gradients down to the indexer's inputs, in one call.

    Over the selected slots j of a row: p = exp(scale_value q_h . k_j - softmax_max) / softmax_sum
    by head, pi = sum_h p / sum_jh p, r = softmax_j(sum_n weights relu(query_index . key_index)),
    loss = sum_j (pi + 1e-10) (log(pi + 1e-10) - log(r + 1e-10)); the scores' gradient is r - pi.

    Same signature as torch_npu's op.  The attention's own softmax statistics (from
    `npu_sparse_flash_attention`) save the loss a pass; the loss is summed over all query tokens.

    Formula: DeepSeek-V3.2-Exp (DeepSeek-AI, 2025), the indexer's sparse training stage.

    Args:
        query: [B, S, N, R] or [T, N, R].
        key: [B, S2, 1, R] or [T2, 1, R].
        query_index: [B, S, Ni, Di] or [T, Ni, Di].
        key_index: [B, S2, 1, Di] or [T2, 1, Di].
        weights: [B, S, Ni] or [T, Ni].
        sparse_indices: int32 [B, S, 1, K] or [T, 1, K]; negative or out of range: absent.
        softmax_max: float32 [B, 1, S, N] or [1, T, N].
        softmax_sum: likewise.
        scale_value: factor of the attention's logits.
        query_rope: [B, S, N, Dr] or [T, N, Dr].
        key_rope: [B, S2, 1, Dr] or [T2, 1, Dr].
        actual_seq_qlen: host lengths (BSND) or prefix sums (TND).
        actual_seq_klen: likewise.
        layout: "BSND" or "TND".
        sparse_mode: 3, causal, aligned at the last key; 0, all selected keys.
        pre_tokens: only the default is supported.
        next_tokens: only the default is supported.
        sinks: [N] float32 logits that enter the attention's denominator alone.

    Returns:
        d_query_index, d_key_index, d_weights, like their inputs, and the loss, float32 [1].

    Raises:
        ValueError: a shape, layout, device or option does not fit.
        TypeError: a type or dtype does not fit.
        RuntimeError: an argument requires grad, while grad mode is on.

    >>> import torch, custom
    >>> query, key = torch.randn(1, 2, 4, 32), torch.randn(1, 9, 1, 32)
    >>> q, k, w = torch.randn(1, 2, 4, 16), torch.randn(1, 9, 1, 16), torch.rand(1, 2, 4)
    >>> index, _ = custom.npu_lightning_indexer(q, k, w, sparse_count=4)
    >>> _, top, total = custom.npu_sparse_flash_attention(
    ...     query, key, None, index, 32**-0.5, return_softmax_lse=True
    ... )
    >>> d_q, d_k, d_w, loss = custom.npu_sparse_lightning_indexer_grad_kl_loss(
    ...     query, key, q, k, w, index, top, total, 32**-0.5
    ... )
    >>> d_q.shape, d_k.shape, d_w.shape, loss.shape
    (torch.Size([1, 2, 4, 16]), torch.Size([1, 9, 1, 16]), torch.Size([1, 2, 4]), torch.Size([1]))
    """
