# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Index keys into a cache of 8 bits, see quantizers.py."""

from __future__ import annotations

from typing_extensions import Unpack

from ...ops.caches.index_cache_write import Arguments
from ..common import quantizers


def forward(**x: Unpack[Arguments]) -> None:
    k = x["k"]
    k = quantizers.rotated(k, x["index_hadamard"], x["hadamard_round"])
    new, scale = quantizers.of_floats(k, x["kind"], x["scale_format"])
    quantizers.write(x["values"][:, :, 0], x["slots"], new)
    quantizers.write(x["scales"], x["slots"], quantizers.stored(scale, x["scales"].dtype)[:, None])
