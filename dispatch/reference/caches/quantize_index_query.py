# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Index queries to 8 bits, a scale for each head, see quantizers.py."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from ...ops.caches.quantize_index_query import Arguments
from ..common import quantizers


def forward(**x: Unpack[Arguments]) -> tuple[Tensor, Tensor]:
    q = x["q"]
    q = quantizers.rotated(q, x["index_hadamard"], x["hadamard_round"])
    values, scale = quantizers.of_floats(q, x["kind"], x["scale_format"])
    factors = x["weights"].float() * scale if x["fold"] else scale
    return values.contiguous(), factors.contiguous()
