# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Planted mistakes: each must be caught by the case it names, or the harness proves nothing.

What a case said is kept under the hash of all that decides it; a sample is asked again."""

from __future__ import annotations

import importlib.util
import random
import shutil
import sys
import tempfile
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from types import ModuleType

from ..support import places
from . import anew, isolated, known, sources
from .case import Case
from .compiler import compile_for_npu
from .examine import Outcome, examine, lower
from .lint import unbounded_indirect_loads
from .toolchain import NEWEST, digest


@dataclass(frozen=True)
class Control:
    """In `npu_ops/<file>.py`, `old` (found exactly once) becomes `new`; `case` must then fail:
    by its values or its process (stage "run"), by another result where a launch is refused
    ("refuse"), or in the compiler or the lints ("compile") with this build."""

    title: str
    file: str
    old: str
    new: str
    case: str
    stage: str = "run"
    build: str = NEWEST


@dataclass
class Planted:
    title: str
    caught: bool
    said: str


def plant(control: Control) -> None:
    """Put the changed module in the place of the real one, in this process."""
    text = places.files()[control.file].read_text()
    if text.count(control.old) != 1:
        raise LookupError(f"{control.old!r} occurs {text.count(control.old)} times, expected once")
    plant_text(control.file, text.replace(control.old, control.new))


def plant_text(file: str, text: str) -> None:
    """`text` in the place of the file of npu_ops/, in this process."""
    name = places.name(file)
    # what was imported before would not meet it; of what knows the call under way, and of the
    # workspace that a case has set, there is one
    kept = tuple(f"custom.npu_ops.common.{name}" for name in ("tune", "refusals", "tiling"))
    for each in [x for x in sys.modules if x.startswith("custom.npu_ops.") and x not in kept]:
        del sys.modules[each]
    folder = tempfile.mkdtemp()
    # not before the process ends: the JIT reads the sources of its functions when it lowers them
    Finalize(None, shutil.rmtree, args=(folder,), exitpriority=0)
    scratch = Path(folder) / f"{file}.py"
    scratch.write_text(text)
    spec = importlib.util.spec_from_file_location(name, scratch)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    setattr(importlib.import_module(name.rpartition(".")[0]), file, module)
    spec.loader.exec_module(module)


def _attempt(control: Control, case: Case, file: str) -> tuple[bool, str]:
    plant(control)
    if control.stage == "run":
        outcome = examine(case, file, None)
        return outcome.share > 1, outcome.findings[0]
    if control.stage == "refuse":
        wrong = anew.examine(case)
        return bool(wrong), (wrong or ["the same bits whatever was refused"])[0]
    for launch in lower(case):
        compiled = compile_for_npu(launch.linalg, launch.options, control.build)
        found = [*compiled.found, *unbounded_indirect_loads(launch.ttir)]
        new = [x.text for x in found if known.wrong(launch.kernel, x.kind, control.build)]
        if not compiled.ok or new:
            return True, compiled.error or new[0]
    return False, "compiled, and no lint spoke"


def run(
    modules: list[ModuleType],
    outcomes: dict[str, Outcome],
    kept: dict[str, list[str]],
    whole: bool,
    sample: int,
    cold: bool,
    jobs: int,
) -> list[Planted]:
    """All of them; what was caught is put into `kept`, and not planted again, but for a sample."""
    harness = sources.of(__name__)
    calls: dict[str, tuple[Control, Case, str]] = {}
    keys: dict[str, str] = {}
    for module in modules:
        by_name = {case.name: case for case in module.CASES}
        for x in module.CONTROLS:
            case, name = by_name[x.case], _name(x, module.__name__)
            if name in calls:
                raise LookupError(f"two planted mistakes are called {name!r}")
            calls[name] = x, case, module.__name__
            passed = outcomes[case.title].key if case.title in outcomes else ""
            keys[name] = digest(repr(x), passed, places.files()[x.file].read_text(), harness)
    there = [] if cold else [x for x in calls if kept.get(x, [""])[0] == keys[x]]
    skipped = {*there} - {*random.sample(there, min(sample, len(there)))}
    planted = [Planted(_title(calls[name][0]), True, kept[name][1]) for name in skipped]
    todo = [call for name, call in calls.items() if name not in skipped]
    for (control, _, file), answer in isolated.each(_attempt, todo, jobs):
        if isinstance(answer, isolated.Crash):
            # a mistake may kill the process, but only by touching what it must not
            answer = ("out of range" in str(answer), str(answer))
        caught, said = answer
        planted.append(Planted(_title(control), caught, said))
        if caught:
            name = _name(control, file)
            kept[name] = [keys[name], said]
    for name in kept.keys() - calls.keys() if whole else ():
        del kept[name]
    print(f"{len(calls)} planted mistakes, {len(todo)} of them now")
    return sorted(planted, key=lambda x: (x.title, x.said))


def _title(control: Control) -> str:
    return f"{control.file}: {control.title}"


def _name(control: Control, file: str) -> str:
    return f"{file.rpartition('.')[2]}, {_title(control)}"
