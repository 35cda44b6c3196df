# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Cases of one op, one after the other, each legal and spoiled."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Container
from functools import partial
from math import inf
from typing import Any

import torch

from . import illegal, legal
from .draw import draw
from .shrink import kind, outcome, shrunk


def run(
    op: str,
    numbers: range,
    seed: int,
    device: str,
    progress: Callable[[str], Any] = lambda _: None,
    seconds: float = inf,
    known: Container[str] = (),
    most: int = 16,
) -> tuple[Counter[str], dict[str, str]]:
    """Counts, and a line for `FOUND` by kind of failure not known; ends when the seconds are over,
    or with the device's context."""
    kinds = {
        "cpu": ["float64", "float32", "float16", "bfloat16"],
        "interpret": ["float32", "float16"],  # its products of bfloat16 are wrong
    }.get(device, ["float16", "bfloat16"])
    where = torch.device("cpu" if device == "interpret" else device)
    checks: dict[str, Callable[[dict[str, Any]], str]] = {
        "legal": partial(legal.check, device=where),
        "illegal": partial(illegal.check, device=where),
    }
    counts: Counter[str] = Counter()
    found: dict[str, str] = {}
    end = time.monotonic() + seconds
    for number in numbers:
        if time.monotonic() > end:
            break
        case = draw(op, number, seed, kinds, 0 if where.type == "cpu" else most)
        progress(f"{op} {number}")
        for which, check in checks.items():
            answer, error = outcome(check, case)
            counts[f"{which} calls {answer}"] += 1
            if error is None:
                continue
            name = f"{which} {kind(error)}"
            if not alive(where):
                return counts, found | {LOST: _line(which, case, error)}
            if name not in found and name not in known:
                found[name] = _line(which, *shrunk(check, case, error, end))
                if not alive(where):
                    return counts, found | {LOST: _line(which, case, error)}
    return counts, found


LOST = "the device's context is lost"


def alive(device: torch.device) -> bool:
    """Whether the device still answers: a kernel that leaves its tensors takes its context away."""
    if device.type == "cpu":
        return True
    try:
        getattr(torch, device.type).synchronize()
        return bool(torch.ones(2, device=device).sum() == 2)
    except RuntimeError:
        return False


def _line(which: str, case: dict[str, Any], error: BaseException) -> str:
    first = str(error).partition("\n")[0]
    return f"    ({which!r}, {case!r}),  # {type(error).__name__}: {first[:160]}"
