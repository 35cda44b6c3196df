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

_PAGE = mmap.PAGESIZE
_NONE, _READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_NO_RESERVE = 0x4000  # Linux; Python 3.11 has no name for it
_libc = ctypes.CDLL(None, use_errno=True)
_mappings: list[mmap.mmap] = []  # alive for as long as the process, which runs one case


def _protect(start: int, size: int, how: int) -> None:
    if size and _libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(size), how):
        raise OSError(ctypes.get_errno(), "mprotect")


def empty(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """An allocation full of NaN (or of a large negative integer), between two forbidden pages."""
    count = math.prod(shape)
    size = -(-count * dtype.itemsize // 16) * 16  # pointers stay divisible by 16, as the JIT sees
    body = -(-max(size, 1) // _PAGE) * _PAGE
    region = mmap.mmap(-1, body + 2 * _PAGE)
    _mappings.append(region)
    start = ctypes.addressof(ctypes.c_char.from_buffer(region))
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


def vast(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """Addresses for a tensor of any size; memory is taken where it is touched, which reads 0."""
    count = math.prod(shape)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    region = mmap.mmap(-1, count * dtype.itemsize, flags=flags)
    return torch.frombuffer(region, dtype=dtype, count=count).view(*shape)


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
