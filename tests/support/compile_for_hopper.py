# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Kernels compiled for Hopper where there is none: what a launch would run, and no launch.

Sees what the compiler refuses, in branches that no test on a GPU may reach; wrong numbers are for
gluon_on_cpu and the GPU.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import KernelInterface


def driver(capability):
    """Triton's driver of a GPU that is not there."""
    return SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        # a key of Triton's caches, beside those of real GPUs
        get_current_device=lambda: f"pretended sm_{capability}",
        set_current_device=lambda device: None,
        get_current_stream=lambda device: 0,
        launcher_cls=lambda src, metadata: None,
        utils=SimpleNamespace(
            get_device_properties=lambda device: dict(max_shared_mem=227 * 1024),
            load_binary=lambda *_: (None, None, 0, 0, 1024),
        ),
    )


def address(tensor: torch.Tensor) -> int:
    """Of a fake tensor: aligned, and the same for two views of one storage."""
    return (tensor.untyped_storage()._cdata << 12) + tensor.storage_offset() * tensor.itemsize


def stand_in(monkeypatch, capability=90):
    """From here on a launch compiles its kernel; returns the list of what was compiled."""
    compiled = []

    def launch(kernel, grid):
        return lambda *arguments, **named: compiled.append(
            kernel.warmup(*arguments, grid=grid, **named)
        )

    monkeypatch.setattr(triton.runtime.driver, "_active", driver(capability))
    monkeypatch.setattr(KernelInterface, "__getitem__", launch)
    return compiled
