# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What a call costs on the host:  python -m custom.bench OP --host

Eager calls with the checks on, one after the other and none waited for, on inputs that were seen
before; the device's own time does not count, unless it is the longer one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..dispatch import call_cache
from .case import Case
from .timing import waiting

_CALLS = 50  # in a row: their launches fit in the queue of a device
_ROWS = 20

Call = Callable[[], Any]


def microseconds(call: Call, device: torch.device) -> float:
    """Of one call, on the host: the median over rows of calls, each begun with an idle device."""
    wait = waiting(device)
    for _ in range(3):  # compiles, records, repeats
        call()
    samples: list[float] = []
    for _ in range(_ROWS):
        wait()
        start = time.perf_counter()
        for _ in range(_CALLS):
            call()
        samples.append((time.perf_counter() - start) / _CALLS * 1e6)
    wait()
    return statistics.median(samples)


def launches(call: Call, device: torch.device) -> int | None:
    """Triton kernels that a call launches; None where Triton is not the one to ask."""
    if device.type != "cuda":
        return None
    from triton import knobs

    seen: list[object] = []

    def note(metadata: Any) -> None:
        seen.append(metadata)

    hook = knobs.runtime.launch_enter_hook
    hook.add(note)
    try:
        call()
    finally:
        hook.remove(note)
    return len(seen)


def table(cases: Sequence[Case], device: torch.device) -> str:
    """A line a case: microseconds, launches, the share that decides whether the call is like an
    earlier one (all that is left of its check), and the peers by the same measure."""
    lines = [("us", "launches", "checks", "case", "peers")]
    for case in cases:
        arguments = case.make(device, 0)
        call = partial(case.call, arguments)
        ours = microseconds(call, device)
        check = microseconds(partial(call_cache.cache_key, (), arguments), torch.device("cpu"))
        count = launches(call, device)
        peers = {name: prepare(arguments) for name, prepare in case.peers.items()}
        beside = [
            f"{name} {microseconds(peer, device):.0f}" for name, peer in peers.items() if peer
        ]
        shown = "-" if count is None else str(count)
        lines.append((f"{ours:.0f}", shown, f"{check / ours:.0%}", case.label, ", ".join(beside)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    right = 3  # numbers
    return "\n".join(
        "  ".join(
            x.rjust(width) if number < right else x.ljust(width)
            for number, (x, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
