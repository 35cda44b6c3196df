# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Cases of one op, one after the other, each legal and spoiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from . import illegal, legal
from .draw import draw
from .shrink import kind, outcome, shrunk


def run(
    op: str, numbers: range, seed: int, device: str, progress: Callable[[str], Any] = lambda _: None
) -> tuple[Counter[str], dict[str, str]]:
    """Counts, and a line for `FOUND` by kind of failure."""
    kinds = {
        "cpu": ["float64", "float32", "float16", "bfloat16"],
        "interpret": ["float32", "float16"],  # its products of bfloat16 are wrong
    }.get(device, ["float16", "bfloat16"])
    where = torch.device("cpu" if device == "interpret" else device)
    checks: dict[str, Callable[[dict[str, Any]], str]] = {
        "legal": partial(legal.check, device=where)
    }
    if device == "cpu":  # the checks are the same on every device
        checks["illegal"] = illegal.check
    counts: Counter[str] = Counter()
    found: dict[str, str] = {}
    for number in numbers:
        case = draw(op, number, seed, kinds)
        progress(f"{op} {number}")
        for which, check in checks.items():
            answer, error = outcome(check, case)
            counts[f"{which} calls {answer}"] += 1
            if error is None:
                continue
            name = f"{which} {kind(error)}"
            if name not in found:
                small, error = shrunk(check, case)
                first = str(error).partition("\n")[0]
                found[name] = (
                    f"    ({which!r}, {small!r}),  # {type(error).__name__}: {first[:160]}"
                )
    return counts, found
