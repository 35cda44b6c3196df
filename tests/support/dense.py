# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Cases of dense attention."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Of q [B, H, Nq, D] and k [B, Hk, Nk, D]."""

    B: int
    H: int
    Hk: int
    Nq: int
    Nk: int
    D: int
