# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Compiles a lowered kernel for Atlas A3 and reads the final HIVM text.

bishengir-compile goes through HFusion, HIVM, memory planning and synchronisation, and fails where
it fails on the machine.  Only code generation, which is closed, is left out.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .toolchain import ARCH, BISHENGIR

# takes the place of the closed code generator: keeps its input, which is the final HIVM
_CODE_GENERATOR = """#!/bin/sh
[ "$1" = --version ] && { echo "hivmc 1.2.0"; exit 0; }
for argument in "$@"; do
  case "$argument" in *.mlir) cp "$argument" "$FINAL_HIVM" ;; esac
done
"""

_FLAGS = {
    "multibuffer": "enable-auto-multi-buffer",
    "enable_auto_bind_sub_block": "enable-auto-bind-sub-block",
    "enable_hivm_auto_cv_balance": "enable-hivm-auto-cv-balance",
    "sync_solver": "enable-hivm-graph-sync-solver",
    "unit_flag": "enable-hivm-unit-flag-sync",
    "set_workspace_multibuffer": "set-workspace-multibuffer",
    "tile_mix_vector_loop": "tile-mix-vector-loop",
    "tile_mix_cube_loop": "tile-mix-cube-loop",
}
_BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "f16": 16, "bf16": 16, "f32": 32}
MEMORIES = {"UB": "ub", "L1": "cbuf", "L0C": "cc"}


@dataclass
class Compiled:
    """The compiler's answer; `problems` are our own findings in a compile that passed."""

    ok: bool
    error: str = ""
    hivm: str = field(default="", repr=False)
    kib: dict[str, int] = field(default_factory=dict)
    scalar_loops: int = 0
    problems: list[str] = field(default_factory=list)


def compile_for_npu(linalg: str, options: dict[str, Any], timeout: float = 300) -> Compiled:
    """`options` are launch keywords of triton-ascend, as a configuration gives them."""
    chosen = {"multibuffer": True, "enable_auto_bind_sub_block": True} | options
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        (work / "hivmc").write_text(_CODE_GENERATOR)
        (work / "hivmc").chmod(0o755)
        source = work / "kernel.ttadapter.mlir"
        # triton-ascend strips this attribute as well
        source.write_text(re.sub(r', mix_mode\s*=\s*"[^"]*"', "", linalg))
        command = [str(BISHENGIR), str(source), f"--target={ARCH}"]
        command += [f"--{_FLAGS[name]}={value}" for name, value in chosen.items()]
        command += ["--enable-hfusion-compile=true", "--enable-hivm-compile=true"]
        command += ["--enable-triton-kernel-compile=true", "-o", str(work / "kernel")]
        final = work / "final.mlir"
        environment = os.environ | {
            "PATH": f"{scratch}:{os.environ['PATH']}",
            "FINAL_HIVM": str(final),
        }
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout, env=environment
            )
        except subprocess.TimeoutExpired:
            return Compiled(False, f"no answer in {timeout} s")
        said = done.stderr + done.stdout
        if done.returncode or not final.exists():
            return Compiled(False, _first_error(said) or f"ended with {done.returncode}")
        hivm = final.read_text()
    compiled = Compiled(True, hivm=hivm, scalar_loops=scalar_loops(hivm))
    compiled.kib = {name: -(-highest(hivm, space) // 8192) for name, space in MEMORIES.items()}
    compiled.problems = wrong_multiplies(hivm)
    compiled.problems += re.findall(r"\[NOTE\][^\n]*", said)
    if "limit_sub_block_id0" in hivm:
        compiled.problems.append("both vector sub-cores repeat the same vector work")
    return compiled


def _first_error(said: str) -> str:
    overflow = re.search(r"\w+ overflow, requires \d+ bits while \d+ bits", said)
    if overflow:
        return overflow[0]
    lines = [x for x in said.splitlines() if re.search("error|Assert|failed", x)]
    return " | ".join(lines[:2])[:400]


def _functions(hivm: str) -> list[str]:
    return re.split(r"\n  func\.func ", hivm)[1:]


def highest(hivm: str, space: str) -> int:
    """The highest planned bit of a memory, over the functions of the module."""
    best = 0
    for function in _functions(hivm):
        constants = dict(re.findall(r"(%\S+) = arith\.constant (-?\d+) : i64", function))
        casts = re.findall(
            r"hivm\.hir\.pointer_cast\(([^)]*)\)[^:\n]*: memref<((?:\d+x)*)(\w+)"
            r"[^#\n]*#hivm\.address_space<" + space + ">",
            function,
        )
        for offsets, shape, kind in casts:
            size = _BITS[kind]
            for extent in shape.split("x")[:-1]:
                size *= int(extent)
            for offset in offsets.split(","):
                if offset.strip() in constants:
                    best = max(best, int(constants[offset.strip()]) * 8 + size)
    return best


def wrong_multiplies(hivm: str) -> list[str]:
    """Cube multiplies whose second operand in L1 is not N x K: a silent miscompile, which running
    the lowered form does not show."""
    found = []
    for function in _functions(hivm):
        value: dict[str, int] = {}
        shape: dict[str, list[int]] = {}
        # line by line: sibling regions use a name again
        for line in function.splitlines():
            constant = re.search(r"(%\S+) = arith\.constant (-?\d+) : index", line)
            if constant:
                value[constant[1]] = int(constant[2])
            cast = re.search(r"(%\S+) = memref\.cast %\S+ : memref<((?:\d+x)+\d+)x\w+.*#hivm", line)
            if cast:
                shape[cast[1]] = [int(extent) for extent in cast[2].split("x")]
            call = re.search(r"call @(mma_tile\w+)\(([^)]*)\)", line)
            if not call:
                continue
            arguments = [x.strip() for x in call[2].split(",")]
            k, n = (value.get(arguments[i]) for i in (4, 5))
            tile = shape.get(arguments[1])
            if k is None or n is None or tile is None:
                continue
            wanted = [-(-n // 16), -(-k // 16)]
            if tile[:2] not in (wanted, wanted[::-1]):
                found.append(f"{call[1]}: B in L1 is {tile}, the multiply wants N={n} K={k}")
    return found


def scalar_loops(hivm: str) -> int:
    """Loops that load or store one element of UB or GM after the other."""
    found = 0
    for header, body in _innermost_loops(hivm):
        variable = re.search(r"scf\.for (%\w+) = ", header)
        at = re.escape(variable[1]) if variable else "%"
        found += bool(re.search(rf"memref\.(load|store) [^\n]*\[[^\]]*{at}\b", body))
    return found


def _innermost_loops(hivm: str) -> list[tuple[str, str]]:
    """(header, body) of every loop that contains no other."""
    found: list[tuple[str, str]] = []
    stack: list[tuple[str, str, list[str], bool]] = []
    for line in hivm.splitlines():
        code = re.sub(r'"[^"]*"|\{[^{}]*\}', "", line)
        for entry in stack:
            entry[2].append(line)
        opened = re.search(r"\bscf\.(for|while|if)\b", code)
        indent = re.match(r" *", line)[0]  # type: ignore[index]
        if opened and code.rstrip().endswith("{"):
            if opened[1] != "if":
                stack = [(i, h, b, True) for i, h, b, _ in stack]
                stack.append((indent, line, [], False))
        elif line.startswith(f"{stack[-1][0]}}}") if stack else False:
            _, header, body, contains = stack.pop()
            if not contains:
                found.append((header, "\n".join(body)))
    return found


def operations(hivm: str) -> Counter[str]:
    """How often each HIVM operation and template call occurs in the text."""
    names = re.findall(r"\bhivm\.hir\.(\w+)|\bcall @(\w+)", hivm)
    return Counter(a or b for a, b in names)
