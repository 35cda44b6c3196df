# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""mypy reads every launcher: what it does not read are kernels, and no function lacks types."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

from ..tools.typed_tree import KERNELS, ROOT, decorators, host, is_kernel, sources, without_kernels

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SOURCE = '''
@cache
def launch(x, *, out: int): ...
class Plan:
    def of(self, count: int): ...
    @triton.jit
    def part(x):
        """Lines."""
        return x
def whole(self, x: int) -> None:
    def inner(*rest) -> None: ...
@triton.jit(do_not_specialize=["n"])
def kernel(x, n): ...
'''


@cache
def trees() -> dict[str, ast.Module]:
    return {str(x.relative_to(ROOT)): ast.parse(x.read_text()) for x in sources()}


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Without those inside kernels."""
    return (x for x in host(tree) if isinstance(x, FUNCTIONS))


def lacking(tree: ast.Module) -> list[str]:
    found = []
    for node in functions(tree):
        of = node.args
        each = [*of.posonlyargs, *of.args, *of.kwonlyargs, of.vararg, of.kwarg]
        bare = [x.arg for x in each if x and not x.annotation and x.arg not in ("self", "cls")]
        if not is_kernel(node) and (bare or not node.returns):
            found.append(f"{node.lineno} {node.name}: {', '.join(bare) or 'what it returns'}")
    return found


def test_what_is_no_kernel_is_annotated():
    assert not {file: found for file, tree in trees().items() if (found := lacking(tree))}


def test_what_is_not_read_are_kernels():
    used = {x for tree in trees().values() for node in functions(tree) for x in decorators(node)}
    others = {"cache", "classmethod", "contextmanager", "dataclass", "property", "wraps"}
    assert used >= KERNELS, "one of them is a decorator no more"
    assert used - KERNELS <= others, "a kernel, or a launcher?"


def test_a_function_without_types_is_seen():
    assert lacking(ast.parse(SOURCE)) == [
        "3 launch: x",
        "5 of: what it returns",
        "11 inner: rest",
    ]


def test_mypy_reads_all_but_kernels_at_its_own_lines():
    seen = ast.parse(without_kernels(SOURCE))
    assert [(x.lineno, x.name) for x in functions(seen)] == [
        (3, "launch"),
        (5, "of"),
        (10, "whole"),
        (11, "inner"),
    ]
    names = [(x.lineno, ast.unparse(x)) for x in ast.walk(seen) if isinstance(x, ast.AnnAssign)]
    assert sorted(names) == [(6, "part: _Any"), (12, "kernel: _Any")]
