# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Where the tools lie (run.sh puts them there), how they are called, which versions they are."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".ascend"
# releases of ascendnpu-ir, oldest first: on a machine the compiler is the one of its CANN
BUILDS = ("1.0.0", "1.1.0", "1.2.0")
NEWEST = BUILDS[-1]
LLVM = HOME / "mlir/usr/lib/llvm-19"
ARCH = "Ascend910_9392"  # Atlas A3
_LIBRARIES = f"{HOME / 'mlir/usr/lib/x86_64-linux-gnu'}:{LLVM / 'lib'}"


class ToolError(RuntimeError):
    """A tool refused its input; the message is its own."""


def llvm(tool: str, *arguments: str, text: str | None = None) -> str:
    """Run one of LLVM's tools; `text` is its standard input."""
    command = [str(LLVM / "bin" / tool), *arguments]
    environment = os.environ | {"LD_LIBRARY_PATH": _LIBRARIES}
    done = subprocess.run(command, input=text, text=True, capture_output=True, env=environment)
    if done.returncode:
        raise ToolError(f"{tool} ended with {done.returncode}\n{done.stderr[:3000]}")
    return done.stdout


def digest(*parts: str | bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()[:24]


def bishengir(build: str) -> Path:
    return HOME / f"bishengir-{build}/ascendnpuir/bin/bishengir-compile"


@cache
def stamp(build: str) -> str:
    """The digest of a compiler."""
    return digest(bishengir(build).read_bytes())


@cache
def built(build: str) -> str:
    """The day a compiler was made, by its own words."""
    command = [str(bishengir(build)), "--version"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    day = re.search(r"\d{4}-\d\d-\d\d", said)
    if day is None:
        raise ToolError(f"bishengir-compile of ascendnpu-ir {build} gives no date: {said[:200]}")
    return day[0]


@cache
def versions() -> dict[str, str]:
    """What a run on the CPU was made with: another version is another record."""
    return {
        "triton-ascend": version("triton-ascend"),
        "mlir": digest((LLVM / "bin/mlir-opt").resolve().read_bytes()),
        "torch": version("torch").partition("+")[0],
    }
