# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""`custom` as mypy reads it: as it is installed, and a kernel is no more than a name.

A kernel is written in Triton's language, whose types are not Python's.  Its lines are empty in the
copy, so that an error in a launcher has its line's number.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINKED = ("dispatch", "graph_mode")
WITH_KERNELS = ("cuda_ops", "npu_ops")
# decorators of what the GPU's or the NPU's compiler reads
KERNELS = {
    "triton.jit",
    "gluon.jit",
    "gluon.constexpr_function",
    "constexpr_function",
    "builtin",
    "entry.jit",
    "tuples.jit",
}


def is_kernel(function: ast.FunctionDef) -> bool:
    names = (x.func if isinstance(x, ast.Call) else x for x in function.decorator_list)
    return any(ast.unparse(name) in KERNELS for name in names)


def _kernels(node: ast.AST) -> Iterator[ast.FunctionDef]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef) and is_kernel(child):
            yield child
        else:
            yield from _kernels(child)


def without_kernels(source: str) -> str:
    lines = source.splitlines()
    for kernel in _kernels(ast.parse(source)):
        first = kernel.decorator_list[0].lineno - 1
        indent = " " * kernel.col_offset
        name = f"{indent}from typing import Any as _Any; {kernel.name}: _Any"
        lines[first : kernel.end_lineno] = [name, *[""] * (kernel.end_lineno - first - 1)]
    return "\n".join(lines) + "\n"


def write(folder: Path) -> None:
    package = folder / "custom"
    package.mkdir(parents=True)
    for each in [*(ROOT / "custom").iterdir(), *(ROOT / name for name in LINKED)]:
        (package / each.name).symlink_to(each)
    for name in WITH_KERNELS:
        for file in (ROOT / name).rglob("*.py"):
            copy = package / file.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(without_kernels(file.read_text()))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
