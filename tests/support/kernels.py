# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Where CUDA kernels run in this process: on a GPU, under Triton's interpreter, or nowhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = (torch.bfloat16, torch.float16) if ON_GPU else (torch.float16, torch.float32)
kernels = pytest.mark.skipif(not (ON_GPU or INTERPRETED), reason="needs a GPU or the interpreter")
gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
hopper = pytest.mark.skipif(
    not ON_GPU or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)


def skip_unless_gluon_of_hopper() -> None:
    """For a module about Gluon kernels, which run on a Hopper GPU, or on CPU tensors."""
    pytest.importorskip("triton")
    if INTERPRETED:
        pytest.skip("the kernels are not those of Gluon", allow_module_level=True)
    if ON_GPU and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are those of Hopper", allow_module_level=True)


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, device: torch.device = DEVICE) -> Iterator[None]:
    """Into `graph`, on a stream of `device`: PyTorch's own stream is of the GPU that a process
    captured on first."""
    with torch.cuda.device(device), torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
        yield


def replayed(device: torch.device, call: Callable[[], Any]) -> Callable[[], Any]:
    """A call as a CUDA graph repeats it."""
    if device.type != "cuda":
        pytest.skip("needs a GPU: there are no CUDA graphs elsewhere")
    call()  # compiles
    graph = torch.cuda.CUDAGraph()
    with capturing(graph, device):
        out = call()

    def replay() -> Any:
        graph.replay()
        return out

    return replay
