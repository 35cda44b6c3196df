# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""How many cores the device of this process has: the grid of every kernel here."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.runtime import driver


def cube() -> int:
    """For kernels with `tl.dot`; each brings two vector cores along."""
    return driver.active.utils.get_aicore_num()


def vector() -> int:
    """For kernels without."""
    return driver.active.utils.get_aivector_core_num()


@triton.jit
def tiled(n, TILE: tl.constexpr):
    """(the places of a tile, how many tiles n takes)"""
    return tl.arange(0, TILE), (n + TILE - 1) // TILE


@triton.jit
def turn(first):
    """Which piece of some work this core begins with, where core `first` takes piece 0."""
    core = tl.program_id(0) - first
    return tl.where(core < 0, core + tl.num_programs(0), core)
