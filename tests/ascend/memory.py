# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Tensors that end at a page nobody may touch: a read or write out of range kills the process.

A cache can also forbid single blocks, so that "never read" is proven and not just masked.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Iterable, Sequence

import torch

from . import aten

_PAGE = mmap.PAGESIZE
_NONE, _READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_NO_RESERVE = 0x4000  # Linux; Python 3.11 has no name for it
_libc = ctypes.CDLL(None, use_errno=True)
# (address, mapping), alive for as long as the process, which runs one case
_mappings: list[tuple[int, mmap.mmap]] = []


def _protect(start: int, size: int, how: int) -> None:
    if size and _libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(size), how):
        raise OSError(ctypes.get_errno(), "mprotect")


def empty(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """An allocation full of NaN (or of a large negative integer), between two forbidden pages."""
    with aten.apart():
        return _between_pages(shape, dtype)


def _between_pages(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    count = math.prod(shape)
    size = -(-count * dtype.itemsize // 16) * 16  # pointers stay divisible by 16, as the JIT sees
    body = -(-max(size, 1) // _PAGE) * _PAGE
    region = mmap.mmap(-1, body + 2 * _PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(region))
    _mappings.append((start, region))
    _protect(start, _PAGE, _NONE)
    _protect(start + _PAGE + body, _PAGE, _NONE)
    first = start + _PAGE + body - size
    held = (ctypes.c_char * max(size, 1)).from_address(first)
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    tensor = torch.frombuffer(held, dtype=dtype, count=count)
    bad = float("nan") if dtype.is_floating_point else -1 if dtype.itemsize == 1 else -(2**30)
    tensor.fill_(bad)
    return tensor.view(*shape)


def holds(tensor: torch.Tensor) -> bool:
    """Whether this module made what the tensor lies in."""
    start = tensor.data_ptr()
    return tensor.numel() == 0 or any(low <= start < low + len(x) for low, x in _mappings)


def vast(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """Addresses for a tensor of any size; memory is taken where it is touched, which reads 0."""
    with aten.apart():
        return _untouched(shape, dtype)


def reserved(size: int) -> mmap.mmap:
    """Addresses alone."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)


def _untouched(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    count = math.prod(shape)
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    region = reserved(count * dtype.itemsize)
    tensor = torch.frombuffer(region, dtype=dtype, count=count).view(*shape)
    _mappings.append((tensor.data_ptr(), region))
    return tensor


def far_apart(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """The same values, with so many numbers from block to block of the first dimension; nothing
    lies between them."""
    dense = tensor.contiguous()
    wide = vast(((len(dense) - 1) * by + dense[0].numel(),), dense.dtype)
    return wide.as_strided(dense.shape, (by, *dense.stride()[1:])).copy_(dense)


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """The same values (contiguous), between forbidden pages."""
    return empty(tensor.shape, tensor.dtype).copy_(tensor)


class Forbidden:
    """While entered, the given blocks (first dimension) of the tensors may not be touched at all.
    A block whose pages are shared with an allowed one is left open."""

    def __init__(self, blocks: Iterable[tuple[torch.Tensor, Iterable[int]]]) -> None:
        self.ranges: list[tuple[int, int]] = []
        for tensor, rows in blocks:
            size = tensor[0].numel() * tensor.element_size()
            for row in rows:
                start = tensor.data_ptr() + row * size
                low, high = -(-start // _PAGE) * _PAGE, (start + size) // _PAGE * _PAGE
                if high > low:
                    self.ranges.append((low, high - low))

    def __enter__(self) -> None:
        for start, size in self.ranges:
            _protect(start, size, _NONE)

    def __exit__(self, *_: object) -> None:
        for start, size in self.ranges:
            _protect(start, size, _READ_WRITE)
