# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The widest and the longest functions of the package, for docs/architecture.md.

Lines are those from `def` to the end, without a docstring; parameters are all that are named.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("custom", "dispatch", "npu_ops", "cuda_ops", "graph_mode")
SHOWN = 10


@dataclass(frozen=True)
class Function:
    where: str
    jitted: bool
    lines: int
    parameters: int


def functions(folders: Iterable[str] = FOLDERS) -> Iterator[Function]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).with_suffix("").as_posix()
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef):
                    yield _measured(f"{name}: {node.name}", node)


def _measured(where: str, node: ast.FunctionDef) -> Function:
    docstring = node.body[0] if ast.get_docstring(node) is not None else None
    described = docstring.end_lineno - docstring.lineno + 1 if docstring else 0
    lines = node.end_lineno - node.lineno + 1 - described
    given = node.args
    parameters = len([*given.posonlyargs, *given.args, *given.kwonlyargs])
    return Function(where, any(map(_is_jit, node.decorator_list)), lines, parameters)


def _is_jit(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(called, ast.Attribute) and called.attr == "jit"


def _table(head: str, found: Sequence[Function]) -> list[str]:
    rows = [f"| `{x.where}` | {x.parameters} | {x.lines} |" for x in found]
    return [f"| {head} | parameters | lines |", "|---|---|---|", *rows]


def listed() -> str:
    """Both tables, and what they are cut from."""
    every = list(functions())
    jitted = [x for x in every if x.jitted]
    wide, long = sum(x.parameters > 30 for x in jitted), sum(x.lines > 100 for x in every)
    lines = [
        f"{wide} kernels or parts of kernels have more than 30 parameters, {long} functions more "
        "than 100 lines.",
        "",
        *_table("widest of the kernels", _most(jitted, "parameters")),
        "",
        *_table("longest of all", _most(every, "lines")),
    ]
    return "\n".join(lines) + "\n"


def _most(found: Sequence[Function], what: str) -> list[Function]:
    return sorted(found, key=lambda x: (-getattr(x, what), x.where))[:SHOWN]


BLOCKS = {"functions": listed}
