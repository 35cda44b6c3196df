# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The arguments of a case as views that no copy of 16 bytes can read.

Loads of such rows go through registers, and what products read is laid out another way: those are
other kernels to ptxas, whose faults sass.py finds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Ways = tuple[tuple[int, int], ...]
# Ways of a tensor, in elements: how far behind the start of its memory it lies, and by how much its
# rows are longer than their numbers.  Behind 4, float32 in rows of bytes stays aligned.
WAYS: Ways = ((1, 1), (1, 0), (4, 0), (0, 0))
# What is compiled of a case, by the end of its label: each tensor in the first that the op takes.
# In the last, rows begin at 16 bytes but at no 16 numbers, which Triton has other kernels for.
OFF: dict[str, Ways] = {
    ", rows off 16 bytes": WAYS,
    ", tensors off 16 bytes": WAYS[1:],
    ", rows 8 numbers longer": ((0, 8), (0, 0)),
}
_INDICES = (torch.int32, torch.int64, torch.bool)  # in no product
_NAME = re.compile(r"`(\w+)`")


def _tensors(x: Any) -> list[Tensor]:
    if isinstance(x, (list, tuple)):
        return [tensor for each in x for tensor in _tensors(each)]
    return [x] if isinstance(x, Tensor) and x.dtype not in _INDICES else []


def _in_place_of(x: Any, moved: dict[int, Tensor]) -> Any:
    if isinstance(x, (list, tuple)):
        return type(x)(_in_place_of(each, moved) for each in x)
    return moved.get(id(x), x)


def _views(of: list[Tensor], step: int, longer: int) -> list[Tensor]:
    """Others than those, all of one memory, in one memory again."""
    first, bytes = of[0], of[0].untyped_storage().nbytes()
    memory = torch.empty((1 + longer) * bytes + 64, dtype=torch.uint8, device=first.device)
    memory = memory[step * max(x.itemsize for x in of) :]
    alike = all(x.shape == first.shape and x.is_contiguous() for x in of)
    whole = alike and first.ndim > 1 and 0 < bytes == first.numel() * first.itemsize
    views = []
    for x in of:
        numbers = memory[: memory.numel() // 8 * 8].view(x.dtype)
        if longer and whole:
            *rows, last = x.shape
            numbers = numbers[: x.numel() // last * (last + longer)]
            views.append(numbers.view(*rows, last + longer)[..., :last])
        else:
            at = numbers.storage_offset() + x.storage_offset()
            views.append(numbers.as_strided(x.shape, x.stride(), at))
    return views


def moved(given: dict[str, Any], ways: Ways, at: dict[str, int]) -> dict[str, Any]:
    """`given` as views of other memory; what shares memory does so again."""
    memories: dict[int, list[tuple[str, Tensor]]] = {}
    for name, x in given.items():
        for tensor in _tensors(x):
            memories.setdefault(tensor.untyped_storage()._cdata, []).append((name, tensor))
    views: dict[int, Tensor] = {}
    for named in memories.values():
        tensors = [tensor for _, tensor in named]
        way = ways[max(at[name] for name, _ in named)]
        views |= zip(map(id, tensors), _views(tensors, *way), strict=True)
    return {name: _in_place_of(x, views) for name, x in given.items()}


def off(
    given: dict[str, Any],
    ways: Ways,
    refusal: Callable[[dict[str, Any]], str | None],
) -> dict[str, Any]:
    """Every tensor moved in the first of `ways` that the op does not refuse, naming it."""
    at = dict.fromkeys(given, 0)
    while True:
        arguments = moved(given, ways, at)
        said = refusal(arguments)
        if said is None:
            return arguments
        named = [name for name in _NAME.findall(said) if at.get(name, len(ways)) < len(ways) - 1]
        if not named:
            raise ValueError(said)
        at[named[0]] += 1
