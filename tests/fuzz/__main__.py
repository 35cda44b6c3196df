# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""python -m tests.fuzz OP[,OP..]|all [--cases 500] [--seed 0] [--device cpu|cuda|npu|interpret]
                                     [--processes 16] [--seconds 60] [--only N]

`interpret` runs the CUDA kernels on the CPU, by Triton's interpreter.  Every failure is made small
and printed as a line for `FOUND` of tests/test_fuzz.py.  A process that dies has last printed the
number of the case, and --only repeats it; where there are several the others go on.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("op")
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cpu", "cuda", "npu", "interpret"], default="cpu")
    parser.add_argument("--processes", type=int, default=1, help="they share what Triton compiles")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="an op, at most")
    parser.add_argument("--only", type=int, help="this case alone")
    return parser.parse_args()


class Workers:
    """Processes side by side, which keep what they compiled; new ones when one is lost."""

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self.pool = self._started()

    def _started(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(self.processes, get_context("spawn"))

    def run(
        self, op: str, numbers: range, seed: int, device: str, seconds: float
    ) -> tuple[Counter[str], dict[str, str]]:
        """The same as `run` of one process, the cases dealt out."""
        from .run import LOST, run

        counts: Counter[str] = Counter()
        found: dict[str, str] = {}
        shares = [numbers[first :: self.processes] for first in range(self.processes)]
        parts = [
            self.pool.submit(run, op, share, seed, device, seconds=seconds) for share in shares
        ]
        for share, part in zip(shares, parts, strict=True):
            try:
                more, lines = part.result()
            except BrokenProcessPool:
                more, lines = Counter(lost=1), {LOST: f"    # {op}: a process died, one of {share}"}
            counts += more
            found |= lines
        if LOST in found:
            self.pool.shutdown()
            self.pool = self._started()
        return counts, found


def main() -> int:
    options = _arguments()
    if options.device == "interpret" and os.environ.get("TRITON_INTERPRET") != "1":
        chosen = {"TRITON_INTERPRET": "1", "CUSTOM_BACKEND": "cuda"}
        command = [sys.executable, "-m", "tests.fuzz", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | chosen)
    from custom.dispatch.specs import BY_NAME

    import custom

    from .run import LOST, run

    assert custom.config.backend in ("auto", "cuda")
    ops = list(BY_NAME) if options.op == "all" else options.op.split(",")
    numbers = range(options.cases)
    if options.only is not None:
        numbers = range(options.only, options.only + 1)
    failed = False

    def progress(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r{text}  ", end="", file=sys.stderr, flush=True)

    workers = Workers(options.processes) if options.processes > 1 else None
    for op in ops:
        which = (op, numbers, options.seed, options.device)
        if workers is None:
            counts, found = run(*which, progress, options.seconds)
        else:
            counts, found = workers.run(*which, options.seconds)
        print(
            f"{op}: " + ", ".join(f"{count} {name}" for name, count in sorted(counts.items())),
            flush=True,
        )
        for line in found.values():
            print(line)
        failed = failed or bool(found)
        if workers is None and LOST in found:
            break
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
