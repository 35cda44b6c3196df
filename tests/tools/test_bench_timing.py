# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The clock of the bench, with a stand-in for the device: what is measured is the replay."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from custom.bench import timing

CALL, REPLAY = 900.0, 7.0  # microseconds of an eager call (the host's), of a call in a graph


class Device:
    """Has a clock that eager calls and replays move forward."""

    def __init__(self, graph: str) -> None:
        self.now, self.held, self.replays = 0.0, 0, 0
        self.recording = False
        self.current = 0
        self.called_on: set[int] = set()
        device = self

        class Graph:
            def replay(self) -> None:
                device.replays += 1
                device.now += REPLAY * device.held

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = device.now

            def elapsed_time(self, end: Event) -> float:
                return (end.at - self.at) / 1e3

        @contextmanager
        def record(graph: Graph, stream: SimpleNamespace):
            assert stream.number == device.current
            device.recording = True
            yield
            device.recording = False

        @contextmanager
        def stream(side: object):
            yield

        @contextmanager
        def made_current(where: SimpleNamespace):
            before, device.current = device.current, where.index
            yield
            device.current = before

        def side() -> SimpleNamespace:
            return SimpleNamespace(wait_stream=lambda other: None, number=device.current)

        names = dict(Stream=side, current_stream=side, stream=stream, graph=record, Event=Event)
        names |= dict(device=made_current, current_device=lambda: device.current)
        self.api = SimpleNamespace(**names, **{graph: Graph}, synchronize=lambda: None)

    def call(self) -> None:
        if self.recording:
            self.held += 1
        else:
            self.now += CALL
        self.called_on.add(self.current)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(("kind", "graph"), [("npu", "NPUGraph"), ("cuda", "CUDAGraph")])
def test_a_device_is_measured_by_graph_replay(monkeypatch, kind, graph, index):
    """Also one that is not the current device: a stream of another would record nothing."""
    device = Device(graph)
    monkeypatch.setattr(torch, kind, device.api, raising=False)
    monkeypatch.setattr(timing, "_WARM_UP", 0.0)
    times = timing.measure(
        [device.call, device.call], SimpleNamespace(type=kind, index=index), 0.01
    )
    assert device.current == 0 and device.called_on == {index}
    assert device.replays >= 5
    assert device.held % 2 == 0
    assert times.median == pytest.approx(REPLAY)


def test_peak_memory_of_an_npu(monkeypatch):
    held = {"now": 5 * 2**20, "peak": 5 * 2**20}
    api = SimpleNamespace(
        synchronize=lambda: None,
        reset_peak_memory_stats=lambda device: held.update(peak=held["now"]),
        memory_allocated=lambda device: held["now"],
        max_memory_allocated=lambda device: held["peak"],
    )
    monkeypatch.setattr(torch, "npu", api, raising=False)
    grows = lambda: held.update(peak=held["now"] + 3 * 2**20)  # noqa: E731
    assert timing.peak_mib(grows, SimpleNamespace(type="npu")) == 3.0
    assert timing.peak_mib(grows, torch.device("cpu")) is None
