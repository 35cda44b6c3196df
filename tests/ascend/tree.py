# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""All that a run of the harness reads, as one hash: with the same hash it finds the same."""

from __future__ import annotations

import ast
import json

from . import store
from .lowered import pipeline
from .toolchain import ROOT, digest, versions

# the files of this repository; the record of a run is not one of them, and what is known of mutants
# is held to today's kernels by every run
_READ = ("custom/*.py", "custom/bench/**/*.py", "dispatch/**/*.py", "npu_ops/**/*.py",
         "tests/ascend/**/*", "tests/support/places.py", "tests/mutate/changes.py")  # fmt: skip
_LEFT_OUT = ("results.json", "REPORT.md", "mutants.json", "mutants.py")


def tree() -> str:
    texts = []
    for file in sorted({x for each in _READ for x in ROOT.glob(each)}):
        if file.name in _LEFT_OUT:
            continue
        if file.suffix == ".py":
            texts.append(f"{file.relative_to(ROOT)} {_code(file.read_text())}")
        elif file.is_file() and file.suffix != ".pyc":
            texts.append(f"{file.relative_to(ROOT)} {file.read_text()}")
    tools = json.dumps([versions(), store.stamps(), pipeline()], sort_keys=True)
    return digest(*texts, tools)


def _code(text: str) -> str:
    """The syntax tree, without comments and docstrings."""
    parsed = ast.parse(text)
    for node in ast.walk(parsed):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                node.body = body[1:]  # type: ignore[attr-defined]
    return ast.dump(parsed)
