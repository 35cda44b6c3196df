# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A call like an earlier one: what a plan launches is what its launcher would, and little else."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from custom.dispatch import backends, call_cache, log, register
from custom.dispatch.common import memory, private_torch
from custom.dispatch.common.modes import Mode
from custom.dispatch.registry import BY_NAME, SPECS
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import custom

from ..support import samples

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

import triton
import triton.language as tl
from custom.cuda_ops.common import gpu
from custom.cuda_ops.merging import merge_states
from custom.cuda_ops.runtime import launches, private_triton
from custom.cuda_ops.runtime.fast_launcher import FastLauncher
from custom.cuda_ops.runtime.private_triton import Launcher
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import _async_compile, build
from triton.runtime.jit import KernelInterface

from custom.bench import attention, case, convolution, delta_rule, indexer_loss, sparse_attention

from ..support.compile_for_hopper import address
from ..support.compile_for_hopper import driver as pretended_driver
from ..support.pretended_gpu import Address, Device, address_of, pretend

DECODE = "npu_fused_sigmoid_gating_delta_rule_update"
FORWARD, BACKWARD = "npu_fused_attention", "npu_fused_attention_backward"
CASES = [
    sparse_attention.layer_case(2, 1, 128, 4096),
    sparse_attention.layer_case(1, 1, 16, 1024, 512),
    sparse_attention.layer_case(200, 1, 128, 1024),
    sparse_attention.mla_prolog_case(1, 128),
    sparse_attention.mla_prolog_case(300, 16),
    sparse_attention.indexer_prolog_case(32),
    sparse_attention.indexer_case(1, 1, 8192),
    sparse_attention.indexer_case(2, 4, 12288),
    sparse_attention.attention_case(1, 1, 128, 8192),
    sparse_attention.attention_case(32, 1, 16, 4096),
    sparse_attention.prefill_case(64, 128, 4096),
    attention.case(FORWARD, 1, 16, 16, 512, 512, 128),
    attention.case(FORWARD, 2, 16, 4, 512, 512, 64, packed=True),
    attention.case(FORWARD, 2, 32, 8, 1, 4096, 128, False),
    attention.case(BACKWARD, 1, 16, 16, 512, 512, 128),
    attention.case(BACKWARD, 1, 16, 16, 512, 512, 128, packed=True),
    indexer_loss.loss_case(16, 128, 256, 512, 128),
    indexer_loss.loss_case(128, 576, 256, 512, 128, lse=True),
    indexer_loss.backward_case(256, 512, 128),
    delta_rule.decode_case(1, 1, "kv"),
    delta_rule.decode_case(64, 1, "vk", torch.bfloat16),
    delta_rule.decode_case(4, 4, "kv"),
    delta_rule.chunk_case(512),
    delta_rule.chunk_grad_case(512),
    delta_rule.recurrent_case(4, 2),
    convolution.prefill_case(512, 2),
    convolution.fused_case(4, 3),
    convolution.in_place_case(4, 3),
]


@pytest.fixture(params=[(8, 0), (9, 0)], ids=["sm80", "sm90"])
def pretended(request, monkeypatch) -> Device:
    # nothing here reads a value
    monkeypatch.setattr(
        case.Draw,
        "normal",
        lambda self, *shape, dtype=None, std=1.0: torch.empty(shape, dtype=dtype or self.dtype),
    )
    return pretend(monkeypatch, request.param)


@pytest.fixture(autouse=True)
def _replay(monkeypatch):
    """Also under CUSTOM_REPLAY=0: a test that wants it off says so."""
    monkeypatch.setattr(custom.config, "replay", True)


def direct(name: str, arguments: dict[str, Any]) -> Any:
    """The launcher itself."""
    spec = BY_NAME[name]
    found = backends.launcher(backends.CUDA, spec)
    assert found is not None
    return found.function(**register.bind(register.overload(spec)._schema, (), arguments))


def _tensors(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else [*(out or ())]


@pytest.mark.parametrize("which", CASES, ids=lambda c: f"{c.op}, {c.label}")
def test_a_plan_launches_what_its_launcher_does(which, pretended):
    plans = []
    with pytest.MonkeyPatch.context() as patch:
        make = launches._plan
        patch.setattr(launches, "_plan", lambda *x: plans.append(make(*x)) or plans[-1])
        for seed in range(2):
            which.call(which.make(torch.device("cpu"), seed))
    assert plans, "no plan"
    arguments = which.make(torch.device("cpu"), 2)
    given = [x for x in arguments.values() if isinstance(x, Tensor)]
    pretended.take()
    wanted_out = _tensors(direct(which.op, arguments))
    wanted, pieces = pretended.take()
    out = _tensors(which.call(arguments))
    launched, allocated = pretended.take()

    assert [(name, grid) for name, grid, _ in launched] == [(n, g) for n, g, _ in wanted]
    # the launcher's address -> the plan's; that of an argument stays the same
    same: dict[int, int] = {x.data_ptr(): x.data_ptr() for x in given}
    pairs = []
    for (_, _, a), (_, _, b) in zip(wanted, launched, strict=True):
        pairs += zip(a, b, strict=True)
    pairs += [(address_of(a), b.data_ptr()) for a, b in zip(wanted_out, out, strict=True)]
    for a, b in pairs:
        if isinstance(a, tuple) and isinstance(a[0], Address):
            assert a[1:] == b[1:]
            a, b = a[0], b[0]
        if isinstance(a, Address) and a:  # 0: empty
            inside = [x for x in given if x.data_ptr() <= a < x.data_ptr() + _bytes(x)]
            assert same.setdefault(a, a if inside else b) == b
        elif not isinstance(a, Address):
            assert a == b and type(a) is type(b)
    # no two pieces of memory overlap, and all lie in what was allocated
    places = [(same.get(x.data_ptr()), _bytes(x)) for x in pieces]
    ends = sorted((begin, begin + size) for begin, size in places if begin)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ends))
    whole = [(x.data_ptr(), x.data_ptr() + _bytes(x)) for x in allocated]
    assert all(any(lo <= begin and end <= hi for lo, hi in whole) for begin, end in ends)
    for a, b in zip(wanted_out, out, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


@pytest.mark.parametrize("replay", [True, False], ids=["replay", "anew"])
@pytest.mark.parametrize(
    "op", ["npu_merge_states", "npu_fused_attention", "npu_lightning_indexer", "npu_causal_conv1d"]
)
@pytest.mark.parametrize("pretended", [(9, 0)], ids=["sm90"], indirect=True)
def test_a_switch_says_whether_launches_are_repeated(op, replay, pretended, monkeypatch, capsys):
    """What is launched is the same, and CUSTOM_LOG says which way each call went."""
    monkeypatch.setattr(custom.config, "replay", replay)
    monkeypatch.setattr(custom.config, "log", "dispatch")
    monkeypatch.setattr(log, "_said", set())
    arguments = samples.sample(op, torch.device("cpu"), torch.bfloat16)
    seen = []
    for _ in range(4):
        register.overload(BY_NAME[op])(**arguments)
        seen.append([(name, grid) for name, grid, _ in pretended.take()[0]])
    assert seen[0] and all(each == seen[0] for each in seen)
    said = [line for line in capsys.readouterr().err.splitlines() if op in line]
    assert f"{op} -> cuda (inputs on cpu)" in said[0]
    assert "its launcher runs unchecked" in said[1]
    replayed = [f"custom: {op} -> cuda (like an earlier call: replays {len(seen[0])} launches)"]
    assert said[2:] == (replayed if replay else [])


@pytest.mark.parametrize("pretended", [(9, 0)], ids=["sm90"], indirect=True)
def test_a_repeated_launch_that_fails_says_its_launcher_s_line(pretended, monkeypatch):
    arguments = samples.sample("npu_merge_states", torch.device("cpu"), torch.bfloat16)
    for _ in range(2):
        custom.npu_merge_states(**arguments)
    monkeypatch.setattr(pretended, "launched", None)
    with pytest.raises(AttributeError, match="append") as caught:
        custom.npu_merge_states(**arguments)
    if sys.version_info >= (3, 11):
        [note] = caught.value.__notes__
        assert "merge_states.py:" in note and "CUSTOM_REPLAY=0" in note


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.itemsize


@pytest.fixture
def streams(monkeypatch):
    """(what is done on which stream, the current one)"""
    noted: list[str] = []
    current = ["here"]

    class Stream:
        def __init__(self, name: Any) -> None:
            self.name = name

        def wait_event(self, event: Event) -> None:
            noted.append(f"{self.name} waits for {event.where}")

    class Event:
        def record(self, stream: Stream) -> None:
            self.where = stream.name

    here = SimpleNamespace(get_current_stream=lambda device: current[0])
    monkeypatch.setattr(triton.runtime.driver, "_active", here)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(current[0]))
    monkeypatch.setattr(launches, "_new_stream", lambda device: Stream("there"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(
        torch.cuda, "set_stream", lambda stream: current.__setitem__(0, stream.name)
    )
    launches._streams.cache_clear()
    yield noted, current
    launches._streams.cache_clear()


class Noting:
    """A kernel that notes its number and its stream; a negative one it refuses."""

    def __init__(self, noted: list[str], current: list[str]) -> None:
        self.noted, self.current = noted, current

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launched(tensor: Tensor, **_: Any) -> None:
            if tensor.item() < 0:
                raise ValueError("negative")
            self.noted.append(f"{tensor.item()} on {self.current[0]}")

        return launched


def test_a_plan_forks_the_stream_where_its_launcher_does(streams):
    """The streams of the time of the call, and what is launched on which."""
    noted, current = streams
    kernel = Noting(*streams)

    def launcher(x: Tensor) -> Tensor:
        out = memory.empty((1,), x.dtype, x.device)
        with launches.SideStream(x.device) as side:
            with side.stream():
                launches.kernel(kernel, 1)(x)
            launches.kernel(kernel, 1)(x)
        return out

    _, plan = launches.record(launcher, lambda args, kwargs: dict(x=args[0]), (torch.ones(1),), {})
    assert noted == ["there waits for here", "1.0 on there", "1.0 on here", "here waits for there"]
    noted.clear()
    current[0] = "elsewhere"
    assert plan is not None
    plan([torch.full((1,), 2.0)])
    assert noted == [
        "there waits for elsewhere",
        "2.0 on there",
        "2.0 on elsewhere",
        "elsewhere waits for there",
    ]
    assert current == ["elsewhere"]


def test_a_call_that_fails_beside_the_stream_comes_back_to_it(streams):
    """Else memory of the stream would be others' while its kernels still run."""
    noted, current = streams
    kernel = Noting(*streams)

    def launcher(x: Tensor, y: Tensor) -> None:
        with launches.SideStream(x.device) as side, side.stream():
            launches.kernel(kernel, 1)(x)
            launches.kernel(kernel, 1)(y)

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return dict(x=args[0], y=args[1])

    good, bad = torch.ones(1), -torch.ones(1)
    _, plan = launches.record(launcher, bind, (good, good.clone()), {})
    assert plan is not None
    for call in (launcher, lambda x, y: plan([x, y])):
        noted.clear()
        with pytest.raises(ValueError, match="negative"):
            call(good, bad)
        assert noted == ["there waits for here", "1.0 on there", "here waits for there"]
        assert current == ["here"]


def test_a_plan_allocates_ahead_of_its_second_stream(streams, monkeypatch):
    """Memory belongs to the stream of the call, also what its launcher allocates inside."""
    noted, current = streams
    kernel = Noting(*streams)

    def empty(shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        noted.append(f"memory of {current[0]}")
        return torch.empty(shape, dtype=dtype, device=device)

    def launcher(x: Tensor) -> Tensor:
        with launches.SideStream(x.device) as side, side.stream():
            launches.kernel(kernel, 1)(x)
            return memory.empty((1,), x.dtype, x.device)

    monkeypatch.setattr(memory, "empty", empty)
    _, plan = launches.record(launcher, lambda args, kwargs: dict(x=args[0]), (torch.ones(1),), {})
    assert plan is not None
    noted.clear()
    plan([torch.ones(1)])
    assert noted == [
        "memory of here",
        "there waits for here",
        "1.0 on there",
        "here waits for there",
    ]


class Driver:
    """CUDA's, which gives every stream another address."""

    def __init__(self, fails: str = "") -> None:
        self.called: list[str] = []
        self.fails = fails

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*args: Any) -> int:
            self.called.append(name)
            if name == "cuStreamCreate":
                args[0]._obj.value = 64 * len(self.called)
            return 2 if name == self.fails else 0

        return call


@pytest.mark.parametrize("fails", ["", "cuStreamCreate"])
def test_a_second_stream_is_none_of_those_that_torch_hands_out(fails, monkeypatch):
    driver = Driver(fails)
    external = lambda address, device: SimpleNamespace(address=address)  # noqa: E731
    monkeypatch.setattr(launches.ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(torch.cuda, "ExternalStream", external)
    device = torch.device("cuda", 1)
    if fails:
        with pytest.raises(RuntimeError, match="cuStreamCreate of CUDA's driver failed with 2"):
            launches._new_stream(device)
    else:
        assert launches._new_stream(device).address != launches._new_stream(device).address
    assert driver.called[-1] == "cuCtxPopCurrent_v2"  # the caller's context is current again
    assert driver.called.count("cuThreadExchangeStreamCaptureMode") % 2 == 0


def test_a_user_s_stream_is_no_op_s_second_one(device):
    if device.type != "cuda":
        pytest.skip("streams of a GPU")
    which = sparse_attention.layer_case(2, 1, 128, 4096)
    arguments = which.make(device, 0)
    wanted = [x.clone() for x in _tensors(which.call(arguments))]
    here = torch.cuda.current_stream(device)
    there = launches._streams(device, here.cuda_stream).there
    mine = [torch.cuda.Stream(device) for _ in range(64)]
    assert there.cuda_stream not in {stream.cuda_stream for stream in mine}
    for stream in (here, *mine[:2]):
        with torch.cuda.stream(stream):
            for _ in range(3):  # a first call, a recorded one, a plan
                out = _tensors(which.call(arguments))
                segments = torch.cuda.memory_snapshot()
                for x in out:
                    [at] = [
                        segment["stream"]
                        for segment in segments
                        if 0 <= x.data_ptr() - segment["address"] < segment["total_size"]
                    ]
                    assert at == stream.cuda_stream
            stream.synchronize()
            assert all(map(torch.equal, out, wanted))


def test_a_captured_stream_is_not_disturbed_by_calls_elsewhere(device):
    """The second stream is made while another one is captured, too."""
    if device.type != "cuda":
        pytest.skip("streams of a GPU")
    which = sparse_attention.layer_case(2, 1, 128, 4096)
    arguments = which.make(device, 0)
    wanted = [x.clone() for x in _tensors(which.call(arguments))]
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(4, device=device)
    given: list[list[Tensor]] = []

    def elsewhere() -> None:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            given.append([each.clone() for each in _tensors(which.call(arguments))])

    mine = torch.cuda.Stream(device)
    with torch.cuda.graph(graph, stream=mine, capture_error_mode="thread_local"):
        x += 1
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        out = _tensors(which.call(arguments))
        x += 1
    graph.replay()
    torch.cuda.synchronize(device)
    assert x.tolist() == [2.0] * 4
    assert given and all(map(torch.equal, given[0], wanted)) and all(map(torch.equal, out, wanted))


class Launched:
    """Triton's launcher of a kernel over a pointer, a descriptor, a number and a descriptor; what
    it hands to C is noted."""

    def __init__(self, scratch: int = 0) -> None:
        self.handed: list[Any] = []
        kinds = "*fp16", "tensordesc<fp16[16, 64]>", "i32", "tensordesc<fp32[8]>"
        self.metas = [
            dict(swizzle=3, elem_size=2, elem_type=6, block_size=[16, 64], fp4_padded=False),
            dict(swizzle=0, elem_size=4, elem_type=7, block_size=[8], fp4_padded=False),
        ]
        run = object.__new__(nvidia.CudaLauncher)
        vars(run).update(
            num_ctas=1,
            global_scratch_size=scratch,
            global_scratch_align=128,
            profile_scratch_size=0,
            profile_scratch_align=1,
            launch_cooperative_grid=False,
            launch_pdl=True,
            arg_annotations="annotations",
            kernel_signature="signature",
            gsan_enabled=False,
            launch=nvidia.wrap_handle_tensordesc(
                lambda *args: self.handed.append(args), dict(enumerate(kinds)), self.metas
            ),
        )
        self.kernel = SimpleNamespace(
            run=run,
            function=7,
            packed_metadata=(4, 1, 0),
            launch_metadata=lambda *_: "about",
            metadata=SimpleNamespace(tensordesc_meta=self.metas),
        )

    def by_triton(self, x: Tensor, y: Tensor, *about: Any) -> Any:
        self.kernel.run(
            3,
            2,
            1,
            11,
            7,
            (4, 1, 0),
            *(about or (None,) * 3),
            x.data_ptr(),
            self.rows(x),
            5,
            self.numbers(y),
        )
        return self.handed.pop()

    @staticmethod
    def rows(x: Tensor) -> Any:
        layout = gl.NVMMASharedLayout(128, 16, rank=2)
        return TensorDescriptor(x, [*x.shape], [*x.stride()], [16, 64], layout)

    @staticmethod
    def numbers(x: Tensor) -> Any:
        return TensorDescriptor(x, [x.numel()], [1], [8], gl.NVMMASharedLayout(0, 32, 1))


@pytest.fixture
def encoded(monkeypatch) -> list[int]:
    """Where the descriptors point that are encoded."""
    places: list[int] = []

    def encode(pointer: int, *rest: Any) -> tuple[Any, ...]:
        places.append(pointer)
        return "map", pointer, *rest

    utils = SimpleNamespace(fill_tma_descriptor=encode, fill_tma_descriptor_tiled=encode)
    here = SimpleNamespace(get_current_stream=lambda device: 11, utils=utils)
    monkeypatch.setattr(triton.runtime.driver, "_active", here)
    return places


def run(launch: FastLauncher, values: list[Any]) -> None:
    function, handed = launch.call(values)
    function(*handed)


def test_c_is_handed_what_triton_hands_it(encoded):
    """And descriptors that point where they did are not encoded again."""
    which = Launched()
    launch = FastLauncher(Launcher(which.kernel), (3, 2, 1), 0)
    x, y = torch.empty(32, 64, dtype=torch.float16), torch.empty(8)
    rows, numbers = launch.encoded(which.rows(x)), launch.encoded(which.numbers(y))
    for other in (x, torch.empty_like(x), x):
        wanted = which.by_triton(other, y)
        encoded.clear()
        run(launch, [other.data_ptr(), *rows(other.data_ptr()), 5, *numbers(y.data_ptr())])
        [handed] = which.handed
        which.handed.clear()
        assert _flat(handed) == _flat(wanted)
    assert not encoded  # the third is the first


def test_pointers_in_tuples_move_with_their_tensors():
    values = [9, 0, None, 0, 5, 0, 3, 4]
    pointers = [(1, 0, 0), (3, 1, 8), (5, 1, 16)]
    launch: Any = SimpleNamespace(call=lambda values: values)
    tuples = [slice(5, 7), slice(1, 4)]
    step = launches._Launched(launch, values, pointers, [], [], tuples, "here")
    for x, y in ((100, 200), (300, 400)):
        run: Any = SimpleNamespace(pointers=[x, y])
        assert step.call(run) == [9, (x, None, y + 8), 5, (y + 16, 3), 4]
    assert values == [9, 0, None, 0, 5, 0, 3, 4]


def test_hooks_see_every_launch(encoded, monkeypatch):
    which = Launched()
    launch = FastLauncher(Launcher(which.kernel), (3, 2, 1), 0)
    x, y = torch.empty(32, 64, dtype=torch.float16), torch.empty(8)
    rows, numbers = launch.encoded(which.rows(x)), launch.encoded(which.numbers(y))
    hooks = [lambda about: None for _ in range(2)]
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", hooks[0])
    monkeypatch.setattr(knobs.runtime, "launch_exit_hook", hooks[1])
    run(launch, [x.data_ptr(), *rows(x.data_ptr()), 5, *numbers(y.data_ptr())])
    [handed] = which.handed
    which.handed.clear()
    assert _flat(handed) == _flat(which.by_triton(x, y, "about", *hooks))


def test_scratch_memory_is_another_for_each_launch(encoded, monkeypatch):
    which = Launched(scratch=64)
    numbers = iter(range(10))
    allocator = SimpleNamespace(get=lambda: lambda *_: f"scratch {next(numbers)}")
    monkeypatch.setattr(nvidia._allocation, "_allocator", allocator)
    launch = FastLauncher(Launcher(which.kernel), (3, 2, 1), 0)
    x, y = torch.empty(32, 64, dtype=torch.float16), torch.empty(8)
    values = launch.encoded(which.rows(x))(0), launch.encoded(which.numbers(y))(0)
    for _ in range(2):
        run(launch, [0, *values[0], 5, *values[1]])
    given = [[v for v in _flat(x) if str(v).startswith("scratch")] for x in which.handed]
    assert given == [["scratch 0"], ["scratch 1"]]


def _flat(handed: Any) -> list[Any]:
    *rest, last = handed
    return [*rest, *last] if isinstance(last, (list, tuple)) else [*handed]


@pytest.mark.parametrize("overlapping", [False, True])
def test_memory_is_used_again_where_no_launch_may_still_read_it(overlapping, monkeypatch):
    """By programmatic dependent launch one may write before the one ahead of it has read."""
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def empty(shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        alive.append(sum(each() is not None for each in made))
        out = torch.empty(shape, dtype=dtype, device=device)
        made.append(weakref.ref(out))
        return out

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda tensor, **options: None

    def launcher(x: Tensor) -> Tensor:
        work = memory.empty((2 * launches.PIECE,), torch.uint8, x.device)
        launches.kernel(Kernel(), 1)(work, launch_pdl=overlapping)
        out = memory.empty((1,), x.dtype, x.device)
        launches.kernel(Kernel(), 1)(out, launch_pdl=overlapping)
        return out

    monkeypatch.setattr(memory, "empty", empty)
    _, plan = launches.record(launcher, lambda args, kwargs: dict(x=args[0]), (torch.ones(1),), {})
    assert plan is not None
    made.clear()
    alive.clear()
    plan([torch.ones(1)])
    assert alive == [0, int(overlapping)]


def test_each_stream_forks_into_one_of_its_own(monkeypatch):
    """What one user's stream still reads would be another's new memory, or part of its graph."""
    monkeypatch.setattr(launches, "_new_stream", lambda device: SimpleNamespace(device=device))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", SimpleNamespace)
    launches._streams.cache_clear()
    first, second = (torch.device("cuda", index) for index in range(2))
    made = [launches._streams(*user) for user in ((first, 1), (first, 2), (second, 1))]
    assert launches._streams(first, 1) is made[0]
    assert len({id(x.there) for x in made}) == 3
    assert [x.there.device for x in made] == [first, first, second]
    launches._streams.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.bool], ids=str)
def test_a_tensor_that_shares_its_memory_keeps_its_strides(dtype, monkeypatch):
    """Strides of sizes of 1 too, from which launchers choose kernels; older torch makes them 1."""
    from_dlpack = torch.from_dlpack

    def older(tensor: Tensor) -> Tensor:
        assert not tensor.is_floating_point()
        steps = [step if size > 1 else 1 for size, step in zip(*_sized(tensor), strict=True)]
        return from_dlpack(tensor).as_strided(tensor.shape, steps)

    monkeypatch.setattr(torch, "from_dlpack", older)
    whole = torch.ones(2, 5, 3, 17).to(dtype)  # no number of another size fits in a row
    part = whole[1:, :, 1:2]
    own = launches._of_its_own(part)
    assert (own.data_ptr(), own.dtype) == (part.data_ptr(), dtype)
    assert _sized(own) == _sized(part)
    assert own.untyped_storage()._cdata != part.untyped_storage()._cdata


def _sized(tensor: Tensor) -> tuple[Any, Any]:
    return tensor.shape, tensor.stride()


@pytest.mark.parametrize(
    "does",
    [
        lambda x: x.sum().item(),  # reads a value
        lambda x: launches.kernel(Reads(), 1)(torch.tensor([1])),  # a tensor from nowhere
        lambda x: launches.kernel(Reads(), 1)((x, object())),
    ],
    ids=["value", "tensor", "object"],
)
def test_what_a_plan_cannot_do_again_has_none(does):
    def launcher(x: Tensor) -> Tensor:
        does(x)
        return x + 1

    out, plan = launches.record(launcher, lambda a, kwargs: dict(x=a[0]), (torch.ones(3),), {})
    assert plan is None and out.tolist() == [2, 2, 2]


def test_a_launcher_that_gives_back_what_it_got_has_no_plan():
    """An op's result shares no memory with what it got."""
    given = torch.ones(3)
    out, plan = launches.record(lambda x: x[1:], lambda a, kwargs: dict(x=a[0]), (given,), {})
    assert plan is None and out.data_ptr() == given[1:].data_ptr()


class Reads:
    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **named: None


def test_a_plan_repeats_operators_and_cuts_results():
    def launcher(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        work = torch.zeros(2, 3)
        work[1].add_(x[:3], alpha=2).mul_(y)
        whole = memory.empty((4, 3), torch.float32, x.device)
        whole[1:3].copy_(work)
        return whole[1:3].t(), work.amax(0)

    def call(x: Tensor, y: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (x,), dict(y=y)

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return dict(x=args[0], **kwargs)

    both = torch.arange(6.0)
    # the two share their memory: which one a part of it belongs to is known all the same
    _, plan = launches.record(launcher, bind, (both,), dict(y=both[3:]))
    assert plan is not None
    x, y = torch.randn(4), torch.randn(3)
    for ours, wanted in zip(plan([x, y]), launcher(x, y), strict=True):
        assert torch.equal(ours, wanted) and ours.stride() == wanted.stride()


@pytest.mark.parametrize("first", ["empty", "whole"])
def test_a_plan_takes_parts_without_elements(first):
    """Their address is 0, wherever their memory lies."""
    order = {"empty": ("b", "a"), "whole": ("a", "b")}[first]
    seen = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *x, **_: seen.append([each.data_ptr() for each in x])

    def launcher(**x: Tensor) -> None:
        launches.kernel(Kernel(), 1)(x["a"], x["a"][:, 4:], x["b"], x["a"][:, 1:3])

    def call() -> dict[str, Any]:
        rows = torch.zeros(2, 4)
        each = dict(a=rows, b=rows[:, :0])
        return {name: each[name] for name in order}

    _, plan = launches.record(launcher, lambda _, kwargs: kwargs, (), call())
    assert plan is not None
    for _ in range(2):
        given = call()
        plan([*given.values()])
        start = given["a"].data_ptr()
        assert seen[-1] == [start, 0, 0, start + 4]


def test_a_plan_repeats_operators_that_copy_where_they_must():
    """As launchers call them: below autograd a mode sees `to` and `reshape` themselves."""

    def launcher(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.float().t().reshape(-1), x.float().double().to(torch.float16)

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return dict(x=args[0])

    with private_torch.below_autograd():
        _, plan = launches.record(launcher, bind, (torch.zeros(2, 3),), {})
        assert plan is not None
        x = torch.randn(2, 3)
        for ours, wanted in zip(plan([x]), launcher(x), strict=True):
            assert torch.equal(ours, wanted) and ours.dtype is wanted.dtype


@pytest.mark.parametrize("pretended", [(9, 0)], ids=["sm90"], indirect=True)
@pytest.mark.parametrize(
    "which", [x for x in CASES if "backward" not in x.op], ids=lambda c: f"{c.op}, {c.label}"
)
def test_a_repeated_call_looks_nothing_up(which, pretended):
    """No import, no file, no binding, no check; its outputs and work space are all it allocates."""
    arguments = which.make(torch.device("cpu"), 0)
    for _ in range(2):
        out = _tensors(which.call(arguments))
    _, first = pretended.take()
    called: list[str] = []

    def watch(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            called.append(f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}")
        elif event == "c_call":
            called.append(f"{argument.__module__}.{argument.__name__}")

    sys.setprofile(watch)
    try:
        which.call(arguments)
    finally:
        sys.setprofile(None)
    files = ("importlib", "os", "posix", "pathlib", "io", "inspect")
    package = custom.__name__
    ours = (f"{package}.dispatch.ops", f"{package}.dispatch.check.", f"{package}.cuda_ops")
    runtime = f"{package}.cuda_ops.runtime"
    steps = tuple(f"{runtime}.{module}." for module in ("launches", "fast_launcher"))
    unwanted = {x for x in called if x.startswith((*files, *ours)) and not x.startswith(steps)}
    assert not unwanted
    _, allocated = pretended.take()
    large = [x for x in first[len(first) // 2 :] if _bytes(x) > launches.PIECE]
    # an op in place makes its result before it goes where the input was
    assert len(allocated) <= max(len(out), 1) + len(large) + 1


@pytest.fixture
def variants(pretended, monkeypatch) -> dict[str, dict[str, str]]:
    """Triton's own keys of what is launched, by kernel: it compiles once for each.  Of each key
    what the launcher chose: tile sizes, flags, and which tensors there are."""
    found: dict[str, dict[str, str]] = {}
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: "counted",
        get_current_stream=lambda device: 0,
    )

    def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def launched(*args: Any, **named: Any) -> None:
            _, kinds, options = kernel.device_caches["counted"][-1](*args, **named)
            tiles = [
                kind
                for kind, param in zip(kinds, kernel.params, strict=True)
                if param.is_constexpr or str(kind[0]).startswith("tensordesc") or kind[1] is None
            ]
            found.setdefault(kernel.__name__, {})[f"{kinds} {options}"] = f"{tiles} {options}"

        return launched

    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(KernelInterface, "__getitem__", launch)
    return found


def _tokens(random: Random) -> int:
    return random.randint(64, 3000)


def _batch(random: Random) -> tuple[int, int]:
    """Requests, and tokens of each."""
    return random.randint(1, 64), random.randint(1, 4)


def _keys(random: Random) -> int:
    return 256 * random.randint(50, 120)


@pytest.mark.parametrize("pretended", [(9, 0)], ids=["sm90"], indirect=True)
@pytest.mark.parametrize(
    "shape",
    [
        lambda r: delta_rule.decode_case(r.randint(5, 300), 1, "vk"),
        lambda r: delta_rule.chunk_case(_tokens(r)),
        lambda r: delta_rule.chunk_grad_case(_tokens(r)),
        lambda r: attention.case(FORWARD, r.randint(1, 4), 16, 16, n := _tokens(r), n + 99, 128),
        lambda r: attention.case(BACKWARD, r.randint(1, 4), 16, 16, n := _tokens(r), n + 99, 128),
        lambda r: sparse_attention.attention_case(8, 1, 128, _keys(r)),
        lambda r: sparse_attention.indexer_case(8, 1, _keys(r)),
        lambda r: sparse_attention.layer_case(8, 1, 128, _keys(r)),
    ],
    ids=["decode", "chunk", "chunk grad", "attention", "gradient", "sparse", "indexer", "layer"],
)
def test_another_length_compiles_nothing_anew(shape, variants):
    """50 shapes of one model: lengths, pages, and batch where no tile depends on it."""
    random = Random(0)
    for _ in range(50):
        which = shape(random)
        direct(which.op, which.make(torch.device("cpu"), 0))
    # the layer has several products, and top-k another kernel where a sample is not whole tiles;
    # the kernel of short rows holds the sample whole, 1024 or 2048 scores here
    most = dict(_product=2, _collect=4, _topk=2)
    assert variants
    assert not {x: len(keys) for x, keys in variants.items() if len(keys) > most.get(x, 1)}


def test_a_launch_says_that_multiply_and_add_round_once(variants):
    """Triton 3.9 warns of a change to come where one does not."""
    which = delta_rule.decode_case(2, 1, "vk")
    direct(which.op, which.make(torch.device("cpu"), 0))
    assert all("'enable_fp_fusion': True" in key for keys in variants.values() for key in keys)


@pytest.mark.parametrize("pretended", [(9, 0), (8, 0)], ids=["sm90", "sm80"], indirect=True)
@pytest.mark.parametrize(
    ("shape", "most"),
    [
        (lambda r: delta_rule.decode_case(r.randint(1, 300), 1, "vk"), 2),
        (lambda r: attention.case(FORWARD, r.randint(1, 8), 16, 16, n := _tokens(r), n, 128), 1),
        (lambda r: attention.case(BACKWARD, r.randint(1, 8), 16, 16, n := _tokens(r), n, 128), 3),
        (lambda r: sparse_attention.attention_case(*_batch(r), 128, _keys(r)), 10),
        (lambda r: sparse_attention.indexer_case(*_batch(r), _keys(r)), 13),
        (lambda r: sparse_attention.mla_prolog_case(r.randint(1, 1000), 128), 19),
        (lambda r: sparse_attention.layer_case(*_batch(r), 128, _keys(r)), 51),
    ],
    ids=["decode", "attention", "gradient", "sparse", "indexer", "prolog", "layer"],
)
def test_another_batch_compiles_for_other_tiles_alone(shape, most, variants, monkeypatch):
    """50 batches of one model: there are so many sets of tiles, and no batch, length or stride
    makes two kernels of one set."""
    monkeypatch.setattr(FakeTensor, "data_ptr", address)
    random = Random(0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for _ in range(50):
            which = shape(random)
            direct(which.op, which.make(torch.device("cpu"), 0))
    assert variants and sum(map(len, variants.values())) <= most
    for kernel, keys in variants.items():
        assert len(keys) == len(set(keys.values())), kernel


@pytest.fixture
def grids(pretended, monkeypatch) -> dict[str, tuple[int, ...]]:
    """The largest grid of every kernel that is launched."""
    found: dict[str, tuple[int, ...]] = {}

    def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        before = found.get(kernel.__name__, grid)
        found[kernel.__name__] = tuple(map(max, before, grid))
        return lambda *args, **named: None

    monkeypatch.setattr(KernelInterface, "__getitem__", launch)
    return found


OPS = [spec.name for spec in SPECS if backends.has_kernel(backends.CUDA, spec)]


@pytest.mark.parametrize("name", OPS)
def test_requests_and_tokens_are_counted_in_a_grid_s_first_dimension(name, grids):
    """The others end at 65535."""
    found = []
    for size in (1, 2):
        grids.clear()
        arguments = samples.sample(name, torch.device("cpu"), torch.bfloat16, B=size)
        direct(name, arguments)
        found.append(dict(grids))
    few, many = found
    assert few
    for kernel in few.keys() & many.keys():
        pairs = zip(few[kernel][1:], many[kernel][1:], strict=True)
        assert all(after <= before for before, after in pairs), kernel


@pytest.mark.parametrize("name", ["npu_indexer_loss", "npu_indexer_loss_backward"])
def test_more_requests_than_a_grid_s_second_dimension_has(name, grids):
    B, S, K = 65536, 1, 4
    index_score = torch.empty(B, S, K, dtype=torch.bfloat16)
    arguments = dict(index_score=index_score, indices=torch.zeros(B, S, K, dtype=torch.int32))
    if name == "npu_indexer_loss":
        query = torch.empty(B, 1, S, 16, dtype=torch.bfloat16)
        arguments |= dict(query=query, key=query[:, 0], scaling=1.0, chunk_offset=0)
    else:
        arguments |= dict(grad_loss=torch.empty(B, S), target=torch.empty(B, S, K), key_length=1)
        arguments |= dict(chunk_offset=0)
    direct(name, arguments)
    assert grids and all(grid == (B * S,) for grid in grids.values())


def decode(**changed: Any) -> dict[str, Any]:
    return samples.sample(DECODE, torch.device("cpu"), torch.float32) | changed


def call(arguments: dict[str, Any]) -> Tensor:
    return getattr(torch.ops.custom, DECODE)(**arguments)


@pytest.fixture
def checked(monkeypatch) -> list[str]:
    """The ops whose arguments were checked."""
    done: list[str] = []
    check = register._checked

    def noting(spec: Any, *given: Any) -> dict[str, Any]:
        done.append(spec.name)
        return check(spec, *given)

    monkeypatch.setattr(register, "_checked", noting)
    return done


def test_a_call_like_an_earlier_one_is_not_checked_again(checked):
    first, second = decode(), decode(q=torch.randn_like(decode()["q"]))
    outs = [call(arguments) for arguments in (first, second)]
    assert checked == [DECODE]
    assert not torch.equal(*outs)
    assert log.calls[DECODE, "reference"] >= 2


def test_the_dispatcher_reads_the_arguments_of_a_call_once():
    """The Autograd kernel calls the backend's, where no key is between."""
    arguments = decode()
    call(arguments)
    again: list[Any] = []

    def watch(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code is torch._ops.OpOverload.__call__.__code__:
            again.append(frame)

    sys.setprofile(watch)
    try:
        call(arguments)
    finally:
        sys.setprofile(None)
    assert not again


def test_a_mode_sees_calls_like_earlier_ones():
    seen: list[Any] = []

    class Seeing(Mode):
        def called(self, func: Any, args: Any, kwargs: Any) -> Any:
            seen.append(func)
            return func(*args, **kwargs)

    for _ in range(2):
        call(decode())
        with Seeing():
            call(decode())
    assert seen.count(register.overload(BY_NAME[DECODE])) == 2


def test_what_is_between_a_call_and_its_backend_comes_first():
    """A tensor that lies there with the other sign has a key of its own, below Autograd."""
    outs, lses = torch.randn(2, 3, 4, 16), torch.randn(2, 3, 4)
    negative = torch.complex(lses, -lses).conj().imag
    assert negative.is_neg() and torch.equal(negative, lses)
    wanted = custom.npu_merge_states(outs, negative.resolve_neg())
    for given, expected in zip(custom.npu_merge_states(outs, negative), wanted, strict=True):
        assert torch.equal(given, expected)


def test_pools_are_cut_in_one_way_again_and_again(checked):
    """Rows of states beside other rows, each pool elsewhere: all of them are one call."""
    arguments, lies = decode(), []
    states = arguments["initial_state_source"]
    for _ in range(4):
        pool = torch.zeros(len(states), 2, *states.shape[1:])
        lies.append(pool)
        q = pool[0, 1].flatten()[: arguments["q"].numel()].view_as(arguments["q"])
        call(arguments | dict(initial_state_source=pool[:, 0].copy_(states), q=q))
    assert len({pool.data_ptr() for pool in lies}) == 4 and len(checked) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda a: dict(q=a["q"].double()),
        lambda a: dict(q=a["q"][..., :-1]),
        lambda a: dict(q=a["q"].transpose(2, 3).contiguous().transpose(2, 3)),
        lambda a: dict(softplus_beta=-1.0),
        lambda a: dict(state_layout="vv"),
        lambda a: dict(k=a["k"].to("meta")),
        lambda a: dict(q=None),
    ],
    ids=["dtype", "shape", "strides", "number", "string", "device", "none"],
)
def test_a_bad_call_is_refused_after_a_good_one(change):
    arguments = decode()
    with pytest.raises((ValueError, TypeError, RuntimeError, NotImplementedError)) as before:
        call(arguments | change(arguments))
    for _ in range(3):
        call(decode())
    with pytest.raises(type(before.value)) as after:
        call(arguments | change(arguments))
    assert str(after.value) == str(before.value)


def test_a_setting_makes_another_call_of_it(checked, monkeypatch):
    for _ in range(2):
        call(decode())
    monkeypatch.setattr(custom.config, "backend", "reference")
    call(decode())
    assert len(checked) == 2
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    call(decode())
    assert len(checked) == 3


def test_values_are_checked_every_time(monkeypatch):
    monkeypatch.setattr(custom.config, "debug", True)
    call(decode())
    slots = decode()["initial_state_indices"]
    with pytest.raises(ValueError, match="initial_state_indices"):
        call(decode(initial_state_indices=torch.ones_like(slots)))


def test_pointers_that_are_aligned_or_equal_make_another_call_of_it():
    def key(*args: Any) -> call_cache.Key:
        found = call_cache.cache_key(args, {})
        assert found is not None
        return found.key

    x, y = torch.zeros(64), torch.zeros(64)
    assert key(x[:8], y[:8]) == key(y[:8], x[16:24])
    assert key(x[:8], y[:8]) != key(x[1:9], y[:8])
    assert key(x[:8], y[:8]) != key(x[:8], x[:8])
    assert key(x, 1) != key(x, 2)


@pytest.mark.parametrize("value", [torch.nn.Buffer(torch.ones(1)), object(), [torch.ones(1)]])
def test_what_is_not_plain_is_like_nothing(value):
    plain = type(value) is Tensor
    assert (call_cache.cache_key((value,), {}) is None) != plain


def test_kinds_of_calls_are_bounded():
    kept = call_cache.CallCache()
    kinds = [call_cache.CacheKey((number,), [], []) for number in range(call_cache.MOST + 5)]
    for each in kinds:
        kept.keep(each, lambda *_: None)
    assert kept.find(kinds[4]) is None and kept.find(kinds[5]) is not None
    kept.clear()
    assert kept.find(kinds[5]) is None


def test_ways_in_which_tensors_lie_in_each_other_are_bounded():
    kept, pool = (
        call_cache.CallCache(writes=True),
        torch.zeros(call_cache.MOST + 10, dtype=torch.uint8),
    )
    laid = [
        call_cache.CacheKey((), [pool, pool[at:]], [0, at]) for at in range(call_cache.MOST + 5)
    ]
    for each in laid:
        kept.keep(each, lambda *_: None)
    assert kept.find(laid[4]) is None and kept.find(laid[5]) is not None


def first(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The first call of a launcher."""
    with launches.compiled(function, arguments):
        return function(**arguments)


def test_what_a_call_is_the_first_to_need_is_compiled_ahead(monkeypatch):
    """Until a few calls on a GPU have needed nothing; operators of torch write in the call
    alone."""
    said: list[str] = []
    compiled: set[str] = set()

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = name

        def warmup(self, *args: Any, **named: Any) -> None:
            said.append(f"asked for {self.name}")
            if self.name not in compiled:
                compiled.add(self.name)
                _async_compile.active_mode.get().executor.submit(self.compiled)

        def compiled(self) -> SimpleNamespace:
            said.append("compiled")
            return SimpleNamespace(run=None)

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *args, **named: said.append(f"launched {self.name}")

    def launcher(x: Tensor, phase: str) -> Tensor:
        launches.kernel(Kernel("both"), 1)(x)
        x.add_(1)
        launches.kernel(Kernel(phase), 1)(x)
        return x

    def ran(phase: str) -> list[str]:
        said.clear()
        first(launcher, dict(x=x, phase=phase))
        assert said[-2:] == ["launched both", f"launched {phase}"]
        return sorted(said[:-2])

    monkeypatch.setattr(triton.runtime.driver, "_active", pretended_driver(90))
    monkeypatch.setattr(launches, "_ALONE", False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    x = torch.zeros(3)
    asked = ["asked for both", "asked for prefill"]
    assert ran("prefill") == [*asked, "compiled", "compiled"]
    assert [ran("prefill") for _ in range(launches._SETTLED - 1)] == [asked] * 3
    assert ran("decode") == ["asked for both", "asked for decode", "compiled"]
    assert [ran("prefill") for _ in range(launches._SETTLED)] == [asked] * 4
    assert ran("prefill") == ran("decode") == []
    assert x.tolist() == [11, 11, 11]
    monkeypatch.setattr(triton.runtime.driver, "_active", pretended_driver(80))
    assert ran("prefill") == asked  # another GPU has none of them


def test_what_triton_does_once_begins_with_the_import_of_kernels(monkeypatch):
    """Where there is a GPU; a first call waits for it."""
    assert launches._begin() == []
    said: list[str] = []
    go_on = threading.Event()

    def key() -> None:
        go_on.wait()
        said.append("key")

    monkeypatch.setattr(gpu, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(private_triton, "_triton_key", key)
    monkeypatch.setattr(triton.runtime.driver, "_active", pretended_driver(90))
    begun = launches._begin()
    assert begun and not said
    monkeypatch.setattr(launches, "_begun", begun)
    go_on.set()
    with ThreadPoolExecutor(1) as executor, launches.compiling(executor):
        assert said == ["key"]


def test_calls_go_on_behind_a_kernel_that_did_not_compile(monkeypatch):
    def compile() -> CompiledKernel:
        raise ValueError("no such layout")

    monkeypatch.setattr(gpu, "INTERPRETED", False)
    monkeypatch.setattr(triton.runtime.driver, "_active", pretended_driver(90))
    with ThreadPoolExecutor(1) as executor:
        with pytest.raises(ValueError, match="no such layout"), launches.compiling(executor):
            _async_compile.active_mode.get().submit("key", compile, lambda kernel: None)
        with launches.compiling(executor):
            pass


@triton.jit
def _increment(x):
    tl.store(x, tl.load(x) + 1)


@pytest.fixture
def compiled(monkeypatch) -> list[Exception | None]:
    """What each compile of _increment ends in, one after the other."""
    ends: list[Exception | None] = []

    def compile(*_: Any, **__: Any) -> SimpleNamespace:
        end = ends.pop(0)
        if end is not None:
            raise end
        return SimpleNamespace(run=None)

    driver = pretended_driver(90)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(launches, "_ALONE", False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(KernelInterface, "__getitem__", lambda *_: lambda *args, **named: None)
    _increment.device_caches.clear()
    assert _increment.device_caches[driver.get_current_device()]
    monkeypatch.setattr(_increment, "compile", compile)
    return ends


def test_a_compile_that_failed_is_tried_again(compiled):
    """A full disk is no longer full; Triton keeps the error with the kernel."""

    def launcher(x: Tensor) -> None:
        launches.kernel(_increment, 1)(x)

    compiled += [OSError("no space left"), ValueError("ptxas was killed"), None]
    for error in (OSError, ValueError):
        with pytest.raises(error):
            first(launcher, dict(x=torch.zeros(1)))
    for _ in range(2):
        first(launcher, dict(x=torch.zeros(1)))
    assert not compiled


def test_of_two_compiles_that_failed_both_are_tried_again(compiled):
    """Also the one that fails when the other's error is out already."""

    def launcher() -> None:
        for dtype in (torch.float32, torch.float16):
            launches.kernel(_increment, 1)(torch.zeros(1, dtype=dtype))

    compiled += [OSError("no space left"), OSError("no space left"), None, None]
    with pytest.raises(OSError, match="no space"):
        first(launcher, {})
    first(launcher, {})
    assert not compiled


def test_who_compiles_side_by_side_around_an_op_goes_on(compiled):
    with ThreadPoolExecutor(1) as executor, _async_compile.AsyncCompileMode(executor) as theirs:
        with launches.compiling(executor):
            assert _async_compile.active_mode.get() is not theirs
        assert _async_compile.active_mode.get() is theirs


def merge(seed: int = 1) -> dict[str, Any]:
    return samples.sample("npu_merge_states", torch.device("cpu"), torch.float32, seed)


@pytest.mark.parametrize("pretended", [(9, 0)], ids=["sm90"], indirect=True)
@pytest.mark.parametrize("setting", ["debug", "add_stages_inspection_hook", "pre_run_hooks"])
def test_a_plan_ends_with_the_settings_it_was_made_under(setting, pretended, monkeypatch):
    """Triton compiles for them, or calls somebody at each launch."""
    recorded: list[bool] = []
    record = launches.record

    def noting(*args: Any) -> Any:
        recorded.append(True)
        return record(*args)

    monkeypatch.setattr(launches, "record", noting)
    backends.recorder.cache_clear()
    register.forget()
    call = register.overload(BY_NAME["npu_merge_states"])
    for _ in range(3):
        call(**merge())
    assert len(recorded) == 1
    if not hasattr(knobs.runtime, setting) and setting != "pre_run_hooks":
        pytest.skip(f"this Triton has no {setting}")
    if setting == "pre_run_hooks":
        monkeypatch.setattr(merge_states._merge, setting, hooks := [])
        register.forget()
        for _ in range(3):
            call(**merge())
        assert len(recorded) == 2
        recorded.pop()
        hooks.append(lambda *args, **named: None)
    else:
        monkeypatch.setattr(knobs.runtime, setting, lambda: ("key", "hash"))
    pretended.take()
    for _ in range(3):
        call(**merge())
    assert len(recorded) == 2
    assert len(pretended.take()[0]) == 3
    monkeypatch.undo()
    backends.recorder.cache_clear()
    register.forget()


class _Other(nvidia.CudaLauncher):
    """Triton's launcher, as one to come may be."""

    def __init__(self, run: Any, change: Callable[[list[Any]], list[Any]]) -> None:
        self.of, self.change = run, change
        vars(self).update(vars(run))

    def __call__(self, *args: Any) -> None:
        *before, values = args[:9], list(args[9:])
        vars(self.of)["launch"] = self.launch
        self.of(*before[0], *self.change(values) if values else values)


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (lambda values: values, True),
        (lambda values: values[::-1], False),
        (lambda values: [*values, None], False),
        (lambda values: [float(x) if type(x) is int else x for x in values], False),
    ],
    ids=["the same", "turned", "one more", "floats"],
)
def test_what_c_would_not_be_handed_is_not_handed_to_it(change, same, encoded):
    which = Launched()
    which.kernel.run.launch = partial(which.handed.append)  # of no descriptors, as of C
    which.kernel.run = _Other(which.kernel.run, change)
    launcher, x = Launcher(which.kernel), torch.empty(8)
    given, values = [x, 5, "constant"], [x.data_ptr(), 5, "constant"]
    assert private_triton.agrees(launcher, (3, 2, 1), given, values) == same
    assert not which.handed


def test_descriptors_are_handed_to_c_as_triton_hands_them(encoded):
    which = Launched()
    x, y = torch.empty(32, 64, dtype=torch.float16), torch.empty(8)
    launcher = Launcher(which.kernel)
    launch = FastLauncher(launcher, (3, 2, 1), 0)
    rows, numbers = which.rows(x), which.numbers(y)
    values = [
        x.data_ptr(),
        *launch.encoded(rows)(x.data_ptr()),
        5,
        *launch.encoded(numbers)(y.data_ptr()),
    ]
    given = [x, rows, 5, numbers]
    assert private_triton.agrees(launcher, (3, 2, 1), given, values)
    assert not private_triton.agrees(launcher, (3, 2, 1), given, values[::-1])
    assert not which.handed


@pytest.mark.parametrize("pretended", [(9, 0)], ids=["sm90"], indirect=True)
@pytest.mark.parametrize("name", ["_KNOWN", "CompiledKernel", "_encode"])
@pytest.mark.parametrize("op", ["npu_merge_states", "npu_mla_prolog_pto"])
def test_a_triton_that_nobody_tried_launches_in_its_public_way(op, name, pretended, monkeypatch):
    """Plans of kernels with descriptors there are none then."""
    arguments = samples.sample(op, torch.device("cpu"), torch.bfloat16)
    register.forget()
    direct(op, arguments)
    wanted = [(each, grid) for each, grid, _ in pretended.take()[0]]
    monkeypatch.setattr(private_triton, name, None)
    monkeypatch.setattr(log, "_said", set())
    monkeypatch.setattr(launches, "FastLauncher", None)
    for _ in range(3):
        register.overload(BY_NAME[op])(**arguments)
        assert [(each, grid) for each, grid, _ in pretended.take()[0]] == wanted
    register.forget()


def test_on_a_gpu_launches_go_straight_to_c(device, monkeypatch):
    """Nothing has moved in this Triton: no line says that launches take its public way."""
    if device.type != "cuda":
        pytest.skip("launches of a GPU")
    monkeypatch.setattr(log, "_said", set())
    which = sparse_attention.layer_case(2, 1, 128, 4096)
    arguments = which.make(device, 0)
    for _ in range(3):
        which.call(arguments)
    assert not [said for said in log._said if said[0] == "triton"]


def test_no_op_fails_to_import_where_a_private_name_has_moved():
    """And one runs, with its kernel compiled and launched in Triton's public way."""
    subprocess.run([sys.executable, "-c", _MOVED], check=True, timeout=300)


_MOVED = """
import importlib, sys
from types import SimpleNamespace
import torch, triton, custom
import triton.experimental.gluon.language._core, triton.runtime._async_compile
import triton.backends.nvidia.driver, triton.compiler, triton.runtime.build
from triton.runtime.jit import KernelInterface
from tests.support.compile_for_hopper import driver

MOVED = {
    "triton.compiler": ["CompiledKernel"],
    "triton.runtime._async_compile": ["AsyncCompileMode", "active_mode"],
    "triton.runtime.cache": ["triton_key"],
    "triton.runtime.build": ["_load_module_from_path"],
    "triton.backends.nvidia.driver": ["make_tensordesc_arg"],
    "triton.backends.driver": ["DriverBase"],
    "triton.experimental.gluon.language._core": ["builtin"],
    "triton._C.libtriton": ["ir"],
}
triton.runtime.driver._active = driver(90)
torch.cuda.is_current_stream_capturing = lambda: False
launched = []
KernelInterface.__getitem__ = lambda kernel, grid: lambda *a, **n: launched.append(kernel)
ours = [name for name in sys.modules if name.startswith("custom.cuda_ops")]
assert not ours
for module, names in MOVED.items():
    for name in names:
        there = sys.modules[module]
        kept = getattr(there, name)
        delattr(there, name)
        try:
            if name in ("builtin", "ir"):
                importlib.import_module("custom.cuda_ops.attention.fused_attention_backward")
            found = importlib.import_module("custom.cuda_ops.merging.merge_states")
            launches = importlib.import_module("custom.cuda_ops.runtime.launches")
            # what is asked for ahead is not compiled: the kernel says so
            triton.runtime.jit.JITFunction.warmup = lambda self, *a, **n: None
            launches._ALONE = False
            given = dict(outs=torch.ones(2, 3, 4, 16), lses=torch.ones(2, 3, 4), sums=None)
            with launches.compiled(found.forward, given):
                found.forward(**given)
            assert launched.pop().__name__ == "_merge"
            gpu = importlib.import_module("custom.cuda_ops.common.gpu")
            gpu.capability = lambda device: (9, 0)
            assert gpu.is_hopper(torch.device("cpu")) == (name not in ("builtin", "ir"))
        finally:
            setattr(there, name, kept)
        for each in [x for x in sys.modules if x.startswith("custom.cuda_ops")]:
            del sys.modules[each]
"""


def test_what_is_compiled_ahead_can_be_launched_at_once(monkeypatch):
    """Its launcher, compiled C, is made and its code loaded by the thread that compiled it, for the
    GPU of the call (a thread begins with the first one), once the launcher has given all."""
    here = threading.local()
    made: list[tuple[str, int]] = []

    class Compiled:
        @property
        def run(self) -> None:
            made.append((threading.current_thread().name, here.device))

    driver = SimpleNamespace(
        get_current_device=lambda: 3,
        set_current_device=lambda device: setattr(here, "device", device),
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    compiled = Compiled()
    with ThreadPoolExecutor(2, "compiler") as executor:
        readying = launches._Readying(executor)
        future = readying.submit(lambda: compiled)
        executor.submit(lambda: None).result(60)
        early = made.copy()
        readying.all_given.set()
        assert future.result(60) is compiled
    assert not early
    ((thread, device),) = made
    assert thread.startswith("compiler_") and device == 3


_LAUNCHER = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *none) {{ return PyLong_FromLong({number}); }}
static PyMethodDef methods[] = {{{{"launch", launch, METH_NOARGS, ""}}, {{NULL, NULL, 0, NULL}}}};
static struct PyModuleDef module = {{
  PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods
}};
PyMODINIT_FUNC PyInit___triton_launcher(void) {{ return PyModule_Create(&module); }}
"""


def test_threads_that_load_launchers_get_their_own(monkeypatch, tmp_path):
    """As Triton 3.6 makes them: modules of one name, loaded again for every kernel that has the
    same arguments."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "_load_module_from_path", build._load_module_from_path)
    private_triton.load_apart(lambda: True)

    def launcher(number: int) -> Callable[[], int]:
        source = _LAUNCHER.format(number=number)
        return build.compile_module_from_src(source, "__triton_launcher").launch

    def others(number: int) -> int:
        return sum(launcher(number)() != number for _ in range(5000))

    assert [launcher(number)() for number in range(4)] == [*range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert not any(threads.map(others, range(4)))
    finally:
        sys.setswitchinterval(interval)


def test_launchers_of_others_are_loaded_as_triton_does(monkeypatch):
    shared = SimpleNamespace(launch="launch")
    monkeypatch.setattr(private_triton, "_load", lambda name, path: shared)
    monkeypatch.setattr(build, "_load_module_from_path", None)
    private_triton.load_apart(lambda: False)
    assert build._load_module_from_path("name", "path") is shared
    private_triton.load_apart(lambda: True)
    own = build._load_module_from_path("name", "path")
    assert own is not shared and own.launch == "launch"


def test_what_writes_nothing_gets_its_keywords():
    with launches._WritesNothing():
        assert torch.ones(2).sum(0, dtype=torch.float64).dtype == torch.float64


def test_first_calls_import_nothing_slow():
    """torch's compiler takes seconds: neither what is compiled ahead nor what is recorded asks for
    it."""
    code = """
import sys
import torch, custom
from custom.cuda_ops.runtime import launches
out, lse = torch.ones(2, 3, 4, 16), torch.ones(2, 3, 4)
for _ in range(3):
    with launches._WritesNothing():
        custom.npu_merge_states(out, lse)
slow = {"torch._dynamo", "torch._inductor", "sympy", "onnx", "transformers", "pandas"}
assert not slow & set(sys.modules)
"""
    chosen = dict(TRITON_INTERPRET="1", CUSTOM_BACKEND="cuda")
    subprocess.run([sys.executable, "-c", code], env=os.environ | chosen, check=True)
