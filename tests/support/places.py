# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Where a kernel's module lies below npu_ops/: its name is enough, no two have the same."""

from __future__ import annotations

import ast
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent.parent


@cache
def files() -> dict[str, Path]:
    """The modules by their names."""
    paths = [x for x in sorted((ROOT / "npu_ops").rglob("*.py")) if x.name != "__init__.py"]
    found = {path.stem: path for path in paths}
    assert len(found) == len(paths), "two modules of npu_ops have the same name"
    return found


def name(file: str) -> str:
    """The dotted name of a module."""
    return ".".join(("custom", *files()[file].relative_to(ROOT).with_suffix("").parts))


def module(file: str) -> ModuleType:
    return import_module(name(file))


def imported(file: str) -> set[str]:
    """The modules that one of them takes at its top, by their names; none is run."""
    found = set()
    for node in ast.parse(files()[file].read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            below = files()[file].parents[node.level - 1].joinpath(*(node.module or "").split("."))
            for each in (below, *(below / alias.name for alias in node.names)):
                if files().get(each.name) == each.with_suffix(".py"):
                    found.add(each.name)
    return found
