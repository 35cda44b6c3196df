# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What Gluon calls differently from one Triton to the next (3.5 to 3.9), under one name each.

Chosen by what is there, the newest name first: an old one can be left over and refuse its call.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

# gl.barrier since 3.7; async_load and async_store since 3.8
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
if hasattr(tma, "async_load"):
    cp_async = async_copy.async_load
    tma_load, tma_store = tma.async_load, tma.async_store
else:
    cp_async = async_copy.async_copy_global_to_shared
    tma_load, tma_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global


@builtin
def reinterpret(memory, dtype, shape, layout, _semantic=None):
    """The same shared memory with another shape and layout of as many bytes; a method since 3.9,
    before that a private one."""
    method = memory.reinterpret if hasattr(memory, "reinterpret") else memory._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)
