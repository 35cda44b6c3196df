# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""python -m tests.fuzz OP[,OP..]|all [--cases 500] [--seed 0] [--device cpu|cuda|npu|interpret]
                                     [--processes 16] [--seconds 60]
                                     [--models 16] [--only N]

`interpret` runs the CUDA kernels on the CPU, by Triton's interpreter.  Every failure is made small
and printed as a line for `FOUND` of test_fuzz.py.  A process that dies has last printed the
number of the case, and --only repeats it; where there are several the others go on.  What the
seconds leave undone is left out evenly; the last lines say how many calls of each op were made.
"""

from __future__ import annotations

import argparse
import os
import sys


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("op")
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cpu", "cuda", "npu", "interpret"], default="cpu")
    parser.add_argument("--processes", type=int, default=1, help="side by side, on all GPUs")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of them all")
    parser.add_argument("--models", type=int, default=16, help="compiled on a GPU, an op at most")
    parser.add_argument("--only", type=int, help="this case alone")
    return parser.parse_args()


def main() -> int:
    options = _arguments()
    if options.device == "interpret" and os.environ.get("TRITON_INTERPRET") != "1":
        chosen = {"TRITON_INTERPRET": "1", "CUSTOM_BACKEND": "cuda"}
        command = [sys.executable, "-m", "tests.fuzz", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | chosen)
    from custom.dispatch.registry import BY_NAME

    import custom

    from .shares import Shares

    assert custom.config.backend in ("auto", "cuda")
    ops = list(BY_NAME) if options.op == "all" else options.op.split(",")
    numbers = range(options.cases)
    if options.only is not None:
        numbers = range(options.only, options.only + 1)

    def progress(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r{text}  ", end="", file=sys.stderr, flush=True)

    which = ops, numbers, options.seed, options.device
    shares = Shares(*which, options.seconds, progress, options.models)
    return int(not shares.run(options.processes))


if __name__ == "__main__":
    sys.exit(main())
