# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Rotation at the end of a product on Hopper (Gluon): from shared memory to global."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function


@constexpr_function
def _pairs(tokens, interleaved, warps):
    """[tokens, 64] in which a thread holds both columns of each of its pairs."""
    first = [0, 1] if interleaved else [0, 32]
    lanes = [[0, (2 if interleaved else 1) << i] for i in range(5)]
    of_warps = [[1 << i, 0] for i in range(warps.bit_length() - 1)]
    rows = [[warps << i, 0] for i in range((tokens // warps).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[first, *rows],
        lane_bases=lanes,
        warp_bases=of_warps,
        block_bases=[],
        shape=[tokens, 64],
    )


@gluon.jit
def rotate(
    tile, out, stride, sin, cos, token, tokens, BLOCK_T: gl.constexpr, INTERLEAVED: gl.constexpr
):
    """out[t * stride :] = the 64 columns of shared tile [BLOCK_T, 64], rotated."""
    dtype: gl.constexpr = out.dtype.element_ty
    ROWS: gl.constexpr = min(BLOCK_T, 32)  # at a time, for the registers
    flat: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [gl.num_warps(), 1], [1, 0])
    i = gl.arange(0, 32, gl.SliceLayout(0, flat))[None, :]
    for row in gl.static_range(0, BLOCK_T, ROWS):
        both = tile.slice(row, ROWS).load(_pairs(ROWS, INTERLEAVED, gl.num_warps()))
        if INTERLEAVED:
            left, right = gl.split(both.reshape([ROWS, 32, 2]))
        else:
            left, right = gl.split(both.reshape([ROWS, 2, 32]).permute([0, 2, 1]))
        left = gl.convert_layout(left, flat).to(gl.float32)
        right = gl.convert_layout(right, flat).to(gl.float32)
        t = (token + row + gl.arange(0, ROWS, gl.SliceLayout(1, flat)))[:, None]
        mask = (t < tokens) & (i >= 0)
        t = t.to(gl.int64)
        angle = t * 64 + i
        low = left * gl.load(cos + angle, mask=mask, other=0.0).to(gl.float32)
        low -= right * gl.load(sin + angle, mask=mask, other=0.0).to(gl.float32)
        high = right * gl.load(cos + angle + 32, mask=mask, other=0.0).to(gl.float32)
        high += left * gl.load(sin + angle + 32, mask=mask, other=0.0).to(gl.float32)
        at = out + t * stride + i
        gl.store(at, low.to(dtype), mask=mask)
        gl.store(at + 32, high.to(dtype), mask=mask)


@gluon.jit
def pass_on(tile, out, stride, token, tokens, BLOCK_T: gl.constexpr):
    """out[t * stride :] = the 64 columns of shared tile [BLOCK_T, 64], as they are."""
    ROWS: gl.constexpr = min(BLOCK_T, 32)
    flat: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [gl.num_warps(), 1], [1, 0])
    i = gl.arange(0, 64, gl.SliceLayout(0, flat))[None, :]
    for row in gl.static_range(0, BLOCK_T, ROWS):
        t = (token + row + gl.arange(0, ROWS, gl.SliceLayout(1, flat)))[:, None]
        mask = (t < tokens) & (i >= 0)
        gl.store(out + t.to(gl.int64) * stride + i, tile.slice(row, ROWS).load(flat), mask=mask)
