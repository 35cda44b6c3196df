# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What KDA and its gradient share on Hopper (Gluon): where a chunk lies, and tiles of rows."""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...common.hopper.tma import describe
from ...common.kda import in_piece
from ...common.lengths import later
from .chunks import CHUNK, add


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


@gluon.jit
def place(bounds, chunk, T, sequences, PIECES: gl.constexpr, VARLEN: gl.constexpr):
    """As in common/kda.py."""
    if VARLEN:
        s, begin, end = pieces(bounds, T, sequences, PIECES)
        ends = gl.associative_scan((end - begin + 63) // 64, 0, add)
        start, first, length, live = in_piece(chunk, s, begin, end, ends, sequences)
        batch = chunk * 0
    else:
        each = (T + 63) // 64
        batch = chunk // each
        first = chunk % each * 64
        start = chunk * 0
        length = T
        live = T > 0
    return batch, start, first, length, live


@gluon.jit
def rate_of(beta, token, b_row, length, BETA: gl.constexpr):
    """How much of its key's value a token changes, in float32; 0 where there is none."""
    valid = token < length
    rate = gl.load(beta + token * b_row, mask=valid, other=0.0).to(gl.float32)
    if BETA > 1:
        rate = gl.where(valid, (BETA - 1.0) / (1.0 + gl.exp(-rate)), 0.0)
    return rate


@gluon.jit
def again(x):
    """The same number, of which the compiler does not know: what is made of it is made here, and
    not kept from elsewhere."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], gl.int32, False, 1)


@gluon.jit
def again_float(x):
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], gl.float32, False, 1)


def rows_of(x: Tensor, varlen: bool, width: int) -> TensorDescriptor:
    """Blocks of 64 rows of a head of [B, T, H, D]."""
    return describe(x[0] if varlen else x.transpose(1, 2), CHUNK, width, varlen)
