# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Where the pieces of packed sequences lie, and tiles of rows, for KDA on Hopper (Gluon)."""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...common.hopper.tma import describe

CHUNK = 64


@gluon.jit
def later(a, b):
    return gl.maximum(a, b)


@gluon.jit
def pieces(bounds, T, sequences, PIECES: gl.constexpr):
    """As in lengths.py: by piece its number, first token and end."""
    LIST: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    s = gl.arange(0, PIECES, layout=LIST)
    # before they are cast: what does not fit 32 bits wraps
    begin = gl.load(bounds + s - 1, mask=(s > 0) & (s <= sequences + 1), other=0)
    end = gl.load(bounds + s, mask=s <= sequences, other=0)
    begin = gl.minimum(gl.maximum(begin, 0), T).to(gl.int32)
    end = gl.minimum(gl.maximum(end, 0), T).to(gl.int32)
    begin = gl.associative_scan(begin, 0, later)
    end = gl.associative_scan(end, 0, later)
    return s, gl.where(s > sequences + 1, T, begin), gl.where(s > sequences, T, end)


def rows_of(x: Tensor, varlen: bool, width: int) -> TensorDescriptor:
    """Blocks of 64 rows of a head of [B, T, H, D]."""
    return describe(x[0] if varlen else x.transpose(1, 2), CHUNK, width, varlen)
