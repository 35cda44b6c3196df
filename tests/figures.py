# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The speed table, from the CSV files that `python -m custom.bench OP --csv` wrote.

docs/figures/public.csv holds the best public kernel of each row, measured on the same kind of card;
a peer of the row's own run that is faster takes its place.
`python -m tests.figures` draws the plots beside the CSV files, as `--plot` would have.
"""

from __future__ import annotations

import csv
from pathlib import Path

from custom.bench.report import Row, plot, read_public, read_rows

FIGURES = Path(__file__).parent.parent / "docs" / "figures"


def _four(value: float) -> str:
    """Four digits, and never an exponent."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def _best(row: Row, public: dict[str, str] | None) -> str:
    """The fastest that is not ours: a peer of the same run, or the best public kernel on record."""
    times = {name: us for name, us in row.peers.items() if name != "reference"}
    if public:
        times[public["name"]] = min(float(public["us"]), times.get(public["name"], float("inf")))
    if not times:
        return "-"
    name = min(times, key=times.__getitem__)
    return f"{_four(times[name])} ({name})"


def _memory(peaks: dict[str, float]) -> str:
    """Peak extra memory of a call, results included, beside torch's; "-" where not measured."""
    if "ours" not in peaks:
        return "-"
    others = [f"{name} {_four(mib)}" for name, mib in peaks.items() if name.startswith("torch")]
    return f"**{_four(peaks['ours'])}**" + (f" ({', '.join(others)})" if others else "")


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
        line = [
            f"`{row.op.removeprefix('npu_')}`",
            row.case,
            _four(row.floor_us),
            f"**{_four(row.median_us)}**",
            f"{row.of_floor:.0%}",
            _best(row, public.get((row.op, row.case))),
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
