# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""`custom` as mypy reads it: below one folder, as it is installed, and of each kernel its name.

    python -m tests.tools.typed_tree FOLDER

A kernel is Triton, whose types are not Python's.  Its lines are empty in the copy, so that an error
in a launcher has the number of its line.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("cuda_ops", "npu_ops")  # with kernels
# decorators of what Triton compiles, and of what it calls meanwhile
KERNELS = {
    "triton.jit",
    "gluon.jit",
    "gluon.constexpr_function",
    "constexpr_function",
    "builtin",
    "entry.jit",
    "tuples.jit",
}


def decorators(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Their names, without arguments."""
    names = (x.func if isinstance(x, ast.Call) else x for x in function.decorator_list)
    return {ast.unparse(name) for name in names}


def is_kernel(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and not KERNELS.isdisjoint(decorators(node))


def host(node: ast.AST) -> Iterator[ast.AST]:
    """What is in a module, kernels as a whole."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not is_kernel(child):
            yield from host(child)


def without_kernels(source: str) -> str:
    lines = source.splitlines()
    for node in host(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and is_kernel(node):
            first, last = node.decorator_list[0].lineno - 1, node.end_lineno
            name = " " * node.col_offset + f"from typing import Any as _Any; {node.name}: _Any"
            lines[first:last] = [name, *[""] * (last - first - 1)]
    return "\n".join(lines) + "\n"


def link(folder: Path) -> None:
    """All but the packages with kernels, which nothing imports by name."""
    package = folder / "custom"
    package.mkdir(parents=True)
    for each in [*(ROOT / "custom").iterdir(), ROOT / "dispatch", ROOT / "graph_mode"]:
        (package / each.name).symlink_to(each)


def sources() -> list[Path]:
    return sorted(file for name in PACKAGES for file in (ROOT / name).rglob("*.py"))


def write(folder: Path) -> None:
    link(folder)
    for file in sources():
        copy = folder / "custom" / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(without_kernels(file.read_text()))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
