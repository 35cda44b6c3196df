# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Imports the real torch_npu, over empty shared libraries, with NPU graphs that run on a CPU.

Everything in Python is torch_npu's own: Dynamo backends, FX passes, the decision whether to capture
again, the copies into captured inputs.  What only a device can do stands in: a graph records the
ops that are called while it captures, and calls them again on the same memory when it replays.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch_npu
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Graph(TorchDispatchMode):
    """Stands for torch.npu.NPUGraph, on CPU tensors."""

    captured: ClassVar[list[Graph]] = []

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Any]]] = []
        self.replays = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        kept = [
            (tensor, tensor.clone())
            for argument in func._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_leaves(given.get(argument.name))
            if isinstance(tensor, Tensor)
        ]
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, tree_leaves(out)))
        for tensor, before in kept:  # a capture runs nothing: what was written is as it was
            tensor.copy_(before)
        return out

    def replay(self) -> None:
        self.replays += 1
        with torch.no_grad():
            for func, args, kwargs, outputs in self.calls:
                fresh = tree_leaves(func(*args, **kwargs))
                for kept, new in zip(outputs, fresh, strict=True):
                    if isinstance(kept, Tensor) and kept.data_ptr() != new.data_ptr():
                        kept.copy_(new)

    def reset(self) -> None:
        self.calls.clear()


@contextmanager
def _graph(graph: Graph, **options: Any) -> Iterator[None]:
    with graph:
        yield
    if graph.calls:  # torchair opens its memory pool with an empty capture
        Graph.captured.append(graph)


class _Stream:
    _ids = itertools.count()

    def __init__(self, *args: Any, **options: Any) -> None:
        self.stream_id = next(self._ids)


class _Event:
    pass


def _storage(pointer: int, device: torch.device, size: int) -> torch.UntypedStorage:
    with no_dispatch():
        if not size:
            return torch.UntypedStorage()
        raw = (ctypes.c_char * size).from_address(pointer)
        return torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()


def _tensor(metadata: dict[str, Any], storage: torch.UntypedStorage) -> Tensor:
    with no_dispatch():
        empty = torch.empty(0, dtype=metadata["dtype"])
        return empty.set_(storage, metadata["storage_offset"], metadata["size"], metadata["stride"])


def install() -> None:
    npu, extension = torch_npu.npu, torch_npu._C
    current = _Stream()
    npu.NPUGraph, npu.graph, npu.Stream, npu.Event = Graph, _graph, _Stream, _Event
    npu.current_stream = lambda *_: current
    npu.current_device = lambda: 0
    npu.graph_pool_handle = lambda: (0, 1)
    npu.get_stream_limit = lambda _: {"cube_core_num": 1, "vector_core_num": 1}
    for nothing in ("set_stream_limit", "synchronize", "empty_cache"):
        setattr(npu, nothing, lambda *_: None)
    for nothing in ("_npu_getCheckpointState", "_npu_setCheckpointPoolState"):
        setattr(extension, nothing, lambda *_: None)
    extension._construct_storage_from_data_pointer = _storage
    extension._construct_NPU_Tensor_From_Storage_And_Metadata = _tensor
