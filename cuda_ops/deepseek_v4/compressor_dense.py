# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Entries of requests that begin at position 0: the kernels of compressor.py, without states.

condition    kernels
any          nz_matmul.py, compressor.py
"""

from __future__ import annotations

from torch import Tensor

from ...dispatch.common import compressed, memory
from .compressor import ending, finish, nothing, pool, unsupported

__all__ = ["forward", "unsupported"]


def forward(
    x: Tensor,
    wkv: Tensor,
    wgate: Tensor,
    ape: Tensor,
    norm_weight: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    rope_head_dim: int,
    cmp_ratio: int,
    cu_seqlens: Tensor | None,
    seqused: Tensor | None,
    coff: int,
    norm_eps: float,
    rotary_mode: int,
    hadamard: bool,
) -> Tensor:
    size, shape = norm_weight.shape[0], compressed.rows(x, cu_seqlens, cmp_ratio)
    out = memory.empty((*shape, size), x.dtype, x.device)
    if nothing(x, cu_seqlens, size):
        return out.zero_()
    made = pool(x, wkv, wgate, ape, size, shape, cu_seqlens, seqused, None, coff, None, None, False)
    end = ending(rope_sin, size, rope_head_dim, rotary_mode, hadamard)
    finish(made, norm_weight, rope_sin, rope_cos, norm_eps, out, end)
    return out
