# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Makes `kernel[grid](cpu_tensors)` lower for Atlas A3 and run the lowered form on the CPU.

The JIT's own binder decides types and specialisation, as on the machine.  Every launch is recorded.
"""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from . import aten
from .lowered import CpuKernel
from .toolchain import ARCH, digest

MAX_GRID = 65535
_TRIES = 4  # the adapter of triton-ascend 3.2.0 dies at random, about once in two thousand times


@dataclass
class Launch:
    """One launch: what was compiled, and what it was called with."""

    kernel: str  # module.function
    constants: dict[str, Any]
    options: dict[str, Any]
    grid: tuple[int, ...]
    scalars: list[Any]
    ttir: str = field(repr=False)
    linalg: str = field(repr=False)

    @property
    def lowered_key(self) -> str:
        return digest(self.linalg, repr(sorted(self.options.items())))[:16]


class Recorder:
    """State of the stand-in: the core counts it claims, the launches, whether kernels run."""

    cube_cores = 24
    execute = True
    observe: Callable[[Launch, list[Any]], None] | None = None

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.lowered: dict[Any, tuple[str, str, CpuKernel | None]] = {}


recorder = Recorder()


class Driver:
    """What the launchers and the JIT ask of the machine's driver."""

    class utils:
        @staticmethod
        def get_device_properties(device: Any) -> dict[str, int]:
            cores = recorder.cube_cores
            return {"max_shared_mem": 1, "num_aicore": cores, "num_vectorcore": 2 * cores}

        @staticmethod
        def get_arch() -> str:
            return ARCH

        @staticmethod
        def get_aicore_num() -> int:
            return recorder.cube_cores

        @staticmethod
        def get_aivector_core_num() -> int:
            return 2 * recorder.cube_cores

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("npu", ARCH, 0)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_device_interface(self) -> None:
        return None


def _lower(function: Any, signature: Any, constants: Any, attributes: Any, options: Any) -> tuple:
    backend = make_backend(triton.runtime.driver.active.get_current_target())
    stages: dict[str, Any] = {}
    metadata = {"hash": "x", "target": backend.target, **options.__dict__}
    backend.add_stages(stages, options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(function, signature, constants, attributes)
    module = source.make_ir(
        options, backend.get_codegen_implementation(), backend.get_module_map(), context
    )
    module = stages["ttir"](module, metadata)
    ttir = str(module)
    for left in reversed(range(_TRIES)):
        try:
            return ttir, stages["ttadapter"](module, metadata)
        except subprocess.CalledProcessError as error:
            # a signal; what the adapter refuses ends with 1, every time
            if error.returncode >= 0 or not left:
                raise
            print(f"{function.__name__}: triton-adapter-opt ended by signal {-error.returncode}")
    raise AssertionError("no try at all")


def _run(self: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
    """Takes the place of `JITFunction.run`."""
    backend = make_backend(triton.runtime.driver.active.get_current_target())
    keywords["debug"] = False
    if self.binder is None:
        self.create_binder(backend)
    bound, spec, constexprs, values, extra = self.binder(*args, **keywords)
    options = backend.parse_options(keywords)
    # an option that is no parameter of the kernel works as well, but triton-ascend prints a warning
    unknown = [name for name in extra if name != "debug"]
    if unknown:
        raise KeyError(f"{self.__name__} has no parameters {unknown}")
    names = [self.params[i].name for i in self.non_constexpr_indices]
    all_values = tuple(bound.values())
    attributes = backend.get_attrs_descriptor(self.params, all_values)
    folded = attributes.get_constants()
    constants = {
        p.name: value
        for value, p in zip(all_values, self.params, strict=True)
        if p.is_constexpr or p.num in folded or value is None
    }
    chosen = {n: v for n, v in keywords.items() if n in options.__dict__ and n != "debug"}
    key = (self.cache_key, "".join(spec), str(constexprs))
    if key not in recorder.lowered:
        types = zip(names, spec[: len(names)], strict=True)
        signature = {name: "*i8" if kind == "none" else kind for name, kind in types}
        ttir, linalg = _lower(self, signature, constants, attributes, options)
        linalg = re.sub(r" loc\([^)]*\)", "", linalg)
        recorder.lowered[key] = (ttir, linalg, None)
    ttir, linalg, ready = recorder.lowered[key]
    sizes = tuple(grid(bound) if callable(grid) else grid)
    if math.prod(sizes) > MAX_GRID or min(sizes) < 1:
        raise RuntimeError(f"{self.__name__}: grid {sizes}, the NPU takes 1 to {MAX_GRID} programs")
    given = [value for name, value in zip(names, values, strict=True) if name not in constants]
    described = [
        f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else value
        for value in given
    ]
    shown = {p.name: constants[p.name] for p in self.params if p.is_constexpr}
    where = f"{self.fn.__module__.rpartition('.')[2]}.{self.fn.__name__}"
    launch = Launch(where, shown, chosen, sizes, described, ttir, linalg)
    recorder.launches.append(launch)
    if recorder.observe is not None:
        recorder.observe(launch, given)
    if recorder.execute:
        if ready is None:
            ready = CpuKernel(linalg)
            recorder.lowered[key] = (ttir, linalg, ready)
        ready(sizes, given)


def _run_apart(self: Any, *args: Any, **keywords: Any) -> None:
    with aten.apart():
        _run(self, *args, **keywords)


def install() -> None:
    triton.runtime.driver.set_active(Driver())
    triton.JITFunction.run = _run_apart
    aten.install()
