# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""python -m tests.fuzz OP|all [--cases 500] [--seed 0] [--device cpu|cuda|npu|interpret]
                             [--processes 16] [--only N]

`interpret` runs the CUDA kernels on the CPU, by Triton's interpreter.  Every failure is made small
and printed as a line for `FOUND` of tests/test_fuzz.py; a process that dies has last printed the
number of the case: --only repeats it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("op")
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cpu", "cuda", "npu", "interpret"], default="cpu")
    parser.add_argument("--processes", type=int, default=1, help="they share what Triton compiles")
    parser.add_argument("--only", type=int, help="this case alone")
    return parser.parse_args()


def _at_once(
    processes: int, op: str, numbers: range, seed: int, device: str
) -> tuple[Counter[str], dict[str, str]]:
    """The same, the cases dealt out."""
    from .run import run

    counts: Counter[str] = Counter()
    found: dict[str, str] = {}
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        parts = [
            pool.submit(run, op, numbers[first::processes], seed, device)
            for first in range(processes)
        ]
        for part in parts:
            more, lines = part.result()
            counts += more
            found |= lines
    return counts, found


def main() -> int:
    options = _arguments()
    if options.device == "interpret" and os.environ.get("TRITON_INTERPRET") != "1":
        chosen = {"TRITON_INTERPRET": "1", "CUSTOM_BACKEND": "cuda"}
        command = [sys.executable, "-m", "tests.fuzz", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | chosen)
    from custom.dispatch.specs import BY_NAME

    import custom

    from .run import run

    assert custom.config.backend in ("auto", "cuda")
    ops = list(BY_NAME) if options.op == "all" else [options.op]
    numbers = range(options.cases)
    if options.only is not None:
        numbers = range(options.only, options.only + 1)
    failed = False

    def progress(text: str) -> None:
        print(f"\r{text}  ", end="", file=sys.stderr, flush=True)

    for op in ops:
        if options.processes == 1:
            counts, found = run(op, numbers, options.seed, options.device, progress)
        else:
            counts, found = _at_once(options.processes, op, numbers, options.seed, options.device)
        print(f"{op}: " + ", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
        for line in found.values():
            print(line)
        failed = failed or bool(found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
