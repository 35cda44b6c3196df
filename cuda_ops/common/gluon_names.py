# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What Gluon calls differently from one Triton to the next (3.6 to 3.9), under one name each.

Chosen by what is there, the newest name first: an old one can be left over and refuse its call.
Where something is missing its name is None and in LACKING, and gpu.is_hopper says no.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import ampere, hopper

from ..runtime.private_triton import GLUON_LACKS, builtin

LACKING: list[str] = [*GLUON_LACKS]


def _named(module: Any, *names: str) -> Any:
    found = next((getattr(module, name) for name in names if hasattr(module, name)), None)
    if found is None:
        LACKING.append(names[0])
    return found


barrier = _named(gl, "barrier", "thread_barrier")
cp_async = _named(ampere.async_copy, "async_load", "async_copy_global_to_shared")
mma_v2 = _named(ampere, "mma_v2")
tma_load = _named(hopper.tma, "async_load", "async_copy_global_to_shared")
tma_store = _named(hopper.tma, "async_store", "async_copy_shared_to_global")
_reinterpret = _named(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")
_named(gl, "num_warps")  # its name never changed; since 3.6, as the list gl.warp_specialize takes

# 3.8 reinterprets a memory as a whole alone, others its first part as well
REINTERPRETS_PARTS = not triton.__version__.startswith("3.8.")


@builtin
def reinterpret(memory, dtype, shape, layout, _semantic=None):
    """The same shared memory in another shape and layout of as many bytes."""
    return _reinterpret(memory, dtype, shape, layout, _semantic=_semantic)
