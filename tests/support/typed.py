# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What mypy, strict, says of a package of ours beside stubs of what it is a plug-in of."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ..tools.typed_tree import link

ROOT = Path(__file__).parents[2]
STUBS = ROOT / "tests" / "vllm" / "stubs"  # made by tests/vllm/stubs.py


def checker(scratch: Path, package: str) -> Callable[..., str]:
    """A function of folders of stubs."""
    pytest.importorskip("mypy", reason="a tool of `make lint`")
    typed = scratch / "typed"
    link(typed)

    def said(*stubs: Path) -> str:
        command = ["-m", "mypy", "--cache-dir", scratch / "cache", "-p", package]
        path = ":".join(map(str, [typed, *stubs]))
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env={**os.environ, "MYPYPATH": path},
            capture_output=True,
            text=True,
        )
        return done.stdout + done.stderr

    return said


def moved(stubs: Path, scratch: Path, changes: Mapping[str, tuple[str, str]]) -> Path:
    """A copy of the stubs in which a release moved something: {file: (before, after)}."""
    copy = scratch / "stubs"
    shutil.copytree(stubs, copy)
    for file, (before, after) in changes.items():
        text = (copy / file).read_text()
        assert before in text, file
        (copy / file).write_text(text.replace(before, after, 1))
    return copy
