# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""In every process of a run, started by Python itself: this folder is on PYTHONPATH.

MUTATE_PLANT=FILE     one module of ours is another one: the file has its path and its text
MUTATE_TRACE=FOLDER   modules of ours say which of their statements run, and each test which it
                      ran and which files it read; with `-p sitecustomize` under pytest
"""

from __future__ import annotations

import atexit
import builtins
import json
import marshal
import os
import time
from importlib.machinery import SourceFileLoader
from pathlib import Path

WORLD = ("TRITON_INTERPRET", "CUSTOM_BACKEND")  # what makes other tests of the same ids
SEEN = "_statement_seen"  # what a module calls, with the number of a statement


def plant(file: str) -> None:
    """Before the module is imported.  Who reads its text gets the other one; the tree stays."""
    target, text = json.loads(Path(file).read_text())
    usual, read_text = SourceFileLoader.get_code, Path.read_text

    def get_code(self, name):
        if os.path.realpath(self.path) == target:
            return compile(text, self.path, "exec", dont_inherit=True)
        return usual(self, name)

    def read(self, *args, **named):
        return text if os.path.realpath(self) == target else read_text(self, *args, **named)

    SourceFileLoader.get_code, Path.read_text = get_code, read


class Tracer:
    """Of the files of FOLDER/wanted.json, whose code that says what runs lies beside it."""

    def __init__(self, folder: str) -> None:
        self.folder, self.parent = Path(folder), os.environ.get("MUTATE_TEST", "")
        self.wanted = json.loads((self.folder / "wanted.json").read_text())
        self.seen: set[int] = set()
        self.rest: set[int] = set()  # outside of tests
        self.read: list[int] = []
        self.tests: list[list] = []
        self.began, self.outcome = 0.0, ""
        setattr(builtins, SEEN, seen)
        usual, read_text = SourceFileLoader.get_code, Path.read_text

        def get_code(loader, name):
            number = self.wanted.get(os.path.realpath(loader.path))
            if number is None:
                return usual(loader, name)
            return marshal.loads((self.folder / f"{number}.code").read_bytes())

        def read(path, *args, **named):
            number = self.wanted.get(os.path.realpath(path))
            if number is not None:
                self.read.append(number)
            return read_text(path, *args, **named)

        SourceFileLoader.get_code, Path.read_text = get_code, read

    def write(self) -> None:
        world = {name: os.environ[name] for name in WORLD if name in os.environ}
        told = dict(world=world, parent=self.parent, tests=self.tests)
        told["rest"] = sorted(self.rest | self.seen)
        (self.folder / f"{os.getpid()}-{time.time_ns()}.json").write_text(json.dumps(told))


def seen(number):
    tracer.seen.add(number)


def pytest_sessionstart(session):
    from torch._dynamo import config

    if hasattr(config, "ignore_logging_functions"):
        config.ignore_logging_functions.add(seen)  # what is compiled is what it was


def pytest_runtest_logstart(nodeid, location):
    tracer.rest |= tracer.seen
    tracer.seen.clear()
    tracer.read.clear()
    tracer.began, tracer.outcome = time.perf_counter(), "passed"
    os.environ["MUTATE_TEST"] = nodeid


def pytest_runtest_logreport(report):
    if report.outcome != "passed":
        tracer.outcome = report.outcome


def pytest_runtest_logfinish(nodeid, location):
    seconds = round(time.perf_counter() - tracer.began, 3)
    both = sorted(tracer.seen), sorted(set(tracer.read))
    tracer.tests.append([nodeid, seconds, tracer.outcome, *both])
    tracer.seen.clear()


if "MUTATE_PLANT" in os.environ:
    plant(os.environ["MUTATE_PLANT"])
if "MUTATE_TRACE" in os.environ:
    tracer = Tracer(os.environ["MUTATE_TRACE"])
    atexit.register(tracer.write)
