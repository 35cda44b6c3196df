# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What one call writes is apart in memory from all else that it gets: views of one pool may be, or
not; or page i of one cache is page i of another, which has a table of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from operator import add, le
from typing import Any

from torch import Tensor

Dims = list[tuple[int, int]]  # (bytes from one to the next, how many), the farthest apart first


def span(tensor: Tensor) -> int:
    """Bytes from the first of a tensor to its last."""
    return _span(_dims(tensor)) if tensor.numel() else 0


def interleaved(starts: Sequence[int], spans: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """For memory that starts and spans so, each with the number of the piece that it lies within
    reach of, and how far behind its start; nothing where all are apart."""
    ends = sorted(map(add, starts, spans))
    if all(map(le, ends, sorted(starts)[1:])):
        return ()
    found, first, end = [(0, 0)] * len(spans), 0, 0
    for start, size, number in sorted(zip(starts, spans, range(len(spans)), strict=True)):
        if start >= end:
            first = number
        found[number] = first, start - starts[first]
        end = max(end, start + size)
    return tuple(found)


def refuse(
    op: str,
    written: Sequence[str],
    arguments: Mapping[str, Any],
    tables: Sequence[Sequence[str]] = (),
) -> None:
    """Where what is written shares memory with any other argument.

    `tables`: the caches of each.  Those of different ones may have their pages from one pool.
    """
    table = {cache: number for number, caches in enumerate(tables) for cache in caches}
    tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
    caches = [name for name in written if name in tensors]
    others = [name for name in tensors if name not in caches]
    for one, other in combinations(caches, 2):
        a, b = tensors[one], tensors[other]
        tabled = {one, other} <= table.keys() and table[one] != table[other]
        if overlap(a, b) and not (tabled and same_pages(a, b)):
            raise ValueError(
                f"{op}: `{one}` and `{other}` overlap in memory, expected tensors that are apart, "
                "as both are written. Give each memory of its own."
            )
    for one, other in product(others, caches):
        if overlap(tensors[one], tensors[other]):
            raise ValueError(
                f"{op}: `{one}` and `{other}` overlap in memory, expected tensors that are apart, "
                f"as `{other}` is written. Pass {one}.clone()."
            )


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether any byte is of both."""
    if not a.numel() or not b.numel() or a.device != b.device:
        return False
    return _meet(b.data_ptr() - a.data_ptr(), _dims(a), _dims(b))


def same_pages(a: Tensor, b: Tensor) -> bool:
    """Whether what is at one index of the first dimension meets that alone in the other."""
    page, other = (x.stride(0) * x.itemsize for x in (a, b))
    ahead = b.data_ptr() - a.data_ptr()
    return page == other and span(a[0]) - page <= ahead <= page - span(b[0])


def _dims(tensor: Tensor) -> Dims:
    """As few as say it, the bytes of a number the last of them."""
    strides = (stride * tensor.itemsize for stride in tensor.stride())
    dims: Dims = [(1, tensor.itemsize)]
    for stride, size in sorted(zip(strides, tensor.shape, strict=True)):
        if size > 1 and stride:  # one number again and again is one number
            inner, count = dims[0]
            if stride == inner * count:
                dims[0] = inner, count * size
            else:
                dims.insert(0, (stride, size))
    return dims


def _span(dims: Dims) -> int:
    return 1 + sum(stride * (size - 1) for stride, size in dims)


def _meet(ahead: int, a: Dims, b: Dims) -> bool:
    """b begins `ahead` bytes behind a."""
    if ahead >= _span(a) or -ahead >= _span(b):
        return False
    if not a and not b:
        return True
    (of_a, count_a), (of_b, count_b) = a[0] if a else (0, 1), b[0] if b else (0, 1)
    if of_a < of_b:
        return _meet(-ahead, b, a)
    if of_a == of_b:
        # the blocks of both by how many the one of b is ahead of that of a
        least, most, a, b = 1 - count_a, count_b - 1, a[1:], b[1:]
    else:
        least, most, a = 1 - count_a, 0, a[1:]
    first = max(least, -((ahead + _span(b) - 1) // of_a))
    last = min(most, (_span(a) - 1 - ahead) // of_a)
    return any(_meet(ahead + n * of_a, a, b) for n in range(first, last + 1))
