# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Imports the real torch_npu, over empty shared libraries, with NPU graphs that run on a CPU.

Everything in Python is torch_npu's own: Dynamo backends, FX passes, the decision whether to capture
again, the copies into captured inputs.  What only a device can do stands in; the graph is that of
tests/support/npu_graph.py.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import torch
import torch_npu
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from tests.support.npu_graph import Graph, recorded


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
    npu.NPUGraph, npu.graph, npu.Stream, npu.Event = Graph, recorded, _Stream, _Event
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
