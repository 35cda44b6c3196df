# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Which tests execute a statement, or read its file: a trace of each test file, kept in .mutate/
until the test file changes."""

from __future__ import annotations

import json
import marshal
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .changes import ROOT, Mutant, Source, digest, files, source
from .inside.sitecustomize import SEEN

HOME = ROOT / ".mutate"
INSIDE = ROOT / "tests/mutate/inside"
MOST = 100_000  # statements of a file
_EACH = 8  # of a test function's cases that execute a statement: the fastest, and others
# they run other tests, which count by themselves; or copies of the tree
_LEFT_OUT = ("test_under_the_interpreter", "test_contributing.py")
# they read the tree on disk, or measure the machine
_FILES_LEFT_OUT = {"test_contributing", "test_documents", "test_packaging", "test_mutate"}
_NOT_HANDED_ON = ("TRITON_INTERPRET", "CUSTOM_BACKEND", "PYTHONDONTWRITEBYTECODE")
_PATIENCE = 3600  # seconds of a test file

World = tuple[tuple[str, str], ...]  # variables, those of inside/sitecustomize.py


@dataclass(frozen=True)
class Test:
    world: World
    id: str
    seconds: float

    @property
    def name(self) -> str:
        """As a record has it."""
        return " ".join([*(f"{name}={value}" for name, value in self.world), self.id])


@dataclass
class Map:
    tests: dict[str, Test] = field(default_factory=dict)  # by name
    # file -> statement -> names of tests
    of: dict[str, dict[str, set[str]]] = field(default_factory=lambda: defaultdict(dict))

    def asked(self, mutant: Mutant) -> list[Test]:
        """The tests of its statement; of its function, where that is newer than the map; of its
        file, where it runs at import."""
        here = self.of.get(mutant.file, {})
        own = here.get(mutant.statement.key)
        names = set(own or ())
        if not mutant.function or names == {"import"}:
            names = set().union(*here.values())
        elif own is None:
            same = (x for key, x in here.items() if key.startswith(f"{mutant.function} "))
            names = set().union(*same)
        names |= here.get("read", set())
        return [self.tests[name] for name in names if name in self.tests]


def environment(**more: str) -> dict[str, str]:
    """No pool of threads; what is compiled is kept out of the tree."""
    paths = f"{INSIDE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)
    base = {name: value for name, value in os.environ.items() if name not in _NOT_HANDED_ON}
    kept = {"PYTHONPYCACHEPREFIX": str(HOME / "compiled"), "PYTHONPATH": paths}
    return base | {"OMP_NUM_THREADS": "1"} | kept | more


def test_files() -> list[Path]:
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return [path for path in found if path.stem not in _FILES_LEFT_OUT]


def _traced(path: Path) -> Path:
    return HOME / f"{path.stem}.json"


def _stamp(path: Path) -> str:
    return digest(path.read_text())


def old() -> list[Path]:
    """Test files without a trace of today."""
    found = []
    for path in test_files():
        kept = _traced(path)
        if not kept.exists() or json.loads(kept.read_text())["stamp"] != _stamp(path):
            found.append(path)
    return found


def trace(path: Path) -> str:
    """Run a test file, and keep what executes what; what the run said last."""
    HOME.mkdir(exist_ok=True)
    # what a test left running may still write there
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        wanted = {os.path.realpath(ROOT / file): i for i, file in enumerate(files())}
        (folder / "wanted.json").write_text(json.dumps(wanted))
        for i, file in enumerate(files()):
            code = Source(file).telling(SEEN, i * MOST)
            (folder / f"{i}.code").write_bytes(marshal.dumps(code))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no", "-rN"]
        ran = subprocess.run(
            [*command, "--timeout", "900", str(path.relative_to(ROOT))],
            cwd=ROOT,
            env=environment(MUTATE_TRACE=name, PYTEST_ADDOPTS="-p sitecustomize"),
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
        )
        told = [json.loads(x.read_text()) for x in folder.glob("[0-9]*-*.json")]
    _traced(path).write_text(json.dumps({"stamp": _stamp(path), **_compact(told)}))
    return (ran.stdout.strip().splitlines() or [ran.stderr[-300:]])[-1]


def _compact(told: list[dict[str, Any]]) -> dict[str, Any]:
    tests: dict[str, Any] = {}  # name -> [world, id, seconds]
    ran: dict[int, set[str]] = defaultdict(set)  # statement -> names
    read: dict[int, set[str]] = defaultdict(set)  # file -> names
    imported: set[int] = set()
    by_id: dict[str, str] = {}
    for process in told:
        world = tuple(sorted(process["world"].items()))
        for id, seconds, outcome, seen, of_files in process["tests"]:
            if outcome != "passed" or any(x in id for x in _LEFT_OUT):
                continue
            test = Test(world, id, seconds)
            tests[test.name] = [process["world"], id, seconds]
            if not process["parent"]:
                by_id[id] = test.name
            for each in seen:
                ran[each].add(test.name)
            for each in of_files:
                read[each].add(test.name)
    for process in told:
        parent = by_id.get(process["parent"])
        for each in process["rest"]:
            if parent and not process["tests"]:  # a process that a test started
                ran[each].add(parent)
            else:
                imported.add(each)
    of: dict[str, dict[str, list[str]]] = {}
    used: set[str] = set()
    for i, file in enumerate(files()):
        here = {"read": _few(read[i], tests)}
        used.update(here["read"])
        for number, statement in enumerate(source(file).statements, i * MOST):
            here[statement.key] = _few(ran[number], tests)
            used.update(here[statement.key])
            if number in imported:
                here[statement.key].append("import")
        of[file] = here
    numbers = {name: n for n, name in enumerate(sorted(used))}
    numbers["import"] = -1
    return {
        "tests": [tests[name] for name in sorted(used)],
        "of": {
            file: {key: [numbers[x] for x in names] for key, names in here.items()}
            for file, here in of.items()
        },
    }


def _few(names: set[str], tests: dict[str, Any]) -> list[str]:
    """Cases of each test function in each world: half of them the fastest, half spread over all."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names, key=lambda x: (tests[x][2], x)):
        groups[name.partition("[")[0]].append(name)
    kept: list[str] = []
    for group in groups.values():
        first, rest = group[: _EACH // 2], group[_EACH // 2 :]
        kept += first + rest[:: max(1, -(-len(rest) // (_EACH // 2)))]
    return kept


def read() -> Map:
    """Of all test files that were traced."""
    found = Map()
    for path in sorted(HOME.glob("*.json")):
        kept = json.loads(path.read_text())
        here = [Test(tuple(sorted(world.items())), *rest) for world, *rest in kept["tests"]]
        names = [test.name for test in here]
        found.tests |= dict(zip(names, here, strict=True))
        for file, statements in kept["of"].items():
            of_file = found.of[file]
            for key, numbers in statements.items():
                tests = of_file.setdefault(key, set())
                tests.update("import" if n < 0 else names[n] for n in numbers)
    return found
