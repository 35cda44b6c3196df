# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""In every process of a run, started by Python itself: this folder is on PYTHONPATH.

MUTATE_PLANT=FILE     one module of ours is another one: the file has its path and its text
MUTATE_TRACE=FOLDER   which lines each test executes, and which files it reads; with
                      `-p sitecustomize` under pytest
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from importlib.machinery import SourceFileLoader
from pathlib import Path

WORLD = ("TRITON_INTERPRET", "CUSTOM_BACKEND")  # what makes other tests of the same ids
LINES = 100_000  # more than a file has: file * LINES + line is a number


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
    """Lines of the files of wanted.json, but for those of kernels."""

    def __init__(self, folder: str) -> None:
        wanted = json.loads((Path(folder) / "wanted.json").read_text())
        self.wanted = {path: (i, kernels) for i, (path, kernels) in enumerate(wanted.items())}
        self.folder, self.parent = folder, os.environ.get("MUTATE_TEST", "")
        self.known: dict[int, tuple] = {}  # by id; the code is kept, so that no other one has it
        self.seen: set[int] = set()
        self.tests: list[list] = []
        self.files_read: dict[str, list[int]] = {}  # by test
        self.began = self.outcome = None

    def call(self, frame, event, argument):
        code = frame.f_code
        known = self.known.get(id(code))
        if known is None:
            known = self.known[id(code)] = (code, self.line_of(code))
        return known[1]

    def line_of(self, code):
        file, kernels = self.wanted.get(code.co_filename, (None, ()))
        if file is None or any(a <= code.co_firstlineno <= b for a, b in kernels):
            return None
        base = file * LINES

        def line(frame, event, argument):
            if event == "line":
                self.seen.add(base + frame.f_lineno)
            return line

        return line

    def notes_what_is_read(self) -> None:
        read_text = Path.read_text

        def read(path, *args, **named):
            file = self.wanted.get(os.path.realpath(path))
            if file:
                self.files_read.setdefault(os.environ.get("MUTATE_TEST", ""), []).append(file[0])
            return read_text(path, *args, **named)

        Path.read_text = read

    def start(self) -> None:
        threading.settrace(self.call)
        sys.settrace(self.call)

    def write(self) -> None:
        world = {name: os.environ[name] for name in WORLD if name in os.environ}
        told = dict(world=world, parent=self.parent, tests=self.tests, rest=sorted(self.seen))
        told["read"] = self.files_read
        path = Path(self.folder) / f"{os.getpid()}-{time.time_ns()}.json"
        path.write_text(json.dumps(told))


def pytest_runtest_logstart(nodeid, location):
    tracer.rest, tracer.seen = tracer.seen, set()
    tracer.began, tracer.outcome = time.perf_counter(), "passed"
    os.environ["MUTATE_TEST"] = nodeid
    tracer.start()  # a test may have stopped it


def pytest_runtest_logreport(report):
    if report.outcome != "passed":
        tracer.outcome = report.outcome


def pytest_runtest_logfinish(nodeid, location):
    seconds = round(time.perf_counter() - tracer.began, 3)
    tracer.tests.append([nodeid, seconds, tracer.outcome, sorted(tracer.seen)])
    tracer.seen = tracer.rest


if "MUTATE_PLANT" in os.environ:
    plant(os.environ["MUTATE_PLANT"])
if "MUTATE_TRACE" in os.environ:
    tracer = Tracer(os.environ["MUTATE_TRACE"])
    atexit.register(tracer.write)
    tracer.notes_what_is_read()
    tracer.start()
