# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The speed table, from the CSV files that `python -m custom.bench OP --csv` wrote.

docs/figures/public.csv holds the best public kernel of each row, measured on the same kind of card.
`python -m tests.figures` draws the plots beside the CSV files, as `--plot` would have.
"""

from __future__ import annotations

import csv
from pathlib import Path

from custom.bench.report import plot, read_public, read_rows

FIGURES = Path(__file__).parent.parent / "docs" / "figures"


def _memory(peaks: dict[str, float]) -> str:
    """Peak extra memory of a call, results included, beside torch's; "-" where not measured."""
    if "ours" not in peaks:
        return "-"
    others = [f"{name} {mib:.4g}" for name, mib in peaks.items() if name.startswith("torch")]
    return f"**{peaks['ours']:.4g}**" + (f" ({', '.join(others)})" if others else "")


def table() -> str:
    with (FIGURES / "public.csv").open(newline="") as file:
        public = {(r["op"], r["case"]): r for r in csv.DictReader(file)}
    rows = [row for path in sorted(FIGURES.glob("npu_*.csv")) for row in read_rows(path)]
    head = ["op", "shape", "floor", "ours", "of floor", "best public"]
    remembered = any(row.peaks for row in rows)
    if remembered:
        head.append("peak MiB")
    lines = [head]
    for row in rows:
        best = public.get((row.op, row.case))
        line = [
            f"`{row.op.removeprefix('npu_')}`",
            row.case,
            f"{row.floor_us:.4g}",
            f"**{row.median_us:.4g}**",
            f"{row.of_floor:.0%}",
            f"{best['us']} ({best['name']})" if best else "-",
        ]
        lines.append([*line, _memory(row.peaks)] if remembered else line)
    drawn = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([drawn[0], "|---" * len(head) + "|", *drawn[1:]]) + "\n"


def draw() -> None:
    """A plot of each op that has one."""
    for path in sorted(FIGURES.glob("npu_*.csv")):
        if (picture := path.with_suffix(".png")).exists():
            plot(picture, read_rows(path), f"{path.stem}, NVIDIA H200", read_public())


if __name__ == "__main__":
    draw()
