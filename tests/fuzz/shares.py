# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The cases of several ops, shared by processes: whoever is done takes the next share."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from math import inf
from multiprocessing import active_children, get_context
from threading import Lock
from typing import Any

import torch

from .draw import models
from .run import LOST, run

_TURN = 50  # cases
_BEYOND = 20  # seconds after the end, when a process that has not come back hangs
Found = tuple[Counter[str], dict[str, str]]


def _begin(number: int) -> None:
    """One thread and one GPU of those that are shared."""
    torch.set_num_threads(1)
    if gpus := torch.cuda.device_count():
        torch.cuda.set_device(number % gpus)


def _lost(op: str, share: range, why: str) -> Found:
    return Counter(lost=1), {LOST: f"    # {op}: a process {why}, in one of {share}"}


class _Process:
    """One that keeps what it compiled; a new one where it is lost."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.pool: ProcessPoolExecutor | None = None

    def run(self, op: str, share: range, *rest: Any, seconds: float, **named: Any) -> Found:
        if self.pool is None:
            started = get_context("spawn"), _begin, (self.number,)
            self.pool = ProcessPoolExecutor(1, *started)
        part = self.pool.submit(run, op, share, *rest, seconds=seconds, **named)
        wait([part], None if seconds == inf else seconds + _BEYOND)
        try:
            counts, found = part.result() if part.done() else _lost(op, share, "hangs")
        except BrokenProcessPool:
            counts, found = _lost(op, share, "died")
        if LOST in found:
            self.pool.shutdown(wait=False)
            self.pool = None
        return counts, found


@dataclass
class Shares:
    """Cases that share what is compiled are together in one, or begin in one of their own."""

    ops: list[str]
    numbers: range
    seed: int
    device: str
    seconds: float
    progress: Callable[[str], Any]
    most: int = 16  # models of an op

    def __post_init__(self) -> None:
        self.end = time.monotonic() + self.seconds
        self.lock = Lock()
        self.counts: dict[str, Counter[str]] = {op: Counter() for op in self.ops}
        self.known: dict[str, set[str]] = {op: set() for op in self.ops}
        # by turns where time is short, so that each op has about as many when it is over
        size = _TURN if self.seconds < inf else len(self.numbers)
        every = []
        for op in self.ops:
            count = models(op, self.most)
            for model in range(count):
                cases = self.numbers[model::count]
                for at in range(0, len(cases), size):
                    every.append((at * count + model * size, op, cases[at : at + size]))
        if self.seconds < inf:
            every.sort(key=lambda x: x[0])
        self.left = deque((op, share) for _, op, share in every)
        self.open = Counter(op for op, _ in self.left)

    def work(self, runs: Callable[..., Found]) -> None:
        while (left := self.end - time.monotonic()) > 0:
            with self.lock:
                if not self.left:
                    break
                op, share = self.left.popleft()
            known = frozenset(self.known[op])
            which = op, share, self.seed, self.device
            counts, found = runs(*which, seconds=left, known=known, most=self.most)
            with self.lock:
                self._note(op, counts, found)

    def _note(self, op: str, counts: Counter[str], found: dict[str, str]) -> None:
        self.counts[op] += counts
        for name, line in found.items():
            if name not in self.known[op] or name == LOST:
                print(line, flush=True)
            self.known[op].add(name)
        self.open[op] -= 1
        if not self.open[op]:
            self._tell(op)

    def _tell(self, op: str) -> None:
        every = sorted(self.counts[op].items())
        said = ", ".join(f"{count} {name}" for name, count in every)
        print(f"{op}: {said or 'not called'}", flush=True)

    def run(self, processes: int) -> bool:
        """Whether nothing failed; prints failures as they come and what was called of every op."""
        if processes == 1:

            def here(*args: Any, **named: Any) -> Found:
                counts, found = run(*args, self.progress, **named)
                if LOST in found:
                    self.left.clear()
                return counts, found

            self.work(here)
        else:
            with ThreadPoolExecutor(processes) as threads:
                list(threads.map(self.work, (_Process(i).run for i in range(processes))))
        for op, left in self.open.items():
            if left:
                self._tell(op)
        for child in active_children():  # those that hang
            child.kill()
        return not any(self.known.values())
