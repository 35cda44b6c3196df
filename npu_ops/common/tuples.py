# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Kernels whose parameters are named tuples, which triton-ascend 3.2.0 does not take.

    class Strides(NamedTuple):          class Constants(NamedTuple):
        row: int                            HEADS: tl.constexpr
        head: int                           SIZE: tl.constexpr

    @tuples.jit(do_not_specialize=["rows"])
    def kernel(x, rows, of_x: Strides, C: Constants, TILE: tl.constexpr):
        ... of_x.row ... C.SIZE ... part(x, *of_x)

Triton is given the same function with a parameter a field, and a launch gives field after field: a
number or a tensor is called `of_x_row`, a constant `SIZE`.  Numbers of tuples are not specialised.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import typing
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from . import entry


def jit(do_not_specialize: list[str] | None = None) -> Callable[[Any], triton.JITFunction]:
    """`entry.jit` of what `spread` makes of the function."""

    def jitted(function: Any) -> triton.JITFunction:
        flat, numbers = spread(function)
        return entry.jit([*(do_not_specialize or []), *numbers])(flat)

    return jitted


def spread(function: Any) -> tuple[Any, list[str]]:
    """The function without tuples, and which of its parameters are their numbers."""
    lines, first = inspect.getsourcelines(function)
    node = ast.parse("".join(lines)).body[0]
    assert isinstance(node, ast.FunctionDef)
    tuples: dict[str, dict[str, str]] = {}  # parameter: field: its own parameter
    constants: set[str] = set()
    numbers: list[str] = []
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        kind = parameter.annotation
        if isinstance(kind, type) and issubclass(kind, tuple):
            fields = typing.get_type_hints(kind)
            constants |= {field for field, of in fields.items() if of is tl.constexpr}
            tuples[name] = {x: x if x in constants else f"{name}_{x}" for x in fields}
            numbers += [f"{name}_{x}" for x, of in fields.items() if of in (int, float)]
    made = [flat for fields in tuples.values() for flat in fields.values()]
    every = list(ast.walk(node))
    names = [x.id for x in every if isinstance(x, ast.Name)]
    names += [x.arg for x in every if isinstance(x, ast.arg)]
    if twice := [x for x in made if (made + names).count(x) > 1]:
        raise TypeError(f"{function.__name__} has two things called {twice[0]}")
    changes: list[tuple[ast.expr | ast.arg, str]] = []
    for part in every:
        match part:
            case ast.arg(arg=name) if name in tuples:
                flat = (
                    f"{x}: tl.constexpr" if x in constants else x for x in tuples[name].values()
                )
                changes.append((part, ", ".join(flat)))
            case ast.Attribute(value=ast.Name(id=name), attr=field) if name in tuples:
                changes.append((part, tuples[name][field]))
            case ast.Starred(value=ast.Name(id=name)) if name in tuples:
                changes.append((part, ", ".join(tuples[name].values())))
    for part, new in sorted(changes, key=lambda x: -x[0].col_offset):
        line = lines[part.lineno - 1].encode()
        line = line[: part.col_offset] + new.encode() + line[part.end_col_offset :]
        lines[part.lineno - 1] = line.decode()
    # at its own lines, where Triton, and an error, read the source
    text = "\n" * (first + node.lineno - 2) + "".join(lines[node.lineno - 1 :])
    file = f"<{function.__name__} of {inspect.getsourcefile(function)}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    space: dict[str, Any] = {}
    code = compile(text, file, "exec", annotations.compiler_flag, dont_inherit=True)
    exec(code, function.__globals__, space)
    return space[function.__name__], numbers
