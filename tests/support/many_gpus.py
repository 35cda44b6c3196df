# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""pytest-xdist on a host of several GPUs, for

pytest --device cuda -k cuda -n 38 --dist worksteal --max-worker-restart 60 --failures FILE

The workers share the GPUs evenly; a worker whose CUDA context a kernel has ended ends as well, so
that the tests behind that one have a new context; a failure is in FILE at once, not at the end.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch


def rotated(devices: list[str], worker: str) -> list[str]:
    """All of them, the worker's own last: the one that tests take."""
    first = (int(worker.removeprefix("gw")) + 1) % len(devices)
    return devices[first:] + devices[:first]


class Failures:
    """In the controller, to which the workers' reports come."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def pytest_runtest_logreport(self, report):
        if report.failed:
            with self.file.open("a") as file:
                file.write(f"== {report.nodeid} ({report.when})\n{report.longreprtext[-3000:]}\n")


def pytest_addoption(parser):
    parser.addoption("--failures", type=Path, help="append every failure to this file at once")


def pytest_configure(config):
    worker, file = os.environ.get("PYTEST_XDIST_WORKER"), config.getoption("--failures")
    if worker is None and file is not None:
        config.pluginmanager.register(Failures(file))
    if worker is None or config.getoption("--device") != "cuda":
        return
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = given.split(",") if given else [str(n) for n in range(torch.cuda.device_count())]
    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(rotated(devices, worker))


def pytest_runtest_logfinish(nodeid, location):
    # a test may stand in for torch.cuda
    if "PYTEST_XDIST_WORKER" not in os.environ or not hasattr(torch.cuda, "is_initialized"):
        return
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize(torch.cuda.device_count() - 1)
        except RuntimeError:
            os._exit(1)
