# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""RMSNorm with a gate, as linear attention ends in."""

from __future__ import annotations

from torch import Tensor

from ._op import op


@op
def npu_gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    epsilon: float = 1e-6,
    *,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    activation: str = "silu",
) -> Tensor:
    """Normalise `x` by the root of its mean square, and open it by `gate`.

    out = x / sqrt(mean(x^2) + epsilon) * weight * act(gate), or, with norm_before_gate=False, the
    same norm of x * act(gate), times weight; in float32. Differentiable in every tensor; equal
    runs give equal gradients.

    Formula: Mamba-2's RMSNormGated; Qwen3-Next's and fla's FusedRMSNormGated.

    Args:
        x: [..., D], 2 to 4 dimensions, any strides with a dense last dimension.
        gate: like `x`, with strides of its own.
        weight: [D], any dtype of floating point.
        epsilon: added to the mean square.
        group_size: of the channels that share a norm, a divisor of D; None: all of D.
        norm_before_gate: gate what is normalised, or normalise what is gated.
        activation: "silu" (also called "swish") or "sigmoid".

    Returns:
        out like `x`.

    Raises:
        ValueError: a shape, device or option does not fit.
        TypeError: a type or dtype does not fit.

    >>> import torch, custom
    >>> x, gate = torch.randn(3, 4, 16), torch.randn(3, 4, 16)
    >>> custom.npu_gated_rms_norm(x, gate, torch.ones(16)).shape
    torch.Size([3, 4, 16])
    """
