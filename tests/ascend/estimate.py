# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Estimated times on Atlas A3, launch by launch:  tests/ascend/run.sh --estimate OP [--shape b=4]

The rows are those of `python -m custom.bench`.  The kernels are compiled, walked (cost.py) and run
on the CPU, since a later launch may depend on what an earlier one wrote.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from custom.bench.presets import presets

from . import cost, driver
from .compiler import compile_for_npu
from .driver import Launch, recorder
from .toolchain import NEWEST

_SUM = "sum of the launches, without gaps"


def _row(launch: Launch, given: list[Any]) -> tuple[float, str]:
    compiled = compile_for_npu(launch.linalg, launch.options, NEWEST)
    if not compiled.ok:
        raise RuntimeError(f"{launch.kernel}: {compiled.error}")
    costs = cost.of(compiled.hivm, given, launch.grid)
    programs, cores = launch.grid[0], recorder.cube_cores
    by_unit: dict[str, float] = {}
    for each in costs:
        for unit, seconds in each.seconds(programs, cores).items():
            # cube and vectors of a core share the way to memory
            before = by_unit.get(unit, 0.0)
            by_unit[unit] = before + seconds if unit == "memory" else max(before, seconds)
    unit = max(by_unit, key=lambda name: by_unit[name])
    kib = [sum(getattr(c, name) for c in costs) / 1024 for name in ("loaded", "stored")]
    wide = sum((c.vector for c in costs), start=costs[0].vector.__class__())
    vector = " ".join(f"{8 * w} bit {n // w / 1e3:.0f}k" for w, n in sorted(wide.items()))
    text = (
        f"{launch.kernel:<32}{programs:>4}{kib[0]:>12.0f}{kib[1]:>12.0f}"
        f"{sum(c.multiplied for c in costs) / 1e6:>10.1f}{sum(c.scalar_loads for c in costs):>8}"
        f"{by_unit[unit] * 1e6:>10.1f}  {unit:<14}{vector}"
    )
    return by_unit[unit], text


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.ascend.estimate")
    parser.add_argument("op")
    parser.add_argument("--shape", default="", help="only rows with these sizes: b=4,s1=1")
    chosen = parser.parse_args()
    wanted = dict(pair.split("=") for pair in chosen.shape.split(",") if pair)
    torch.set_num_threads(1)
    driver.install()
    print("ESTIMATES for Atlas A3, from the final HIVM and public rates; nothing ran on hardware.")
    print("Sizes are those of program 0; `bound` is the unit that the estimate finds the slowest.")
    for case in presets(chosen.op, "npu"):
        if any(str(case.shape.get(name)) != size for name, size in wanted.items()):
            continue
        rows: list[tuple[float, str]] = []
        recorder.observe = lambda launch, given, rows=rows: rows.append(_row(launch, given))
        case.call(case.make(torch.device("cpu"), 0))
        print(f"\n{chosen.op} {case.label}")
        print(
            f"{'launch':<32}{'grid':>4}{'in KiB':>12}{'out KiB':>12}{'MMAC':>10}{'loads':>8}"
            f"{'us':>10}  {'bound':<14}vector numbers"
        )
        for _, text in rows:
            print(text)
        total = sum(seconds for seconds, _ in rows)
        floor = max(case.bytes / 1.6e12, case.flops / 350e12)
        print(f"{_SUM:<68}{'':>10}{total * 1e6:>10.1f}  floor {floor * 1e6:.1f}", flush=True)


if __name__ == "__main__":
    main()
