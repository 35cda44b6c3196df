# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The tables of docs/graph_mode.md show the records, and nothing else."""

from __future__ import annotations

import ast
import functools
import json

import pytest
from custom.dispatch.registry import SPECS

from docs import graph_modes
from docs.graph_modes import MODES, ROOT


@functools.cache
def functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.title)
def test_every_test_of_a_column_exists(mode):
    for name in (*mode.tests, *mode.every, *mode.steps, *mode.refusals):
        file, _, function = name.partition("::")
        assert function in functions(file), name


def test_every_recorded_test_exists():
    for name, record in graph_modes.records().items():
        for each in record["passed"]:
            file, _, rest = each.partition("::")
            assert rest.partition("[")[0] in functions(file), (name, each)


@pytest.mark.parametrize(
    "mode", [mode for mode in MODES if mode.record != "cuda"], ids=lambda mode: mode.title
)
def test_what_needs_no_gpu_is_recorded_of_every_op(mode):
    """A test that passed, or a refusal; or the mode is none of the op's."""
    found = graph_modes.records()
    cells = {spec.name: graph_modes._cell(found, mode, spec) for spec in SPECS}
    missing = [name for name, cell in cells.items() if cell == "not checked"]
    assert not missing, f"record {mode.record}.json anew (docs/graph_modes.py says how)"
    assert graph_modes._step_cell(found, mode) != "not checked"


def test_a_cell_counts_what_is_recorded_of_its_op(tmp_path):
    mode = next(mode for mode in MODES if mode.title == "capture, CUDA")
    spec = next(spec for spec in SPECS if spec.name == "npu_lightning_indexer")
    grad = next(spec for spec in SPECS if spec.name == "npu_lightning_indexer_grad")
    assert graph_modes._cell(graph_modes.records(tmp_path), mode, spec) == "not checked"
    record = {"passed": [f"{mode.tests[0]}[cuda-{spec.name}]", f"{mode.steps[0]}[cuda]"]}
    (tmp_path / f"{mode.record}.json").write_text(json.dumps(record))
    found = graph_modes.records(tmp_path)
    assert graph_modes._cell(found, mode, spec) == "1"
    assert graph_modes._cell(found, mode, grad) == "not checked"
    assert graph_modes._step_cell(found, mode) == "1"


def test_a_check_of_every_op_counts_for_the_ops_of_its_day(tmp_path):
    mode = next(mode for mode in MODES if mode.title == "AOTInductor, CUDA")
    record = {"ops": [SPECS[0].name], "passed": [f"{mode.every[0]}[cuda]"]}
    (tmp_path / f"{mode.record}.json").write_text(json.dumps(record))
    cells = [graph_modes._cell(graph_modes.records(tmp_path), mode, spec) for spec in SPECS]
    assert cells == ["1"] + ["not checked"] * (len(SPECS) - 1)
