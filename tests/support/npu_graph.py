# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""NPU graphs that run on a CPU: a graph records the ops that are called while it captures, and
calls them again on the same memory when it replays.  As on a device, a capture runs nothing and
the host can read nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from custom.dispatch.dispatch_keys import caches, written
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ATEN = torch.ops.aten
HOST_READS = (
    _ATEN._local_scalar_dense.default,
    _ATEN.nonzero.default,
    _ATEN.equal.default,
    _ATEN.unique_dim.default,
)


class Graph(TorchDispatchMode):
    """Stands for torch.npu.NPUGraph, on CPU tensors."""

    captured: ClassVar[list[Graph]] = []

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Any]]] = []
        self.replays = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in HOST_READS:
            raise RuntimeError(f"{func}: the host waits while a graph captures")
        kwargs = kwargs or {}
        kept = [
            (tensor, tensor.clone())
            for _, given in caches(written(func), args, kwargs)
            for tensor in tree_leaves(given)
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
def recorded(graph: Graph, **options: Any) -> Iterator[None]:
    with graph:
        yield
    if graph.calls:  # torchair opens its memory pool with an empty capture
        Graph.captured.append(graph)


def stand_in(monkeypatch: Any) -> type[Graph]:
    """CPU tensors count as an NPU's where graphs are made; the class of the graphs."""

    def stream(*_: Any) -> SimpleNamespace:
        return SimpleNamespace(wait_stream=lambda other: None)

    npu = SimpleNamespace(
        NPUGraph=Graph,
        graph=recorded,
        Stream=stream,
        current_stream=stream,
        stream=nullcontext,
        is_current_stream_capturing=lambda: False,
    )
    Graph.captured.clear()
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    for module in ("capture", "replayed"):
        there = importlib.import_module(f"custom.graph_mode.{module}")
        monkeypatch.setattr(there, "kind_of", lambda _: "npu")
    return Graph
