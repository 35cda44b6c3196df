# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Entries of requests that begin at position 0: the kernels of compressor.py, without states.

condition    kernels
any          nz_matmul.py, compressor.py
"""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from ...dispatch.common import compressed, memory
from ...dispatch.ops.deepseek_v4.compressor_dense import Arguments
from .compressor import ending, finish, nothing, pool, unsupported

__all__ = ["forward", "unsupported"]


def forward(**a: Unpack[Arguments]) -> Tensor:
    x, cu_seqlens = a["x"], a["cu_seqlens"]
    size, shape = a["norm_weight"].shape[0], compressed.rows(x, cu_seqlens, a["cmp_ratio"])
    out = memory.empty((*shape, size), x.dtype, x.device)
    if nothing(x, cu_seqlens, size):
        return out.zero_()
    made = pool(a, shape)
    finish(made, a, out, ending(a, size))
    return out
