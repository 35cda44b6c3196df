# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Tensors that one call writes are apart in memory: views of one pool may be, or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from torch import Tensor

Dims = list[tuple[int, int]]  # (bytes from one to the next, how many), the farthest apart first


def beside(tensors: Sequence[Tensor]) -> tuple[int, ...] | None:
    """Where those that share an allocation lie in it, as far as it matters to each other."""
    pools = [x.untyped_storage().data_ptr() for x in tensors]
    if len({*pools}) == len(pools):
        return None
    first = [tensors[pools.index(pool)].data_ptr() for pool in pools]
    return tuple(x.data_ptr() - at for x, at in zip(tensors, first, strict=True))


def refuse(op: str, written: Mapping[str, Tensor]) -> None:
    for (one, a), (other, b) in combinations(written.items(), 2):
        if overlap(a, b):
            raise ValueError(
                f"{op}: `{one}` and `{other}` overlap in memory, expected tensors that are apart, "
                "as both are written. Give each memory of its own."
            )


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether any byte is of both; no number of either lies on another one of the same."""
    if not a.numel() or not b.numel() or _pool(a) != _pool(b):
        return False
    return _meet(b.data_ptr() - a.data_ptr(), _dims(a), _dims(b))


def _pool(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _dims(tensor: Tensor) -> Dims:
    """As few as say it, the bytes of a number the last of them."""
    strides = (stride * tensor.itemsize for stride in tensor.stride())
    dims: Dims = [(1, tensor.itemsize)]
    for stride, size in sorted(zip(strides, tensor.shape, strict=True)):
        if size > 1:
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
