# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Index keys into a cache of 8 bits, see _quantise.py."""

from __future__ import annotations

from torch import Tensor

from . import _quantise


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
    k = _quantise.rotated(k, index_hadamard, hadamard_round)
    new, scale = _quantise.of_floats(k, kind, scale_format)
    _quantise.write(values[:, :, 0], slots, new)
    _quantise.write(scales, slots, _quantise.stored(scale, scales.dtype)[:, None])
