# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Where the tools lie (run.sh puts them there), how they are called, which versions they are."""

from __future__ import annotations

import hashlib
import os
import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".ascend"
BISHENGIR = HOME / "bishengir/ascendnpuir/bin/bishengir-compile"
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


@cache
def versions() -> dict[str, str]:
    """What a record was made with: another version is another record."""
    return {
        "triton-ascend": version("triton-ascend"),
        "bishengir-compile": digest(BISHENGIR.read_bytes()),
        "mlir": digest((LLVM / "bin/mlir-opt").resolve().read_bytes()),
        "torch": version("torch").partition("+")[0],
    }
