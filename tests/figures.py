# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The speed table, from the CSV files that `python -m custom.bench OP --csv` wrote.

docs/figures/public.csv holds the best public kernel of each row, measured on the same kind of card.
"""

from __future__ import annotations

import csv
from pathlib import Path

FIGURES = Path(__file__).parent.parent / "docs" / "figures"


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def table() -> str:
    public = {(r["op"], r["case"]): r for r in _rows(FIGURES / "public.csv")}
    lines = [
        "| op | shape | floor | ours | of floor | best public |",
        "|---|---|---|---|---|---|",
    ]
    for path in sorted(FIGURES.glob("npu_*.csv")):
        for row in _rows(path):
            best = public.get((row["op"], row["case"]))
            against = f"{best['us']} ({best['name']})" if best else "-"
            ours = float(row["median_us"])
            lines.append(
                f"| `{row['op'].removeprefix('npu_')}` | {row['case']} | "
                f"{float(row['floor_us']):.4g} | **{ours:.4g}** | {float(row['of_floor']):.0%} | "
                f"{against} |"
            )
    return "\n".join(lines) + "\n"
