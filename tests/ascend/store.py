# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""results.json: what was found, under hashes of all that decided it.

cases       title -> [key, share of the bound, seconds]
refused     title -> key of a case whose launches were refused once each: see anew.py
planted     module of the case, file and title of a planted mistake -> [key, what its case said]:
            see controls.py
tree        of the last green run of everything: see tree.py
compilers   build -> hash of the compiler and of what reads its output
compiled    lowered text and options -> one entry a build, in the order of `compilers`: the KiB of
            [UB, L1, L0C], then the findings as "kind: text"; or the compiler's error; or null
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import sources
from .case import Case
from .compiler import MEMORIES, Compiled
from .lint import Finding
from .toolchain import BUILDS, ROOT, digest, stamp

PATH = ROOT / "tests/ascend/results.json"
Entry = list[Any] | str | None


@dataclass
class Store:
    cases: dict[str, list[Any]] = field(default_factory=dict)
    compiled: dict[str, dict[str, Entry]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    planted: dict[str, list[str]] = field(default_factory=dict)
    tree: str = ""

    def write(self) -> None:
        lines = ["{", ' "cases": {']
        lines.append(",\n".join(_line(*item) for item in sorted(self.cases.items())))
        lines += [" },", ' "refused": {']
        lines.append(",\n".join(_line(*item) for item in sorted(self.refused.items())))
        lines += [" },", ' "planted": {']
        lines.append(",\n".join(_line(*item) for item in sorted(self.planted.items())))
        lines += [" },", f' "tree": "{self.tree}",']
        lines += [f' "compilers": {json.dumps(stamps())},', ' "compiled": {']
        rows = {key: [of.get(build) for build in BUILDS] for key, of in self.compiled.items()}
        lines.append(",\n".join(_line(*item) for item in sorted(rows.items())))
        PATH.write_text("\n".join([*lines, " }", "}"]) + "\n")


def _line(name: str, value: Any) -> str:
    return f"  {json.dumps(name)}: {json.dumps(value)}"


def stamps() -> dict[str, str]:
    reader = sources.of("tests.ascend.compiler", "tests.ascend.isolated")
    return {build: digest(stamp(build), reader) for build in BUILDS}


def read() -> Store:
    """Without what another compiler, or another reader of its output, found."""
    if not PATH.exists():
        return Store()
    text = json.loads(PATH.read_text())
    now = stamps()
    valid = {build: text["compilers"].get(build) == now[build] for build in BUILDS}
    order = list(text["compilers"])
    compiled = {
        key: {
            build: entry
            for build, entry in zip(order, entries, strict=True)
            if valid.get(build) and entry is not None
        }
        for key, entries in text["compiled"].items()
    }
    return Store(text["cases"], compiled, text["refused"], text["planted"], text.get("tree", ""))


def entry(compiled: Compiled) -> Entry:
    if not compiled.ok:
        return compiled.error
    found = [f"{finding.kind}: {finding.text}" for finding in compiled.found]
    return [[compiled.kib[name] for name in MEMORIES], *found]


QUICK = 6  # seconds


def drawn(took: Mapping[Case, float]) -> list[Case]:
    """A case of each op to run anew, by the seconds that it took: any of the quick ones, or the
    quickest.  All ops together take 20 s of two cores, 50 at most."""
    by_op: dict[str, list[Case]] = {}
    for case in took:
        by_op.setdefault(case.op, []).append(case)
    found = []
    for cases in by_op.values():
        quick = [case for case in cases if took[case] <= QUICK]
        found.append(random.choice(quick) if quick else min(cases, key=lambda case: took[case]))
    return found


# KiB between the plans of one kernel by one build: of 70 compiles of 14 kernels 2 differed, by 8
# and by 14
SPREAD = {"1.0.0": 16}


def agree(kept: Entry, now: Entry, build: str) -> bool:
    """The same findings, and memories as large as this build plans them every time."""
    if kept is None or isinstance(kept, str) or isinstance(now, str) or now is None:
        return kept == now
    spread = SPREAD.get(build, 0)
    near = all(abs(a - b) <= spread for a, b in zip(kept[0], now[0], strict=True))
    return near and kept[1:] == now[1:]


def answer(kept: Entry) -> Compiled:
    if isinstance(kept, str):
        return Compiled(kept)
    assert kept is not None
    kib, *found = kept
    findings = [Finding(*text.split(": ", 1)) for text in found]
    return Compiled("", "", dict(zip(MEMORIES, kib, strict=True)), findings)
