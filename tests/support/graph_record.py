# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A plugin of pytest: `--record-graph FILE` writes which graph-mode tests passed.

docs/graph_modes.py makes the tables of docs/graph_mode.md from such records.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
from pathlib import Path

import pytest
import torch
from custom.dispatch.registry import SPECS

from docs.graph_modes import RECORDED

_ids: set[str] = set()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-graph", help="write which graph-mode tests passed to this JSON file")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed and report.nodeid.partition("[")[0] in RECORDED:
        _ids.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    path = session.config.getoption("--record-graph")
    ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    if not path or not ended or hasattr(session.config, "workerinput"):
        return
    cuda = session.config.getoption("--device") == "cuda"
    record = {
        "hardware": torch.cuda.get_device_name() if cuda else platform.machine(),
        "date": datetime.date.today().isoformat(),
        "versions": {"torch": torch.__version__, **_versions("torch_npu", "onnx", "onnxruntime")},
        "ops": [spec.name for spec in SPECS],
        "passed": sorted(_ids),
    }
    Path(path).write_text(json.dumps(record, indent=1) + "\n")


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
