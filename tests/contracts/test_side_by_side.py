# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Ops called from two threads, on two streams, in forked and spawned processes: the same bits."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from custom.dispatch import register
from custom.dispatch.register import overload
from custom.dispatch.registry import SPECS

from ..support.accuracy import skip_unless_taken
from ..support.calls import assert_same, every_spec, everything, other
from ..support.samples import sample
from ..support.threads import at_once

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def in_a_fixed_order():
    """A gradient's atomics add in any order otherwise."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def dtype_of(device):
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def arguments_of_two(spec, device):
    """Of two calls that share a plan."""
    dtype = dtype_of(device)
    return [sample(spec.name, device, dtype), other(spec, device, dtype)]


def each_alone(spec, calls):
    with torch.no_grad():
        return [everything(spec, overload(spec), each) for each in calls]


def two_calls(spec, device):
    """Arguments of two calls that share a plan, and what each gives alone."""
    calls = arguments_of_two(spec, device)
    return calls, each_alone(spec, calls)


@every_spec
def test_first_calls_race(spec, device, backend):
    """Nothing is remembered or, where this is the first test, compiled: each thread checks,
    compiles and records for all; then plans.  In streams of their own, where there are any."""
    skip_unless_taken(dtype_of(device), device, backend)
    calls, results = arguments_of_two(spec, device), {}

    def first(number):
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        with torch.no_grad(), torch.cuda.stream(stream):
            given = calls[number % 2]
            results[number] = [everything(spec, overload(spec), given) for _ in range(3)]
            if stream is not None:
                stream.synchronize()

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    register.forget()
    at_once(4, first)
    register.forget()
    alone = each_alone(spec, calls)
    for number, every in results.items():
        for result in every:
            assert_same(result, alone[number % 2])


@every_spec
def test_two_threads(spec, device, backend):
    skip_unless_taken(dtype_of(device), device, backend)
    calls, alone = two_calls(spec, device)

    def many(number):
        with torch.no_grad():
            return [everything(spec, overload(spec), calls[number]) for _ in range(8)]

    with ThreadPoolExecutor(2) as pool:
        for number, results in enumerate(pool.map(many, (0, 1))):
            for result in results:
                assert_same(result, alone[number])


@every_spec
def test_two_streams(spec, device, backend):
    if device.type != "cuda":
        pytest.skip("a CPU has none")
    skip_unless_taken(dtype_of(device), device, backend)
    calls, alone = two_calls(spec, device)
    streams = [torch.cuda.Stream(device) for _ in calls]
    torch.cuda.synchronize(device)
    results = [[], []]
    with torch.no_grad():
        for _ in range(8):
            for number, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    results[number].append(everything(spec, overload(spec), calls[number]))
    torch.cuda.synchronize(device)
    for number, every in enumerate(results):
        for result in every:
            assert_same(result, alone[number])


def _bits(device: str) -> list[float]:
    """What a few ops give; floats of their sums, which compare exactly."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    where, found = torch.device(device), []
    dtype = dtype_of(where)
    for spec in SPECS[::5]:
        with torch.no_grad():
            results = everything(spec, overload(spec), sample(spec.name, where, dtype))
        found += [float(x.double().nan_to_num().sum()) for x in results]
    return found


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes(method, device, backend):
    with ProcessPoolExecutor(2, multiprocessing.get_context(method)) as pool:
        first, second = pool.map(_bits, [device.type] * 2)
    assert first == second == _bits(device.type)


_FORKS = """
import os, sys
sys.path.insert(0, {root!r})
import custom
from tests.contracts.test_side_by_side import _bits
if {called}:
    _bits({device!r})
children = []
for _ in range(2):
    child = os.fork()
    if not child:
        print(_bits({device!r}), flush=True)
        os._exit(0)
    children.append(child)
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
"""


@pytest.mark.parametrize("called", [False, True], ids=["imported", "called"])
def test_forked(called, device):
    """As servers start their workers: the parent has imported the package, and may have called it.
    It has no other threads, whose locks no child could open: the tests' own process may."""
    if called and device.type == "cuda":
        pytest.skip("torch refuses CUDA in a child of a process that has used it")
    script = _FORKS.format(root=str(ROOT), device=device.type, called=called)
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines() == [str(_bits(device.type))] * 2


def test_processes_that_share_a_gpu(device):
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    ops = ["npu_chunk_gated_delta_rule", "npu_chunk_gated_delta_rule_grad", "npu_fused_attention"]
    command = [sys.executable, "-m", "tests.tools.shared", *ops, "--processes=3", "--seconds=4"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-2000:]
