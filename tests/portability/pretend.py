# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""One GPU that is not here: which kernels the launchers would run on it, and what those compile to.

python -m tests.portability.pretend CAPABILITY KNOWN.json OUT.json SAMPLE JOBS PLACE [PART ...]

SAMPLE `new` compiles what KNOWN has not, a number so many launches of every op that it has, by
chance.  JOBS at a time; of all cases, or of those whose `op | label` contains a PART.  PLACE
`offset` moves what a case gives off 16 bytes (offset.py), `given` leaves it.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import hashlib
import importlib
import json
import os
import pkgutil
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton.runtime import jit
from triton.runtime.jit import JITCallable, KernelInterface

from .gpus import GPUS, HOME
from .offset import OFF, off
from .sass import disassembled, late_constants, wrong_descriptors


def guard() -> Path:
    """guard.cpp, compiled once."""
    library = HOME / "guard.so"
    if not library.exists():
        HOME.mkdir(exist_ok=True)
        torch_at = torch.__path__[0]
        source = Path(__file__).with_name("guard.cpp")
        with tempfile.TemporaryDirectory(dir=HOME) as scratch:
            made = Path(scratch) / library.name
            command = ["c++", "-shared", "-fPIC", "-std=c++17", f"-I{torch_at}/include", source]
            subprocess.run([*command, f"-L{torch_at}/lib", "-lc10", "-o", made], check=True)
            made.replace(library)
    return library


def pretend(capability: int) -> None:
    """From here on tensors on `cuda` have shapes but no memory, and the GPU is that one."""
    ctypes.CDLL(str(guard()))
    from custom.cuda_ops.common import gpu
    from custom.cuda_ops.runtime import launches

    from custom.bench.case import Draw

    from ..support.compile_for_hopper import address, driver

    at_hand = GPUS[capability]
    gpu.capability = lambda device: divmod(capability, 10)
    gpu.num_sms = lambda device: at_hand.processors
    gpu.shared_memory = lambda device: at_hand.shared_memory
    triton.runtime.driver._active = driver(capability)
    launches.SideStream = _Side
    FakeTensor.data_ptr = address

    def draw(self, device, seed, dtype=torch.bfloat16):
        self.device, self.dtype, self.random = device, dtype, None

    Draw.__init__ = draw


class _Side:
    def __init__(self, device):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def stream(self):
        return contextlib.nullcontext()


class _Told(ast.NodeTransformer):
    """Takes strings that are statements out."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        value = node.value
        return None if isinstance(value, ast.Constant) and isinstance(value.value, str) else node


def bare(source: str) -> str:
    """Without comments, docstrings and layout."""
    return ast.unparse(_Told().visit(ast.parse(source)))


class Dependencies(jit.DependenciesFinder):
    """What Triton hashes of a kernel, of its bare source."""

    def __init__(self, name, globals, nonlocals, src):
        super().__init__(name, globals, nonlocals, bare(src))


class Recorder:
    """What would be launched: the keys in `launches`; `of` has the name of each and how to compile
    it."""

    def __init__(self) -> None:
        self.launches: list[str] = []
        self.of: dict[str, tuple[str, Callable[[], Any]]] = {}
        self.compile = triton.compiler.compile
        triton.compiler.compile = self._compiled
        KernelInterface.__getitem__ = lambda kernel, grid: self._launcher(kernel)
        jit.DependenciesFinder = Dependencies
        # a kernel that only moved within its file is the same
        import custom.cuda_ops

        inside = custom.cuda_ops.__name__ + "."
        for module in pkgutil.walk_packages(custom.cuda_ops.__path__, inside):
            found = vars(importlib.import_module(module.name)).values()
            for kernel in (x for x in found if isinstance(x, JITCallable)):
                kernel.starting_line_number = 1

    def _launcher(self, kernel):
        def launch(*arguments, **named):
            self.launches.append(kernel.warmup(*arguments, grid=(1,), **named))

        return launch

    def _compiled(self, src, target, options) -> str:
        """In place of Triton's own compile: the key of what is to be compiled."""
        chosen = {n: x for n, x in options.items() if n != "extern_libs"}  # a path of this machine
        parts = (src.hash(), repr(sorted(chosen.items())), repr(target), triton.__version__)
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
        name = f"{src.fn.__module__.partition('.cuda_ops.')[2]}.{src.name}"
        self.of[key] = name, lambda: self.compile(src, target=target, options=options)
        return key


def facts(binary) -> dict[str, Any]:
    """What is kept of a compiled kernel."""
    ptx = binary.asm["ptx"]
    # `forget` of hopper/tma.py says why
    made, gone = (binary.asm["ttgir"].count(f"ttng.{x}_barrier ") for x in ("init", "inval"))
    if "ttg.warp_specialize" not in binary.asm["ttgir"] and made != gone:
        raise RuntimeError(f"of {made} barriers in shared memory it invalidates {gone}")
    units = [unit for unit in ("wgmma", "tcgen05", "mma.sync") if unit in ptx]
    if "wgmma" in units:
        sass = disassembled(binary.asm["cubin"])
        if wrong := wrong_descriptors(sass):
            raise RuntimeError(f"ptxas takes a wrong register for a wgmma descriptor: {wrong[0]}")
        if late := late_constants(sass):
            raise RuntimeError(f"ptxas moves a constant behind a wgmma that reads it: {late[0]}")
    return dict(
        unit=units[0] if units else "",
        shared=binary.metadata.shared,
        tensor=getattr(binary.metadata, "tmem_size", None) or 0,
    )


def in_child(compile: Callable[[], Any]) -> dict[str, Any]:
    """Its facts, or its error: LLVM ends the process where it gives up."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            os.dup2(err.fileno(), 2)
            try:
                found = facts(compile())
            except Exception as error:
                found = dict(error=f"{type(error).__name__}: {error}"[:600])
            json.dump(found, out)
            out.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        for file in (out, err):
            file.seek(0)
        if not os.WIFSIGNALED(status):
            return json.load(out)
        name = signal.Signals(os.WTERMSIG(status)).name
        return dict(error=f"the compiler died of {name}: {err.read()[:300]}")


def gather(recorder: Recorder, wanted: list[str], offset: bool = False) -> list[dict[str, Any]]:
    """Every case: the keys of what it launches, or why it is not; `offset`: as offset.py has it."""
    from custom.dispatch import backends
    from custom.dispatch.register import bind, overload
    from custom.dispatch.registry import BY_NAME

    from .cases import cases

    def refusal(spec: Any, given: dict[str, Any]) -> str | None:
        arguments = bind(overload(spec)._schema, (), given)
        try:
            spec.check(**arguments)
        except (TypeError, ValueError) as error:
            return str(error)
        device = backends.device_of(arguments)
        return backends.reason_against(backends.CUDA, spec, device, arguments)

    found = []
    moved = OFF.items() if offset else [("", None)]
    for (op, label, make), (place, ways) in product(cases(), moved):
        if wanted and not any(part in f"{op} | {label}" for part in wanted):
            continue
        spec, row = BY_NAME[op], dict(op=op, label=label + place)
        found.append(row)
        recorder.launches.clear()
        with FakeTensorMode(allow_non_fake_inputs=True):
            given = make(torch.device("cuda:0"), 0)
            if ways:
                given = off(given, ways, partial(refusal, spec))
            arguments = bind(overload(spec)._schema, (), given)
            spec.check(**arguments)
            device = backends.device_of(arguments)
            row["refused"] = backends.reason_against(backends.CUDA, spec, device, arguments)
            if row["refused"] is None:
                backends.launcher(backends.CUDA, spec).function(**arguments)
        row["launches"] = list(dict.fromkeys(recorder.launches))
    return found


def drawn(found: list[dict[str, Any]], known: dict[str, Any], count: int) -> list[str]:
    """Of the known launches of every op so many, by chance."""
    of: dict[str, set[str]] = {}
    for case in found:
        of.setdefault(case["op"], set()).update(known.keys() & case["launches"])
    every = (random.sample(sorted(keys), min(count, len(keys))) for keys in of.values())
    return list(dict.fromkeys(key for keys in every for key in keys))


def main() -> None:
    capability, sample = int(sys.argv[1]), sys.argv[4]
    known, out = json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
    torch.set_num_threads(1)
    pretend(capability)
    recorder = Recorder()
    found = gather(recorder, sys.argv[7:], sys.argv[6] == "offset")
    unknown = list(recorder.of.keys() - known)
    wanted = unknown if sample == "new" else drawn(found, known, int(sample))
    compiled = {}
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["TRITON_CACHE_DIR"] = scratch
        # each in a process of its own; the threads only wait for them
        with ThreadPoolExecutor(int(sys.argv[5])) as pool:
            found_of = pool.map(lambda key: in_child(recorder.of[key][1]), wanted)
            for key, what in zip(wanted, found_of, strict=True):
                compiled[key] = dict(kernel=recorder.of[key][0]) | what
                print(f"  sm_{capability}, {triton.__version__}: {compiled[key]}", flush=True)
    names = {key: name for key, (name, _) in recorder.of.items()}
    answer = dict(triton=triton.__version__, cases=found, names=names, compiled=compiled)
    out.write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
