# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What the kernels' host code takes of Triton that Triton does not promise: here alone.

Each is behind a check.  Where a name has moved, or Triton is none of those that were tried, the
public way is taken, and a line says so once: kernel[grid](...) launches, kernels compile one after
another, plain ones run on Hopper.
"""

from __future__ import annotations

import copy
import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from inspect import getclosurevars, isfunction, signature
from operator import attrgetter
from types import CellType, FunctionType, ModuleType
from typing import Any, Protocol

import triton
from torch import Tensor
from triton import knobs

from ...dispatch import log
from ...dispatch.versions import NEWEST_TRITON, OLDEST_TRITON, release


def _named(module: str, name: str) -> Any:
    """What a module of Triton's has under this name, or None."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


CompiledKernel = _named("triton.compiler", "CompiledKernel")
_AsyncCompileMode = _named("triton.runtime._async_compile", "AsyncCompileMode")
_active_mode = _named("triton.runtime._async_compile", "active_mode")
_triton_key = _named("triton.runtime.cache", "triton_key")
_load = _named("triton.runtime.build", "_load_module_from_path")
_encode = _named("triton.backends.nvidia.driver", "make_tensordesc_arg")
_DriverBase = _named("triton.backends.driver", "DriverBase")
_builtin = _named("triton.experimental.gluon.language._core", "builtin")
ir = _named("triton._C.libtriton", "ir")

# of Gluon: without these its kernels do not run (gluon_names.py)
GLUON_LACKS = [name for name, x in (("builtin", _builtin), ("ir", ir)) if x is None]
_KNOWN = OLDEST_TRITON <= release(triton.__version__) <= NEWEST_TRITON
# since 3.8 it gets the launch's other arguments as well
_REST = (None,) * (len(signature(_encode).parameters) - 2) if _encode else ()


def builtin(function: Callable[..., Any]) -> Any:
    """A function that Gluon's kernels call while they are compiled."""
    return _builtin(function) if _builtin else function


def pretends() -> bool:
    """Whether a stand-in is in the place of Triton's driver (tests)."""
    driver = getattr(triton.runtime.driver, "_active", None)
    return driver is not None and not (_DriverBase and isinstance(driver, _DriverBase))


def once_a_process() -> list[Callable[[], Any]]:
    """What Triton does at its first kernel: a hash of itself, which is in the key of every kernel,
    and its driver, which is C."""
    parts = [_triton_key, lambda: triton.runtime.driver.active]
    return [part for part in parts if part]


class Compilers(Protocol):
    """What Triton asks of an executor."""

    def submit(self, compiled: Callable[[], Any], /) -> Future[Any]: ...


@contextmanager
def compiled_by(executor: Compilers) -> Iterator[None]:
    """Kernels that are asked for inside are compiled by `executor`, and ready at the end; where
    Triton has no such mode any more, at once."""
    if _AsyncCompileMode is None or _active_mode is None:
        _say("compiles kernels one after another")
        yield
        return
    others = _active_mode.get()
    _active_mode.set(None)
    try:
        with _AsyncCompileMode(executor):
            yield
    finally:
        _active_mode.set(others)  # Triton leaves ours where a kernel did not compile


def forget_failed(kernel: Any, future: Future[Any]) -> None:
    """Triton keeps a kernel whose compile failed, and would raise its error for ever: the next call
    tries again."""
    if future.cancelled() or future.exception() is None:
        return
    for kept, *_ in list(getattr(kernel, "device_caches", {}).values()):
        for key, found in list(kept.items()):
            if getattr(found, "future", None) is future:
                kept.pop(key, None)


def load_apart(is_ours: Callable[[], bool]) -> None:
    """Triton up to 3.6 loads the launcher of every kernel as a module of one name.  A file that was
    loaded before gives the module object that bears the name, filled anew: of two threads that load
    launchers one got the other's.  So one loads at a time, and ours have modules of their own."""
    if _load is None:
        return
    alone = threading.Lock()

    def loaded(name: str, path: str) -> ModuleType:
        with alone:
            module: ModuleType = _load(name, path)
            if is_ours():
                own = ModuleType(name)
                own.__dict__.update(vars(module))
                module = own
        return module

    build: Any = importlib.import_module("triton.runtime.build")
    build._load_module_from_path = loaded


LOADS_APART = release(triton.__version__) < (3, 7)  # later ones have one launcher


def _settings(*names: tuple[str, str]) -> Callable[[], Any]:
    there = [f"{of}.{name}" for of, name in names if hasattr(getattr(knobs, of, None), name)]
    return partial(attrgetter(*there), knobs) if there else lambda: None


# what Triton looks at in every launch, and compiles for
settings = _settings(
    ("runtime", "debug"),
    ("runtime", "add_stages_inspection_hook"),
    ("compilation", "instrumentation_mode"),
)


def is_seen(kernel: Any) -> bool:
    """Whether somebody is to be called at every launch of this kernel, before it is found."""
    hook = getattr(knobs.runtime, "add_stages_inspection_hook", None)
    return hook is not None or bool(run_hooks(kernel))


def run_hooks(kernel: Any) -> list[Any]:
    """Those that Triton calls before it runs this kernel."""
    hooks: list[Any] = getattr(kernel, "pre_run_hooks", [])
    return hooks


class Launcher:
    """Triton's launcher of a compiled kernel, and the function in C that it ends in."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.run = kernel, copy.copy(kernel.run)
        self.in_c: Callable[..., Any] | None = None
        launch = getattr(self.run, "launch", None)
        # of a kernel with tensor descriptors: a function that encodes them, around the one in C
        self.encodes = isfunction(launch)
        self._outer = launch
        if launch is not None:
            if self.encodes:
                launch = getclosurevars(launch).nonlocals["launcher"]
            if not (self.run.global_scratch_size or self.run.profile_scratch_size):
                self.in_c = launch
                self.between, self.listed = self._handed()
            self.run.launch = launch
        self.metas = kernel.metadata.tensordesc_meta if self.encodes else None

    def by_triton(self, run: Any, grid: tuple[int, ...], stream: int, values: Sequence[Any]) -> Any:
        kernel = self.kernel
        return run(
            *grid, stream, kernel.function, kernel.packed_metadata, None, None, None, *values
        )

    def _handed(self) -> tuple[list[Any], bool]:
        """(what Triton hands to the function in C between the stream and the values, whether it has
        these in a list of their own, as since 3.7)"""
        handed: list[Any] = []
        self.run.launch = lambda *args: handed.extend(args)
        self.by_triton(self.run, (1, 1, 1), 0, ())
        listed = handed[-1] == ()
        return handed[4:-1] if listed else handed[4:], listed

    def hands_over(self, grid: tuple[int, ...], given: Sequence[Any], values: list[Any]) -> bool:
        """Whether the function in C gets from us, who call it with `values`, what it gets from
        Triton, who was given `given`: an argument in another's place would be anything."""
        if self.in_c is None:
            return True
        handed: list[Any] = []
        run, note = copy.copy(self.run), lambda *args: handed.extend(args)
        run.launch = _around(self._outer, note) if self.encodes else note
        self.by_triton(run, grid, 0, given)
        ours = [*grid, 0, *self.between]
        return _same(handed, [*ours, values] if self.listed else [*ours, *values])


def encode(descriptor: Any, meta: Any) -> list[Any]:
    """A descriptor as the function in C takes it."""
    found: list[Any] = _encode(descriptor, meta, *_REST)
    return found


def _around(outer: Any, launcher: Callable[..., Any]) -> Callable[..., Any]:
    """The function that encodes descriptors, around another launcher."""
    names = outer.__code__.co_freevars
    cells = [
        CellType(launcher) if name == "launcher" else cell
        for name, cell in zip(names, outer.__closure__, strict=True)
    ]
    return FunctionType(
        outer.__code__, outer.__globals__, outer.__name__, outer.__defaults__, tuple(cells)
    )


def _same(theirs: Any, ours: Any) -> bool:
    """A tensor is where it begins; of what only C can read the kind has to do."""
    if isinstance(theirs, (list, tuple)):
        return (
            isinstance(ours, (list, tuple))
            and len(theirs) == len(ours)
            and all(map(_same, theirs, ours))
        )
    if isinstance(theirs, Tensor):
        at = ours.data_ptr() if hasattr(ours, "data_ptr") else ours
        return type(at) is int and at == theirs.data_ptr()
    if theirs is None or isinstance(theirs, (bool, int, float, str)):
        return type(theirs) is type(ours) and (theirs == ours or theirs != theirs)
    return theirs is ours or type(theirs) is type(ours)


def launcher_of(compiled: Any) -> Launcher | None:
    """Of what kernel[grid](...) gave; None where that is the one way to launch it."""
    if CompiledKernel is None or not isinstance(compiled, CompiledKernel):
        return None
    if not _KNOWN or _encode is None:
        _say("launches kernels in its public way, which takes the host longer")
        return None
    try:
        return Launcher(compiled)
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        _say(f"launches kernels in its public way, for its launcher is another one ({error!r})")
        return None


def agrees(
    launcher: Launcher, grid: tuple[int, ...], given: Sequence[Any], values: list[Any]
) -> bool:
    """`launcher.hands_over`, and a line where it does not."""
    try:
        same = launcher.hands_over(grid, given, values)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        same = False
        _say(f"launches kernels in its public way, for its launcher is another one ({error!r})")
    if not same:
        _say("launches kernels in its public way, for its launcher takes other arguments")
    return same


def _say(what: str) -> None:
    oldest, newest = (".".join(map(str, each)) for each in (OLDEST_TRITON, NEWEST_TRITON))
    here = triton.__version__
    log.once(("triton", what), f"triton {here} {what}; known are {oldest} to {newest}")
