# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Mechanical mistakes, one at a time, in every kernel and launcher: does a case notice?

A mutant is caught if a case of an op that uses its file fails, crashes or raises.  Cases whose
launches stay the same (text, grid, arguments) are not run.  What no case notices survives, and must
be in EQUIVALENT with the reason why it changes no result.
"""

from __future__ import annotations

import ast
import builtins
import json
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from custom.dispatch.common import memory as launcher_memory
from custom.dispatch.specs import BY_NAME
from torch import Tensor

from . import controls, isolated, memory, sources
from .case import Case, Inputs
from .driver import Launch, recorder
from .examine import call, examine, prepare
from .toolchain import ROOT

RESULTS = ROOT / "tests/ascend/mutants.json"
_PATIENCE = 300  # seconds for one case
# what a part of a larger whole is told by
_PARTS = ("first", "start", "before", "begin", "offset", "written")
# tables and budgets: the table of configurations holds each of them to the compiler
_LEFT_OUT = ("__init__", "tune", "tiling", "cores", "entry", "front_end", "refusals")

# title of a mutant: why it changes no result
EQUIVALENT = {
    "ragged.page_rows: off by one: key.shape[0] <= 1 -> key.shape[0] < 1": (
        "the only page has the number 0, whatever lies between two"
    ),
}


@dataclass(frozen=True)
class Mutant:
    file: str
    function: str
    kind: str
    old: str
    new: str
    nth: int  # among those of this file with the same words
    text: str  # the whole file

    @property
    def title(self) -> str:
        nth = f" ({self.nth + 1})" if self.nth else ""
        return f"{self.file}.{self.function}: {self.kind}: {self.old} -> {self.new}{nth}"


_SHIFTED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
Change = tuple[str, ast.expr]  # kind, what takes the place
_ours: set[str] = set()  # modules of ours that the file at hand imports


def _compare(node: ast.expr) -> Iterator[Change]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _SHIFTED:
        shifted = _SHIFTED[type(node.ops[0])]()
        yield "off by one", ast.Compare(node.left, [shifted, *node.ops[1:]], node.comparators)


def _dropped_part(node: ast.expr) -> Iterator[Change]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        for part, rest in ((node.left, node.right), (node.right, node.left)):
            if isinstance(part, ast.Name) and part.id in _PARTS:
                yield "a part dropped", rest


def _swapped(node: ast.expr) -> Iterator[Change]:
    """Neighbours in a call of a kernel or of a helper of ours; those of tl and torch have types."""
    if not isinstance(node, ast.Call):
        return
    function = node.func
    helper = isinstance(function, ast.Name) and not hasattr(builtins, function.id)
    launch = isinstance(function, ast.Subscript)
    base = function.value if isinstance(function, ast.Attribute) else None
    if not (helper or launch or (isinstance(base, ast.Name) and base.id in _ours)):
        return
    given = node.args
    for i in range(len(given) - 1):
        pair = given[i : i + 2]
        if all(isinstance(x, ast.Name | ast.Attribute) for x in pair):
            swapped = [*given[:i], *pair[::-1], *given[i + 2 :]]
            yield "swapped", ast.Call(node.func, swapped, node.keywords)


def _moved_epsilon(node: ast.expr) -> Iterator[Change]:
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("sqrt") and node.args:
        inside = node.args[0]
        if isinstance(inside, ast.BinOp) and "eps" in ast.unparse(inside.right):
            outside = ast.Call(node.func, [inside.left, *node.args[1:]], node.keywords)
            yield "an epsilon moved", ast.BinOp(outside, ast.Add(), inside.right)
            yield "an epsilon dropped", outside


def _dropped_mask(node: ast.expr) -> Iterator[Change]:
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("tl.load", "tl.store"):
        kept = [x for x in node.keywords if x.arg not in ("mask", "other")]
        if len(kept) < len(node.keywords):
            yield "a mask dropped", ast.Call(node.func, node.args, kept)


_CHANGES: tuple[Callable[[ast.expr], Iterator[Change]], ...] = (
    _compare,
    _dropped_part,
    _swapped,
    _moved_epsilon,
    _dropped_mask,
)


def mutants_of(file: str, text: str) -> list[Mutant]:
    """In the order of the text; only inside of functions."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    data = text.encode()
    found: list[Mutant] = []
    counted: dict[tuple[str, ...], int] = {}
    tree = ast.parse(text)
    _ours.clear()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level:
            _ours.update(alias.name for alias in node.names)
    for function in tree.body:
        if not isinstance(function, ast.FunctionDef):
            continue
        for statement in function.body:
            for node in ast.walk(statement):
                if not isinstance(node, ast.expr):
                    continue
                for kind, place in (x for change in _CHANGES for x in change(node)):
                    assert node.end_lineno is not None and node.end_col_offset is not None
                    low = starts[node.lineno - 1] + node.col_offset
                    high = starts[node.end_lineno - 1] + node.end_col_offset
                    new = f"({ast.unparse(place)})".encode()
                    whole = (data[:low] + new + data[high:]).decode()
                    words = _difference(ast.unparse(node), ast.unparse(place))
                    name = (function.name, kind, *words)
                    nth = counted.get(name, 0)
                    counted[name] = nth + 1
                    found.append(Mutant(file, function.name, kind, *words, nth, whole))
    return found


def _difference(old: str, new: str) -> tuple[str, str]:
    """Without most of what both begin and end with."""
    low = 0
    while low < min(len(old), len(new)) and old[low] == new[low]:
        low += 1
    high = 0
    while high < min(len(old), len(new)) - low and old[-1 - high] == new[-1 - high]:
        high += 1
    low, high = max(0, low - 25), max(0, high - 25)
    return old[low : len(old) - high], new[low : len(new) - high]


def files_of(op: str) -> set[str]:
    """The files of npu_ops/ that the op's launcher is made of."""
    module = f"custom.npu_ops.{BY_NAME[op].file}"
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += [x for x in sources.imported(name) if x.startswith("custom.npu_ops.")]
    return {name.rpartition(".")[2] for name in seen} - set(_LEFT_OUT)


def _launched(case: Case) -> list[tuple[Any, ...]]:
    """What decides the result of the call, kernel by kernel, without running it: the lowered text
    and what it is called with, tensors by whose they are and where they begin."""
    names: dict[int, Any] = {}
    found: list[tuple[Any, ...]] = []

    def empty(*given: Any) -> Tensor:
        made = memory.empty(*given)
        names[made.untyped_storage().data_ptr()] = len(names)
        return made

    def described(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        whose = names.get(value.untyped_storage().data_ptr())
        return whose, value.dtype, value.shape, value.stride(), value.storage_offset()

    def observe(launch: Launch, given: list[Any]) -> None:
        found.append((launch.lowered_key, launch.grid, *map(described, given)))

    arguments = case.make(Inputs(case.dtype, case.seed))
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            names[value.untyped_storage().data_ptr()] = name
    recorder.execute, recorder.observe, launcher_memory.empty = False, observe, empty
    recorder.cube_cores = case.cores[0]
    call(case, arguments)
    recorder.execute, recorder.observe, launcher_memory.empty = True, None, memory.empty
    recorder.launches = []
    return found


def baseline(cases: list[Case]) -> dict[str, list[tuple[Any, ...]]]:
    prepare()
    return {case.title: _launched(case) for case in cases}


def _late(*_: Any) -> None:
    raise TimeoutError("no end")


def attempt(mutant: Mutant, cases: list[tuple[Case, str]], usual: dict[str, Any]) -> str:
    """What the first case that notices says, or nothing."""
    controls.plant_text(mutant.file, mutant.text)
    prepare()
    signal.signal(signal.SIGALRM, _late)
    for case, file in cases:
        signal.alarm(_PATIENCE)
        # the cases' own references may be made by an op of another file: those stay as they are
        if usual.get(case.title) == _launched(case):
            continue
        outcome = examine(case, file, None)
        signal.alarm(0)
        if outcome.share > 1:
            return f"{case.name}: {outcome.findings[0]}"
    return ""


def run(
    cases: list[tuple[Case, str]], seconds: dict[str, int], sample: int, seed: int, jobs: int
) -> int:
    """Plant, tell, and write mutants.json; 1 if one survives that nobody explained."""
    by_file: dict[str, list[tuple[Case, str]]] = {}
    for case, where in sorted(cases, key=lambda x: seconds.get(x[0].title, 99)):
        for file in files_of(case.op):
            by_file.setdefault(file, []).append((case, where))
    # another op's launcher is left to the cases of that op
    foreign = {spec.file for spec in BY_NAME.values()} - {BY_NAME[c.op].file for c, _ in cases}
    planted = [
        mutant
        for file in sorted(by_file.keys() - foreign)
        for mutant in mutants_of(file, (ROOT / f"npu_ops/{file}.py").read_text())
    ]
    of_all = len(planted)
    if sample:
        planted = random.Random(seed).sample(planted, min(sample, of_all))
    print(f"{len(planted)} of {of_all} mistakes", flush=True)
    usual: dict[str, Any] = {}
    by_op: dict[str, list[Case]] = {}
    for case, _ in cases:
        by_op.setdefault(case.op, []).append(case)
    for _, answer in isolated.each(baseline, [(x,) for x in by_op.values()], jobs):
        if isinstance(answer, isolated.Crash):
            sys.exit(f"without a mistake: {answer}")
        usual |= answer
    records = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    began, unexplained = time.time(), 0
    calls = [(mutant, by_file[mutant.file], usual) for mutant in planted]
    for done, ((mutant, *_), said) in enumerate(isolated.each(attempt, calls, jobs), 1):
        record = asdict(Verdict(mutant.file, mutant.kind, str(said)[:120]))
        records[mutant.title] = record
        if not said:
            reason = EQUIVALENT.get(mutant.title)
            unexplained += reason is None
            print(f"SURVIVES {mutant.title}: {reason or 'no reason is given'}", flush=True)
        if done % 10 == 0:
            left = (time.time() - began) / done * (len(planted) - done) / 60
            print(f"{done} of {len(planted)}, {left:.0f} minutes left", flush=True)
        RESULTS.write_text(json.dumps(dict(sorted(records.items())), indent=0) + "\n")
    caught = sum(bool(records[x.title]["said"]) for x in planted)
    print(f"{caught} of {len(planted)} caught, {unexplained} survivors without a reason")
    return bool(unexplained)


@dataclass(frozen=True)
class Verdict:
    file: str
    kind: str
    said: str  # by the first case that noticed; empty: it survived


def table() -> list[str]:
    """Markdown, of what mutants.json has."""
    if not RESULTS.exists():
        return ["Not run."]
    records = {t: Verdict(**x) for t, x in json.loads(RESULTS.read_text()).items()}
    kinds = sorted({x.kind for x in records.values()})
    lines = ["| file | " + " | ".join(kinds) + " |", "|---|" + "---|" * len(kinds)]
    for file in sorted({x.file for x in records.values()}):
        cells = []
        for kind in kinds:
            here = [x for x in records.values() if (x.file, x.kind) == (file, kind)]
            cells.append(f"{sum(bool(x.said) for x in here)} of {len(here)}" if here else "")
        lines.append(f"| {file} | " + " | ".join(cells) + " |")
    caught = sum(bool(x.said) for x in records.values())
    lines += ["", f"{caught} of {len(records)} caught.  Those that survive:", ""]
    lines += [
        f"- `{title}`: {EQUIVALENT.get(title, 'not explained yet')}"
        for title, x in records.items()
        if not x.said
    ]
    return lines
