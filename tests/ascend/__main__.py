# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Runs the harness; see the package's own words."""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch._dynamo  # noqa: F401  a second of every process that parts from this one
from custom.npu_ops.common import tune

from . import (
    anew,
    aten,
    calibrate,
    controls,
    estimate,
    isolated,
    known,
    limits,
    models,
    moved,
    mutants,
    ops,
    report,
    retry,
    store,
    tree,
)
from . import large as large_rows
from .case import Case
from .compiler import Compiled, compile_for_npu
from .driver import Launch
from .examine import Outcome, examine, lower, lower_large
from .store import Store
from .toolchain import BUILDS, versions

PLANTED_AGAIN = 24  # of the planted mistakes, in each --check


def modules(names: list[str]) -> list[ModuleType]:
    """models.py and the files of ops/ with these names; without names, all."""
    found = {x.name: f"{ops.__name__}.{x.name}" for x in pkgutil.iter_modules(ops.__path__)}
    found["models"] = models.__name__
    for name in names:
        if name not in found:
            sys.exit(f"no cases for {name}; there are {', '.join(found)}")
    return [importlib.import_module(found[name]) for name in names or found]


def lower_cases(cases: list[tuple[Case, str]], jobs: int) -> tuple[dict[str, Outcome], list[str]]:
    outcomes: dict[str, Outcome] = {}
    failures: list[str] = []
    for (case,), launches in isolated.each(lower, [(case,) for case, _ in cases], jobs):
        if isinstance(launches, isolated.Crash):
            failures.append(f"{case.title}: {launches}")
        else:
            outcomes[case.title] = Outcome("", launches)
    return outcomes, failures


def too_many(found: list[ModuleType], outcomes: dict[str, Outcome]) -> list[str]:
    """Cases whose calls launch more, or less, than their module says; there is a call for each
    number of cores."""
    failures = []
    for module in found:
        for case in module.CASES:
            listed = getattr(module, "LAUNCHES", {}).get(case.name)
            if listed is None or case.title not in outcomes:
                continue
            launches = len(outcomes[case.title].launches) // len(case.cores)
            if launches != listed:
                failures.append(f"{case.title}: {launches} launches, listed are {listed}")
    return failures


def lower_models(
    outcomes: dict[str, Outcome], jobs: int
) -> tuple[dict[str, list[Launch]], list[str]]:
    """The launches of the large calls, and which of their kernels no case ran."""
    launched: dict[str, list[Launch]] = {}
    failures: list[str] = []
    calls = [(op,) for op in sorted({large.op for large in models.LARGE})]
    for (op,), found in isolated.each(lower_large, calls, jobs):
        if isinstance(found, isolated.Crash):
            failures.append(f"{op} at full size: {found}")
        else:
            launched |= found
    ran = {x.lowered_key for outcome in outcomes.values() for x in outcome.launches}
    missing: dict[str, str] = {}
    for title, launches in launched.items():
        for x in launches:
            if x.lowered_key not in ran:
                missing.setdefault(x.lowered_key, f"{title}: no case runs {x.kernel} {x.constants}")
    return launched, failures + list(missing.values())


def some_controls(found: list[ModuleType], number: int) -> tuple[list[Any], set[str]]:
    """So many of the planted mistakes, by module, and the titles of the cases that catch them."""
    every = [(module, control) for module in found for control in module.CONTROLS]
    drawn = random.sample(every, min(number, len(every)))
    modules: list[Any] = []
    titles = set()
    for module in found:
        chosen = [control for of, control in drawn if of is module]
        names = {control.case for control in chosen}
        modules.append(
            SimpleNamespace(__name__=module.__name__, CASES=module.CASES, CONTROLS=chosen)
        )
        titles |= {case.title for case in module.CASES if case.name in names}
    return modules, titles


def run_cases(
    cases: list[tuple[Case, str]], kept: Store, sample: list[str], cold: bool, jobs: int
) -> tuple[dict[str, Outcome], list[str]]:
    """Outcomes by title, failures; what passed is put into `kept`."""
    outcomes: dict[str, Outcome] = {}
    failures: list[str] = []
    fresh = {title: entry[0] for title, entry in kept.cases.items() if title not in sample}
    calls = [(case, file, None if cold else fresh.get(case.title)) for case, file in cases]
    for (case, _, _), outcome in isolated.each(examine, calls, jobs):
        if isinstance(outcome, isolated.Crash):
            failures.append(f"{case.title}: {outcome}")
            print(f"FAIL {case.title}: {outcome}", flush=True)
            continue
        outcomes[case.title] = outcome
        if outcome.kept:
            outcome.share = kept.cases[case.title][1]
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
        before = kept.cases.get(case.title)
        if case.title in sample and before and before[0] == outcome.key:
            if abs(before[1] - outcome.share) > 0.25:
                failures.append(f"{case.title}: kept with {before[1]}, now {outcome.share:.2f}")
            continue
        kept.cases[case.title] = [outcome.key, round(outcome.share, 3), round(outcome.seconds)]
    return outcomes, failures


def compile_all(
    distinct: dict[str, Launch], kept: Store, sample: int, cold: bool, jobs: int
) -> tuple[dict[str, dict[str, Compiled]], list[str]]:
    """Answers by lowered text and build; a sample of the kept ones is asked for again."""
    pairs = [(key, build) for key in distinct for build in BUILDS]
    there = [] if cold else [x for x in pairs if x[1] in kept.compiled.get(x[0], {})]
    again = random.sample(there, min(sample, len(there)))
    skipped = set(there) - set(again)
    todo = [x for x in pairs if x not in skipped]
    answers: dict[str, dict[str, Compiled]] = {key: {} for key in distinct}
    for key, build in skipped:
        answers[key][build] = store.answer(kept.compiled[key][build])
    failures = []
    calls = [(distinct[key].linalg, distinct[key].options, build) for key, build in todo]
    places = {(text, repr(options), build): at for at, (text, options, build) in enumerate(calls)}
    for (text, options, build), answer in isolated.each(compile_for_npu, calls, jobs):
        key = todo[places[text, repr(options), build]][0]
        compiled = Compiled(str(answer)) if isinstance(answer, isolated.Crash) else answer
        answers[key][build] = compiled
        if sum(map(len, answers.values())) % 100 == 0:
            print(f"{sum(map(len, answers.values()))} of {len(pairs)} compiled", flush=True)
        entry = store.entry(compiled)
        before = kept.compiled.setdefault(key, {}).get(build)
        if (key, build) in again and not store.agree(before, entry, build):
            failures.append(
                f"{distinct[key].kernel} with {build}: kept as {before}, now {entry}: run --cold"
            )
        kept.compiled[key][build] = entry
    print(f"{len(todo)} compiles of {len(pairs)}, the others are kept", flush=True)
    return answers, failures


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.ascend")
    parser.add_argument("ops", nargs="*", help="files of ops/, default all")
    parser.add_argument("--cold", action="store_true", help="run everything, kept or not")
    parser.add_argument("--no-run", action="store_true", help="lower, compile and lint only")
    parser.add_argument("--check", action="store_true", help="run a case of each op, kept or not")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--only", default="", help="cases whose title contains this")
    parser.add_argument("--keep-ir", metavar="DIR", help="write the IR of every kernel there")
    parser.add_argument("--mutate", action="store_true", help="plant mechanical mistakes instead")
    parser.add_argument("--changed", action="store_true", help="those of changed functions alone")
    parser.add_argument("--large", action="store_true", help="all rows of the bench, instead")
    parser.add_argument("--sample", type=int, default=0, help="of the mistakes, so many")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    chosen = parser.parse_args()

    whole = not chosen.ops and not chosen.only
    found = modules(chosen.ops)
    cases = [(c, m.__name__) for m in found for c in m.CASES if chosen.only in c.title]
    kept = store.read()
    versions()  # once, before the processes part
    if chosen.mutate:
        of_ops = [case for case, file in cases if file != models.__name__]
        failed = mutants.run(of_ops, chosen.changed, chosen.sample, chosen.seed, chosen.jobs)
        report.write_mutants()
        return failed
    if chosen.large:
        lowered, failures = lower_cases(cases, chosen.jobs)
        of_cases = {x.lowered_key for outcome in lowered.values() for x in outcome.launches}
        told, refused = large_rows.run(0, of_cases, chosen.jobs)
        print("\n".join([*told, *(f"FAIL {x}" for x in [*failures, *refused])]))
        return bool(failures or refused)
    sample: list[str] = []
    now = tree.tree()
    settled = chosen.check and whole and kept.tree == now
    all_ran = whole and not settled
    if chosen.check:
        took = {c: kept.cases[c.title][2] for c, _ in cases if c.title in kept.cases}
        sample = [case.title for case in store.drawn(took)]
    controlled, refused_once = found, [case for case, _ in cases]
    if settled:
        print("nothing has changed since everything was run: a sample of each part")
        controlled, titles = some_controls(found, PLANTED_AGAIN)
        quick = [case for case in took if case.title in kept.refused and took[case] <= store.QUICK]
        refused_once = random.sample(quick, min(2, len(quick)))
        titles |= {*sample, *(case.title for case in refused_once)}
        cases = [x for x in cases if x[0].title in titles]

    if chosen.no_run:
        outcomes, failures = lower_cases(cases, chosen.jobs)
    else:
        outcomes, failures = run_cases(cases, kept, sample, chosen.cold, chosen.jobs)
        failures += anew.run(
            refused_once,
            outcomes,
            kept.refused,
            2 * chosen.check,
            chosen.cold,
            chosen.jobs,
        )
    failures += too_many(found, outcomes)
    failures += aten.uncaptured(
        (case.op, outcomes[case.title].aten) for case, _ in cases if case.title in outcomes
    )
    kept.write()  # a case that passed is kept, whatever else fails
    distinct: dict[str, Launch] = {}
    for outcome in outcomes.values():
        for launch in outcome.launches:
            distinct.setdefault(launch.lowered_key, launch)
    large: dict[str, list[Launch]] = {}
    if all_ran or "models" in chosen.ops:
        large, unrun = lower_models(outcomes, chosen.jobs)
        failures += unrun
        for launches in large.values():
            for launch in launches:
                distinct.setdefault(launch.lowered_key, launch)
    compiled, differing = compile_all(
        distinct, kept, 6 * chosen.check, chosen.cold or bool(chosen.keep_ir), chosen.jobs
    )
    failures += differing
    kept.write()
    if chosen.keep_ir:
        report.write_ir(chosen.keep_ir, distinct, compiled)

    told, differing = moved.run([case for case, _ in cases], outcomes, chosen.jobs)
    failures += differing
    print(*told, sep="\n", end="\n" * bool(told))
    rows = report.rows(tune.TABLE, outcomes, distinct, compiled)
    failures += [problem for row in rows for problem in row.problems if row.launches]
    failures += report.unlisted(tune.TABLE, distinct)
    # of a part, the op's own kernels that it launches; others may be there for another op
    own = {row.kernel for row in rows if row.launches and row.kernel.split(".")[0] in chosen.ops}
    asked = [row for row in rows if all_ran or (row.kernel in own and not chosen.only)]
    failures += [f"{row.title}: no case reaches it" for row in asked if not row.launches]
    if all_ran:
        failures += report.forgotten_kernels(distinct)
        failures += [f"{x}: nothing shows it any more" for x in known.unused()]
        if chosen.check:
            gone = sorted(set(kept.cases) - {case.title for case, _ in cases})
            failures += [f"{x}: kept, but no case any more: run tests/ascend/run.sh" for x in gone]
        of_cases = {x.lowered_key for outcome in outcomes.values() for x in outcome.launches}
        told, refused = large_rows.run(3, of_cases, chosen.jobs)
        failures += refused
        print("\n".join(told))
    if whole:
        if chosen.check:
            failures += report.miscounted()
        failures += mutants.unmatched()
        for _, broken in isolated.each(limits.broken, [()], 1):
            failures += [str(broken)] if isinstance(broken, isolated.Crash) else broken
        for _, wrong in isolated.each(estimate.stale, [()], 1):
            failures += [str(wrong)] if isinstance(wrong, isolated.Crash) else wrong
        for _, wrong in isolated.each(calibrate.claims, [()], 1):
            failures += [str(wrong)] if isinstance(wrong, isolated.Crash) else wrong
        told, refused = retry.run(chosen.jobs)
        failures += refused
        print("\n".join(told))
    partial = bool(chosen.only) or chosen.no_run
    planted = []
    if not partial:
        planted = controls.run(
            controlled,
            outcomes,
            kept.planted,
            all_ran,
            PLANTED_AGAIN * chosen.check,
            chosen.cold,
            chosen.jobs,
        )
        kept.write()
    failures += [f"planted mistake not caught: {x.title}" for x in planted if not x.caught]
    print(report.table([row for row in rows if row.launches]))
    for each in planted:
        print(f"planted: {each.title}: {each.said}")
    print(
        f"{len(cases)} cases ({sum(o.kept for o in outcomes.values())} kept, the rest run now), "
        f"{len(large)} calls at full size, "
        f"{len(distinct)} lowered kernels with {len(BUILDS)} compilers, "
        f"{len(planted)} planted mistakes"
    )
    if all_ran and not chosen.no_run and not failures:
        report.write(rows, planted, outcomes, versions())
        kept.cases = {title: kept.cases[title] for title in outcomes}
        kept.compiled = {key: kept.compiled[key] for key in distinct}
        asked = anew.chosen([case for case, _ in cases], outcomes)
        kept.refused = {title: kept.refused[title] for title in asked}
        kept.tree = now
        kept.write()
    for failure in failures:
        print(f"FAIL {failure}")
    print("green" if not failures else f"{len(failures)} failures", flush=True)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
