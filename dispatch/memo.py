# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What was found out about a call holds for every call like it: check, backend, launcher.

Two calls are alike if they agree in all that these read: shapes, strides, dtypes, devices, whether
pointers are aligned and equal, where tensors that are written share an allocation, formats of an
NPU, numbers and strings, and the settings.  Never in a tensor's values: where CUSTOM_DEBUG has them
checked, no call is like another.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .common import nz
from .env import config
from .keys import Places, caches
from .overlap import beside

MOST = 1024  # kinds of calls that an op remembers
_NUMBERS = (int, float, bool, str, type(None))

Key = tuple[Any, ...]
Again = Callable[[tuple[Any, ...], dict[str, Any], list[Tensor]], Any]


class Memo:
    """What to do with a call like an earlier one, of one op under one dispatch key."""

    def __init__(self) -> None:
        self._known: dict[Key, Again] = {}
        self._lock = Lock()

    def find(self, key: Key) -> Again | None:
        return self._known.get(key)

    def keep(self, key: Key, again: Again) -> None:
        """The oldest goes where there are too many."""
        with self._lock:
            if len(self._known) >= MOST:
                del self._known[next(iter(self._known))]
            self._known[key] = again

    def clear(self) -> None:
        with self._lock:
            self._known.clear()


def likeness(
    args: tuple[Any, ...], kwargs: dict[str, Any], writes: Places = ()
) -> tuple[Key, list[Tensor]] | None:
    """(what alike calls share, the tensors in order); None where no call is like another.  `writes`
    are the places of what the op writes."""
    if config.debug or config.log:
        return None
    key: list[Any] = [config.backend, torch.are_deterministic_algorithms_enabled(), *kwargs]
    tensors: list[Tensor] = []
    pointers: list[int] = []
    for value in (*args, *kwargs.values()):
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            pointer = value.data_ptr()
            tensors.append(value)
            pointers.append(pointer)
            key += (value.shape, value.stride(), value.dtype, value.device, pointer & 15)
        elif kind in _NUMBERS:
            key.append(value)
        elif kind is list and all(type(each) is int for each in value):
            key.append(tuple(value))
        else:
            return None
    if len({*pointers}) < len(pointers):
        key.append(tuple(map(pointers.index, pointers)))
    if tensors and (config.backend == "npu" or tensors[0].device.type == "npu"):
        key += map(nz.npu_format, tensors)
    if len(writes) > 1:
        key.append(beside([x for _, x in caches(writes, args, kwargs)]))
    return tuple(key), tensors
