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
from .gpus import GPUS, HOME, TENSOR_MEMORY, WHOLE

ROOT = HOME.parent
RESULTS = Path(__file__).parent / "results.json"
COMPILED = HOME / "compiled.json"  # by runs over a part, or cut off
TABLE = ROOT / "docs/portability.md"


def one(
    pair: tuple[int, str], known: Path, sample: str, jobs: int, place: str, parts: list[str]
) -> dict[str, Any]:
    """What pretend.py found for one GPU and one Triton: that of .portability, else the installed
    one."""
    capability, version = pair
    ours = {n: x for n, x in os.environ.items() if not n.startswith(("TRITON_", "CUSTOM_"))}
    with tempfile.TemporaryDirectory() as scratch:
        out = f"{scratch}/out.json"
        command = [sys.executable, "-m", "tests.portability.pretend"]
        subprocess.run(
            [*command, str(capability), str(known), out, sample, str(jobs), place, *parts],
            cwd=ROOT,
            env=ours | {"PYTHONPATH": str(HOME / f"triton-{version}")},
            check=True,
        )
        found = json.loads(Path(out).read_text())
    if found["triton"] != version:
        raise RuntimeError(f"triton {found['triton']} ran: run.sh puts {version} into {HOME}")
    return found


def unknown(names: dict[str, str], results: dict[str, Any]) -> str | None:
    """What to do where results.json is of other sources; `names` are those of what is launched."""
    others = sorted({name for key, name in names.items() if key not in results})
    if not others:
        return None
    return f"{RESULTS.name} is not of today's {', '.join(others)}: run `make portability`"


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


def keep(results: dict[str, Any], file: Path) -> None:
    """A kernel a line."""
    lines = [f'"{key}": {json.dumps(results[key])}' for key in sorted(results)]
    whole = file.with_suffix(".new")
    whole.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    whole.replace(file)  # others read it meanwhile


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.portability", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="change nothing, compile a sample again"
    )
    parser.add_argument(
        "--sample", type=int, default=1, help="launches of an op that --check compiles again"
    )
    parser.add_argument("--gpu", type=int, nargs="*", default=list(GPUS), choices=GPUS)
    parser.add_argument("--triton", nargs="*", help="folders of .portability, or the installed one")
    parser.add_argument("--only", nargs="*", default=[], help="cases with this in `op | label`")
    parser.add_argument(
        "--offset",
        action="store_true",
        help="the same cases in rows off 16 bytes; what they compile to stays in .portability",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers side by side")
    options = parser.parse_args()
    if options.check and options.offset:
        parser.error("--check has no records of --offset: leave one out")
    start = time.time()
    results, known = json.loads(RESULTS.read_text()), RESULTS
    if not options.check:
        if COMPILED.exists():
            results |= json.loads(COMPILED.read_text())
        known = COMPILED
        keep(results, known)
    pairs = [pair for pair in WHOLE if pair[0] in options.gpu]
    if options.triton:
        pairs = [(capability, version) for version in options.triton for capability in options.gpu]
    sample = str(options.sample) if options.check else "new"
    place = "offset" if options.offset else "given"
    jobs = max(1, options.jobs // len(pairs))
    found: report.Found = {}
    wrong, compiled = [], 0
    with ThreadPoolExecutor(options.jobs) as pool:
        answers = pool.map(lambda pair: one(pair, known, sample, jobs, place, options.only), pairs)
        for pair, answer in zip(pairs, answers, strict=True):
            at = f"sm_{pair[0]}, Triton {pair[1]}"
            for key, facts in answer["compiled"].items():
                compiled += 1
                if results.setdefault(key, facts) != facts:
                    wrong.append(f"{at}: {facts} now, kept as {results[key]}")
            if other := unknown(answer["names"], results):
                wrong.append(f"{at}: {other}")
                continue
            found[pair] = answer
            for case in answer["cases"]:
                said = against(case, pair[0], results)
                wrong += [f"{at}, {case['op']}, {case['label']}: {x}" for x in said]
            if not options.check:  # a run that is cut off later need not compile these again
                keep(results, known)
    wrong += paths(found, results)
    if not (options.only or options.offset) and found.keys() >= set(WHOLE):
        table = report.table(found, results)
        if not options.check:
            TABLE.write_text(table)
            used = {key for answer in found.values() for key in answer["names"]}
            keep({key: results[key] for key in used}, RESULTS)
        elif TABLE.read_text() != table:
            wrong.append(f"{TABLE.name} says something else: run `make portability`")
    print("\n".join(wrong))
    cases, seconds = sum(len(answer["cases"]) for answer in found.values()), time.time() - start
    print(f"{cases} cases, {compiled} kernels compiled, {len(wrong)} wrong, {seconds:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
