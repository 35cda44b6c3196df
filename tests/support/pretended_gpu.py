# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A stand-in for a CUDA GPU: what launchers ask of it, what they launch, and by which frames."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from custom.cuda_ops.common import gpu
from custom.dispatch.common import memory
from torch import Tensor
from torch.utils._pytree import tree_leaves
from triton.compiler import CompiledKernel
from triton.runtime.jit import KernelInterface

import custom

from ..portability.gpus import GPUS

ROOT = Path(__file__).parent.parent.parent
_SHIPPED = tuple(
    f"{ROOT / each}/" for each in ("cuda_ops", "custom", "dispatch", "graph_mode", "npu_ops")
)


def our_frames() -> list[str]:
    """The package's frames that the caller runs in, the outermost first."""
    found: list[str] = []
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_SHIPPED):
            found.append(f"{Path(file).relative_to(ROOT)}:{frame.f_code.co_name}")
        frame = frame.f_back
    return found[::-1]


class Device:
    """A stand-in for the GPU: notes every launch, and gives the launcher a compiled kernel."""

    def __init__(self) -> None:
        self.launched: list[tuple[str, tuple[int, ...], list[Any]]] = []
        self.allocated: list[Tensor] = []

    def launch(self, kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launched(*args: Any, **named: Any) -> CompiledKernel:
            given = dict(zip(kernel.arg_names, args, strict=False)) | named
            again = partial(self.again, kernel)
            again(
                *(*grid, 1, 1)[:3],
                0,
                None,
                None,
                None,
                None,
                None,
                *(given.get(p.name, p.default) for p in kernel.params),
            )
            compiled = object.__new__(CompiledKernel)
            compiled.module = compiled.function = compiled.packed_metadata = None
            compiled._run = again
            return compiled

        return launched

    def again(self, kernel: Any, x: int, y: int, z: int, *rest: Any) -> None:
        values = [address_of(value) for value in tree_leaves(rest[6:])]
        self.launched.append((kernel.__name__, (x, y, z), values))

    def empty(self, shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        out = torch.empty(shape, dtype=dtype, device=device)
        self.allocated.append(out)
        return out

    def take(self) -> tuple[list[Any], list[Tensor]]:
        """What was noted since the last time."""
        noted = self.launched, self.allocated
        self.launched, self.allocated = [], []
        return noted


class Address(int):
    """A tensor's, among the numbers that a kernel gets."""


def address_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Address(value.data_ptr())
    if hasattr(value, "block_shape"):
        there = value.base.data_ptr()
        return Address(there), [*value.shape], [*value.strides], value.block_shape, value.layout
    return value


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> Device:
    """CUDA launchers take CPU tensors from now on, as on a GPU of this compute capability."""
    out = Device()
    monkeypatch.setattr(custom.config, "backend", "cuda")
    monkeypatch.setattr(gpu, "capability", lambda device: capability)
    monkeypatch.setattr(gpu, "num_sms", lambda device: 132)
    monkeypatch.setattr(
        KernelInterface, "__getitem__", lambda kernel, grid: out.launch(kernel, grid)
    )
    here = SimpleNamespace(get_current_stream=lambda device: 0)
    monkeypatch.setattr(triton.runtime.driver, "_active", here)
    monkeypatch.setattr(memory, "empty", out.empty)
    return out


@contextmanager
def pretended(capability: int) -> Iterator[None]:
    """What launchers ask about the GPU, of one of tests/portability/gpus.py."""
    card = GPUS[capability]
    about = dict(
        capability=lambda device: divmod(capability, 10),
        num_sms=lambda device: card.processors,
        shared_memory=lambda device: card.shared_memory,
    )
    with mock.patch.multiple(gpu, **about):
        yield
