# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The versions on an Ascend machine that belong together, and what this machine has of them."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path


@dataclass(frozen=True)
class Together:
    """By the tables of their makers; `compiler` is the day of the public build of bishengir-compile
    nearest to that CANN.  CANN brings the compiler: triton-ascend takes the one on the PATH."""

    triton_ascend: str
    cann: str
    torch: str
    torch_npu: str
    compiler: str


NAMES = {
    "triton_ascend": "triton-ascend",
    "cann": "CANN",
    "torch": "torch",
    "torch_npu": "torch_npu",
    "compiler": "bishengir-compile of",
}
# of CUDA: what the kernels import is not all in 3.4; 3.9 is the newest that all were compiled with
OLDEST_TRITON, NEWEST_TRITON = (3, 5), (3, 9)
# the first row is what `pip install ".[npu]"` takes on aarch64: PyPI has no other triton-ascend
TABLE = (
    Together("3.2.0", "8.5.0", "2.9.0", "2.9.0", "2026-01-16"),
    Together("3.2.1", "9.0.0", "2.9.0", "2.9.0.post2", "2026-04-30"),
    Together("3.2.2", "9.1.0", "2.9.0", "2.9.0.post6", "2026-07-29"),
)
# torch's builds for the CPU
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"


def installing(torch: str, *others: str, machine: str | None) -> str:
    """The command for this torch and what goes with it.  On x86-64 torch_npu takes torch's build
    for the CPU; PyPI has the one for CUDA alone, whose triton overwrites triton-ascend."""
    on_x86 = machine == "x86_64"
    named = " ".join((f"torch=={torch}{'+cpu' if on_x86 else ''}", *others))
    return f"pip install {named}" + (f" --extra-index-url {CPU_BUILDS}" if on_x86 else "")


# what a package raises that is broken, or built for another version of what it needs
BROKEN = (ImportError, OSError, RuntimeError, AttributeError, subprocess.SubprocessError)


def release(version: str, numbers: int = 2) -> tuple[int, ...]:
    """(2, 9) of `2.9.0.post2+cpu`, `2.9.0rc1` and `2.9.0a0+git1a2b`."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split(".")[:numbers])) if found else ()


@cache
def installed(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Build:
    """One bishengir-compile: where it lies, what it says of itself."""

    path: Path
    said: str

    @property
    def day(self) -> str | None:
        found = re.search(r"\b20\d\d-\d\d-\d\d\b", self.said)
        return found[0] if found else None


def compiler_path() -> str | None:
    """The Ascend compiler as triton-ascend finds it: set_env.sh of a CANN puts it on the PATH."""
    on_path = shutil.which("bishengir-compile")
    folder = os.environ.get("TRITON_NPU_COMPILER_PATH")
    return on_path or (shutil.which("npuc", path=folder) if folder else None)


@cache
def _build(path: str) -> Build:
    asked = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    lines = (asked.stdout + asked.stderr).strip().splitlines()
    # 1.1.0 names the folder it was built in
    said = re.sub(r"/\S+ ", "", lines[0]).strip() if lines else "bishengir-compile"
    return Build(Path(path), said)


def compiler() -> Build | None:
    """The Ascend compiler that triton-ascend calls here, or None."""
    path = compiler_path()
    return None if path is None else _build(path)


def cann() -> str | None:
    """The version of the CANN that torch_npu found, or None."""
    if installed("torch_npu") is None:
        return None
    version: str = import_module("torch_npu.npu.utils").get_cann_version()
    return version or None


def here() -> dict[str, str | None]:
    """What is installed of a row of the table; None: absent."""
    build = compiler()
    torch = installed("torch")
    return {
        "triton_ascend": installed("triton-ascend"),
        "cann": cann(),
        "torch": torch.partition("+")[0] if torch else None,
        "torch_npu": installed("torch_npu"),
        "compiler": None if build is None else build.day,
    }


def apart(have: dict[str, str | None]) -> str | None:
    """How what is installed differs from the row of its triton-ascend, or None."""
    row = next((row for row in TABLE if row.triton_ascend == have["triton_ascend"]), None)
    if row is None:
        known = ", ".join(row.triton_ascend for row in TABLE)
        return f"triton-ascend {have['triton_ascend']} is in no table here, known are {known}"
    differing = [
        f"{NAMES[name]} {have[name] or '-'} (expected {getattr(row, name)})"
        for name in have
        if have[name] != getattr(row, name)
    ]
    return (
        f"beside triton-ascend {row.triton_ascend}: {', '.join(differing)}" if differing else None
    )
