# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A compiled kernel, launched without what Triton's launcher does anew at every launch.

Triton's launcher encodes tensor descriptors, looks for scratch memory, and hands all that to a
function in C.  Here descriptors are encoded once for each place that they point to, and the
function is called at once; where a kernel wants scratch memory or hooks watch launches, Triton's
launcher is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import repeat
from typing import Any
from weakref import WeakValueDictionary

import triton
from triton import knobs

from .private_triton import Launcher, encode

_PLACES = 8192  # for which descriptors stay encoded: weights, memory used again; 5 MB

_runtime = knobs.runtime

Encoded = Callable[[int], list[Any]]


class _Pointer:
    """What a tensor descriptor asks of its base."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def data_ptr(self) -> int:
        return self.pointer


class _Kind:
    """What descriptors share that differ in where they point: one object in a process."""

    def __init__(self, of_none: Any, meta: Any, encodes: bool) -> None:
        self._of_none, self._meta, self._encodes = of_none, meta, encodes

    def at(self, pointer: int) -> list[Any]:
        there = copy.copy(self._of_none)
        there.base = _Pointer(pointer)
        return encode(there, self._meta) if self._encodes else [there]


_kinds: WeakValueDictionary[tuple[str, str, bool], _Kind] = WeakValueDictionary()
_encoded = lru_cache(_PLACES)(_Kind.at)


class FastLauncher:
    """Of one kernel and grid.  `call` takes the kernel's values: pointers as numbers, and of each
    descriptor what `encoded` gives."""

    def __init__(self, launcher: Launcher, grid: tuple[int, ...], device: int) -> None:
        self._encodes, self._grid = launcher.encodes, grid
        self._kernel, self._run, self._in_c = launcher.kernel, launcher.run, launcher.in_c
        if self._in_c is not None:
            self._between, self._listed = launcher.between, launcher.listed
        self._stream = partial(triton.runtime.driver.active.get_current_stream, device)
        self._metas = iter(launcher.metas or repeat(None))

    def encoded(self, descriptor: Any) -> Encoded:
        """The kernel's next descriptor as values, by where it points; the first tells that."""
        of_none, meta = copy.copy(descriptor), next(self._metas)
        of_none.base = None  # the tensor itself is not kept
        kind = _Kind(of_none, meta, self._encodes)
        return partial(
            _encoded, _kinds.setdefault((repr(of_none), repr(meta), self._encodes), kind)
        )

    def call(self, values: Sequence[Any]) -> tuple[Callable[..., Any], Sequence[Any]]:
        """The function to call, and its arguments."""
        stream = self._stream()
        enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            about = self._kernel.launch_metadata(self._grid, stream, *values)
        elif self._in_c is None:
            enter = leave = about = None
        elif self._listed:
            return self._in_c, (*self._grid, stream, *self._between, values)
        else:
            return self._in_c, (*self._grid, stream, *self._between, *values)
        return self._run, (
            *self._grid,
            stream,
            self._kernel.function,
            self._kernel.packed_metadata,
            about,
            enter,
            leave,
            *values,
        )
