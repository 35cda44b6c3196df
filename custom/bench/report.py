# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The table of a benchmark: text, CSV, plot, and the comparison with an earlier CSV."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

# in a clone of the repository: the best public kernel of each row, where one was measured
_PUBLIC = Path(__file__).resolve().parents[2] / "docs" / "figures" / "public.csv"


@dataclass(frozen=True)
class Row:
    op: str
    case: str
    backend: str
    error: float
    median_us: float
    p20_us: float
    p80_us: float
    floor_us: float
    of_floor: float
    tflops: float
    gb_per_s: float
    peers_us: str  # "name=microseconds; ..."
    peak_mib: str = ""  # "ours=MiB; name=MiB; ...": device memory at its peak, beside the inputs
    stages_us: str = ""  # as peers_us; of an op that is composed of others, each alone

    @property
    def peers(self) -> dict[str, float]:
        return unpacked(self.peers_us)

    @property
    def stages(self) -> dict[str, float]:
        return unpacked(self.stages_us)

    @property
    def peaks(self) -> dict[str, float]:
        return unpacked(self.peak_mib)


def packed(named: Mapping[str, float], form: str = ".2f") -> str:
    return "; ".join(f"{name}={value:{form}}" for name, value in named.items())


def unpacked(text: str) -> dict[str, float]:
    pairs = [pair.split("=") for pair in text.split("; ") if pair]
    return {name: float(value) for name, value in pairs}


def text(rows: Sequence[Row], before: dict[tuple[str, str], float]) -> str:
    """A table; `before` holds the medians of an earlier CSV."""
    head = ["case", "median us", "p20", "p80", "floor us", "of floor", "TFLOPS", "GB/s"]
    peers = list(dict.fromkeys(name for row in rows for name in row.peers))
    head += [f"x {name}" for name in peers]
    # memory only where it was measured, which is on CUDA
    peaks = list(dict.fromkeys(name for row in rows for name in row.peaks))
    head += ["MiB" if name == "ours" else f"MiB {name}" for name in peaks]
    stages = list(dict.fromkeys(name for row in rows for name in row.stages))
    head += (["x before"] if before else []) + stages
    lines = [head]
    for row in rows:
        line = [
            row.case,
            f"{row.median_us:.1f}",
            f"{row.p20_us:.1f}",
            f"{row.p80_us:.1f}",
            f"{row.floor_us:.1f}",
            f"{row.of_floor:.0%}",
            f"{row.tflops:.3g}",
            f"{row.gb_per_s:.3g}",
        ]
        line += [f"{row.peers[p] / row.median_us:.2f}" if p in row.peers else "-" for p in peers]
        line += [f"{row.peaks[p]:.4g}" if p in row.peaks else "-" for p in peaks]
        if before:
            old = before.get((row.op, row.case))
            line.append(f"{old / row.median_us:.2f}" if old else "-")
        line += [f"{row.stages[name]:.1f}" if name in row.stages else "-" for name in stages]
        lines.append(line)
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def write_table(path: Path, kind: type, rows: Sequence[Any], digits: int) -> None:
    """Rows of a dataclass, their floats to so many digits."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(kind)], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            cells = asdict(row).items()
            writer.writerow({k: f"{x:.{digits}g}" if isinstance(x, float) else x for k, x in cells})


def read_medians(path: Path) -> dict[tuple[str, str], float]:
    with path.open(newline="") as file:
        return {(r["op"], r["case"]): float(r["median_us"]) for r in csv.DictReader(file)}


def read_rows(path: Path) -> list[Row]:
    """What write_csv wrote, now or before it had all of today's columns."""
    floats = {field.name for field in fields(Row) if field.type == "float"}

    def parsed(row: dict[str, Any]) -> dict[str, Any]:
        return {name: float(cell) if name in floats else cell for name, cell in row.items()}

    with path.open(newline="") as file:
        return [Row(**parsed(row)) for row in csv.DictReader(file)]


def read_public() -> dict[tuple[str, str], tuple[str, float]]:
    """Of a row (op, case) the best public kernel on record: its name and its microseconds."""
    if not _PUBLIC.exists():
        return {}
    with _PUBLIC.open(newline="") as file:
        return {(r["op"], r["case"]): (r["name"], float(r["us"])) for r in csv.DictReader(file)}


def plot(
    path: Path,
    rows: Sequence[Row],
    title: str,
    public: Mapping[tuple[str, str], tuple[str, float]],
) -> None:
    """Bars of the medians, ours beside the peers', with the floor as a line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    beside = {
        row.case: row.peers | {"best public": best[1]}
        if (best := public.get((row.op, row.case)))
        else row.peers
        for row in rows
    }
    if any(row.stages for row in rows):
        figure = _stacks(rows, beside)
        figure.suptitle(title)
    else:
        figure, axes = plt.subplots(figsize=(2.2 + 1.3 * len(rows), 4.2), layout="constrained")
        axes.set_yscale("log")
        centre = _bars(axes, rows, beside)
        axes.set_ylabel("microseconds")
        middles = [x + centre for x in range(len(rows))]
        axes.set_xticks(middles, [row.case for row in rows], rotation=20, ha="right")
        axes.set_title(title)
        axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _stacks(rows: Sequence[Row], beside: Mapping[str, Mapping[str, float]]) -> Any:
    """A panel for each row, on its own scale: the op in one call, its stages end to end as each
    takes alone, and the peers but the reference, whose length would hide the rest."""
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(name for row in rows for name in row.stages))
    colours = dict(zip(names, ["#0072B2", "#56B4E9", "#009E73", "#E69F00"], strict=False))
    across = min(3, len(rows))
    down = -(-len(rows) // across)
    figure, panels = plt.subplots(
        down,
        across,
        figsize=(1 + 3.9 * across, 0.9 + 1.9 * down),
        layout="constrained",
        squeeze=False,
    )
    for panel in panels.flat[len(rows) :]:
        panel.set_axis_off()
    for panel, row in zip(panels.flat, rows, strict=False):
        others = {name: us for name, us in beside[row.case].items() if name != "reference"}
        longest = max(row.median_us, sum(row.stages.values()), *others.values(), row.floor_us)
        panel.set_xlim(0, 1.14 * longest)
        lines = ["in one call", "its stages", *others]
        panel.set_yticks(range(len(lines)), lines)
        panel.invert_yaxis()
        panel.barh(0, row.median_us, color="#333333")
        end = 0.0
        for name, us in row.stages.items():
            panel.barh(1, us, left=end, color=colours.get(name), label=name)
            if us > 0.07 * longest:
                panel.text(
                    end + us / 2, 1, f"{us:.0f}", ha="center", va="center", color="white", size=8
                )
            end += us
        ends = [row.median_us, end, *others.values()]
        for i, us in enumerate(others.values()):
            panel.barh(2 + i, us, color="#BBBBBB")
        for i, us in enumerate(ends):
            panel.text(us + 0.012 * longest, i, f"{us:.0f}", va="center", size=8)
        panel.axvline(row.floor_us, color="black", linestyle="dashed", linewidth=1, label="floor")
        panel.set_title(f"{row.case}: floor {row.floor_us:.0f}", size=9)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[-1]:
        panel.set_xlabel("microseconds")
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncol=len(labels), frameon=False)
    return figure


def curves(path: Path, rows: Sequence[Row], title: str) -> None:
    """TFLOPS over the length of the sequences, ours and the peers', a panel for each head size.
    Not the reference's, which would lie on the axis."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels: dict[str, list[tuple[int, Row]]] = {}
    totals: set[int] = set()
    for row in rows:
        found = re.match(r"B(\d+) (H\S+ D\S+), (\d+) x \d+(.*)", row.case)
        if found is None:
            raise ValueError(f"{row.case}: no batch, heads and length")
        totals.add(int(found[1]) * int(found[3]))
        panels.setdefault(found[2] + found[4], []).append((int(found[3]), row))
    in_all = f", {totals.pop()} in all" if len(totals) == 1 else ""
    figure, axes = plt.subplots(
        1, len(panels), figsize=(1 + 4.2 * len(panels), 4), layout="constrained", squeeze=False
    )
    for panel, (name, points) in zip(axes[0], panels.items(), strict=True):
        work = [row.tflops * row.median_us for _, row in points]
        times = {"ours": [row.median_us for _, row in points]}
        for peer in dict.fromkeys(peer for _, row in points for peer in row.peers):
            if peer == "reference":
                continue
            times[peer] = [row.peers.get(peer, float("nan")) for _, row in points]
        for label, us in times.items():
            rates = [w / t for w, t in zip(work, us, strict=True)]
            panel.plot([n for n, _ in points], rates, "o-", label=label)
        panel.set_xscale("log", base=2)
        panel.set_xticks([n for n, _ in points], [str(n) for n, _ in points])
        panel.set_ylim(bottom=0)
        panel.set_xlabel(f"tokens of a sequence{in_all}")
        panel.set_title(name)
        panel.grid(alpha=0.3)
        panel.legend()
    axes[0][0].set_ylabel("TFLOPS")
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _bars(axes: Any, rows: Sequence[Row], beside: Mapping[str, Mapping[str, float]]) -> float:
    """Draw them; the distance from a row's first bar to the middle of its bars."""
    others = list(dict.fromkeys(name for named in beside.values() for name in named))
    width = 0.8 / (1 + len(others))
    places = range(len(rows))
    axes.bar(places, [row.median_us for row in rows], width, label="ours")
    for i, name in enumerate(others, 1):
        heights = [beside[row.case].get(name, 0.0) for row in rows]
        axes.bar([x + i * width for x in places], heights, width, label=name)
    for x, row in enumerate(rows):
        left, right = x - width / 2, x + (len(others) + 0.5) * width
        label = "floor" if x == 0 else "_nolegend_"
        axes.hlines(row.floor_us, left, right, colors="black", linestyles="dashed", label=label)
    return len(others) * width / 2
