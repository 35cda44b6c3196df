# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Medians of device time: graph replay over rotated inputs on CUDA and NPU, the wall on the CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..dispatch.backends import made_current

Call = Callable[[], Any]
_WARM_UP = 0.1  # seconds


@dataclass(frozen=True)
class Times:
    """Microseconds of one call."""

    median: float
    p20: float
    p80: float


def _quantiles(samples: Sequence[float]) -> Times:
    tenths = statistics.quantiles(samples, n=10)
    return Times(statistics.median(samples), tenths[1], tenths[7])


def measure(calls: Sequence[Call], device: torch.device, seconds: float = 0.5) -> Times:
    """Time one call; `calls` are the same work on different inputs, so that no cache stays warm."""
    if device.type == "cpu":
        return wall_clock(calls, device, seconds)
    with made_current(device):
        return _replay(calls, device, seconds)


def _nothing() -> None:
    return None


def waiting(device: torch.device) -> Call:
    """What waits until the device has nothing left to do."""
    return partial(torch.accelerator.synchronize, device) if device.type != "cpu" else _nothing


def wall_clock(calls: Sequence[Call], device: torch.device, seconds: float = 0.2) -> Times:
    """Time eager calls, each waited for: for the CPU, and for what no graph can hold."""
    wait = waiting(device)
    for call in calls:
        call()
    wait()
    samples: list[float] = []
    begin = time.perf_counter()
    while len(samples) < 5 or (time.perf_counter() - begin < seconds and len(samples) < 200):
        for call in calls:
            start = time.perf_counter()
            call()
            wait()
            samples.append((time.perf_counter() - start) * 1e6)
    return _quantiles(samples)


def _replay(calls: Sequence[Call], device: torch.device, seconds: float) -> Times:
    """The current device's own time: a launch of the host takes longer than many a kernel."""
    api: Any = getattr(torch, device.type)  # torch.npu has the names of torch.cuda
    side = api.Stream()
    side.wait_stream(api.current_stream())
    with api.stream(side):
        for call in calls:
            call()
    api.current_stream().wait_stream(side)
    api.synchronize()
    once = _elapsed(lambda: [call() for call in calls], api) / len(calls)
    # enough calls in a graph that its own launch does not count
    rounds = max(1, min(16, int(1500 / max(once, 1.0)) // len(calls)))
    graph = api.CUDAGraph() if device.type == "cuda" else api.NPUGraph()
    with api.graph(graph, stream=side):
        for _ in range(rounds):
            for call in calls:
                call()
    replayed = rounds * len(calls)
    # right after the check of the results a call can take a tenth longer (H200, 2026-11)
    begin = time.perf_counter()
    while time.perf_counter() - begin < _WARM_UP:
        _elapsed(graph.replay, api)
    repeats = max(5, min(50, int(seconds * 1e6 / max(once * replayed, 1.0))))
    return _quantiles([_elapsed(graph.replay, api) / replayed for _ in range(repeats)])


def _elapsed(call: Call, api: Any) -> float:
    start, end = (api.Event(enable_timing=True) for _ in range(2))
    api.synchronize()
    start.record()
    call()
    end.record()
    api.synchronize()
    return float(start.elapsed_time(end) * 1e3)


def peak_mib(call: Call, device: torch.device) -> float | None:
    """Device memory that one call holds at its peak beside what was there, results included; None
    where the allocator does not tell.  The call has run before, so that nothing is set up in it."""
    if device.type == "cpu":
        return None
    api: Any = getattr(torch, device.type)
    api.synchronize()
    api.reset_peak_memory_stats(device)
    before = api.memory_allocated(device)
    call()
    api.synchronize()
    return float(api.max_memory_allocated(device) - before) / 2**20


# bytes/s and bf16 FLOP/s that a large copy and a large matrix product reach (H200, 2026-10)
_KNOWN = {"NVIDIA H200": (4.3e12, 790e12)}


def rates(device: torch.device) -> tuple[float, float, str]:
    """(bytes/s, FLOP/s, where they come from): measured, unless this device's are on record."""
    if device.type == "cuda" and torch.cuda.get_device_name(device) in _KNOWN:
        return *_KNOWN[torch.cuda.get_device_name(device)], "on record"
    size = 2**24 if device.type == "cpu" else 2**30
    source = torch.empty(size, dtype=torch.uint8, device=device).zero_()
    copied = measure([lambda: source.clone()], device, 0.2).median
    n = 1024 if device.type == "cpu" else 8192
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    a = torch.randn(n, n, device=device, dtype=dtype)
    product = measure([lambda: a @ a], device, 0.2).median
    return 2 * size / copied * 1e6, 2 * n**3 / product * 1e6, "measured now"
