# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The code behind a module, without its comments and docstrings: what a record was made with."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from functools import cache
from pathlib import Path

# the tiles that were chosen are in the lowered text, and versions in the key; a planted mistake
# changes no real run, and words no result
_LEFT_OUT = (".tune", ".controls", ".versions", ".log", ".errors")


def path(module: str) -> tuple[str, str]:
    """What a call of this op (family.file) goes through before its launcher."""
    return "custom.dispatch.register", f"custom.dispatch.ops.{module}"


def of(*modules: str) -> str:
    """The syntax trees of the modules and of all that they import relatively."""
    seen: dict[str, str] = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen[name], imported = _read(name)
            waiting += imported
    return "\n".join(f"{name} {seen[name]}" for name in sorted(seen))


def imported(module: str) -> tuple[str, ...]:
    """The modules that it imports relatively."""
    return _read(module)[1]


def text(origin: str) -> str:
    return Path(origin).read_text()


@cache
def _read(name: str) -> tuple[str, tuple[str, ...]]:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ImportError(name)
    tree = ast.parse(text(spec.origin))
    package = name if spec.submodule_search_locations else name.rpartition(".")[0]
    imported: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            # `from ..common import memory` imports a module, `from .errors import X` does not
            for alias in node.names:
                full = f"{base}.{alias.name}"
                imported.append(full if _is_module(full) else base)
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and _is_docstring(body[0]):
            node.body = body[1:]  # type: ignore[attr-defined]
    return ast.dump(tree), tuple(x for x in imported if not x.endswith(_LEFT_OUT))


@cache
def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, AttributeError):
        return False


def _is_docstring(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
