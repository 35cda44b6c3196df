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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import lint
from .toolchain import ARCH, bishengir

# takes the place of the closed code generator: keeps its input, which is the final HIVM, and goes
# on with the real one where there is one
_CODE_GENERATOR = """#!/bin/sh
for argument in "$@"; do
  case "$argument" in *.mlir) cp "$argument" "$FINAL_HIVM" ;; esac
done
[ -n "$HIVMC" ] && exec "$HIVMC" "$@"
[ "$1" = --version ] && echo "hivmc 1.2.0"
exit 0
"""

_FLAGS = {
    "multibuffer": "enable-auto-multi-buffer",
    "enable_auto_bind_sub_block": "enable-auto-bind-sub-block",
    "enable_hivm_auto_cv_balance": "enable-hivm-auto-cv-balance",
    "sync_solver": "enable-hivm-graph-sync-solver",
    "unit_flag": "enable-hivm-unit-flag-sync",
    "limit_auto_multi_buffer_of_local_buffer": "limit-auto-multi-buffer-of-local-buffer",
    "set_workspace_multibuffer": "set-workspace-multibuffer",
    "tile_mix_vector_loop": "tile-mix-vector-loop",
    "tile_mix_cube_loop": "tile-mix-cube-loop",
}
_BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "f16": 16, "bf16": 16, "f32": 32}
_PATIENCE = 300  # seconds
MEMORIES = {"UB": "ub", "L1": "cbuf", "L0C": "cc"}


@dataclass
class Compiled:
    """The compiler's answer; `found` are our own findings in a compile that passed."""

    error: str = ""
    hivm: str = field(default="", repr=False)
    kib: dict[str, int] = field(default_factory=dict)
    found: list[lint.Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.error


def compile_for_npu(linalg: str, options: dict[str, Any], build: str) -> Compiled:
    """`options` are launch keywords of triton-ascend, as a configuration gives them."""
    return compile_with(bishengir(build), None, ARCH, linalg, options)


def compile_with(
    compiler: Path, hivmc: str | None, arch: str, linalg: str, options: dict[str, Any]
) -> Compiled:
    """`hivmc` is the closed code generator of the same CANN, if there is one."""
    chosen = {"multibuffer": True, "enable_auto_bind_sub_block": True} | options
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        (work / "hivmc").write_text(_CODE_GENERATOR)
        (work / "hivmc").chmod(0o755)
        source = work / "kernel.ttadapter.mlir"
        # triton-ascend strips this attribute as well
        source.write_text(re.sub(r', mix_mode\s*=\s*"[^"]*"', "", linalg))
        command = [str(compiler), str(source), f"--target={arch}"]
        command += [f"--{_FLAGS[name]}={value}" for name, value in chosen.items()]
        command += ["--enable-hfusion-compile=true", "--enable-hivm-compile=true"]
        command += ["--enable-triton-kernel-compile=true", "-o", str(work / "kernel")]
        final = work / "final.mlir"
        environment = os.environ | {
            "PATH": f"{scratch}:{os.environ['PATH']}",
            "FINAL_HIVM": str(final),
            "HIVMC": hivmc or "",
        }
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_PATIENCE, env=environment
            )
        except subprocess.TimeoutExpired:
            return Compiled(f"no answer in {_PATIENCE} s")
        said = done.stderr + done.stdout
        if done.returncode or not final.exists():
            return Compiled(_first_error(said) or f"ended with {done.returncode}")
        hivm = final.read_text()
    kib = {name: -(-highest(hivm, space) // 8192) for name, space in MEMORIES.items()}
    return Compiled("", hivm, kib, lint.of(hivm, said))


def _first_error(said: str) -> str:
    overflow = re.search(r"\w+ overflow, requires \d+ bits while \d+ bits", said)
    if overflow:
        return overflow[0]
    # without the place, which is in a folder of this run
    plain = re.sub(r'loc\("[^"]*"[^)]*\): ', "", said)
    lines = [x for x in plain.splitlines() if re.search("error|Assert|failed", x)]
    return " | ".join(lines[:2])[:400]


def highest(hivm: str, space: str) -> int:
    """The highest planned bit of a memory, over the functions of the module."""
    best = 0
    for function in lint.functions(hivm):
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
