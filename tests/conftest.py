# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Devices, poisoned allocations, and the record of what was verified where.

pytest --device cpu|cuda|npu     one device (default: every device of this machine)
pytest --quick                   two cases of each parametrised test
pytest --replay                  CUDA launchers run once on copies, and plans give the results
pytest --failures FILE           append every failure to it at once
pytest --record FILE             write which ops ran in passing tests, by backend
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from custom.dispatch import backends, log, register, values
from custom.dispatch.common import memory

import custom

pytest.register_assert_rewrite("tests.support")
pytest_plugins = ["tests.support.cxx", "tests.support.graph_record", "tests.support.many_gpus"]
BACKEND_OF = {"cpu": "reference", "cuda": "cuda", "npu": "npu"}
_verified: Counter[tuple[str, str]] = Counter()  # (op, backend) -> passing tests that ran it
_doubted: set[tuple[str, str] | None] = set()  # what a failing test ran; None: it ran nothing


def devices_here() -> list[str]:
    found = ["cpu"]
    if torch.cuda.is_available():
        found.append("cuda")
    if hasattr(torch, "npu") and torch.npu.is_available():
        found.append("npu")
    return found


def pytest_addoption(parser):
    parser.addoption("--device", choices=list(BACKEND_OF), help="default: every device here")
    parser.addoption("--quick", action="store_true", help="two cases of each parametrised test")
    parser.addoption("--replay", action="store_true", help="results come from plans (launches.py)")
    parser.addoption("--record", help="write the record of verified ops to this JSON file")


def pytest_generate_tests(metafunc):
    if "device" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--device")
        names = [chosen] if chosen else devices_here()
        metafunc.parametrize("device", names, indirect=True, scope="session")


def pytest_collection_modifyitems(config, items):
    if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4):
        reason = "Triton's interpreter needs numpy below 2.4"
        for item in items:
            if item.originalname == "test_under_the_interpreter":
                item.add_marker(pytest.mark.skip(reason=reason))
    if not config.getoption("--quick"):
        return
    seen: Counter[str] = Counter()
    keep, drop = [], []
    for item in items:
        name = item.nodeid.partition("[")[0]
        (keep if seen[name] < 2 else drop).append(item)
        seen[name] += 1
    items[:] = keep
    config.hook.pytest_deselected(items=drop)


@pytest.fixture(scope="session")
def device(request) -> torch.device:
    """The last one of the host, so that where there are two the current one is another."""
    if request.param == "cpu":
        return torch.device("cpu")
    return torch.device(request.param, getattr(torch, request.param).device_count() - 1)


@pytest.fixture
def backend(device) -> str:
    """The backend that must run on `device`: a test on a GPU must not pass by the reference."""
    if custom.config.backend != "auto":
        return custom.config.backend
    return BACKEND_OF[device.type]


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    from .support.poison import poisoned  # behind register_assert_rewrite

    monkeypatch.setattr(memory, "empty", poisoned)


@pytest.fixture(autouse=True)
def _values(monkeypatch):
    """Backends agree on values too that mean nothing, which the CPU refuses by default."""
    monkeypatch.setattr(values, "on_cpu", False)


@pytest.fixture
def looked_at(monkeypatch):
    """By default, as users have it."""
    monkeypatch.setattr(values, "on_cpu", True)


@pytest.fixture
def processors_of_a_gpu(monkeypatch):
    """The interpreter has one: K would always be whole."""
    from .support.kernels import INTERPRETED  # behind register_assert_rewrite

    if INTERPRETED:
        monkeypatch.setattr("custom.cuda_ops.common.gpu.num_sms", lambda device: 132)


@pytest.fixture(autouse=True)
def _forget():
    """A test may replace parts of the package: no call in it is like one of another test."""
    register.forget()


def _by_plan(launcher, **arguments):
    """What `launcher` gives, by the plan of what it did with copies."""
    from custom.cuda_ops.runtime import launches

    storages: dict[int, torch.UntypedStorage] = {}
    copies = {name: _copied(x, storages) for name, x in arguments.items()}
    _, plan = launches.record(launcher, lambda args, kwargs: kwargs, (), copies)
    if plan is None:
        return launcher(**arguments)
    return plan([x for x in arguments.values() if isinstance(x, torch.Tensor)])


def _copied(x, storages):
    """A copy of a tensor; two that share their memory share the copy's."""
    if not isinstance(x, torch.Tensor):
        return x
    storage = x.untyped_storage()
    if storage._cdata not in storages:
        storages[storage._cdata] = storage.clone()
    copy = torch.empty(0, dtype=x.dtype, device=x.device)
    return copy.set_(storages[storage._cdata], x.storage_offset(), x.shape, x.stride())


@pytest.fixture(autouse=True)
def _replay(request, monkeypatch):
    if request.config.getoption("--replay"):
        choose = backends.runner

        def runner(*given):
            found = choose(*given)
            if found.backend is not backends.CUDA:
                return found
            return dataclasses.replace(found, function=partial(_by_plan, found.function))

        monkeypatch.setattr(backends, "runner", runner)
        # a plan would be of a launcher that has one itself
        monkeypatch.setattr(custom.config, "replay", False)


@pytest.fixture(autouse=True)
def _turns(request):
    """Tests of tens of GB: two workers at a time share a GPU, and give the memory back."""
    if request.node.get_closest_marker("large") is None or not torch.cuda.is_available():
        yield
        return
    import fcntl  # not on every system, but wherever there is CUDA and pytest-xdist

    turn = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 2
    with open(Path(tempfile.gettempdir()) / f"npu-custom-ops-large-{turn}", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        torch.cuda.empty_cache()


@pytest.fixture
def one_thread():
    """A recurrence is many small products; on a busy machine more threads only wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


_RAN = pytest.StashKey[dict[tuple[str, str], int]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    before = Counter(log.calls)
    try:
        return (yield)
    finally:
        ran = (log.calls - before).items()
        item.stash[_RAN] = {key: 1 for key, count in ran if count > 0}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """However it failed, and before or after its call as well."""
    report = yield
    ran = item.stash.get(_RAN, {})
    if report.failed:
        _doubted.update(ran or [None])
    elif report.when == "call" and report.passed:
        _verified.update(ran)
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """A worker of pytest-xdist is done: add what it verified."""
    output = getattr(node, "workeroutput", {})
    for op, ran_on, tests in output.get("verified", []):
        _verified[op, ran_on] += tests
    # one that died says nothing
    _doubted.update(each and (each[0], each[1]) for each in output.get("doubted", [None]))


def pytest_sessionfinish(session, exitstatus):
    output = getattr(session.config, "workeroutput", None)
    if output is not None:  # this is such a worker
        output["verified"] = [(*key, tests) for key, tests in _verified.items()]
        output["doubted"] = [*_doubted]
        return
    path = session.config.getoption("--record")
    if not path or exitstatus not in (0, 1) or None in _doubted:
        return
    device = session.config.getoption("--device") or "cpu"
    where = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    today, there = datetime.date.today().isoformat(), Path(path)
    earlier = json.loads(there.read_text()) if there.exists() else {}
    kept = earlier["ops"] if earlier.get("hardware") == where else {}
    ran = {
        op: {"backend": ran_on, "tests": tests, "date": today}
        for (op, ran_on), tests in sorted(_verified.items())
        if ran_on == BACKEND_OF[device] and (op, ran_on) not in _doubted
    }
    doubted = {op for op, ran_on in filter(None, _doubted) if ran_on == BACKEND_OF[device]}
    # a run of a part takes nothing from an op of which an earlier one ran more
    ran = {op: x for op, x in ran.items() if x["tests"] >= kept.get(op, x)["tests"]}
    record = {
        "device": device,
        "hardware": where,
        "torch": torch.__version__,
        "ops": {op: x for op, x in sorted((kept | ran).items()) if op not in doubted},
    }
    there.write_text(json.dumps(record, indent=2) + "\n")
