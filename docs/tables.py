# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The tables of the READMEs and of docs/, from records that tests and benches wrote
and from the code.

pytest --device D --record tests/records/NAME.json              records the ops that it verifies
python -m custom.bench OP --csv docs/figures/OP.csv             writes the figures of an op
python -m custom.bench.models --csv docs/figures/models.csv     writes those of whole models
tests/ascend/run.sh --mutate                                    counts planted mistakes
python -m docs.tables                                           puts the tables into the pages
make figures                                                    draws the plots of the CSVs anew

docs/figures/public.csv holds the best public kernel of each row, measured on the same kind of card,
with its build; a peer of the row's own run that is faster takes its place.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

from custom.dispatch import backends
from custom.dispatch.registry import SPECS

from custom.bench.report import read_public

from . import cards, functions, graph_modes, numerics, op_table, plots

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "tests" / "records"
FIGURES = ROOT / "docs" / "figures"


def simulated() -> Counter[str]:
    """Cases of each op that passed the Ascend harness; their keys are hashes of what was run."""
    titles = json.loads((ROOT / "tests" / "ascend" / "results.json").read_text())["cases"]
    return Counter(title.partition(":")[0] for title in titles)


def _cell(found: dict[str, dict[str, Any]], name: str, op: str, backend: str) -> str:
    """What the record `name` shows of `op`; a kernel with no record is said to have none."""
    tests = found.get(name, {}).get("ops", {}).get(op, {}).get("tests", 0)
    if tests:
        return f"{tests} tests"
    spec = next(spec for spec in SPECS if spec.name == op)
    which = next(b for b in backends.BACKENDS if b.name == backend)
    return "not verified" if op_table.has_kernel(which, spec) else "-"


def verified() -> str:
    """Every op and the tests of each backend that passed."""
    found, npu = graph_modes.records(RECORDS), simulated()
    rows = ["| op | CPU | CUDA | Atlas A3, never on hardware |", "|---|---|---|---|"]
    for spec in SPECS:
        cases = npu[spec.name.removeprefix("npu_")]
        cells = [
            _cell(found, "cpu", spec.name, "reference"),
            _cell(found, "cuda", spec.name, "cuda"),
            f"{cases} cases, simulated" if cases else "-",
        ]
        rows.append(f"| `{spec.name}` | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n\n" + sources(found)


def sources(found: dict[str, dict[str, Any]]) -> str:
    """One line a record: where, when, with what."""
    lines = []
    for name, record in found.items():
        days = sorted({op["date"] for op in record["ops"].values()})
        when = " to ".join(dict.fromkeys([days[0], days[-1]]))
        lines.append(f"- {name}: {record['hardware']}, {when}, torch {record['torch']}")
    return "\n".join(lines) + "\n"


def _four(value: float) -> str:
    """Four digits, and never an exponent."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def _memory(peaks: dict[str, float]) -> str:
    """Peak extra memory of a call, results included, beside torch's; "-" where not measured."""
    if "ours" not in peaks:
        return "-"
    others = [f"{name} {_four(mib)}" for name, mib in peaks.items() if name.startswith("torch")]
    return f"**{_four(peaks['ours'])}**" + (f" ({', '.join(others)})" if others else "")


def speed() -> str:
    """Every row, a table for each op below its plot."""
    drawn, known = [], read_public()
    for op, rows in plots.measured().items():
        drawn += [f"### {op}", ""]
        if (FIGURES / f"{op}.svg").exists():
            drawn += [f"![public kernels' times over ours](figures/{op}.svg)", ""]
        head = ("shape", "floor", "ours", "of floor", "best public", "peak MiB")
        drawn += [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        for row in rows:
            best = next(iter(plots.peers(row, known).items()), None)
            line = (
                row.case,
                _four(row.floor_us),
                f"**{_four(row.median_us)}**",
                f"{row.of_floor:.0%}",
                f"{_four(best[1])} ({best[0]})" if best else "-",
                _memory(row.peaks),
            )
            drawn.append(f"| {' | '.join(line)} |")
        drawn.append("")
    return "\n".join(drawn)


def models() -> str:
    """Whole models, with our ops and without."""
    path = FIGURES / "models.csv"
    if not path.exists():
        return "There is no record of a GPU yet.\n"
    from custom.bench import models  # needs transformers

    rows = models.read_rows(path)
    where = f"{rows[0].device}, {rows[0].date}, tokens a second.\n\n"
    return where + "\n".join([models.HEAD, *map(models.markdown, rows)]) + "\n"


def _over(us: float | None, measured: dict[str, float]) -> str:
    if us is None:
        return "not asked"
    return f"{us:.0f} ({', '.join(f'{us / x:.2f}' for x in measured.values())})"


def _stages(found: dict[str, float] | None) -> str:
    if found is None:
        return ""
    ours, us = found["ours"], found["us"]
    return f"{ours:.0f} of {us:.0f} ({ours / us:.2f})"


def _mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def published() -> str:
    """Ascend: what others measured, beside what two models say of our kernels."""
    rows = json.loads((ROOT / "tests" / "ascend" / "published.json").read_text())
    drawn = [
        "| shape | on | measured, us | AscendC's stages by ours | ours (over each) "
        "| second (over each) | what binds ours | published in |",
        "|---|---|---|---|---|---|---|---|",
    ]
    ratios: dict[str, list[float]] = {"ours": [], "second": []}
    for row in rows:
        us = row["us"]
        cells = (
            row["what"],
            row["card"],
            ", ".join(f"{by} {x:g}" for by, x in us.items()),
            _stages(row.get("stages")),
            *(_over(row.get(name), us) for name in ratios),
            f"`{row['binds'].split('.')[-1]}`",
            row["source"],
        )
        drawn.append(f"| {' | '.join(cells)} |")
        for name, found in ratios.items():
            of = {by: row[name] / x for by, x in us.items()} if name in row else {}
            if name == "ours" and "stages" in row:
                of["AscendC"] = row["stages"]["ours"] / row["stages"]["us"]
            found += of.values()
    means = " and ".join(
        f"{name} {_mean(found):.2f} of {len(found)} ratios" for name, found in ratios.items()
    )
    drawn.append(f"\nGeometric means: {means}.")
    return "\n".join(drawn) + "\n"


def mutants() -> str:
    """Ascend: the last count of planted mistakes in its report."""
    report = (ROOT / "tests" / "ascend" / "REPORT.md").read_text()
    counted = re.search(
        r"^Of (\d+): (\d+) caught, (\d+) without effect, (\d+) survive, (\d+) not asked",
        report,
        re.M,
    )
    assert counted is not None
    planted, caught, idle, left, unasked = (f"{int(x):,}" for x in counted.groups())
    return (
        f"Of {planted} the cases notice {caught}, {idle} change nothing, each with its reason, "
        f"and {left} survive;\n{unasked} have not been asked since their function changed last.\n"
    )


def _kept(record: str, of: str, goal: float) -> str:
    """Two models beside `goal` times what is recorded, and whether the slower is below it."""
    drawn = [f"| what | {of} | ours | second | below | what binds ours |", "|" + "---|" * 6]
    for row in json.loads((ROOT / "tests" / "ascend" / record).read_text()):
        wanted = {by: goal * us for by, us in row["us"].items()}
        named = [f"{by} {us:g}" if goal == 1 else f"{us:.0f}" for by, us in wanted.items()]
        estimates = [row[model] for model in ("ours", "second") if model in row]
        cells = (
            row["what"],
            ", ".join(named),
            *(f"{row[model]:.0f}" if model in row else "-" for model in ("ours", "second")),
            "yes" if max(estimates) < min(wanted.values()) else "no",
            f"`{row['binds']}`",
        )
        drawn.append(f"| {' | '.join(cells)} |")
    return "\n".join(drawn) + "\n"


def pooled() -> str:
    """Ascend: two models beside the floors of rows of the bench."""
    drawn = ["| row | floor, us | ours | second | what binds ours |", "|" + "---|" * 5]
    for row in json.loads((ROOT / "tests" / "ascend" / "pooled.json").read_text()):
        op, _, label = row["what"].partition(": ")
        estimates = (f"{row[model]:.0f}" for model in ("ours", "second"))
        cells = (f"`{op}`, {label}", f"{row['us']['floor']:g}", *estimates, f"`{row['binds']}`")
        drawn.append(f"| {' | '.join(cells)} |")
    return "\n".join(drawn) + "\n"


BLOCKS = {
    "verified": verified,
    "published": published,
    "mutants": mutants,
    "deepseek v4": lambda: _kept("deepseek_v4.json", "CANN's, us", 1),
    "deepseek v4 layers": lambda: _kept("deepseek_v4_layers.json", "1.75 x floor, us", 1.75),
    "pooled": pooled,
    "speed": speed,
    "models": models,
    **graph_modes.BLOCKS,
    **functions.BLOCKS,
    **cards.BLOCKS,
    **numerics.BLOCKS,
    **op_table.BLOCKS,
    **plots.BLOCKS,
}
# page -> the blocks it shows
PAGES = {
    "README.md": ("ops",),
    "README.zh.md": ("ops zh",),
    "docs/verified.md": ("verified",),
    "docs/speed.md": ("summary", "speed"),
    "docs/models.md": ("models",),
    "docs/graph_mode.md": tuple(graph_modes.BLOCKS),
    "docs/architecture.md": tuple(functions.BLOCKS),
    "docs/parallel.md": tuple(cards.BLOCKS),
    "docs/numerics.md": tuple(numerics.BLOCKS),
    "docs/ascend.md": ("mutants",),
    "docs/ascend_speed.md": ("published", "deepseek v4", "deepseek v4 layers", "pooled"),
}


def fresh(page: str) -> str:
    """The page with its blocks as they follow from the records and figures of today."""
    text = (ROOT / page).read_text()
    for name in PAGES[page]:
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        block = f"{begin}\n{BLOCKS[name]()}{end}"
        text = re.sub(f"{begin}.*?{end}", lambda _, block=block: block, text, flags=re.S)
    return text


if __name__ == "__main__":
    for page in PAGES:
        (ROOT / page).write_text(fresh(page))
