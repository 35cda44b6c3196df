# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What bears the name of a parameter is given for it, in every call of ours: launches, helpers,
named tuples.  Two arguments that changed places run on a machine that has no such GPU."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("dispatch", "graph_mode", "cuda_ops")
# (file, argument, parameter): meant
MEANT = {
    ("cuda_ops/common/combine.py", "out", "partial"),  # parts' own
    ("cuda_ops/caches/hadamard.py", "rows", "x"),
    # shared memory that is free
    ("cuda_ops/delta_rule/hopper/chunk_gated_delta_rule.py", "o", "place"),
    ("cuda_ops/delta_rule/hopper/chunk_gated_delta_rule_grad.py", "first", "row"),
    ("cuda_ops/delta_rule/hopper/chunks.py", "first", "row"),
    ("cuda_ops/delta_rule/hopper/chunk_kda.py", "first", "row"),
    ("cuda_ops/delta_rule/hopper/chunk_kda_grad.py", "first", "row"),
    ("cuda_ops/attention/hopper/fused_attention.py", "rows", "tile"),
    # states are square, and only what is widened twice is added up together
    ("cuda_ops/delta_rule/kda_layer_decode.py", "K", "V"),
    ("cuda_ops/delta_rule/kda_layer_decode.py", "TWICE", "TOGETHER"),
    # float32, rounded later
    ("cuda_ops/attention/hopper/fused_attention_backward.py", "sums", "grad_q"),
    ("cuda_ops/attention/hopper/fused_attention_backward.py", "D", "WIDTH"),
    # the same number to the compiler, where the other kernel has a constant
    ("cuda_ops/attention/hopper/fused_infer_attention_score_v2.py", "tile", "kept"),
    ("cuda_ops/indexer/hopper/topk.py", "drawn", "x"),
    ("cuda_ops/indexer/hopper/topk_of_short_rows.py", "drawn", "x"),
    ("cuda_ops/indexer/hopper/topk_of_short_rows.py", "length", "hi"),  # the last part's end
    ("cuda_ops/prolog/stages.py", "D", "WIDTH"),
    # without caches nothing is read of these
    ("cuda_ops/deepseek_v4/compressor.py", "bounds", "table"),
    ("cuda_ops/deepseek_v4/compressor_dense_grad.py", "bounds", "table"),
    ("cuda_ops/deepseek_v4/compressor_dense_grad.py", "product", "state"),
    ("dispatch/overlap.py", "a", "b"),  # a relation that goes both ways
    ("dispatch/overlap.py", "b", "a"),
}


def files() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def _named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _takes(path: Path) -> dict[str, list[str]]:
    """name -> parameters of the functions of a module, fields of its tuples and dataclasses."""
    found = {}
    for node in _tree(path).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = [x.arg for x in (*node.args.posonlyargs, *node.args.args)]
        elif isinstance(node, ast.ClassDef):
            fields = [x.target for x in node.body if isinstance(x, ast.AnnAssign)]
            found[node.name] = [x.id for x in fields if isinstance(x, ast.Name)]
    return found


@cache
def _imported(path: Path) -> dict[str, tuple[Path, str | None]]:
    """name -> (module of ours, what of it; None: the module)."""
    found: dict[str, tuple[Path, str | None]] = {}
    for node in ast.walk(_tree(path)):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
        for alias in node.names:
            name = alias.asname or alias.name
            if (base / f"{alias.name}.py").exists():
                found[name] = base / f"{alias.name}.py", None
            elif base.with_suffix(".py").exists():
                found[name] = base.with_suffix(".py"), alias.name
    return found


def _parameters(path: Path, function: ast.expr) -> list[str]:
    imported = _imported(path)
    if isinstance(function, ast.Name):
        module, name = imported.get(function.id, (path, function.id))
        return _takes(module).get(name or "", [])
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        module, name = imported.get(function.value.id, (path, ""))
        return _takes(module).get(function.attr, []) if name is None else []
    if isinstance(function, ast.Call) and ast.unparse(function.func) == "launches.kernel":
        return _parameters(path, function.args[0])
    return []


def exchanged(path: Path) -> Iterator[tuple[str, str, int]]:
    """(argument, the parameter that it is given for, line) where another one has its name."""
    for call in ast.walk(ast.parse(path.read_text())):
        if not isinstance(call, ast.Call):
            continue
        parameters = _parameters(path, call.func)
        starred = (i for i, x in enumerate(call.args) if isinstance(x, ast.Starred))
        given = list(zip(parameters, call.args[: next(starred, None)], strict=False))
        # a field is given by keyword for what it means to a kernel
        given += [(x.arg, x.value) for x in call.keywords if isinstance(x.value, ast.Name)]
        for parameter, value in given:
            last = getattr(value, "id", getattr(value, "attr", None))
            if last in parameters and last.lower() != (parameter or last).lower():
                yield last, parameter, call.lineno


@pytest.mark.parametrize("path", files(), ids=_named)
def test_arguments_are_given_for_the_parameters_of_their_names(path):
    found = [x for x in exchanged(path) if (_named(path), *x[:2]) not in MEANT]
    assert not found


def test_what_is_meant_is_there():
    assert {(_named(path), *x[:2]) for path in files() for x in exchanged(path)} >= MEANT


def test_two_that_changed_places_are_found(tmp_path):
    path = tmp_path / "exchanged.py"
    path.write_text(
        "def kernel(x, rows, columns):\n    pass\n\n\n"
        "launches.kernel(kernel, 1)(x, columns, sizes.rows)\nkernel(x, rows, columns=rows)\n"
    )
    assert list(exchanged(path)) == [
        ("columns", "rows", 5),
        ("rows", "columns", 5),
        ("rows", "columns", 6),
    ]
