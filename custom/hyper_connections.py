# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Manifold-constrained hyper-connections: four residual streams instead of one."""

from __future__ import annotations

from torch import Tensor

from ._op import described_by, op


@op
def npu_hc_pre(
    x: Tensor,
    hc_fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    *,
    hc_mult: int = 4,
    hc_sinkhorn_iters: int = 20,
    norm_eps: float = 1e-6,
    hc_eps: float = 1e-6,
    norm_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Bring the streams of a token together for a sublayer, and make the gates of the way back.

    mix = vec(x) hc_fn^T / sqrt(mean x^2 + norm_eps) holds, one behind the other, 4 numbers for
    pre, 4 for post and 16 for comb:
    pre = sigmoid(scale mix + base) + hc_eps, y = sum_j pre_j x_j,
    post = 2 sigmoid(scale mix + base), comb = softmax over rows of (scale mix + base), + hc_eps,
    whose columns, then rows and columns in turn, are divided by their sums + hc_eps.
    Differentiable in every tensor; products and divisions are done again for it, not stored.

    Formula: mHC (Xie et al., 2026); CANN's npu_hc_pre, DeepSeek-V4's HyperConnection.

    Args:
        x: [T, 4, h] or [B, S, 4, h] contiguous, the streams.
        hc_fn: [24, 4 h] float32 (float64 beside a float64 `x`); [4, 4 h]: the head of a model,
            which has `y` alone.
        hc_scale: [3] of pre, post, comb, dtype of `hc_fn`; [1] of the head.
        hc_base: [24], dtype of `hc_fn`; [4] of the head.
        hc_mult: the number of streams, 4.
        hc_sinkhorn_iters: how often the columns of comb are divided by their sums.
        norm_eps: added to mean squares.
        hc_eps: added to sums and gates.
        norm_weight: [h], dtype of `hc_fn`: y becomes its RMSNorm, rounded once.

    Returns:
        y: [T, h] or [B, S, h], dtype of `x`.
        post: [.., 4], dtype of `hc_fn`; [0] of the head.
        comb: [.., 4, 4] likewise, from the stream in its row to the stream in its column.

    Raises:
        ValueError: a shape, stride, device or option does not fit.
        TypeError: a type or dtype does not fit.

    >>> import torch, custom
    >>> x, fn = torch.randn(3, 4, 8), torch.randn(24, 32)
    >>> y, post, comb = custom.npu_hc_pre(x, fn, torch.ones(3), torch.zeros(24))
    >>> y.shape, post.shape, comb.shape
    (torch.Size([3, 8]), torch.Size([3, 4]), torch.Size([3, 4, 4]))
    """


@op
def npu_hc_post(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Spread what a sublayer gave over the streams, which mix: out_k = post_k x + sum_j comb_jk
    residual_j, rounded once.

    Differentiable in every tensor.

    Formula: mHC (Xie et al., 2026); CANN's npu_hc_post.

    Args:
        x: [T, h] or [B, S, h] contiguous, what the sublayer gave.
        residual: [.., 4, h] contiguous, dtype of `x`, the streams in front of it.
        post: [.., 4] float32 (float64 beside a float64 `x`), as `npu_hc_pre` gives it.
        comb: [.., 4, 4] likewise.

    Returns:
        like `residual`.

    Raises:
        ValueError: a shape, stride or device does not fit.
        TypeError: a type or dtype does not fit.

    >>> import torch, custom
    >>> x, streams = torch.ones(1, 2), torch.tensor([[[1.0], [2], [3], [4]]]).expand(1, 4, 2)
    >>> shift = torch.eye(4).roll(1, 1)[None]
    >>> custom.npu_hc_post(x, streams.contiguous(), torch.zeros(1, 4), shift)[0, :, 0].tolist()
    [4.0, 1.0, 2.0, 3.0]
    """


@op
@described_by(npu_hc_pre)
def npu_hc_post_pre(
    x: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    hc_fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    *,
    hc_mult: int = 4,
    hc_sinkhorn_iters: int = 20,
    norm_eps: float = 1e-6,
    hc_eps: float = 1e-6,
    norm_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`npu_hc_post` of one sublayer and `npu_hc_pre` of the next, bit by bit, which reads the
    streams once less: what lies between two sublayers.

    No gradient: the two ops have theirs.

    Formula: those of `npu_hc_post` and `npu_hc_pre`.

    Args:
        x: [T, h] or [B, S, h] contiguous, what the sublayer gave.
        residual: [.., 4, h] contiguous, dtype of `x`, the streams in front of it.
        post: [.., 4] float32 (float64 beside a float64 `x`), of that sublayer.
        comb: [.., 4, 4] likewise.

    Returns:
        residual: the streams behind the sublayer, like `residual`.
        y: [.., h], dtype of `x`, the next one's input.
        post: [.., 4], of the next one; [0] where `hc_fn` is a head.
        comb: [.., 4, 4], of the next one; likewise.

    Raises:
        ValueError: a shape, stride, device or option does not fit.
        TypeError: a type or dtype does not fit.

    >>> import torch, custom
    >>> streams, fn = torch.randn(3, 4, 8), torch.randn(4, 32)
    >>> y, post, comb = custom.npu_hc_pre(
    ...     streams, torch.randn(24, 32), torch.ones(3), torch.zeros(24)
    ... )
    >>> streams, y, _, _ = custom.npu_hc_post_pre(
    ...     y, streams, post, comb, fn, torch.ones(1), torch.zeros(4)
    ... )
    >>> streams.shape, y.shape
    (torch.Size([3, 4, 8]), torch.Size([3, 8]))
    """
