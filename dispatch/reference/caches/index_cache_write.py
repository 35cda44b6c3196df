# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Index keys into a cache of 8 bits, see quantizers.py."""

from __future__ import annotations

from torch import Tensor

from ..common import quantizers


def forward(
    k: Tensor,
    values: Tensor,
    scales: Tensor,
    slots: Tensor,
    kind: str,
    scale_format: str,
    index_hadamard: bool,
    hadamard_round: str,
) -> None:
    k = quantizers.rotated(k, index_hadamard, hadamard_round)
    new, scale = quantizers.of_floats(k, kind, scale_format)
    quantizers.write(values[:, :, 0], slots, new)
    quantizers.write(scales, slots, quantizers.stored(scale, scales.dtype)[:, None])
