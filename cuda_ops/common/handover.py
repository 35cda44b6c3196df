# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Programmatic dependent launch: how a product waits for the kernel ahead and lets the next begin.

Plain kernels and those in Gluon call the same function.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin(FIRST: tl.constexpr, LATE: tl.constexpr):
    """FIRST: an op starts here, and none of its kernels before every earlier op has ended.  LATE:
    what this kernel reads was there when the one ahead began, so that it waits at its own end."""
    if FIRST:
        gdc_wait()
        gdc_launch_dependents()
    else:
        gdc_launch_dependents()
        if not LATE:
            gdc_wait()
