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
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from ..dispatch.backends import BACKENDS, made_current
from ..dispatch.common.modes import Mode
from ..dispatch.errors import NotSupported
from ..dispatch.keys import caches, written
from ..dispatch.register import compile_kernels, overload
from ..dispatch.sentences import call
from ..dispatch.specs import BY_NAME


class _KeepWritten(Mode):
    """Keeps a copy of each of `tensors` before it is first written."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._ours = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        self._kept: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for _, value in caches(written(func), args, kwargs):
            self._before(value)
        return func(*args, **kwargs)

    def _before(self, value: Any) -> None:
        for tensor in tree_leaves(value):
            if isinstance(tensor, Tensor):
                pointer = tensor.untyped_storage().data_ptr()
                if pointer in self._ours and pointer not in self._kept:
                    self._kept[pointer] = self._ours[pointer].clone()

    def restore(self) -> None:
        for pointer, kept in self._kept.items():
            self._ours[pointer].copy_(kept)


class Captured:
    """A captured function.  Call it with new tensors of the same shapes (they are copied into the
    buffers that were captured) or with the captured tensors themselves, changed in place.  The
    outputs are buffers too: the next call overwrites them."""

    def __init__(self, graph: Any, inputs: Sequence[Any], outputs: Any) -> None:
        self._graph, self._inputs, self.outputs = graph, inputs, outputs

    def __call__(self, *args: Any) -> Any:
        if len(args) != len(self._inputs):
            raise ValueError(
                f"capture: {len(args)} arguments came, expected the {len(self._inputs)} captured."
            )
        changed = [
            pair
            for number, (buffer, value) in enumerate(zip(self._inputs, args, strict=True))
            if buffer is not value
            for pair in _pairs(number, buffer, value)
        ]
        for buffer, value in changed:
            buffer.copy_(value)
        self._graph.replay()
        return self.outputs


def _pairs(number: int, captured: Any, came: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """(buffer, new value) of the tensors in one argument, which may be a list, a dict and so on."""
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
            if isinstance(buffer, Tensor) or isinstance(value, Tensor) or buffer != value:
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
        elif buffer is not value:
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
    buffers if it is a module, while it is warmed up is undone: a cache or a recurrent state holds
    what it held before.

    Args:
        fn: any function of tensors on one CUDA or NPU device.
        args: its arguments.
        warmup: calls before the capture; the first compiles and tunes the kernels.

    Returns:
        A `Captured`: call it like `fn`.

    Raises:
        NotSupported: the arguments lie on the CPU, which has no graphs.
        RuntimeError: something inside `fn` waits for the device (`.item()`, `.cpu()`, a print).

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
    tensors = _tensors(args)
    with made_current(tensors[0].device):
        graph, outputs = _recorded(fn, args, tensors, kind, warmup)
    return Captured(graph, args, outputs)


def _recorded(
    fn: Callable[..., Any], args: tuple[Any, ...], tensors: list[Tensor], kind: str, warmup: int
) -> tuple[Any, Any]:
    """(graph, its outputs), recorded on the current device."""
    device = getattr(torch, kind)
    held = fn.buffers() if isinstance(fn, torch.nn.Module) else ()
    keep = _KeepWritten([*tensors, *held])
    side = device.Stream()
    side.wait_stream(device.current_stream())
    try:
        try:
            with device.stream(side), keep:
                for number in range(max(1, warmup)):
                    # the first call may compile, which synchronises; a later one must not
                    with _no_synchronisation(kind) if number else nullcontext():
                        fn(*args)
        finally:
            # after an error too: what was written there comes before what is put back here
            device.current_stream().wait_stream(side)
        graph = device.CUDAGraph() if kind == "cuda" else device.NPUGraph()
        with _no_synchronisation(kind), device.graph(graph):
            outputs = fn(*args)
    finally:
        keep.restore()
    return graph, outputs


class _no_synchronisation(AbstractContextManager[None]):
    """Turns a wait for the device into an error that says what to do."""

    def __init__(self, kind: str) -> None:
        self._cuda = kind == "cuda"
        self._mode = 0

    def __enter__(self) -> None:
        if self._cuda:
            self._mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._cuda:
            torch.cuda.set_sync_debug_mode(self._mode)
        # "synchronizing": torch's own check; "captur": the device's, for what torch does not check
        if isinstance(error, RuntimeError) and re.search("synchroniz|captur", str(error)):
            raise RuntimeError(
                "capture: the function waits for the device, which a graph cannot hold. Keep "
                "lengths, tables and indices in device tensors: no .item(), .cpu(), .tolist(), "
                "no branch on a tensor, no boolean mask as an index, no synchronize()."
            ) from error


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
