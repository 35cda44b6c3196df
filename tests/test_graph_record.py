# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The tables of docs/graph_mode.md show the records, and nothing else."""

from __future__ import annotations

import ast
import functools
import json

import pytest
from custom.dispatch.specs import SPECS

from . import graph_record
from .graph_record import MODES, ROOT


@functools.cache
def functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_page_shows_the_records():
    text = graph_record.PAGE.read_text()
    assert text.count(": begin -->") == 3
    assert text == graph_record.fresh(text), "run python -m tests.graph_record"


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.title)
def test_every_test_of_a_column_exists(mode):
    for name in (*mode.tests, *mode.every, *mode.steps, *mode.refusals):
        file, _, function = name.partition("::")
        assert function in functions(file), name


def test_every_recorded_test_exists():
    for name, record in graph_record.records().items():
        for each in record["passed"]:
            file, _, rest = each.partition("::")
            assert rest.partition("[")[0] in functions(file), (name, each)


def test_a_cell_counts_what_is_recorded_of_its_op(tmp_path, monkeypatch):
    monkeypatch.setattr(graph_record, "RECORDS", tmp_path)
    mode = next(mode for mode in MODES if mode.title == "capture, CUDA")
    spec = next(spec for spec in SPECS if spec.name == "npu_lightning_indexer")
    grad = next(spec for spec in SPECS if spec.name == "npu_lightning_indexer_grad")
    assert graph_record._cell(graph_record.records(), mode, spec) == "not checked"
    record = {"passed": [f"{mode.tests[0]}[cuda-{spec.name}]", f"{mode.steps[0]}[cuda]"]}
    (tmp_path / f"{mode.record}.json").write_text(json.dumps(record))
    found = graph_record.records()
    assert graph_record._cell(found, mode, spec) == "1"
    assert graph_record._cell(found, mode, grad) == "not checked"
    assert graph_record._step_cell(found, mode) == "1"


def test_a_check_of_every_op_counts_for_the_ops_of_its_day(tmp_path, monkeypatch):
    monkeypatch.setattr(graph_record, "RECORDS", tmp_path)
    mode = next(mode for mode in MODES if mode.title == "AOTInductor, CUDA")
    record = {"ops": [SPECS[0].name], "passed": [f"{mode.every[0]}[cuda]"]}
    (tmp_path / f"{mode.record}.json").write_text(json.dumps(record))
    cells = [graph_record._cell(graph_record.records(), mode, spec) for spec in SPECS]
    assert cells == ["1"] + ["not checked"] * (len(SPECS) - 1)
