# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Runs the matrix; see the package's own words."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from . import report
from .gpus import GPUS, HOME, TENSOR_MEMORY, TRITONS, WHOLE

ROOT = HOME.parent
RESULTS = Path(__file__).parent / "results.json"
TABLE = ROOT / "docs/portability.md"


def one(pair: tuple[int, str], share: float, jobs: int, parts: list[str]) -> dict[str, Any]:
    """What pretend.py found for one GPU and one Triton."""
    capability, version = pair
    with tempfile.TemporaryDirectory() as scratch:
        out = f"{scratch}/out.json"
        command = [sys.executable, "-m", "tests.portability.pretend"]
        subprocess.run(
            [*command, str(capability), str(RESULTS), out, str(share), str(jobs), *parts],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(HOME / f"triton-{version}")},
            check=True,
        )
        found = json.loads(Path(out).read_text())
    if found["triton"] != version:
        raise RuntimeError(f"triton {found['triton']} ran: run.sh puts {version} into {HOME}")
    return found


def against(case: dict[str, Any], capability: int, results: dict[str, Any]) -> list[str]:
    """What is wrong with a case on that GPU."""
    gpu, found = GPUS[capability], []
    for key in case["launches"]:
        kernel = results[key]
        if "error" in kernel:
            found.append(f"{kernel['kernel']}: {kernel['error']}")
            continue
        if kernel["shared"] > gpu.shared_memory:
            found.append(
                f"{kernel['kernel']} needs {kernel['shared'] / 1024:.1f} KiB of shared memory, "
                f"there are {gpu.shared_memory // 1024}"
            )
        if kernel["tensor"] > TENSOR_MEMORY:
            found.append(f"{kernel['kernel']} needs {kernel['tensor']} columns of tensor memory")
        if kernel["unit"] == "wgmma" and capability != 90:
            found.append(f"{kernel['kernel']} takes wgmma")
    return found


def paths(found: report.Found, results: dict[str, Any]) -> list[str]:
    """The cases that take other kernels with one Triton than with another, on the same GPU."""
    taken: dict[tuple[int, str, str], dict[str, set[str]]] = {}
    for (capability, version), answer in found.items():
        for case in answer["cases"]:
            if case["refused"] is None:
                names = {results[key]["kernel"] for key in case["launches"]}
                at = capability, case["op"], case["label"]
                taken.setdefault(at, {})[version] = names
    return [
        f"sm_{capability}, {op}, {label}: {of}"
        for (capability, op, label), of in taken.items()
        if len({frozenset(names) for names in of.values()}) > 1
    ]


def keep(results: dict[str, Any]) -> None:
    """Into the file of what is known, a kernel a line."""
    lines = [f'"{key}": {json.dumps(results[key])}' for key in sorted(results)]
    whole = RESULTS.with_suffix(".new")
    whole.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    whole.replace(RESULTS)  # others read it meanwhile


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.portability", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="change nothing, compile a sample again"
    )
    parser.add_argument(
        "--sample", type=float, default=0.01, help="share that --check compiles again"
    )
    parser.add_argument("--gpu", type=int, nargs="*", default=list(GPUS), choices=GPUS)
    parser.add_argument("--triton", nargs="*", default=TRITONS, help="folders of .portability")
    parser.add_argument("--only", nargs="*", default=[], help="cases with this in `op | label`")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers side by side")
    options = parser.parse_args()
    start = time.time()
    results = json.loads(RESULTS.read_text())
    pairs = [(capability, version) for version in options.triton for capability in options.gpu]
    share = options.sample if options.check else 0.0
    jobs = max(1, options.jobs // len(pairs))
    found: report.Found = {}
    wrong, compiled = [], 0
    with ThreadPoolExecutor(options.jobs) as pool:
        answers = pool.map(lambda pair: one(pair, share, jobs, options.only), pairs)
        for pair, answer in zip(pairs, answers, strict=True):
            found[pair] = answer
            for key, facts in answer["compiled"].items():
                compiled += 1
                if results.setdefault(key, facts) != facts:
                    wrong.append(f"{pair}: {facts} now, kept as {results[key]}")
            for case in answer["cases"]:
                wrong += [
                    f"sm_{pair[0]}, Triton {pair[1]}, {case['op']}, {case['label']}: {x}"
                    for x in against(case, pair[0], results)
                ]
            if not options.check:  # a run that is cut off later need not compile these again
                keep(results)
    wrong += paths(found, results)
    whole = not options.only and set(pairs) >= set(WHOLE)
    table = report.table(found, results) if whole else ""
    if options.check and whole and (not TABLE.exists() or TABLE.read_text() != table):
        wrong.append(f"{TABLE.name} says something else: make portability")
    if not options.check:
        if whole:  # nothing is kept of kernels that are no more
            TABLE.write_text(table)
            used = {x for a in found.values() for c in a["cases"] for x in c["launches"]}
            results = {key: results[key] for key in used}
        keep(results)
    print("\n".join(wrong))
    cases, seconds = sum(len(answer["cases"]) for answer in found.values()), time.time() - start
    print(f"{cases} cases, {compiled} kernels compiled, {len(wrong)} wrong, {seconds:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
