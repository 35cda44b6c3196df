# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Ops called from two threads, on two streams, on two GPUs, in forked and spawned processes: the
same bits."""

from __future__ import annotations

import copy
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from custom.dispatch import log, register
from custom.dispatch.backends import made_current
from custom.dispatch.register import overload
from custom.dispatch.registry import BY_NAME, SPECS, Spec
from custom.graph_mode import capture
from torch import Tensor

import custom
from custom.bench import attention, convolution, delta_rule, merging, sparse_attention
from custom.bench.case import Case

from ..support.accuracy import skip_unless_taken
from ..support.calls import (
    assert_same,
    every_spec,
    everything,
    mutated,
    other,
    outputs,
    tensors,
    two_of,
)
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


class Made(NamedTuple):
    """Calls of one op, on whatever device, that share a plan and a graph."""

    spec: Spec
    make: Callable[[torch.device, int], dict[str, Any]]


def _small(spec: Spec, device: torch.device, seed: int) -> dict[str, Any]:
    values = other(spec, device, torch.bfloat16) if seed else None
    return values or sample(spec.name, device, torch.bfloat16)


# of sizes with kernels, descriptors and streams of their own
_TRAINED = [
    attention.case("npu_fused_attention", 1, 16, 4, 512, 512, 128),
    attention.case("npu_fused_attention", 2, 16, 4, 512, 512, 64, packed=True),
    delta_rule.chunk_case(512),
]
_LARGE = [
    attention.case("npu_fused_attention_backward", 1, 16, 16, 512, 512, 128, deterministic=True),
    sparse_attention.layer_case(2, 1, 128, 4096),
    sparse_attention.layer_case(200, 1, 16, 1024),
    sparse_attention.attention_case(2, 1, 128, 8192),
    sparse_attention.indexer_case(2, 4, 12288),
    delta_rule.decode_case(4, 4, "kv"),
    delta_rule.chunk_grad_case(512),
    convolution.update_case(4),
    merging.states_case(4, 64, 16, 512),
]


def _each(specs: Iterable[Spec], large: list[Case]) -> pytest.MarkDecorator:
    made = {spec.name: Made(spec, partial(_small, spec)) for spec in specs}
    made |= {f"{case.op}, {case.label}": Made(BY_NAME[case.op], case.make) for case in large}
    return pytest.mark.parametrize("made", made.values(), ids=made)


every_call = _each(SPECS, _TRAINED + _LARGE)
every_gradient = _each((spec for spec in SPECS if spec.differentiable), _TRAINED)


def made_on(made: Made, places: list[torch.device], seed: int = 0) -> list[dict[str, Any]]:
    calls = []
    for place in places:
        with made_current(place), torch.no_grad():
            calls.append(made.make(place, seed))
    return calls


@torch.no_grad()
def where_it_is_current(
    made: Made, places: list[torch.device], calls: list[dict[str, Any]]
) -> list[list[Tensor]]:
    """What each call gives where its device is the current one."""
    results = []
    for place, call in zip(places, calls, strict=True):
        with made_current(place):
            results.append(everything(made.spec, overload(made.spec), call))
    return results


@every_call
def test_two_devices_in_turn(made, device, backend):
    """Checked, recorded and repeated while the other is the current one; then from two threads,
    where the first one is."""
    places = two_of(device)
    op, calls = overload(made.spec), made_on(made, places)
    register.forget()
    before, results = log.calls[made.spec.name, backend], ([], [])
    with torch.no_grad():
        for _ in range(3):
            for number, call in enumerate(calls):
                with made_current(places[1 - number]):
                    results[number].append(everything(made.spec, op, call))
    assert log.calls[made.spec.name, backend] == before + 6

    def many(number):
        with torch.no_grad():
            return [everything(made.spec, op, calls[number]) for _ in range(3)]

    with ThreadPoolExecutor(2) as pool:
        for number, more in enumerate(pool.map(many, range(2))):
            results[number].extend(more)
    register.forget()
    for every, wanted in zip(results, where_it_is_current(made, places, calls), strict=True):
        for result in every:
            assert_same(result, wanted)


def _gradients(spec: Spec, calls: list[dict[str, Any]]) -> list[list[Tensor]]:
    """Of all calls by one backward, in the order of their arguments."""
    leaves, outs = [], []
    for call in calls:
        given = copy.deepcopy(call)
        floats = {n: x for n, x in tensors(given).items() if x.is_floating_point()}
        leaves.append([x.requires_grad_() for x in floats.values()])
        outs += [x for x in outputs(overload(spec)(**given)) if x.requires_grad]
    flat = [leaf for each in leaves for leaf in each]
    grads = [torch.full_like(x, 0.5) for x in outs]
    found = iter(torch.autograd.grad(outs, flat, grads, allow_unused=True))
    every = [[next(found) for _ in each] for each in leaves]
    return [[x for x in each if x is not None] for each in every]


@every_gradient
def test_a_backward_over_two_devices(made, device, backend):
    """Its threads, one a device, launch what they did not call forward."""
    places = two_of(device)
    calls = made_on(made, places)
    register.forget()
    results = []
    for current in (1, 0, 1):
        with made_current(places[current]):
            results.append(_gradients(made.spec, calls))
    register.forget()
    for number, (place, call) in enumerate(zip(places, calls, strict=True)):
        with made_current(place):
            (wanted,) = _gradients(made.spec, [call])
        assert wanted
        for result in results:
            assert_same(result[number], wanted)


@every_call
def test_graphs_of_two_devices(made, device, backend):
    """Captured and replayed with other values while the other device is the current one."""
    places = two_of(device)
    buffers, names = made_on(made, places), []
    graphs = []
    for number, first in enumerate(buffers):
        names = [*tensors(first)]
        constants = {name: x for name, x in first.items() if name not in names}

        def call(*values, names=names, constants=constants):
            given = dict(zip(names, values, strict=True))
            return overload(made.spec)(**given, **constants)

        with made_current(places[1 - number]), torch.no_grad():
            graphs.append(capture(call, *tensors(first).values()))
    for seed in (1, 0, 1):
        calls = made_on(made, places, seed)
        results = []
        for number, given in enumerate(copy.deepcopy(calls)):
            with made_current(places[1 - number]), torch.no_grad():
                out = outputs(graphs[number](*(given[name] for name in names)))
                written = [buffers[number][n] for n in mutated(made.spec) if n in given]
                results.append([x.clone() for x in (*out, *written)])
        for result, wanted in zip(results, where_it_is_current(made, places, calls), strict=True):
            assert_same(result, wanted)


def test_compiled_code_of_two_devices(device, backend):
    places = two_of(device)
    made = Made(BY_NAME["npu_fused_attention"], _TRAINED[0].make)
    calls = made_on(made, places)
    compiled = torch.compile(lambda **given: 2 * custom.npu_fused_attention(**given))
    for _ in range(3):
        for number, call in enumerate(calls):
            with made_current(places[1 - number]), torch.no_grad():
                got = compiled(**call)
            ((wanted, _),) = where_it_is_current(made, [places[number]], [call])
            assert torch.equal(got, wanted * 2)


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
