# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Index queries to 8 bits, a scale for each head, see quantizers.py."""

from __future__ import annotations

from torch import Tensor

from ..common import quantizers


def forward(
    q: Tensor,
    weights: Tensor,
    kind: str,
    fold: bool,
    scale_format: str,
    index_hadamard: bool,
    hadamard_round: str,
) -> tuple[Tensor, Tensor]:
    q = quantizers.rotated(q, index_hadamard, hadamard_round)
    values, scale = quantizers.of_floats(q, kind, scale_format)
    factors = weights.float() * scale if fold else scale
    return values.contiguous(), factors.contiguous()
