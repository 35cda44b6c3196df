# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Runs the harness; see the package's own words."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from custom.dispatch import log
from custom.dispatch.common import memory as launcher_memory
from custom.dispatch.specs import BY_NAME
from custom.npu_ops import tune

from . import case as judgement
from . import controls, driver, isolated, memory, ops, report, sources
from .case import Case
from .compiler import Compiled, compile_for_npu
from .driver import Launch, recorder
from .lint import unbounded_indirect_loads
from .lowered import pipeline
from .toolchain import ROOT, digest, versions

RESULTS = ROOT / "tests/ascend/results.json"


@dataclass
class Outcome:
    """What the process of one case sends back."""

    key: str
    launches: list[Launch]
    share: float = 0.0
    findings: list[str] = field(default_factory=list)
    seconds: float = 0.0
    kept: bool = False


def prepare() -> None:
    """State of every process of a case."""
    torch.set_num_threads(1)
    driver.install()
    launcher_memory.empty = memory.empty


def _call(case: Case, arguments: dict[str, Any]) -> Any:
    before = log.calls[case.op, "npu"]
    outputs = getattr(torch.ops.custom, case.op)(**arguments)
    if log.calls[case.op, "npu"] != before + 1:
        raise RuntimeError("the NPU backend did not run")
    return outputs


def _key(case: Case, launches: list[Launch]) -> str:
    spec = BY_NAME[case.op]
    lowered = [(x.lowered_key, x.grid, x.scalars) for x in launches]
    read = sources.of(
        f"custom.npu_ops.{spec.file}",
        f"custom.dispatch.reference.{spec.file}",
        f"tests.ascend.ops.{spec.file}",
        "tests.ascend.case",
        "tests.ascend.memory",
    )
    tools = json.dumps(versions(), sort_keys=True)
    return digest(case.title, repr(case.cores), repr(lowered), read, tools, pipeline())


def examine(case: Case, kept: str | None) -> Outcome:
    """Lower the kernels of the case; run them unless `kept` is the key of this very run."""
    prepare()
    inputs = judgement.Inputs(case.dtype, case.seed)
    arguments = case.make(inputs)
    recorder.execute = False
    for recorder.cube_cores in case.cores:
        _call(case, judgement.copied(arguments))
    launches = list(recorder.launches)
    outcome = Outcome(_key(case, launches), launches)
    if outcome.key == kept:
        outcome.kept = True
        return outcome
    start = time.time()
    recorder.execute = True
    plain = judgement.copied(arguments)
    exact = judgement.reference(case.op, case.widen(judgement.copied(plain)))
    rounded = judgement.reference(case.op, judgement.copied(plain))
    first: dict[str, Any] = {}
    for recorder.cube_cores in case.cores:
        for name, value in arguments.items():  # a mutated argument starts anew
            if isinstance(value, torch.Tensor):
                value.copy_(plain[name])
        with memory.Forbidden(inputs.forbidden):
            outputs = _call(case, arguments)
        got = judgement.results(case.op, outputs, arguments)
        if not first:
            for share, sentence in case.judge(case, got, exact, rounded):
                # the worst one first
                at = 0 if share > outcome.share else len(outcome.findings)
                outcome.findings.insert(at, sentence)
                outcome.share = max(outcome.share, share)
            first = judgement.copied(got)
        elif not all(_same(first[name], got[name]) for name in first):
            outcome.share = float("inf")
            outcome.findings.insert(0, f"another result with {recorder.cube_cores} cube cores")
    outcome.seconds = time.time() - start
    return outcome


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(12345.0), b.nan_to_num(12345.0))


def build(linalg: str, options: dict[str, Any], ttir: str) -> Compiled:
    compiled = compile_for_npu(linalg, options)
    compiled.problems += unbounded_indirect_loads(ttir)
    return compiled


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.ascend")
    parser.add_argument("ops", nargs="*", help="files of ops/, default all")
    parser.add_argument("--cold", action="store_true", help="run everything, kept or not")
    parser.add_argument("--check", action="store_true", help="run a sample of what is kept")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--only", default="", help="cases whose title contains this")
    parser.add_argument("--keep-ir", metavar="DIR", help="write the IR of every kernel there")
    chosen = parser.parse_args()

    names = [module.name for module in pkgutil.iter_modules(ops.__path__)]
    whole = not chosen.ops and not chosen.only
    for name in chosen.ops:
        if name not in names:
            parser.error(f"no cases for {name}; there are {', '.join(names)}")
    modules = [importlib.import_module(f"{ops.__name__}.{n}") for n in chosen.ops or names]
    cases = [c for m in modules for c in m.CASES if chosen.only in c.title]
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    keys = {} if chosen.cold else {title: entry["key"] for title, entry in kept.items()}
    sample: list[str] = []
    if chosen.check:
        quick = [c.title for c in cases if kept.get(c.title, {"seconds": 99})["seconds"] < 20]
        sample = random.sample(quick, min(3, len(quick)))
        for title in sample:
            del keys[title]

    failures: list[str] = []
    outcomes: dict[str, Outcome] = {}
    calls = [(case, keys.get(case.title)) for case in cases]
    for (case, _), outcome in isolated.each(examine, calls, chosen.jobs):
        if isinstance(outcome, isolated.Crash):
            failures.append(f"{case.title}: {outcome}")
            print(f"FAIL {case.title}: {outcome}", flush=True)
            continue
        outcomes[case.title] = outcome
        if outcome.kept:
            outcome.share = kept[case.title]["share"]
            continue
        good = outcome.share <= 1
        print(
            f"{'ok  ' if good else 'FAIL'} {case.title} ({outcome.seconds:.0f} s, "
            f"{outcome.share:.2f} of the bound) " + ("" if good else "; ".join(outcome.findings)),
            flush=True,
        )
        if not good:
            failures.append(f"{case.title}: {'; '.join(outcome.findings)}")
            continue
        before = kept.get(case.title)
        if case.title in sample and before and before["key"] == outcome.key:
            if abs(before["share"] - outcome.share) > 0.25:
                failures.append(
                    f"{case.title}: kept with {before['share']}, now {outcome.share:.2f}"
                )
            continue
        kept[case.title] = {
            "key": outcome.key,
            "share": round(outcome.share, 3),
            "seconds": round(outcome.seconds),
        }

    # a case that passed is kept, whatever else fails
    RESULTS.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")

    distinct: dict[str, Launch] = {}
    for outcome in outcomes.values():
        for launch in outcome.launches:
            distinct.setdefault(launch.lowered_key, launch)
    compiled: dict[str, Compiled] = {}
    work = [(x.linalg, x.options, x.ttir) for x in distinct.values()]
    of_text = {(x.linalg, repr(x.options)): key for key, x in distinct.items()}
    for (linalg, options, _), answer in isolated.each(build, work, chosen.jobs):
        key = of_text[linalg, repr(options)]
        if isinstance(answer, isolated.Crash):
            answer = Compiled(False, str(answer))
        compiled[key] = answer
    if chosen.keep_ir:
        report.write_ir(chosen.keep_ir, distinct, compiled)

    rows = report.rows(tune.TABLE, outcomes, distinct, compiled)
    failures += [problem for row in rows for problem in row.problems if row.launches]
    failures += report.unlisted(tune.TABLE, distinct)
    if whole:
        failures += [f"{row.title}: no case reaches it" for row in rows if not row.launches]
        failures += report.forgotten_kernels(distinct)
    planted = controls.run(modules, chosen.jobs) if not chosen.only else []
    failures += [f"planted mistake not caught: {x.title}" for x in planted if not x.caught]
    print(report.table([row for row in rows if row.launches]))
    for each in planted:
        print(f"planted: {each.title}: {each.said}")
    print(
        f"{len(cases)} cases ({sum(o.kept for o in outcomes.values())} kept, the rest run now), "
        f"{len(distinct)} lowered kernels compiled, {len(planted)} planted mistakes"
    )
    if whole and not failures:
        kept = {title: kept[title] for title in sorted(outcomes)}
        report.write(rows, planted, outcomes, versions())
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    for failure in failures:
        print(f"FAIL {failure}")
    print("green" if not failures else f"{len(failures)} failures", flush=True)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
