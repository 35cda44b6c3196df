# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""How many cores the device of this process has: the grid of every kernel here."""

from __future__ import annotations

from triton.runtime import driver


def cube() -> int:
    """For kernels with `tl.dot`; each brings two vector cores along."""
    return driver.active.utils.get_aicore_num()


def vector() -> int:
    """For kernels without."""
    return driver.active.utils.get_aivector_core_num()
