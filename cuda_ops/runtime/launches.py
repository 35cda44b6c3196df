# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""How every kernel is launched, and how a call like an earlier one is made without its launcher.

A launcher reads shapes, strides, dtypes, numbers, alignment and what the GPU can do, never a
tensor's values.  So calls that agree in these (dispatch/call_cache.py) allocate the same memory and
launch the same compiled kernels with the same numbers; only pointers differ.  `record` runs a
launcher and notes its steps: allocations, kernels, operators of torch, forks of the stream.  A
`Plan` does these steps again with other tensors: no tiling, no layouts, no keys of Triton's JIT.

A launcher that does anything else (reads a value, makes a tensor from a list) has no plan, and runs
as it is.  Hooks of Triton's launches are called; a stand-in for Triton's launches (the interpreter,
tests) is called with tensors again.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple, Union

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from ...dispatch.common import memory
from ...dispatch.common.modes import Mode
from ...dispatch.common.private_torch import storage_of
from ..common import gpu
from . import private_triton
from .fast_launcher import Encoded, FastLauncher

Bind = Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]

# bytes up to which work space is cut from one allocation; more is freed after its last use, and
# cut as well where launches overlap, which free nothing
PIECE = 2**20
_APART = 256  # bytes to which the pieces are aligned, as allocations are
_CONSTANTS = (int, float, bool, str, type(None), torch.dtype, tl.dtype, tl.constexpr)

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Step = Union["_Launched", Callable[["_Run"], object]]

_here = threading.local()


def kernel(kernel: Any, *grid: int) -> Callable[..., Any]:
    """`kernel[grid]`, noted where a launcher is being recorded; compiled and not launched inside
    `compiling`."""
    recorder = getattr(_here, "recorder", None)
    if getattr(_here, "compiling", False):
        launch = partial(_asked_for, kernel, grid=grid)
    else:
        launch = kernel[grid] if recorder is None else partial(recorder.launch, kernel, grid)
    # multiply and add round once: the default up to 3.9, which warns where a launch does not say so
    return partial(launch, enable_fp_fusion=True)


def _asked_for(kernel: Any, *args: Any, **named: Any) -> Any:
    _here.asked = kernel
    return kernel.warmup(*args, **named)


class _WritesNothing(Mode):
    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return args[0] if func._schema.is_mutable else func(*args, **kwargs)


def _begin() -> list[threading.Thread]:
    """What Triton does once in a process, in tenths of a second each, is begun while an op's
    kernels are imported."""
    if gpu.INTERPRETED or not torch.cuda.is_initialized():
        return []
    parts = private_triton.once_a_process()
    threads = [threading.Thread(target=part, daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    return threads


_begun = _begin()


@contextmanager
def _our_own() -> Iterator[None]:
    """This thread compiles and loads kernels of this package."""
    before, _here.ours = getattr(_here, "ours", False), True
    try:
        yield
    finally:
        _here.ours = before


if private_triton.LOADS_APART:
    private_triton.load_apart(lambda: getattr(_here, "ours", False))


# ast.parse, with which a compile begins, is not for two threads at a time in these
_ALONE = (3, 11) <= sys.version_info < (3, 11, 8)
_compiles = threading.Lock()


class _Readying:
    """Of an executor what Triton asks for; a kernel that it compiled can be launched at once: its
    launcher is C, which Triton has compiled at the first launch, and its code is on the GPU.

    Nothing is compiled before `all_given`: the first kernels' compilers would hold Python's lock
    against the launcher, which has the longest one still to give."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.all_given = threading.Event()

    def submit(self, compiled: Callable[[], Any]) -> Future[Any]:
        driver = triton.runtime.driver.active
        device = driver.get_current_device()

        def readied() -> Any:
            self.all_given.wait()
            with _our_own():
                with _compiles if _ALONE else nullcontext():
                    kernel = compiled()
                driver.set_current_device(device)  # each thread has its own
                kernel.run  # noqa: B018
            return kernel

        future = self._executor.submit(readied)
        asked = getattr(_here, "asked", None)
        future.add_done_callback(partial(private_triton.forget_failed, asked))
        return future


@contextmanager
def compiling(executor: Executor) -> Iterator[None]:
    """Launchers that run inside launch nothing: their kernels are compiled, side by side, by
    `executor`, and ready at the end.  Operators of torch that write what they get do not run."""
    if gpu.INTERPRETED:
        yield
        return
    for thread in _begun:
        thread.join()
    _here.compiling = True
    readying = _Readying(executor)
    try:
        with private_triton.compiled_by(readying), _WritesNothing():
            try:
                yield
            finally:
                readying.all_given.set()
    finally:
        _here.compiling = False


# other shapes may need other kernels: none is asked any more after so many in a row needed none on
# a GPU; each loads its own
_SETTLED = 4
_needed_none: dict[tuple[Callable[..., Any], int], int] = {}


class _Compilers(ThreadPoolExecutor):
    """A thread for every core."""

    def __init__(self) -> None:
        super().__init__(os.cpu_count())
        self.given = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.given += 1
        return super().submit(fn, *args, **kwargs)


@contextmanager
def compiled(function: Callable[..., Any], arguments: dict[str, Any]) -> Iterator[None]:
    """Around a launcher's first call of a kind: the kernels that it is the first to need are
    compiled side by side before it."""
    if not (gpu.INTERPRETED or _ALONE or torch.cuda.is_current_stream_capturing()):
        here = function, triton.runtime.driver.active.get_current_device()
        calls = _needed_none.get(here, 0)
        if calls < _SETTLED:
            with _Compilers() as executor, compiling(executor):
                function(**arguments)
            _needed_none[here] = 0 if executor.given else calls + 1
    with _our_own():
        yield


class _Streams(NamedTuple):
    here: torch.cuda.Stream
    there: torch.cuda.Stream
    forked: torch.cuda.Event
    joined: torch.cuda.Event


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    """One that nobody else has: torch's own are 32, which it hands out in turn."""
    cuda = ctypes.CDLL("libcuda.so.1")
    context, stream, mode = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int(_RELAXED)

    def call(name: str, *args: Any) -> None:
        if error := getattr(cuda, name)(*args):
            raise RuntimeError(f"{name} of CUDA's driver failed with {error}")

    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device.index)
    call("cuCtxPushCurrent_v2", context)
    # also while a stream is captured
    call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
    finally:
        call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        call("cuCtxPopCurrent_v2", ctypes.byref(context))
    return torch.cuda.ExternalStream(stream.value, device)


_RELAXED, _NON_BLOCKING = 2, 1  # CU_STREAM_CAPTURE_MODE_RELAXED, CU_STREAM_NON_BLOCKING


@cache
def _streams(device: torch.device, here: int) -> _Streams:
    """A second stream and two events for each stream, by its address: memory of a stream is used
    again without asking what other streams still read of it, and a captured stream takes the one
    that it forks into with it.  Who waits for an event has what it was last recorded for: another
    thread's is later in the same stream."""
    current = torch.cuda.current_stream(device)
    return _Streams(current, _new_stream(device), torch.cuda.Event(), torch.cuda.Event())


class SideStream:
    """`with SideStream(device) as side`: a second stream leaves the current one, and comes back at
    the end, also of a launcher or plan that fails; inside `side.stream()` it is the current one.
    An op has one.  What lives on behind it is allocated ahead of it."""

    def __init__(self, device: torch.device) -> None:
        here = triton.runtime.driver.active.get_current_stream(device.index)
        self._here, self._there, self._forked, self._joined = _streams(device, here)
        self._inside = self._apart = False
        _note(lambda run: setattr(run, "side", SideStream(device)))

    def __enter__(self) -> SideStream:
        self._forked.record(self._here)
        self._there.wait_event(self._forked)
        self._apart = True
        _note(lambda run: run.side.__enter__())
        return self

    def __exit__(self, *_: object) -> None:
        """Also where it has come back already: a plan that failed may be inside."""
        self.leave()
        if self._apart:
            self._apart = False
            self._joined.record(self._there)
            self._here.wait_event(self._joined)
            _note(lambda run: run.side.__exit__())

    def enter(self) -> None:
        torch.cuda.set_stream(self._there)
        self._inside = True
        _note(lambda run: run.side.enter())

    def leave(self) -> None:
        if self._inside:
            self._inside = False
            torch.cuda.set_stream(self._here)
            _note(lambda run: run.side.leave())

    @contextmanager
    def stream(self) -> Iterator[None]:
        self.enter()
        try:
            yield
        finally:
            self.leave()


def _note(step: Step) -> None:
    recorder = getattr(_here, "recorder", None)
    if recorder is not None:
        recorder.overlapping = True
        recorder.steps.append(step)


class _NoPlan(Exception):
    """The launcher does what a plan cannot do again."""


@dataclass(frozen=True)
class _Place:
    """A tensor, as a part of one that the call got or made: `offset` bytes behind its start."""

    slot: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Run:
    """One call of a plan: the tensors it got and made, and where they begin."""

    def __init__(self, tensors: Sequence[Tensor], slots: int) -> None:
        more = slots - len(tensors)
        self.tensors: list[Any] = [*tensors, *(None,) * more]
        self.pointers = [tensor.data_ptr() for tensor in tensors]
        self.pointers += (0,) * more
        self.side: Any = None  # its SideStream, once it has one

    def put(self, slot: int, tensor: Tensor) -> None:
        self.tensors[slot] = tensor
        self.pointers[slot] = tensor.data_ptr()

    def at(self, place: _Place) -> Tensor:
        whole: Tensor = self.tensors[place.slot]
        first = whole.storage_offset() + place.offset // whole.dtype.itemsize
        return whole.as_strided(place.shape, place.stride, first)


@dataclass
class _Made:
    """A step: memory for `slot`."""

    slot: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def __call__(self, run: _Run) -> None:
        run.put(self.slot, memory.empty(self.shape, self.dtype, self.device))


@dataclass
class _Dropped:
    """A step: the memory of `slot` is free for what comes."""

    slot: int

    def __call__(self, run: _Run) -> None:
        run.tensors[self.slot] = None


@dataclass
class _Called:
    """A step: `function`, an operator or a stand-in's launch, with tensors; `slots` for those that
    it makes."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    slots: tuple[int, ...] = ()

    def __call__(self, run: _Run) -> None:
        args, kwargs = tree_map_only(_Place, run.at, (self.args, self.kwargs))
        out = self.function(*args, **kwargs)
        if self.slots:
            for slot, tensor in zip(self.slots, tree_flatten(out)[0], strict=True):
                run.put(slot, tensor)


@dataclass
class _Launched:
    """A step: a kernel, by `launch`.  `values` are its arguments, but for the pointers and the
    descriptors at (index, slot, offset); the first value of one of these tells where it points.
    Those of a tuple with pointers lie flat: `tuples` has their places, the last ones first."""

    launch: FastLauncher
    values: list[Any]
    pointers: list[tuple[int, int, int]]
    described: list[tuple[int, int, int]]
    encoded: list[Encoded]
    tuples: list[slice]
    where: str  # file:line of the launcher

    def call(self, run: _Run) -> tuple[Callable[..., Any], Sequence[Any]]:
        """What launches it, and with what."""
        values, pointers = self.values.copy(), run.pointers
        for index, slot, offset in self.pointers:
            values[index] = pointers[slot] + offset
        for (index, slot, offset), encoded in zip(self.described, self.encoded, strict=True):
            values[index] = encoded(pointers[slot] + offset)[0]
        return self.launch.call(self.nested(values))

    def nested(self, values: list[Any]) -> list[Any]:
        for place in self.tuples:
            values[place] = [tuple(values[place])]
        return values


class _Recorder(Mode):
    """Notes what a launcher does with `tensors`, no two of which share their memory."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.hooks: list[list[Any]] = []  # those of Triton's, of each kernel
        # one of another stream, or one that starts before the one ahead of it has ended
        self.overlapping = False
        self._device = tensors[0].device
        self._starts: list[int] = []
        self._dtypes: list[torch.dtype] = []
        self._slots: dict[tuple[int, int], int] = {}
        self.failed = False
        self._launching = False
        for tensor in tensors:
            self._slot(tensor)

    @property
    def slots(self) -> int:
        return len(self._starts)

    def _slot(self, tensor: Tensor) -> int:
        # of several in one storage any will do, but one without elements begins nowhere
        if tensor.numel() or storage_of(tensor) not in self._slots:
            self._slots[storage_of(tensor)] = self.slots
        self._starts.append(tensor.data_ptr())
        self._dtypes.append(tensor.dtype)
        return self.slots - 1

    def place(self, tensor: Tensor, *, of_one_dtype: bool = True) -> _Place:
        slot = self._slots.get(storage_of(tensor))
        if slot is None or (of_one_dtype and self._dtypes[slot] != tensor.dtype):
            raise _NoPlan
        # PyTorch's address of a tensor without elements is 0
        offset = tensor.data_ptr() - self._starts[slot] if tensor.numel() else 0
        return _Place(slot, offset, tuple(tensor.shape), tensor.stride())

    def _placed(self, args: Any) -> Any:
        return tree_map_only(Tensor, self.place, args)

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if not self._launching and not (func.is_view and _is_view(out, (args, kwargs))):
            self._try(self._operated, func, args, kwargs, out)
        return out

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        self.overlapping |= bool(named.get("launch_pdl"))
        self._launching = True
        try:
            compiled = kernel[grid](*args, **named)
        finally:
            self._launching = False
        launcher = sys._getframe(1)
        where = f"{launcher.f_code.co_filename}:{launcher.f_lineno}"
        self._try(self._launched, kernel, compiled, grid, args, named, where)

    def _try(self, note: Callable[..., Step], *args: Any) -> None:
        if not self.failed:
            try:
                self.steps.append(note(*args))
            except _NoPlan:
                self.failed = True

    def _operated(self, func: Any, args: Any, kwargs: Any, out: Any) -> Step:
        if func is torch.ops.aten.empty.memory_format:
            return _Made(self._slot(out), tuple(out.shape), out.dtype, out.device)
        step = _Called(func, *self._placed((args, kwargs)))
        returns = func._schema.returns
        if func.is_view or all(each.alias_info is None for each in returns):
            made = tree_flatten(out)[0]
            if not all(isinstance(each, Tensor) for each in made):
                raise _NoPlan
            step.slots = tuple(map(self._slot, made))
        return step

    def _launched(
        self,
        kernel: Any,
        compiled: Any,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        named: dict[str, Any],
        where: str,
    ) -> Step:
        launcher = private_triton.launcher_of(compiled)
        if launcher is None or private_triton.is_seen(kernel):
            return self._publicly(kernel, grid, args, named)
        given = dict(zip(kernel.arg_names, args, strict=False)) | named
        size = (*grid, 1, 1)[:3]
        launch = FastLauncher(launcher, size, self._device.index or 0)
        step = _Launched(launch, [], [], [], [], [], where)
        by_triton: list[Any] = []
        for param in kernel.params:
            value = given.get(param.name, param.default)
            by_triton.append(value)
            index, values = len(step.values), [value]
            if param.is_constexpr:
                pass
            elif isinstance(value, Tensor):
                values = [self._pointer(step, index, value)]
            elif hasattr(value, "block_shape"):
                place = self.place(value.base, of_one_dtype=False)
                step.described.append((index, place.slot, place.offset))
                step.encoded.append(launch.encoded(value))
                values = step.encoded[-1](value.base.data_ptr())
            elif isinstance(value, tuple) and any(isinstance(each, Tensor) for each in value):
                values = [
                    self._pointer(step, index + i, each) if isinstance(each, Tensor) else each
                    for i, each in enumerate(value)
                ]
                if not all(map(_is_constant, values)):
                    raise _NoPlan
                step.tuples.insert(0, slice(index, index + len(value)))
            elif not _is_constant(value):
                raise _NoPlan
            step.values += values
        if not private_triton.agrees(launcher, size, by_triton, step.nested([*step.values])):
            return self._publicly(kernel, grid, args, named)
        self.hooks.append(private_triton.run_hooks(kernel))
        return step

    def _pointer(self, step: _Launched, index: int, tensor: Tensor) -> int:
        """Where it begins; `step` knows what to put there the next time."""
        place = self.place(tensor, of_one_dtype=False)
        step.pointers.append((index, place.slot, place.offset))
        return tensor.data_ptr()

    def _publicly(
        self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], named: dict[str, Any]
    ) -> Step:
        leaves = tree_flatten((args, named))[0]
        if not all(isinstance(x, Tensor) or _is_constant(x) for x in leaves):
            raise _NoPlan
        return _Called(kernel[grid], *self._placed((args, named)))


def _is_view(out: Any, given: Any) -> bool:
    """Of a tensor that the operator got: `to`, `reshape` and the like may copy instead."""
    whose = {storage_of(each) for each in tree_flatten(given)[0] if isinstance(each, Tensor)}
    return all(storage_of(each) in whose for each in tree_flatten(out)[0])


def _is_constant(value: Any) -> bool:
    """Numbers of a tuple (strides, a kernel's constants) stay what they are as well."""
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return isinstance(value, _CONSTANTS)


class Plan:
    """The steps of a launcher, for the tensors of another call.  `outputs` is None where it only
    writes what it gets."""

    def __init__(
        self, steps: list[Step], slots: int, outputs: Any, single: bool, hooks: list[list[Any]]
    ) -> None:
        self._steps, self._slots, self._outputs, self._single = steps, slots, outputs, single
        self._hooks, self._settings = hooks, private_triton.settings()

    def holds(self) -> bool:
        """Whether Triton would still launch the same kernels, and call nobody before that."""
        return private_triton.settings() == self._settings and not any(self._hooks)

    def __str__(self) -> str:
        return f"{sum(isinstance(step, _Launched) for step in self._steps)} launches"

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        run = _Run(tensors, self._slots)
        try:
            for step in self._steps:
                if isinstance(step, _Launched):
                    launch, values = step.call(run)
                    launch(*values)
                else:
                    step(run)
        except Exception as error:
            _say_where(error, step)
            raise
        finally:
            if run.side is not None:
                run.side.__exit__()
        if self._outputs is None:
            return None
        outputs = [run.tensors[x] if isinstance(x, int) else run.at(x) for x in self._outputs]
        return outputs[0] if self._single else tuple(outputs)


def _say_where(error: Exception, step: Step) -> None:
    """A traceback through a plan has no line of the launcher."""
    if isinstance(step, _Launched) and sys.version_info >= (3, 11):
        error.add_note(
            f"a repeated call: {step.where} launched this; CUSTOM_REPLAY=0 runs the launcher itself"
        )


def record(
    function: Callable[..., Any], bind: Bind, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Plan | None]:
    """(what `function` gives for these arguments, how to do the same for others like them)."""
    tensors = _tensors(args, kwargs)
    if len({storage_of(tensor) for tensor in tensors}) < len(tensors):
        # of two that share their memory, a part of it would not tell which one it is of
        args, kwargs = tree_map_only(Tensor, _of_its_own, (args, kwargs))
        tensors = _tensors(args, kwargs)
    recorder = _Recorder(tensors)
    _here.recorder = recorder
    try:
        with recorder, _our_own():
            out = function(**bind(args, kwargs))
    finally:
        _here.recorder = None
    if recorder.failed:
        return out, None
    try:
        return out, _plan(recorder, len(tensors), out)
    except _NoPlan:
        return out, None


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    return [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]


def _of_its_own(tensor: Tensor) -> Tensor:
    """The same memory under a storage of its own, with the same strides also where a size is 1:
    DLPack of older torch has its own there, and no float8."""
    bits = tensor.detach().view(_BITS[tensor.itemsize])
    alias = torch.from_dlpack(bits)  # type: ignore[attr-defined]
    return alias.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def _plan(recorder: _Recorder, given: int, out: Any) -> Plan:
    single = isinstance(out, Tensor)
    made = {step.slot: step for step in recorder.steps if isinstance(step, _Made)}
    outputs: list[_Place | int] = []
    for tensor in (out,) if single else out or ():
        place = recorder.place(tensor)
        if place.slot < given:
            raise _NoPlan
        whole = made.get(place.slot)
        alone = whole is not None and whole.shape == place.shape and tensor.is_contiguous()
        outputs.append(place.slot if alone else place)
    results = {x if isinstance(x, int) else x.slot for x in outputs}
    last: dict[int, int] = {}
    seen: set[int] = set()  # by what needs a tensor, and not only its address
    for number, step in enumerate(recorder.steps):
        for slot in _used(step):
            last[slot] = number
            if isinstance(step, _Called):
                seen.add(slot)
    inner = [step for slot, step in made.items() if slot not in results]
    small = [step for step in inner if step.bytes <= PIECE or recorder.overlapping]
    pieces = [step for step in small if step.slot not in seen]
    whole_slot, moved, size = recorder.slots, {}, 0
    for piece in pieces:
        moved[piece.slot] = whole_slot, size
        size += -(-piece.bytes // _APART) * _APART
    steps: list[Step] = []
    if pieces:
        steps.append(_Made(whole_slot, (size,), torch.uint8, pieces[0].device))
    for number, step in enumerate(recorder.steps):
        if isinstance(step, _Made) and step.slot in moved:
            continue
        if isinstance(step, _Launched):
            step.pointers = _moved(step.pointers, moved)
            step.described = _moved(step.described, moved)
        steps.append(step)
        if not recorder.overlapping:  # else a launch may still use what a later one would get
            ended = {each.slot for each in inner if last.get(each.slot) == number} - set(moved)
            steps += map(_Dropped, sorted(ended))
    if recorder.overlapping:  # of the stream of the call, which may fork later
        steps.sort(key=lambda step: not isinstance(step, _Made))
    return Plan(steps, whole_slot + 1, None if out is None else outputs, single, recorder.hooks)


def _used(step: Step) -> Iterator[int]:
    if isinstance(step, _Launched):
        yield from (slot for _, slot, _ in (*step.pointers, *step.described))
    elif isinstance(step, _Called):
        leaves = tree_flatten((step.args, step.kwargs))[0]
        yield from (leaf.slot for leaf in leaves if isinstance(leaf, _Place))
        yield from step.slots


def _moved(
    places: list[tuple[int, int, int]], moved: dict[int, tuple[int, int]]
) -> list[tuple[int, int, int]]:
    """(index, slot, offset) of pieces, as those of what they were cut from."""
    return [
        (index, moved[slot][0], moved[slot][1] + offset) if slot in moved else (index, slot, offset)
        for index, slot, offset in places
    ]
