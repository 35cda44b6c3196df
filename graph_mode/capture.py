# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Capture a function into a CUDA graph (or an NPU graph), safely; compile and tune ahead.

torch.compile and torch.export need nothing from here: the specs carry schema and fake.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from itertools import combinations, count
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from ..dispatch.backends import BACKENDS, made_current
from ..dispatch.common.modes import Mode
from ..dispatch.dispatch_keys import caches, written
from ..dispatch.error_messages import call
from ..dispatch.errors import NotSupported
from ..dispatch.overlap import interleaved, overlap, span
from ..dispatch.register import compile_kernels, overload
from ..dispatch.registry import BY_NAME

# of batch normalisation, whose schemas do not say that it writes them
_UNDECLARED = ("running_mean", "running_var")


def _places(func: Any) -> list[tuple[int, str]]:
    """The arguments that an operator writes."""
    arguments = enumerate(func._schema.arguments)
    return written(func) + [(i, a.name) for i, a in arguments if a.name in _UNDECLARED]


class _KeepWritten(Mode):
    """Keeps a copy of each of `tensors` before any of its bytes is first written, by whichever view
    or alias of it."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        ours = {(x.data_ptr(), x.shape, x.stride(), x.dtype): x for x in tensors if x.numel()}
        self._ours = [(x, *_reach(x)) for x in ours.values()]
        self._kept: list[tuple[Tensor, Tensor]] = []

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        for _, value in caches(_places(func), args, kwargs):
            for tensor in _tensors(value):
                self._before(*_reach(tensor))
        return func(*args, **kwargs)

    def _before(self, written_from: int, written_to: int) -> None:
        others = []
        for tensor, start, end in self._ours:
            if start < written_to and written_from < end:
                whole = _each_byte_once(tensor)
                self._kept.append((whole, whole.clone()))
            else:
                others.append((tensor, start, end))
        self._ours = others

    def restore(self) -> None:
        with torch.inference_mode():  # parameters, and tensors of that mode
            for tensor, kept in self._kept:
                tensor.copy_(kept)


def _reach(tensor: Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    return start, start + span(tensor)


def _each_byte_once(tensor: Tensor) -> Tensor:
    """A tensor that can be written: itself, or all from its first number to its last where some of
    them share memory (expanded ones)."""
    least = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < least:
            reach = span(tensor) // tensor.itemsize
            return tensor.as_strided((reach,), (1,), tensor.storage_offset())
        least += stride * (size - 1)
    return tensor


class Captured:
    """A captured function.  Call it with new tensors of the same shapes (they are copied into the
    buffers that were captured) or with the captured tensors themselves, changed in place.  The
    outputs are buffers too: the next call overwrites them.

    Tensors that overlapped in memory when they were captured, or were one, share a buffer: others
    come in their place if these overlap as they did."""

    def __init__(self, graph: Any, inputs: Sequence[Any], outputs: Any) -> None:
        self._graph, self._inputs, self.outputs = graph, inputs, outputs
        buffers = _tensors(inputs)
        self._spans = {id(buffer): span(buffer) for buffer in buffers}
        numbers = [number for number, value in enumerate(inputs) for _ in _tensors(value)]
        numbered = zip(count(), numbers, buffers)
        self._overlapping = [
            ((i, of_a), (j, of_b))
            for (i, of_a, a), (j, of_b, b) in combinations(numbered, 2)
            if overlap(a, b)
        ]

    def __call__(self, *args: Any) -> Any:
        if len(args) != len(self._inputs):
            raise ValueError(
                f"capture: {len(args)} arguments came, expected the {len(self._inputs)} captured."
            )
        pairs = [
            pair
            for number, (buffer, value) in enumerate(zip(self._inputs, args, strict=True))
            if buffer is not value or self._overlapping
            for pair in _pairs(number, buffer, value)
        ]
        for (i, of_a), (j, of_b) in self._overlapping:
            if not _overlap_alike(pairs[i], pairs[j]):
                raise ValueError(
                    f"capture: arguments {of_a} and {of_b} overlapped in memory when they were "
                    "captured, expected tensors that overlap in the same way. Capture again with "
                    "tensors that are apart."
                )
        changed = [pair for pair in pairs if not _same_memory(*pair)]
        for buffer, value in self._apart(changed):
            buffer.copy_(value)
        self._graph.replay()
        return self.outputs

    def _apart(self, changed: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Values that lie where a buffer is filled are copied before any is."""
        starts: list[int] = []
        spans: list[int] = []
        for buffer, value in changed:
            reach = self._spans[id(buffer)]
            spans += (reach, reach if value.stride() == buffer.stride() else span(value))
            starts += (buffer.data_ptr(), value.data_ptr())
        if not interleaved(starts, spans):
            return changed
        return [
            (buffer, value.clone() if any(overlap(each, value) for each, _ in changed) else value)
            for buffer, value in changed
        ]


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """Of two of one shape and dtype."""
    return a is b or (a.data_ptr() == b.data_ptr() and a.stride() == b.stride())


def _overlap_alike(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    """Whether two values meet where their buffers do."""
    (a, x), (b, y) = one, other
    if a.shape == b.shape and a.dtype == b.dtype and _same_memory(a, b):
        return _same_memory(x, y)
    ahead = b.data_ptr() - a.data_ptr()
    alike = (x.stride(), y.stride()) == (a.stride(), b.stride())
    return alike and y.data_ptr() - x.data_ptr() == ahead


def _pairs(number: int, captured: Any, came: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """(buffer, value) of the tensors in one argument, which may be a list, a dict and so on."""
    buffers, structure = tree_flatten(captured)
    values, other = tree_flatten(came)
    if structure != other:
        raise ValueError(
            f"capture: argument {number} is {type(came).__name__} of {len(values)} tensors or "
            f"numbers, expected the structure that was captured, {type(captured).__name__} of "
            f"{len(buffers)}."
        )
    for buffer, value in zip(buffers, values, strict=True):
        if not isinstance(buffer, Tensor) or not isinstance(value, Tensor):
            if type(buffer) is not type(value) or buffer != value:
                raise ValueError(
                    f"capture: argument {number} is {value!r}, {buffer!r} was captured. Only "
                    "tensors may change. Capture again for another value."
                )
        elif (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
            raise ValueError(
                f"capture: argument {number} has shape {list(value.shape)} and {value.dtype}, "
                f"expected {list(buffer.shape)} and {buffer.dtype} as captured. Capture again "
                "for another shape; lengths may change inside their tensors."
            )
        else:
            yield buffer, value


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def kind_of(values: Any) -> str:
    """Of the device of the tensors in some arguments; "cpu" without one."""
    tensors = _tensors(values)
    return tensors[0].device.type if tensors else "cpu"


def capture(fn: Callable[..., Any], *args: Any, warmup: int = 2) -> Captured:
    """Record `fn(*args)` into a device graph that replays with no work on the host.

    The tensors in `args` become the graph's input buffers.  What `fn` writes in them, or in its own
    buffers and parameters if it is a module or a method of one, while it is warmed up is undone: a
    cache or a recurrent state holds what it held before.  Other threads may use the device
    meanwhile; of captures one runs at a time.

    Args:
        fn: any function of tensors on one CUDA or NPU device.
        args: its arguments.
        warmup: calls before the capture, 2 at least: the first compiles and tunes the kernels,
            the others find out what waits for the device.

    Returns:
        A `Captured`: call it like `fn`.

    Raises:
        NotSupported: the arguments lie on the CPU, which has no graphs.
        RuntimeError: something inside `fn` waits for the device (`.item()`, `.cpu()`, a print).
        ValueError: the arguments, or what `fn` calls, lie on several devices.

    >>> import torch, custom
    >>> custom.graph_mode.capture(torch.neg, torch.ones(2))
    Traceback (most recent call last):
    custom.dispatch.errors.NotSupported: capture: the arguments are on cpu, expected cuda or npu...
    """
    kind = kind_of(args)
    if kind not in ("cuda", "npu"):
        raise NotSupported(
            f"capture: the arguments are on {kind}, expected cuda or npu: only these have graphs. "
            "On a CPU, call the function itself, or torch.compile it."
        )
    _refuse_apart(args)
    tensors = _tensors(args)
    with made_current(tensors[0].device):
        graph, outputs = _recorded(fn, args, tensors, kind, warmup)
    return Captured(graph, args, outputs)


def _refuse_apart(args: Sequence[Any]) -> None:
    """Arguments on several devices."""
    numbered = [(number, x) for number, value in enumerate(args) for x in _tensors(value)]
    first, wanted = numbered[0]
    for number, x in numbered:
        if x.device != wanted.device:
            raise ValueError(
                f"capture: argument {number} is on {x.device}, expected {wanted.device} (from "
                f"argument {first}): a graph records one device, and its replays would not see "
                "other values there. Move it with .to()."
            )


def _recorded(
    fn: Callable[..., Any], args: tuple[Any, ...], tensors: list[Tensor], kind: str, warmup: int
) -> tuple[Any, Any]:
    """(graph, its outputs), recorded on the current device."""
    device = getattr(torch, kind)
    owner = getattr(fn, "__self__", fn)
    held = (*owner.buffers(), *owner.parameters()) if isinstance(owner, torch.nn.Module) else ()
    # not lazy ones, which hold nothing yet, nor sparse ones, whose numbers other tensors hold
    held = tuple(x for x in held if not is_lazy(x) and x.layout is torch.strided)
    keep = _KeepWritten([*tensors, *held])
    here, side = device.current_stream(), device.Stream()
    side.wait_stream(here)
    try:
        try:
            with device.stream(side), keep, _Elsewhere(tensors[0].device):
                for number in range(max(2, warmup)):
                    # the first call may compile, which synchronises; a later one must not
                    with _no_synchronisation(kind) if number else nullcontext():
                        fn(*args)
        finally:
            # after an error too: what was written there comes before what is put back here
            here.wait_stream(side)
        graph = device.CUDAGraph() if kind == "cuda" else device.NPUGraph()
        # an NPU's take no mode; torch leaves its stream the current one where a capture fails
        mode = dict(capture_error_mode="thread_local") if kind == "cuda" else {}
        # torch's own stream for captures is of the device that a process captured on first
        captured = device.graph(graph, stream=side, **mode)
        with _ONE_AT_A_TIME, _in_words(), device.stream(here), captured:
            outputs = fn(*args)
    finally:
        keep.restore()
    return graph, outputs


_ONE_AT_A_TIME = RLock()  # a capture begins by a wait for the device, which would end another one


@contextmanager
def _in_words() -> Iterator[None]:
    """Turns an error about a wait for the device into one that says what to do."""
    try:
        yield
    except RuntimeError as error:
        # "synchroniz": below; "captur": the device's own
        if not re.search("synchroniz|captur", str(error)):
            raise
        raise RuntimeError(
            "capture: the function waits for the device, which a graph cannot hold. Keep "
            "lengths, tables and indices in device tensors: no .item(), .cpu(), .tolist(), "
            "no branch on a tensor, no boolean mask as an index, no synchronize()."
        ) from error


@contextmanager
def _no_synchronisation(kind: str) -> Iterator[None]:
    """Refuses what makes this thread wait for a device of this kind, before it does.  Torch's own
    debug mode would do so in all threads."""
    with _in_words(), _Waits(kind), _Builds(kind):
        yield


_ATEN = torch.ops.aten
_COPIES = (_ATEN._to_copy.default, _ATEN.copy_.default)
_INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
_SIZED = (_ATEN.repeat_interleave.Tensor, _ATEN.repeat_interleave.self_Tensor)
_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def _fills(values: Tensor | None = None, accumulate: bool = False, **_: Any) -> bool:
    """Whether writing by one mask is masked_fill_: a number of the host, as on CUDA x[mask] = 0."""
    if values is None or accumulate:
        return False
    return values.device.type == "cpu" and values.numel() == 1


class _Waits(Mode):
    """Refuses operators that read values or sizes back, or copy to or from the host and wait."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        devices = {x.device.type for x in _tensors((args, kwargs))}
        if self._waits(func, args, kwargs, devices):
            raise RuntimeError(f"{func} synchronizes")
        return func(*args, **kwargs)

    def _waits(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], devices: set[str]
    ) -> bool:
        if func in _COPIES:
            if kwargs.get("device") is not None:
                devices = devices | {torch.device(kwargs["device"]).type}
            blocking = not (kwargs.get("non_blocking") or args[2:3] == (True,))
            return blocking and self._kind in devices and len(devices) > 1
        if self._kind not in devices:
            return False
        if func._schema.name in _INDEXED:
            indices = _tensors(args[1])
            if any(x.device.type != self._kind for x in indices):
                return True
            masks = any(x.dtype in (torch.bool, torch.uint8) for x in indices)
            return masks and not (len(indices) == 1 and _fills(*args[2:4], **kwargs))
        if func in _SIZED:
            return kwargs.get("output_size") is None
        # whole under inference mode alone; a device does not look at the values
        if func is _ATEN.one_hot.default and args[1:] and args[1] >= 0:
            return False
        return func is _ATEN._linalg_check_errors.default or not _VALUES.isdisjoint(func.tags)


class _Elsewhere(Mode):
    """Refuses what runs on another device of the same kind: no graph of this one would hold it, and
    replays would go on with what it gave once."""

    def __init__(self, where: torch.device) -> None:
        super().__init__()
        self._where = where

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        out = func(*args, **kwargs)
        for tensor in _tensors((args, kwargs, out)):
            there = tensor.device
            if there.type == self._where.type and there != self._where:
                raise ValueError(
                    f"capture: the function calls {func} on {there}, expected {self._where} alone, "
                    "where its first argument is: a graph records one device. Capture what runs on "
                    "each device by itself."
                )
        return out


class _Builds(TorchFunctionMode):
    """Refuses what modes of operators do not see: numbers of the host as a tensor, and its text."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._kind in self._waiting(func, args, kwargs):
            raise RuntimeError(f"{func} synchronizes")
        return func(*args, **kwargs)

    def _waiting(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[str]:
        """The kinds of the devices that are waited for."""
        if func is Tensor.__repr__:
            return {args[0].device.type}
        if func is Tensor.new_tensor:
            return {torch.device(kwargs.get("device") or args[0].device).type}
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and args:
            came = args[0].device if isinstance(args[0], Tensor) else torch.device("cpu")
            given = args[0].device if isinstance(args[0], Tensor) else torch.get_default_device()
            return {torch.device(kwargs.get("device") or given).type} - {came.type}
        return set()


def warmup(calls: Mapping[str, Sequence[Mapping[str, Any]]], device: str | torch.device) -> None:
    """Compile and tune the kernels of these calls ahead of time, with a progress bar on stderr:
    those for CUDA side by side, on all cores.

    Args:
        calls: op name -> the argument sets to expect, by keyword; a tensor is a tensor or a pair
            (shape, dtype). Made tensors hold random numbers, or zeros if they are integers.
        device: where the ops will run.

    Raises:
        ValueError: a name is no op, the device is none of a backend, or a shape does not fit; no
            kernel has been compiled.
        TypeError: a set lacks an argument or has one that the op has not, or a dtype does not fit.

    >>> import torch, custom
    >>> q = ((1, 2, 5, 16), torch.float32)
    >>> custom.warmup({"npu_fused_attention": [dict(q=q, k=q, v=q)]}, "cpu")
    """
    where = _where(device)
    for name, sets in calls.items():
        _check_sets(name, sets)
    todo = [(name, arguments) for name, sets in calls.items() for arguments in sets]
    meta = torch.device("meta")
    for name, arguments in todo:  # whatever is refused is so before anything is compiled
        with torch.no_grad():
            call(overload(BY_NAME[name]), **_made(arguments, meta))
    with torch.no_grad(), _Compilers() as compilers:
        made = ((BY_NAME[name], _made(arguments, where)) for name, arguments in todo)
        compile_kernels(made, where, compilers)
    for number, (name, arguments) in enumerate(todo, 1):
        with torch.no_grad():
            overload(BY_NAME[name])(**_made(arguments, where))
        _progress("calls", number, len(todo), name)
    if todo:
        print(file=sys.stderr)


def _where(device: str | torch.device) -> torch.device:
    kinds = [backend.device for backend in BACKENDS]
    with suppress(RuntimeError):  # of npu, where torch_npu is not imported
        where = torch.device(device)
        if where.type in kinds:
            return where
    raise ValueError(
        f"warmup: `device` is {str(device)!r}, expected one of {', '.join(kinds)} that PyTorch "
        "knows here. An npu needs `import torch_npu` first."
    )


def _check_sets(name: str, sets: Any) -> None:
    if name not in BY_NAME:
        raise ValueError(f"warmup: {name!r} is no op, expected one of {', '.join(BY_NAME)}.")
    if not isinstance(sets, Sequence) or not all(isinstance(each, Mapping) for each in sets):
        raise TypeError(
            f"warmup: {name!r} has {type(sets).__name__}, expected a list of argument sets, each a "
            "dict by keyword. Put a single one into a list."
        )
    arguments = overload(BY_NAME[name])._schema.arguments
    known = {argument.name for argument in arguments}
    needed = {argument.name for argument in arguments if not argument.has_default_value()}
    for given in sets:
        for problem, odd in (("lacks", needed - {*given}), ("has unknown", {*given} - known)):
            if odd:
                names = ", ".join(f"`{each}`" for each in sorted(odd))
                raise TypeError(
                    f"warmup: a set of {name!r} {problem} {names}, expected the op's arguments by "
                    f"keyword. They are in help(custom.{name})."
                )


class _Compilers(ThreadPoolExecutor):
    """A thread for every core, and a progress bar of what they are given."""

    def __init__(self) -> None:
        super().__init__(os.cpu_count())
        self._given = self._done = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self._given += 1
        future = super().submit(fn, *args, **kwargs)
        future.add_done_callback(self._tick)
        return future

    def _tick(self, _: Future[Any]) -> None:
        self._done += 1
        _progress("kernels", self._done, self._given, "")


def _progress(what: str, done: int, of: int, name: str) -> None:
    bar = "#" * (20 * done // of)
    print(f"\rwarmup [{bar:<20}] {what} {done}/{of} {name}", end="", file=sys.stderr)


def _made(arguments: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    return {key: _make(value, device) for key, value in arguments.items()}


def _make(value: Any, device: torch.device) -> Any:
    if isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[1], torch.dtype):
        shape, dtype = value
        if dtype.is_floating_point:
            return torch.randn(shape, dtype=torch.float32, device=device).to(dtype)
        return torch.zeros(shape, dtype=dtype, device=device)
    # a tensor of the caller's is not written: the call gets a copy
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, copy=True), value)
