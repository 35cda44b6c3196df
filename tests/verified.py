# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The table op x backend x how far verified, from the records that test runs wrote.

pytest --device D --record tests/records/NAME.json     writes a record
python -m tests.verified                                puts the tables into both READMEs
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from custom.dispatch import backends
from custom.dispatch.specs import SPECS

from . import figures

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "tests" / "records"


def records() -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json"))}


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
    return "not verified" if backends.has_kernel(which, spec) else "-"


def table() -> str:
    found, npu = records(), simulated()
    rows = ["| op | CPU | CUDA | Atlas A3 (NPU) |", "|---|---|---|---|"]
    for spec in SPECS:
        cells = [
            _cell(found, "cpu", spec.name, "reference"),
            _cell(found, "cuda", spec.name, "cuda"),
            f"{npu[spec.file]} cases, simulated" if npu[spec.file] else "-",
        ]
        rows.append(f"| `{spec.name}` | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n\n" + sources(found)


def sources(found: dict[str, dict[str, Any]]) -> str:
    """One line a record: where, when, with what."""
    lines = [
        f"- {name}: {record['hardware']}, {record['date']}, torch {record['torch']}"
        for name, record in found.items()
    ]
    return "\n".join(lines) + "\n"


def fresh(text: str) -> str:
    """`text` with both tables as they follow from the records and figures of today."""
    for name, content in (("verified", table()), ("speed", figures.table())):
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        block = f"{begin}\n{content}{end}"
        text = re.sub(f"{begin}.*?{end}", lambda _, block=block: block, text, flags=re.S)
    return text


if __name__ == "__main__":
    for readme in (ROOT / "README.md", ROOT / "README.zh.md"):
        readme.write_text(fresh(readme.read_text()))
