# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Descriptors of TMA: of attention's tensors, of rows of numbers, of weights and plain matrices."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..attention_tiles import strides
from ..gluon_names import barrier, reinterpret, tma_load, tma_store

DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
_FAR = 1 << 30
_WRAP = 1 << 34


@cache
def _layout(swizzle: int, bits: int, rank: int) -> gl.NVMMASharedLayout:
    """Made once: it takes Gluon 10 us."""
    return gl.NVMMASharedLayout(swizzle, bits, rank=rank)


@cache
def _layout_of(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    eight = dtype is torch.float8_e4m3fn
    kind = gl.float8e4nv if eight else DTYPES[dtype]
    return gl.NVMMASharedLayout.get_default_for([*block], kind)


def aligned(*tensors: Tensor) -> bool:
    """As TMA wants where they begin: in units of 16 bytes."""
    return all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


def describable(tensor: Tensor) -> bool:
    """TMA wants 16-byte aligned rows, and a step between them; packed ones wrap at the largest."""
    unit = 16 // tensor.element_size()
    steps = [s for s, n in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if n > 1]
    return aligned(tensor) and all(0 < s < _WRAP and s % unit == 0 for s in steps)


def describe(tensor: Tensor, rows: int, width: int, varlen: bool) -> TensorDescriptor:
    """The 5-D descriptor of blocks of `rows` rows of one head; what `width` has more than the
    tensor reads as zeros and is not written."""
    size = tensor.shape[-1]
    block = [1, 1, 1, rows, width]
    layout = _layout_of(tuple(block), tensor.dtype)
    unit = 16 // tensor.element_size()
    batch, head, row = strides(tensor)
    if varlen:
        heads, tokens = tensor.shape[1], tensor.shape[0]
        row = row if tokens > 1 else unit
        shape = [0x7FFF0000, 0x7FFF0000, heads, _FAR, size]
        steps = [_WRAP - row, row, head if heads > 1 else unit, row, 1]
    else:
        shape = [1, *tensor.shape]
        sized = zip((batch, head, row), tensor.shape[:3], strict=True)
        steps = [unit, *(s if n > 1 else unit for s, n in sized), 1]
    return TensorDescriptor(tensor, shape, steps, block, layout)


def describe_row(tensor: Tensor, count: int) -> TensorDescriptor:
    """Blocks of `count` numbers of a contiguous float32 tensor."""
    layout = _layout(0, 32, 1)
    return TensorDescriptor(tensor, [tensor.numel()], [1], [count], layout)


@gluon.jit
def load_box(box, where, bar, tile):
    """Ask for a block of what is described, into a tile of as many numbers in another shape."""
    tma_load(box, where, bar, reinterpret(tile, box.dtype, box.block_shape, box.layout))


@gluon.jit
def store_box(box, where, tile):
    tma_store(box, where, reinterpret(tile, box.dtype, box.block_shape, box.layout))


@gluon.jit
def forget(bars):
    """The last thing that a kernel does with barriers which no part of warp_specialize holds.

    The compiler gives the memory of what is not used any more to others, and PTX wants a barrier
    invalidated before: without, where an H200 turned to another process, what lay in its place by
    then was overwritten, and 2 % of the delta rule's calls were wrong.
    """
    COUNT: gl.constexpr = bars.shape[0]
    barrier()  # no warp waits any more
    for each in gl.static_range(COUNT):
        mbarrier.invalidate(bars.index(each))


@gluon.jit
def at(batch, head, first, count, row, VARLEN: gl.constexpr, column=0):
    """Coordinates of row `row` of a sequence, from `column` on."""
    if VARLEN:
        far: gl.constexpr = 1073741824
        return [far, first + count, head, far - count + row, column]
    return [0, batch, head, row, column]


def describe_nz(weight: Tensor, depth: int, size: int, columns: int, k: int) -> TensorDescriptor:
    """Blocks [columns / 16, k, 16] of an NZ weight [depth, size]."""
    layout = _layout(32, 16, rank=3)
    shape, block = [max(size, 16) // 16, depth, 16], [columns // 16, k, 16]
    return TensorDescriptor(weight, shape, [depth * 16, 16, 1], block, layout)


def describe_matrix(tensor: Tensor, rows: int, columns: int, block: list[int]) -> TensorDescriptor:
    """Blocks of a contiguous matrix."""
    layout = _layout(min(128, 2 * block[1]), 16, rank=2)
    return TensorDescriptor(tensor, [rows, columns], [columns, 1], block, layout)


def describe_box(
    tensor: Tensor, shape: list[int], steps: list[int], block: list[int]
) -> TensorDescriptor:
    """Blocks of a tensor of any rank, seen as this shape with these steps between its rows."""
    layout = _layout_of(tuple(block), tensor.dtype)
    steps = [
        step if size > 1 else 16 // tensor.element_size()
        for step, size in zip(steps, shape, strict=True)
    ]
    return TensorDescriptor(tensor, shape, [*steps[:-1], 1], block, layout)
