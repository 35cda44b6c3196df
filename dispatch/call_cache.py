# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Cache of validated calls, keyed by the metadata of their arguments.

A hit skips validation and the choice of a backend and a launcher.  The key holds shapes, strides,
dtypes, devices, whether pointers are aligned and equal, how tensors overlap (for an op that
writes), formats of an NPU, numbers, strings, and the settings.  It holds no values of tensors:
where they are looked at (values.py), no call is a hit.
"""

from __future__ import annotations

from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from . import values
from .backends import Replay
from .common import nz
from .env import config
from .overlap import interleaved, span

MOST = 1024  # kinds of calls that an op remembers
# where memory was freed, a pointer is the offset in it: no more than memory has bytes
_FREED = 2**40
_NUMBERS = (int, float, bool, str, type(None))

Key = tuple[Any, ...]


class CallCache:
    """What to do with a call like an earlier one, of one op under one dispatch key."""

    def __init__(self, writes: bool = False) -> None:
        self._writes = writes
        self._known: dict[Key, _Kind] = {}
        self._lock = Lock()

    def find(self, alike: CacheKey) -> Replay | None:
        kind = self._known.get(alike.key)
        return None if kind is None else kind.replays.get(kind.laid(alike.pointers))

    def keep(self, alike: CacheKey, replay: Replay) -> None:
        """The oldest goes where there are too many."""
        with self._lock:
            kind = self._known.get(alike.key)
            if kind is None:
                spans = [span(x) for x in alike.tensors] if self._writes else None
                kind = _Kind(spans, {})
                _put(self._known, alike.key, kind)
            _put(kind.replays, kind.laid(alike.pointers), replay)

    def clear(self) -> None:
        with self._lock:
            self._known.clear()


class _Kind(NamedTuple):
    spans: list[int] | None
    """Bytes from the first of each tensor to its last, of an op that writes."""
    replays: dict[Key, Replay]
    """By how the tensors lie in each other's memory."""

    def laid(self, starts: list[int]) -> Key:
        return () if self.spans is None else interleaved(starts, self.spans)


def _put(known: dict[Key, Any], key: Key, value: Any) -> None:
    if len(known) >= MOST:
        del known[next(iter(known))]
    known[key] = value


class CacheKey(NamedTuple):
    """What alike calls share, and the tensors of this one in order."""

    key: Key
    tensors: list[Tensor]
    pointers: list[int]


def cache_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> CacheKey | None:
    """None where no call is like another."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    key: list[Any] = [config.backend, config.replay, config.log, deterministic, *kwargs]
    tensors: list[Tensor] = []
    pointers: list[int] = []
    for value in (*args, *kwargs.values()):
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            pointer = value.data_ptr()
            if pointer < _FREED and value.numel() and not value.untyped_storage().nbytes():
                return None  # the check refuses it
            if not tensors and values.looked_at(value.device):
                return None
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
    return CacheKey(tuple(key), tensors, pointers)
