# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""From launches and compiles to one table: every configuration of tune.py is a row."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..support import places
from . import known, mutants
from .compiler import Compiled
from .driver import Launch
from .lint import Finding, unbounded_indirect_loads
from .toolchain import ARCH, BUILDS, ROOT, built

REPORT = ROOT / "tests/ascend/REPORT.md"
MEMORY = {"UB": 192, "L1": 512, "L0C": 128}  # KiB of one core


@dataclass
class Row:
    """One configuration: all the variants (dtype, layout, flags) that were compiled of it."""

    kernel: str
    config: Any
    launches: list[Launch] = field(default_factory=list)
    compiled: dict[str, list[Compiled]] = field(default_factory=dict)  # by build
    share: float = 0.0
    cases: int = 0

    @property
    def title(self) -> str:
        return f"{self.kernel} {self.config}"

    @property
    def found(self) -> list[tuple[str, Finding]]:
        """What is judged, each once, by build."""
        listed = []
        for build, answers in self.compiled.items():
            findings = {finding for compiled in answers for finding in compiled.found}
            for launch in self.launches:
                findings.update(unbounded_indirect_loads(launch.ttir))
            if self.worst("UB", build) > known.TIGHT:
                findings.add(Finding("tight", f"{self.worst('UB', build)} KiB of UB"))
            listed += [(build, x) for x in sorted(findings) if build in known.KINDS[x.kind][1]]
        return listed

    @property
    def problems(self) -> list[str]:
        told = []
        for build, answers in self.compiled.items():
            told += sorted(
                {f"{build}: {compiled.error}" for compiled in answers if not compiled.ok}
            )
            told += [
                f"{build}: {self.worst(memory, build)} KiB of {memory}, there are {kib}"
                for memory, kib in MEMORY.items()
                if self.worst(memory, build) > kib
            ]
        told += [
            f"{build}: {x.kind}: {x.text}"
            for build, x in self.found
            if known.expected(self.kernel, self.config, x.kind, build) is None
        ]
        return [f"{self.title}: {text}" for text in told]

    def worst(self, memory: str, build: str) -> int:
        return max((c.kib.get(memory, 0) for c in self.compiled.get(build, ())), default=0)


def matches(launch: Launch, kernel: str, config: Any) -> bool:
    return (
        launch.kernel == kernel
        and all(launch.constants.get(name) == value for name, value in config.tiles.items())
        and launch.options == dict(config.options)
    )


def rows(
    listed: Mapping[str, Sequence[Any]],
    outcomes: Mapping[str, Any],
    distinct: Mapping[str, Launch],
    compiled: Mapping[str, Mapping[str, Compiled]],
) -> list[Row]:
    found = []
    for kernel, configs in listed.items():
        for config in configs:
            row = Row(kernel, config)
            keys = [key for key, x in distinct.items() if matches(x, kernel, config)]
            row.launches = [distinct[key] for key in keys]
            row.compiled = {build: [compiled[key][build] for key in keys] for build in BUILDS}
            for outcome in outcomes.values():
                if any(matches(x, kernel, config) for x in outcome.launches):
                    row.cases += 1
                    row.share = max(row.share, outcome.share)
            found.append(row)
    return found


def unlisted(listed: Mapping[str, Sequence[Any]], distinct: Mapping[str, Launch]) -> list[str]:
    return [
        f"{x.kernel} was launched with {x.constants} {x.options}, which no table lists"
        for x in distinct.values()
        if not any(matches(x, x.kernel, config) for config in listed.get(x.kernel, ()))
    ]


def forgotten_kernels(distinct: Mapping[str, Launch]) -> list[str]:
    """Jitted functions of npu_ops/ that were neither launched nor are called by another."""
    launched = {launch.kernel for launch in distinct.values()}
    jitted: set[str] = set()
    called: set[str] = set()
    for path in places.files().values():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any(
                "jit" in ast.unparse(decorator) for decorator in node.decorator_list
            ):
                jitted.add(f"{path.stem}.{node.name}")
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Call):
                        called.add(ast.unparse(inner.func).rpartition(".")[2])
    return [
        f"{name}: no case launches it"
        for name in sorted(jitted - launched)
        if name.rpartition(".")[2] not in called
    ]


_HEAD = ("kernel", "configuration", "variants", "cases", "of bound", *BUILDS, "known")


def _memories(row: Row, build: str) -> str:
    """UB/L1/L0C of the largest variant, or what the compiler said."""
    errors = [compiled.error for compiled in row.compiled[build] if not compiled.ok]
    if errors:
        overflow = re.match(r"\w+ overflow", errors[0])
        return overflow[0] if overflow else "refused"
    return "/".join(str(row.worst(memory, build)) for memory in MEMORY)


def _known(row: Row) -> str:
    """The kinds found, with their builds where those are not all that are asked."""
    kinds: dict[str, list[str]] = {}
    for build, x in row.found:
        if build not in kinds.setdefault(x.kind, []):
            kinds[x.kind].append(build)
    return ", ".join(
        kind if len(builds) == len(known.KINDS[kind][1]) else f"{kind} ({', '.join(builds)})"
        for kind, builds in sorted(kinds.items())
    )


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.kernel,
        str(row.config),
        str(len(row.launches)),
        str(row.cases),
        f"{row.share:.2f}",
        *(_memories(row, build) for build in BUILDS),
        _known(row),
    )


def table(found: Sequence[Row]) -> str:
    lines = [_HEAD, *(_cells(row) for row in found)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEAD))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def write(
    found: Sequence[Row], planted: Sequence[Any], outcomes: Mapping[str, Any], tools: dict[str, str]
) -> None:
    builds = [f"{build} ({built(build)})" for build in BUILDS]
    text = [
        "# Ascend kernels, compiled and simulated",
        "",
        f"Written by `make test-ascend`: triton-ascend {tools['triton-ascend']} and the Ascend"
        f" compiler for {ARCH} (Atlas A3) of ascendnpu-ir {', '.join(builds)}.",
        "**Not run on hardware**, where the compiler is the one of the CANN that is installed.",
        "",
        "A row is a tile configuration of `npu_ops/common/tune.py`.  *variants*: its lowered forms",
        "(dtype, layout, flags), all compiled with every build; the column of a build has the KiB",
        "of the largest, in the memories of a core:",
        f"{', '.join(f'{name} of {kib}' for name, kib in MEMORY.items())}.  *cases*: calls",
        "of the op that launched it, run from the lowered form on the CPU; *of bound*: the largest",
        "error among them, as a share of the bound that the reference's own error against float64",
        "sets.  *known*: findings that are listed below, with the builds that show them where not",
        "all do.",
        "",
        "| " + " | ".join(_HEAD) + " |",
        "|" + "---|" * len(_HEAD),
        *("| " + " | ".join(_cells(row)) + " |" for row in found),
        "",
        "## Known findings",
        "",
        *(f"- *{kind}*: {text}" for kind, (text, _) in known.KINDS.items()),
        "",
        "| kernel | finding | why it stays |",
        "|---|---|---|",
        *(f"| {x.kernel} {x.where} | {x.kind} | {x.reason} |" for x in known.KNOWN),
        "",
        "## Planted mistakes",
        "",
        "Each was put into the kernel's source, and the harness had to say so.",
        "",
        "| mistake | caught by |",
        "|---|---|",
        *(f"| {x.title} | {x.said} |" for x in planted),
        "",
        *_mutants(),
        "## Cases",
        "",
        "| case | of bound |",
        "|---|---|",
        *(f"| {title} | {x.share:.2f} |" for title, x in sorted(outcomes.items())),
        "",
    ]
    REPORT.write_text("\n".join(text))


def _mutants() -> list[str]:
    return [
        "## Mechanical mistakes",
        "",
        "Planted by `make mutate-ascend` in kernels and launchers, one at a time; a cell has those",
        "that a case noticed, of those planted.",
        "",
        *mutants.table(),
        "",
    ]


def miscounted() -> list[str]:
    """A failure if the report is of other mechanical mistakes than today's."""
    if "\n".join(_mutants()) in REPORT.read_text():
        return []
    return ["REPORT.md is of other mistakes: run tests/ascend/run.sh and python -m docs.tables"]


def write_mutants() -> None:
    """Their part of the report alone."""
    before, _, rest = REPORT.read_text().partition("## Mechanical mistakes\n")
    after = rest[rest.index("## Cases\n") :]
    REPORT.write_text(before + "\n".join(_mutants()) + "\n" + after)


def write_ir(
    folder: str,
    distinct: Mapping[str, Launch],
    compiled: Mapping[str, Mapping[str, Compiled]],
) -> None:
    """TTIR, lowered form and, by build, the final HIVM of every kernel, for reading."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for key, launch in distinct.items():
        stem = f"{launch.kernel}-{key[:8]}"
        (target / f"{stem}.ttir").write_text(launch.ttir)
        (target / f"{stem}.linalg").write_text(launch.linalg)
        for build, answer in compiled[key].items():
            (target / f"{stem}-{build}.hivm").write_text(answer.hivm)
