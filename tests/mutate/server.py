# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Attempts: a process that has imported what takes long, but nothing of ours, forks one for each.

As a program it reads a job a line and answers a line; `Server` is that program, seen from outside.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .changes import ROOT
from .lines import World, environment

_BEFORE = (
    "numpy", "pytest", "_pytest.assertion.rewrite", "hypothesis", "transformers",
    "transformers.modeling_utils", "torch", "torch._dynamo", "torch._inductor.compile_fx",
    "torch._functorch.aot_autograd", "torch.export", "torch.fx.experimental.proxy_tensor",
    "torch.testing._internal.optests", "torch.distributed.tensor", "triton", "triton.language",
    "triton.experimental.gluon.language",
)  # fmt: skip


@dataclass
class Answer:
    noticed: bool
    test: str = ""  # the one that noticed
    said: str = ""
    missing: tuple[str, ...] = ()  # tests that are not there


class Server:
    """Of one world; an attempt at a time."""

    def __init__(self, world: World) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=ROOT,
            env=environment(**dict(world)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, plant: str | None, tests: list[str], seconds: float) -> Answer:
        """`plant` is a file for inside/sitecustomize.py; None: nothing is planted."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps([plant, tests, seconds]) + "\n")
        self._process.stdin.flush()
        return Answer(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


class _Told:
    """What the first failure says."""

    def __init__(self, tests: list[str], path: Path) -> None:
        self.order = {id: i for i, id in enumerate(tests)}
        self.path = path

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items.sort(key=lambda item: self.order.get(item.nodeid, len(self.order)))

    def pytest_collectreport(self, report: Any) -> None:
        self.pytest_runtest_logreport(report)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.path.exists():
            crash = getattr(report.longrepr, "reprcrash", None)
            text = crash.message if crash else str(report.longrepr)[-200:]
            self.path.write_text(json.dumps([report.nodeid, text]))


def _child(plant: str | None, tests: list[str], folder: Path) -> None:
    os.setsid()
    with open(folder / "output", "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    if plant:
        os.environ["MUTATE_PLANT"] = plant  # for the processes that a test starts
        importlib.import_module("sitecustomize").plant(plant)
    import pytest

    options = ["-x", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:anyio"]
    status = pytest.main([*options, *tests], plugins=[_Told(tests, folder / "told")])
    sys.stdout.flush()
    os._exit(int(status))


def _attempt(plant: str | None, tests: list[str], seconds: float) -> Answer:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        child = os.fork()
        if child == 0:
            try:
                _child(plant, tests, folder)
            finally:
                os._exit(70)
        handle = os.pidfd_open(child)
        ended, _, _ = select.select([handle], [], [], seconds)
        os.close(handle)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # and what it has left
        _, status = os.waitpid(child, 0)
        if not ended:
            return Answer(True, said="it does not end")
        output = (folder / "output").read_text(errors="replace")
        if (folder / "told").exists():
            test, said = json.loads((folder / "told").read_text())
            return Answer(True, test, said)
    code = os.waitstatus_to_exitcode(status)
    missing = [x.partition("not found: ")[2] for x in output.splitlines() if "not found: " in x]
    if code == 4 and missing:
        return Answer(False, missing=tuple(x.removeprefix(f"{ROOT}/") for x in missing))
    if code in (0, 5):
        return Answer(False)
    return Answer(True, said=f"pytest ended with {code}: {output[-200:]}")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for module in _BEFORE:
        with suppress(ImportError):
            importlib.import_module(module)
    assert not any(name.split(".")[0] == "custom" for name in sys.modules)
    gc.freeze()  # what is never looked at again stays shared
    for line in sys.stdin:
        answer = _attempt(*json.loads(line))
        answers.write(json.dumps(vars(answer)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
