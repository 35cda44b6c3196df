# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Several processes take turns on one GPU: every op, again and again, on memory full of NaN, gives
the bits that it gave while it was alone.

    python -m tests.tools.shared [OP ...] [--processes 4] [--seconds 60]

A GPU that turns to another process in between shows what a kernel leaves to chance: stores that are
under way at its end, and what it reads of memory that nobody wrote.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch
from custom.dispatch.common import memory
from custom.dispatch.register import overload
from custom.dispatch.registry import BY_NAME

from custom.bench.presets import presets

from ..support.calls import everything
from ..support.poison import poisoned
from ..support.samples import sample

DEVICE = torch.device("cuda")


def _calls(names: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """A sample of each op, and the first row of its bench."""
    calls = []
    for name in names:
        calls.append((name, sample(name, DEVICE, torch.bfloat16)))
        calls += [(name, case.make(DEVICE, 0)) for case in presets(name, "cuda")[:1]]
    return calls


def _bits(name: str, arguments: dict[str, Any]) -> list[torch.Tensor]:
    spec = BY_NAME[name]
    results = everything(spec, overload(spec), arguments)
    return [x.contiguous().view(-1).view(torch.uint8) for x in results if x.numel()]


def _again(lock: Any, ready: Any, names: list[str], seconds: float, _: int) -> list[Any]:
    """(op, calls, those with other bits) of one process."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.empty = poisoned
    with lock, torch.no_grad():
        calls = _calls(names)
        alone = [_bits(*call) for call in calls]
        torch.cuda.synchronize()
    wrong = torch.zeros(len(calls), dtype=torch.int64, device=DEVICE)
    ready.wait(timeout=600)
    end, rounds = time.monotonic() + seconds, 0
    with torch.no_grad():
        while time.monotonic() < end:
            for number, call in enumerate(calls):
                pairs = zip(alone[number], _bits(*call), strict=True)
                off = [(x != y).any() for x, y in pairs]
                wrong[number] += torch.stack(off).any() if off else 0
            rounds += 1
            torch.cuda.synchronize()
    return [(name, rounds, off) for (name, _), off in zip(calls, wrong.tolist(), strict=True)]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.shared", description=__doc__)
    parser.add_argument("ops", nargs="*")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args(arguments)
    if options.processes < 1:
        parser.error(f"--processes is {options.processes}, expected 1 or more")
    if unknown := [name for name in options.ops if name not in BY_NAME]:
        parser.error(f"{unknown[0]} is no op; python -m custom.info lists them")
    names = options.ops or list(BY_NAME)
    spawned = multiprocessing.get_context("spawn")
    calls, wrong = Counter[str](), Counter[str]()
    with spawned.Manager() as shared, ProcessPoolExecutor(options.processes, spawned) as pool:
        lock, ready = shared.Lock(), shared.Barrier(options.processes)
        again = partial(_again, lock, ready, names, options.seconds)
        for counts in pool.map(again, range(options.processes)):
            for name, made, off in counts:
                calls[name] += made
                wrong[name] += off
    for name in names:
        print(f"{name}: {calls[name]} calls, {wrong[name]} with other bits")
    return int(wrong.total() > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
