# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""From launches and compiles to one table: every configuration of npu_ops/tune.py is a row."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .compiler import Compiled
from .driver import Launch
from .toolchain import ARCH, ROOT

MEMORY = {"UB": 192, "L1": 512, "L0C": 128}  # KiB of one core


@dataclass
class Row:
    """One configuration: all the variants (dtype, layout, flags) that were compiled of it."""

    kernel: str
    config: Any
    launches: list[Launch] = field(default_factory=list)
    compiled: list[Compiled] = field(default_factory=list)
    share: float = 0.0
    cases: int = 0

    @property
    def title(self) -> str:
        return f"{self.kernel} {self.config}"

    @property
    def problems(self) -> list[str]:
        found = []
        for compiled in self.compiled:
            if not compiled.ok:
                found.append(f"{self.title}: {compiled.error}")
            found += [f"{self.title}: {problem}" for problem in compiled.problems]
            found += [
                f"{self.title}: {memory} {kib} KiB of {MEMORY[memory]}"
                for memory, kib in compiled.kib.items()
                if kib > MEMORY[memory]
            ]
        return found

    def worst(self, memory: str) -> int:
        return max((c.kib.get(memory, 0) for c in self.compiled), default=0)


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
    compiled: Mapping[str, Compiled],
) -> list[Row]:
    found = []
    for kernel, configs in listed.items():
        for config in configs:
            row = Row(kernel, config)
            keys = [key for key, x in distinct.items() if matches(x, kernel, config)]
            row.launches = [distinct[key] for key in keys]
            row.compiled = [compiled[key] for key in keys]
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
    for path in sorted((ROOT / "npu_ops").glob("*.py")):
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


_HEAD = (
    "kernel", "configuration", "variants", "lowers", "cases", "of bound", "compiles", "UB", "L1",
    "L0C", "scalar loops",
)  # fmt: skip


def _cells(row: Row) -> tuple[str, ...]:
    good = bool(row.compiled) and all(c.ok for c in row.compiled)
    return (
        row.kernel,
        str(row.config),
        str(len(row.compiled)),
        "yes" if row.launches else "no",
        str(row.cases),
        f"{row.share:.2f}",
        "yes" if good else "NO",
        *(str(row.worst(memory)) for memory in MEMORY),
        str(max((c.scalar_loops for c in row.compiled), default=0)),
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
    text = [
        "# Ascend kernels, compiled and simulated",
        "",
        f"Written by `make test-ascend`: triton-ascend {tools['triton-ascend']}, the Ascend"
        f" compiler for {ARCH} (Atlas A3).  **Not run on hardware.**",
        "",
        "A row is a tile configuration of `npu_ops/tune.py`.  *variants*: lowered forms of it",
        "(dtype, layout, flags), all compiled; the memories are those of the largest, in KiB of a",
        f"core ({', '.join(f'{name} {kib}' for name, kib in MEMORY.items())}).  *cases*: calls",
        "of the op that launched it, run from the lowered form on the CPU; *of bound*: the largest",
        "error among them, as a share of the bound that the reference's own error against float64",
        "sets.  *scalar loops*: innermost loops of the final HIVM that touch single elements.",
        "",
        "| " + " | ".join(_HEAD) + " |",
        "|" + "---|" * len(_HEAD),
        *("| " + " | ".join(_cells(row)) + " |" for row in found),
        "",
        "## Planted mistakes",
        "",
        "Each was put into the kernel's source, and the harness had to say so.",
        "",
        "| mistake | caught by |",
        "|---|---|",
        *(f"| {x.title} | {x.said} |" for x in planted),
        "",
        "## Cases",
        "",
        "| case | of bound |",
        "|---|---|",
        *(f"| {title} | {x.share:.2f} |" for title, x in sorted(outcomes.items())),
        "",
    ]
    (ROOT / "tests/ascend/REPORT.md").write_text("\n".join(text))


def write_ir(folder: str, distinct: Mapping[str, Launch], compiled: Mapping[str, Compiled]) -> None:
    """TTIR, lowered form and final HIVM of every kernel, for reading."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for key, launch in distinct.items():
        stem = f"{launch.kernel}-{key[:8]}"
        (target / f"{stem}.ttir").write_text(launch.ttir)
        (target / f"{stem}.linalg").write_text(launch.linalg)
        (target / f"{stem}.hivm").write_text(compiled[key].hivm)
