# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Programmatic dependent launch: how a kernel waits for the one ahead and lets the next one begin.

A kernel launched with launch_pdl starts once every block of the one ahead has let it or ended; that
one may itself still wait for the kernel ahead of it.  So what the caller owns (weights, caches,
tables, lengths, scales, activations) may still be on its way when an op starts:

- The op's first kernel waits ahead of its first load of anything, and only then lets the next one
  begin; or it is launched without launch_pdl.  Then every later kernel of the op starts when all
  that the caller launched before has ended.
- A later kernel may read what no kernel of the op writes before it waits.  What one of them has
  made it reads behind its wait, unless that one had ended when this one was let begin.
- A kernel launched with launch_pdl waits, be it at its own end: whoever waits for it counts on all
  that came before.

test_handover.py reads the kernels of every op for it.  Plain kernels and those in Gluon call
the same functions.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin(FIRST: tl.constexpr):
    """Ahead of all loads.  FIRST: an op starts here, and none of its kernels before every earlier
    op has ended."""
    if FIRST:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def follow(FIRST: tl.constexpr, LATE: tl.constexpr, SECOND: tl.constexpr = False):
    """Ahead of the loads of what the op's kernels have made.  LATE: what this kernel reads was
    there when the one ahead began, so that it waits at its own end.  SECOND: those behind it, which
    are late, read what the one ahead makes as well."""
    if SECOND:
        gdc_wait()
        gdc_launch_dependents()
    elif not FIRST:
        gdc_launch_dependents()
        if not LATE:
            gdc_wait()
