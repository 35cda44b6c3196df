# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Which backend runs a call, why another cannot, and how its launcher is found (lazily)."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import log
from .common import nz
from .env import config
from .errors import BackendUnavailable, NotSupported
from .op_spec import Spec
from .versions import NEWEST_TRITON, OLDEST_TRITON, release
from .versions import installed as installed

_ROOT = __package__.rpartition(".")[0]

_AS_IT_IS = nullcontext()

Bind = Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]


class Call(NamedTuple):
    """How a call is made: inside `ready`, `function(*args, **kwargs)`, and `ran()` behind it.
    Whoever asks for it does so, that no frame but his is between a user and a launcher."""

    ready: AbstractContextManager[Any]
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ran: Callable[[], None] | None = None


Prepare = Callable[[tuple[Any, ...], dict[str, Any]], Call]


@dataclass(frozen=True)
class Backend:
    """`key` is the dispatch key whose tensors come here; `package` holds the launchers."""

    name: str
    key: str
    device: str
    package: str


# plain PyTorch, what the kernels are held against: for tests and ports, not for speed
REFERENCE = Backend("reference", "CPU", "cpu", f"{_ROOT}.dispatch.reference")
CUDA = Backend("cuda", "CUDA", "cuda", f"{_ROOT}.cuda_ops")
NPU = Backend("npu", "PrivateUse1", "npu", f"{_ROOT}.npu_ops")
BACKENDS = (REFERENCE, CUDA, NPU)


def both_tritons() -> str | None:
    """The sentence for an environment in which triton and triton-ascend overwrote each other."""
    if installed("triton") is None or installed("triton-ascend") is None:
        return None
    ascend = importlib.util.find_spec("triton.backends.ascend") is not None
    return (
        "triton and triton-ascend are both installed, and own the same import folder; "
        f"{'triton-ascend' if ascend else 'triton'} was installed last and wins. Keep one: "
        "pip uninstall -y triton triton-ascend, then pip install the one this machine needs "
        "(triton for CUDA, triton-ascend for Ascend)."
    )


@cache
def _importable(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def interpreting() -> bool:
    """Kernels run on CPU tensors: Triton's interpreter, or a stand-in for the driver (tests)."""
    return os.environ.get("TRITON_INTERPRET") == "1" or config.backend in ("cuda", "npu")


def cannot_run(backend: Backend, device: torch.device) -> str | None:
    """Why `backend` cannot run on tensors of `device`, or None."""
    if backend is REFERENCE:
        if device.type == "cpu" or config.backend == "reference":
            return None
        return f"inputs are on {device}; move them, or set CUSTOM_BACKEND=reference"
    if device.type != backend.device and not interpreting():
        return f"inputs are on {device}, this backend needs {backend.device}"
    if not _importable("triton"):
        package = "triton" if backend is CUDA else "triton-ascend"
        return f"{package} is not installed; pip install {package}"
    if backend is NPU and installed("triton-ascend") is None:
        return (
            "triton is installed, this backend needs triton-ascend alone: pip uninstall -y triton, "
            "then pip install triton-ascend"
        )
    if backend is CUDA and installed("triton") is None and installed("triton-ascend"):
        return (
            "triton-ascend is installed, this backend needs triton alone: pip uninstall -y "
            "triton-ascend, then pip install triton"
        )
    version = installed("triton")
    if backend is CUDA and version and release(version) < OLDEST_TRITON:
        return (
            f"triton {version} is installed, this backend needs 3.5 or later, which comes with "
            "torch 2.9: pip install -U torch"
        )
    if backend is CUDA and version and release(version) > NEWEST_TRITON:
        log.once(
            ("triton",),
            f"triton {version} is newer than 3.9, the newest that the CUDA kernels were compiled "
            "with; pip install 'triton>=3.5,<3.10' if one does not compile",
        )
    if backend is CUDA:
        reason: str | None = importlib.import_module(f"{CUDA.package}.common.gpu").cannot_run(
            device
        )
        return reason
    return None


def choose(key: str) -> Backend:
    """The backend for tensors of dispatch key `key`, which CUSTOM_BACKEND can override."""
    wanted = {"reference": REFERENCE, "cuda": CUDA, "npu": NPU}.get(config.backend)
    return wanted or next(backend for backend in BACKENDS if backend.key == key)


def has_kernel(backend: Backend, spec: Spec) -> bool:
    """Whether the backend's package holds a module for the op; imports nothing of it."""
    family = f"{backend.package}.{spec.family}"
    return _importable(family) and _importable(f"{family}.{spec.file}")


class Launcher(NamedTuple):
    """What an op's module in a backend's package offers."""

    function: Callable[..., Any]
    unsupported: Callable[..., str | None]
    """`unsupported(**arguments)`: why the module cannot run a call, or None."""
    unsupported_on: Callable[[torch.device], str | None]
    """Why it runs no call at all on a device, or None."""


@cache
def launcher(backend: Backend, spec: Spec) -> Launcher | None:
    """The op's launcher of the backend's package; None: not written yet."""
    if not has_kernel(backend, spec):
        return None
    module = importlib.import_module(f"{backend.package}.{spec.module}")
    function = getattr(module, spec.function)
    if backend is NPU:
        function = importlib.import_module(f"{_ROOT}.npu_ops.common.tune").retrying(
            spec.name, function
        )
    refusals = (getattr(module, name, _nothing) for name in ("unsupported", "unsupported_on"))
    return Launcher(function, *refusals)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def reason_against_all(backend: Backend, spec: Spec, device: torch.device) -> str | None:
    """Why `backend` runs no call of the op on tensors of `device`, or None."""
    reason = cannot_run(backend, device)
    if reason is not None:
        return reason
    found = launcher(backend, spec)
    return "has no kernel for this op yet" if found is None else found.unsupported_on(device)


def reason_against(
    backend: Backend, spec: Spec, device: torch.device, arguments: Mapping[str, Any]
) -> str | None:
    """Why `backend` cannot run this very call, or None."""
    against = reason_against_all(backend, spec, device)
    if against is not None:
        return against
    found = launcher(backend, spec)
    assert found is not None  # reason_against_all said so
    against = found.unsupported(**arguments)
    if against is None and backend is NPU:
        against = nz.unreadable(arguments)
    return against


def device_of(arguments: Mapping[str, Any]) -> torch.device:
    return next(v.device for v in arguments.values() if isinstance(v, torch.Tensor))


def made_current(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device and its current stream: `device` becomes that one."""
    if device.type == "cpu":
        return _AS_IT_IS
    module = getattr(torch, device.type)
    return _AS_IT_IS if module.current_device() == device.index else module.device(device)


@dataclass(frozen=True)
class Runner:
    """Who runs a call that is checked."""

    spec: Spec
    backend: Backend
    device: torch.device
    function: Callable[..., Any]

    @contextmanager
    def ready(self, arguments: dict[str, Any]) -> Iterator[None]:
        """Inside it `function` runs with these arguments, for the first time; its kernels are
        compiled where the backend does so ahead."""
        reason = f"inputs on {self.device}"
        log.ran(self.spec.name, self.backend.name, reason, arguments)
        compiled = _of_launches(self.backend, "compiled") if self.device.type == "cuda" else None
        with (
            made_current(self.device),
            _AS_IT_IS if compiled is None else compiled(self.function, arguments),
        ):
            yield


def runner(spec: Spec, key: str, arguments: dict[str, Any]) -> Runner:
    """Never falls back: the chosen backend runs the call, or one error says why none can."""
    backend, device = choose(key), device_of(arguments)
    if reason_against(backend, spec, device, arguments) is not None:
        raise _none_can_run(spec, device, arguments)
    found = launcher(backend, spec)
    assert found is not None  # reason_against said so
    return Runner(spec, backend, device, found.function)


@cache
def recorder(backend: Backend) -> Callable[..., Any] | None:
    """`record` of the backend's package: (what a launcher gave, how to do the same again)."""
    return _of_launches(backend, "record")


def compiling(backend: Backend) -> Callable[[Executor], AbstractContextManager[None]] | None:
    """Inside it launchers launch nothing, and have their kernels compiled by an executor."""
    return _of_launches(backend, "compiling")


def _of_launches(backend: Backend, name: str) -> Callable[..., Any] | None:
    if backend is not CUDA:
        return None
    launches = importlib.import_module(f"{CUDA.package}.runtime.launches")
    found: Callable[..., Any] = getattr(launches, name)
    return found


class Replay:
    """Calls like one that ran.  The first is recorded where the backend can, and the others do what
    was recorded; without a plan `runner.function` runs them all."""

    def __init__(self, runner: Runner, bind: Bind) -> None:
        self.runner, self._bind = runner, bind
        self._counted = runner.spec.name, runner.backend.name
        self.unrecorded = self._records()
        self._plan: Any = None  # launches.Plan

    def _records(self) -> bool:
        return config.replay and recorder(self.runner.backend) is not None

    def call(
        self, tensors: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call:
        """One more, of these tensors."""
        log.count(self._counted)
        plan = self._plan
        if plan is not None and not plan.holds():
            self._plan = plan = None
            self.unrecorded = self._records()
        if config.log:
            how = "its launcher runs unchecked" if plan is None else f"replays {plan}"
            log.repeated(*self._counted, how)
        ready = made_current(self.runner.device)
        if plan is not None:
            return Call(ready, plan, (tensors,), {})
        if self.unrecorded:
            return Call(ready, self.record, (args, kwargs), {})
        return Call(ready, self.runner.function, (), self._bind(args, kwargs))

    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.unrecorded = False
        record = recorder(self.runner.backend)
        assert record is not None  # _records said so
        out, self._plan = record(self.runner.function, self._bind, args, kwargs)
        return out


def _none_can_run(
    spec: Spec, device: torch.device, arguments: dict[str, Any]
) -> BackendUnavailable | NotSupported:
    lines = [f"{spec.name} cannot run on {device}."]
    reasons = {b: reason_against(b, spec, device, arguments) for b in BACKENDS}
    lines += [
        f"  {b.name:<10}{why or 'not chosen: see CUSTOM_BACKEND'}" for b, why in reasons.items()
    ]
    lines.append(f"  {log.describe(arguments)}")
    missing = any(
        backend.device == device.type and cannot_run(backend, device) for backend in BACKENDS
    )
    return (BackendUnavailable if missing else NotSupported)("\n".join(lines))
