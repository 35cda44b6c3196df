# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Runs the lowered (Linalg) form of a kernel on the CPU, one program after another.

This is what the Ascend compiler is given, so its values are the kernel's: bf16 included, buffers
filled with NaN.  Not shown: the rounding of the machine's own units, synchronisation, programs that
run at once.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .toolchain import HOME, digest, llvm

_PASSES = ",".join(
    (
        "canonicalize,cse",
        "func.func(linalg-generalize-named-ops,convert-elementwise-to-linalg)",
        "eliminate-empty-tensors,empty-tensor-to-alloc-tensor",
        "one-shot-bufferize{allow-return-allocs-from-loops=true bufferize-function-boundaries=true"
        " function-boundary-type-conversion=identity-layout-map}",
        "canonicalize",
        "func.func(convert-linalg-to-loops)",
        "lower-affine,expand-realloc,memref-expand,arith-expand{include-bf16=true}",
        "canonicalize,cse,convert-vector-to-scf,convert-scf-to-cf",
        "expand-strided-metadata,lower-affine",
        "convert-vector-to-llvm,convert-math-to-llvm,convert-math-to-libm",
        "convert-complex-to-llvm,convert-index-to-llvm",
        "finalize-memref-to-llvm{use-generic-functions=true}",
        "convert-arith-to-llvm,convert-func-to-llvm,convert-cf-to-llvm,convert-arith-to-llvm",
        "reconcile-unrealized-casts",
    )
)

# allocation, strided copies, and stand-ins for functions of the vector library
_RUNTIME = Path(__file__).with_name("runtime.c")

_C_TYPES = {
    "i1": ctypes.c_bool,
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
}


def pipeline() -> str:
    """All that decides the values beside the kernel's own text."""
    return digest(_PASSES, _RUNTIME.read_bytes())


# one-dimensional only: another one stays without a body, and does not link
_GATHER = (
    r"^ *func\.func private @(triton_gather\w*)"
    r"\(tensor<(\d+x\w+)>, tensor<(\d+xi32)>, i32\) -> tensor<(\d+x(\w+))>.*$"
)


def _gather(match: re.Match[str]) -> str:
    name, source, indices, result, element = match.groups()
    identity = "affine_map<(i) -> (i)>"
    return "\n".join(
        (
            f"  func.func private @{name}(%a: tensor<{source}>, %at: tensor<{indices}>, %axis: i32)"
            f" -> tensor<{result}> {{",
            f"    %empty = tensor.empty() : tensor<{result}>",
            f"    %r = linalg.generic {{indexing_maps = [{identity}, {identity}],"
            f' iterator_types = ["parallel"]}} ins(%at : tensor<{indices}>)'
            f" outs(%empty : tensor<{result}>) {{",
            f"    ^bb0(%i: i32, %old: {element}):",
            "      %index = arith.index_cast %i : i32 to index",
            f"      %value = tensor.extract %a[%index] : tensor<{source}>",
            f"      linalg.yield %value : {element}",
            f"    }} -> tensor<{result}>",
            f"    return %r : tensor<{result}>",
            "  }",
        )
    )


def _stand_ins(text: str) -> str:
    """Bodies for the external functions that the lowered form calls."""
    declarations: set[str] = set()

    def body(match: re.Match[str]) -> str:
        name, shape, flag = match.groups()
        kind, element = "sort" if "sort" in name else "cumsum", shape.rpartition("x")[2]
        axis = "" if kind == "sort" else ", i32"
        passed = "%descending" if kind == "sort" else "%axis, %descending"
        callee = f"@stand_in_{kind}_{element}"
        declarations.add(f"  func.func private {callee}(memref<*x{element}>{axis}, i1)")
        return "\n".join(
            (
                f"  func.func private @{name}(%a: tensor<{shape}>, %axis: {flag}, %descending: i1)"
                f" -> tensor<{shape}> {{",
                f"    %source = bufferization.to_memref %a : memref<{shape}>",
                f"    %copy = memref.alloc() : memref<{shape}>",
                f"    memref.copy %source, %copy : memref<{shape}> to memref<{shape}>",
                f"    %any = memref.cast %copy : memref<{shape}> to memref<*x{element}>",
                f"    call {callee}(%any, {passed}) : (memref<*x{element}>{axis}, i1) -> ()",
                f"    %r = bufferization.to_tensor %copy restrict writable : memref<{shape}>",
                f"    return %r : tensor<{shape}>",
                "  }",
            )
        )

    external = (
        r"^ *func\.func private @(triton_(?:sort|cumsum)\w*)"
        r"\(tensor<([^>]*)>, (i64|i32), i1\) -> tensor<[^>]*>.*$"
    )
    text = re.sub(external, body, text, flags=re.M)
    text = re.sub(_GATHER, _gather, text, flags=re.M)
    if declarations:
        at = text.index("\n", text.index("module")) + 1
        text = text[:at] + "\n".join(sorted(declarations)) + "\n" + text[at:]
    return text


def _matmul(match: re.Match[str]) -> str:
    """A matmul with its columns innermost: the same sums in the same order, fit for vector code."""
    a, b, a_type, b_type, c, c_type, result = match.groups()
    element_in, element_out = (x.rpartition("x")[2] for x in (a_type, c_type))
    maps = (
        "affine_map<(m, k, n) -> (m, k)>, affine_map<(m, k, n) -> (k, n)>,"
        " affine_map<(m, k, n) -> (m, n)>"
    )
    wide = [
        f"%wide{x} = arith.extf %{x} : {element_in} to {element_out}"
        for x in ("x", "y")
        if element_in != element_out
    ]
    x, y = ("%widex", "%widey") if wide else ("%x", "%y")
    return (
        f"linalg.generic {{indexing_maps = [{maps}],"
        ' iterator_types = ["parallel", "reduction", "parallel"]}'
        f" ins({a}, {b} : tensor<{a_type}>, tensor<{b_type}>) outs({c} : tensor<{c_type}>) {{\n"
        f"    ^bb0(%x: {element_in}, %y: {element_in}, %z: {element_out}):\n"
        + "".join(f"      {line}\n" for line in wide)
        + f"      %product = arith.mulf {x}, {y} : {element_out}\n"
        f"      %sum = arith.addf %z, %product : {element_out}\n"
        f"      linalg.yield %sum : {element_out}\n    }} -> tensor<{result}>"
    )


def portable(text: str) -> str:
    """The lowered form without what upstream MLIR does not know; none of it changes a value."""
    text = re.sub(r"^ *annotation\.mark .*\n", "", text, flags=re.M)
    text = re.sub(
        r"^ *hivm\.hir\.(sync_block|set_flag|wait_flag|pipe_barrier)\S*.*\n", "", text, flags=re.M
    )
    text = re.sub(r",? ?\bhivm\.(unlikely_condition|parallel_loop)\b(?: = [^,}\n]+)?", "", text)
    text = re.sub(r",? ?\bhivm\.\w+ = (?:\"[^\"]*\"|\[[^\]]*\]|[^,}\n]+)", "", text)
    text = re.sub(r"\{ *, *", "{", text)
    # floating operands only: an int8 product widens differently
    text = re.sub(
        r"linalg\.matmul (?:\{[^}]*\} )?ins\((%\S+), (%\S+) : tensor<((?:\d+x)+b?f\d+)>,"
        r" tensor<((?:\d+x)+b?f\d+)>\) outs\((%\S+) : tensor<((?:\d+x)+f32)>\)"
        r" -> tensor<([^>]*)>",
        _matmul,
        text,
    )
    return _stand_ins(text)


class CpuKernel:
    """A shared object made of the lowered form."""

    effort = "-O3"  # of LLVM; the values are the same with less

    def __init__(self, text: str) -> None:
        found = re.search(r"func\.func @(\w+)\((.*?)\) attributes", text, re.S)
        if found is None:
            raise ValueError("no kernel function in the lowered form")
        self.name = found[1]
        # the first two are the sync lock and the workspace, the last six the grid and the position
        self.types = re.findall(r"%arg\d+: (memref<[^>]*>|\w+)", found[2])[2:-6]
        clean = portable(text)
        library = HOME / "cache" / f"{self.name}_{digest(clean, pipeline())}.so"
        if not library.exists():
            library.parent.mkdir(parents=True, exist_ok=True)
            self._build(clean, library)
        self._library = ctypes.CDLL(str(library))
        self._function = getattr(self._library, self.name)
        self._function.restype = None

    @staticmethod
    def _build(text: str, library: Path) -> None:
        lowered = llvm("mlir-opt", "-", f"--pass-pipeline=builtin.module({_PASSES})", text=text)
        code = llvm("mlir-translate", "--mlir-to-llvmir", "-", text=lowered)
        effort = CpuKernel.effort
        code = llvm("opt", effort, "-mcpu=native", "-S", "-", text=code)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            target = ["-relocation-model=pic", "-filetype=obj", "-o", f"{scratch}/kernel.o"]
            llvm("llc", effort, "-mcpu=native", *target, "-", text=code)
            inputs = [str(_runtime()), f"{scratch}/kernel.o", "-lm"]
            _compile("-shared", *inputs, to=library)

    def __call__(self, grid: Sequence[int], arguments: Sequence[Any]) -> None:
        if len(arguments) != len(self.types):
            raise TypeError(f"{self.name} takes {self.types}, {len(arguments)} arguments given")
        flat: list[Any] = [*_memref(None), *_memref(None)]
        for kind, value in zip(self.types, arguments, strict=True):
            if kind.startswith("memref"):
                flat += _memref(value)
            else:
                flat.append(_C_TYPES[kind](value))
        sizes = (*grid, 1, 1)[:3]
        flat += [ctypes.c_int32(size) for size in sizes]
        for z, y, x in itertools.product(*(range(size) for size in reversed(sizes))):
            self._library.arena_reset()
            self._function(*flat, *(ctypes.c_int32(at) for at in (x, y, z)))


def _runtime() -> Path:
    made = HOME / "cache" / f"runtime_{digest(_RUNTIME.read_bytes())}.o"
    if not made.exists():
        _compile("-c", "-O2", "-fPIC", "-w", str(_RUNTIME), to=made)
    return made


def _compile(*arguments: str, to: Path) -> None:
    """Two processes may make the same file."""
    mine = f"{to}.{os.getpid()}"
    subprocess.run(["cc", *arguments, "-o", mine], check=True)
    os.replace(mine, to)


def _memref(tensor: torch.Tensor | None) -> list[Any]:
    """A 1-D memref descriptor, unpacked: allocated, aligned, offset, size, stride."""
    pointer = 0 if tensor is None else tensor.data_ptr()
    size = 0 if tensor is None else tensor.untyped_storage().nbytes() // tensor.element_size()
    return [ctypes.c_void_p(pointer)] * 2 + [ctypes.c_int64(x) for x in (0, size, 1)]
