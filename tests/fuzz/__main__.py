# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""python -m tests.fuzz OP|all [--cases 500] [--seed 0] [--device cpu|cuda|npu|interpret] [--only N]

`interpret` runs the CUDA kernels on the CPU, by Triton's interpreter.  Every failure is made small
and printed as a line for `FOUND` of tests/test_fuzz.py; a process that dies has last printed the
number of the case: --only repeats it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("op")
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cpu", "cuda", "npu", "interpret"], default="cpu")
    parser.add_argument("--only", type=int, help="this case alone")
    return parser.parse_args()


def run(
    op: str, numbers: range, seed: int, device: str, progress: Callable[[str], Any] = lambda _: None
) -> tuple[Counter[str], dict[str, str]]:
    """Counts, and a line for `FOUND` by kind of failure."""
    import torch

    from . import illegal, legal
    from .draw import draw
    from .shrink import failure, kind, shrunk

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
            error = failure(check, case)
            if error is None:
                counts[f"{which} calls"] += 1
                continue
            counts[f"{which} calls failed"] += 1
            name = f"{which} {kind(error)}"
            if name not in found:
                small, error = shrunk(check, case)
                first = str(error).partition("\n")[0]
                found[name] = (
                    f"    ({which!r}, {small!r}),  # {type(error).__name__}: {first[:160]}"
                )
    return counts, found


def main() -> int:
    options = _arguments()
    if options.device == "interpret" and os.environ.get("TRITON_INTERPRET") != "1":
        chosen = {"TRITON_INTERPRET": "1", "CUSTOM_BACKEND": "cuda"}
        command = [sys.executable, "-m", "tests.fuzz", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | chosen)
    from custom.dispatch.specs import BY_NAME

    import custom

    assert custom.config.backend in ("auto", "cuda")
    ops = list(BY_NAME) if options.op == "all" else [options.op]
    numbers = range(options.cases)
    if options.only is not None:
        numbers = range(options.only, options.only + 1)
    failed = False

    def progress(text: str) -> None:
        print(f"\r{text}  ", end="", file=sys.stderr, flush=True)

    for op in ops:
        counts, found = run(op, numbers, options.seed, options.device, progress)
        print(f"{op}: " + ", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
        for line in found.values():
            print(line)
        failed = failed or bool(found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
