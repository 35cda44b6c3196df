# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Packages that clash on this machine, and the command that mends each:

python -m custom.info --doctor
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from .dispatch import versions
from .integrations.engines import Versions, holds, in_words
from .integrations.sglang.versions import SGLANG
from .integrations.sglang.versions import SWITCH as SGLANG_SWITCH
from .integrations.vllm.modes import ASCEND, VLLM
from .integrations.vllm.modes import SWITCH as VLLM_SWITCH

Have = Mapping[str, str | None]
# what the plug-ins were tried with, and what turns each on
ENGINES: dict[str, tuple[str, Versions]] = {
    "vllm": (VLLM_SWITCH, VLLM),
    "vllm-ascend": (VLLM_SWITCH, ASCEND),
    "sglang": (SGLANG_SWITCH, SGLANG),
}


@dataclass(frozen=True)
class Finding:
    sentence: str
    command: str
    breaks: bool = True
    """The package, or a part of it; else tests alone, and what is printed."""

    def __str__(self) -> str:
        return f"{self.sentence}\n    {self.command}"


def here() -> dict[str, str | None]:
    """The versions that can clash, the machine, the path of CANN's compiler, why torch_npu does not
    import, what torch was built for and asks of triton, and what Triton builds with; None: absent.
    """
    names = ("torch", "torch_npu", "triton", "triton-ascend", "numpy", "transformers", *ENGINES)
    cann = broken = None
    try:
        cann = versions.cann()
    except versions.BROKEN as error:
        broken = f"{type(error).__name__}: {' '.join(str(error).split())}"
    found = {name: versions.installed(name) for name in names}
    found |= {"CANN": cann, "torch_npu does not import": broken}
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return found | {
        "machine": platform.machine(),
        "compiler": versions.compiler_path(),
        "torch's triton": _pinned("torch", "triton"),
        "torch's CUDA": torch.version.cuda,
        "NVIDIA driver": _first_line(Path("/proc/driver/nvidia/version")),
        "C compiler": next(filter(None, map(shutil.which, _C_COMPILERS)), None),
        "Python.h": str(header) if header.exists() else None,
    }


_C_COMPILERS = (os.environ.get("CC") or "cc", "gcc", "clang")


def _pinned(distribution: str, other: str) -> str | None:
    """The version of `other` that an installed distribution requires, or None."""
    if versions.installed(distribution) is None:
        return None
    required = importlib.metadata.requires(distribution) or ()
    found = (re.match(rf"{re.escape(other)}\s*==\s*([\d.]+)", each) for each in required)
    return next((each[1] for each in found if each), None)


def _first_line(file: Path) -> str | None:
    return file.read_text().partition("\n")[0] if file.exists() else None


def _missing(have: Have, row: versions.Together) -> Finding:
    """Of what an Ascend machine needs beside its CANN."""
    absent = [name for name in ("torch_npu", "triton-ascend") if not have[name]]
    sentence = f"CANN's compiler is here ({have['compiler']}), and no {' and no '.join(absent)}"
    ascend = f"triton-ascend=={row.triton_ascend}"
    command = f"pip install --no-deps {ascend}"
    if "torch_npu" in absent:
        others = (f"torch_npu=={row.torch_npu}", ascend)
        command = versions.installing(row.torch, *others, machine=have["machine"])
        if have["machine"] == "x86_64":
            sentence += f": PyPI has no torch for it on x86-64, {versions.CPU_BUILDS} has"
    if have["triton"] and not have["triton-ascend"]:
        command = f"pip uninstall -y triton && {command}"
    return Finding(f"{sentence}.", command)


def clashes(have: Have) -> Iterator[Finding]:
    torch, npu, ascend = have["torch"], have["torch_npu"], have["triton-ascend"]
    triton, numpy, hf, cann = (have[x] for x in ("triton", "numpy", "transformers", "CANN"))
    machine, compiler = have["machine"], have["compiler"]
    row = next((each for each in versions.TABLE if each.triton_ascend == ascend), None)
    if triton and ascend:
        keep = f"triton-ascend=={ascend}" if npu or compiler else f"triton=={triton}"
        yield Finding(
            f"triton {triton} and triton-ascend {ascend} share one import folder, and the one that "
            "was installed last has overwritten the other.",
            f"pip uninstall -y triton triton-ascend && pip install --no-deps {keep}",
        )
    if torch and versions.release(torch) < (2, 7):
        yield Finding(f"torch {torch} is older than 2.7.", 'pip install -U "torch>=2.7"')
    if broken := have.get("torch_npu does not import"):
        yield Finding(
            f"torch_npu {npu} does not import: {broken.removesuffix('.')}.",
            "source /usr/local/Ascend/ascend-toolkit/set_env.sh",
        )
    if compiler and not (npu and ascend):
        yield _missing(have, row or versions.TABLE[0])
    if torch and npu and versions.release(torch, 3) != versions.release(npu, 3):
        wanted = ".".join(npu.split(".")[:3])
        yield Finding(
            f"torch_npu {npu} is built against torch {wanted}, and torch {torch} is installed.",
            versions.installing(wanted, machine=machine),
        )
    if ascend and row is None:
        known = ", ".join(each.triton_ascend for each in versions.TABLE)
        yield Finding(
            f"triton-ascend {ascend} was never tried; {known} were.",
            f"pip install --no-deps triton-ascend=={versions.TABLE[0].triton_ascend}",
        )
    if ascend and row and npu and npu != row.torch_npu:
        yield Finding(
            f"triton-ascend {ascend} goes with torch_npu {row.torch_npu}, and {npu} is installed.",
            versions.installing(row.torch, f"torch_npu=={row.torch_npu}", machine=machine),
        )
    if ascend and row and cann and cann != row.cann:
        other = next((each for each in versions.TABLE if each.cann == cann), None)
        yield Finding(
            f"triton-ascend {ascend} goes with CANN {row.cann}, and CANN {cann} is here.",
            f"pip install --no-deps triton-ascend=={other.triton_ascend}"
            if other
            else f"source the set_env.sh of a CANN {row.cann}",
        )
    if triton and not ascend and versions.release(triton) < versions.OLDEST_TRITON:
        yield Finding(
            f"triton {triton} is older than 3.5, which torch 2.9 brings.",
            'pip install -U "torch>=2.9"',
        )
    if triton and not ascend and versions.release(triton) > versions.NEWEST_TRITON:
        yield Finding(
            f"triton {triton} is newer than 3.9, the newest that the CUDA kernels were compiled "
            "with.",
            'pip install "triton>=3.5,<3.10"',
        )
    if triton and numpy and versions.release(numpy) >= (2, 4):
        yield Finding(
            f"numpy {numpy}: Triton's interpreter, which tests run kernels with, multiplies wrongly"
            " from numpy 2.4 on.",
            'pip install "numpy<2.4"',
            breaks=False,
        )
    if hf and not (5, 17) <= versions.release(hf) < (6,):
        yield Finding(
            f"transformers {hf}: custom.integrations is for 5.17 and later ones below 6.",
            'pip install "transformers>=5.17,<6"',
        )
    yield from _of_engines(have)
    yield from _of_builds(have)


def _of_engines(have: Have) -> Iterator[Finding]:
    for name, (switch, tried) in ENGINES.items():
        version = have.get(name)
        if version and not holds(tried, version):
            yield Finding(
                f"{name} {version}: {switch}=1 was tried with {in_words(tried)}.",
                f'pip install "{name}{in_words(tried)}"',
            )


def _of_builds(have: Have) -> Iterator[Finding]:
    """What torch was built for, and what Triton builds with."""
    torch, triton, wanted = have["torch"], have["triton"], have.get("torch's triton")
    if triton and wanted and not have["triton-ascend"] and triton != wanted:
        yield Finding(
            f"torch {torch} goes with triton {wanted}, and {triton} is installed: torch.compile "
            "may not run with it.",
            f"pip install triton=={wanted}",
        )
    if torch and have.get("NVIDIA driver") and not have.get("torch's CUDA"):
        yield Finding(
            f"torch {torch} is a build for the CPU, and an NVIDIA driver is here: no kernel will "
            "run on its GPU.",
            'pip uninstall -y torch && pip install ".[cuda]"',
        )
    lacking = [name for name in ("C compiler", "Python.h") if name in have and not have[name]]
    if (triton or have["triton-ascend"]) and lacking:
        yield Finding(
            f"no {' and no '.join(lacking)} here, and Triton builds the launcher of a kernel with "
            "it.",
            "apt-get install gcc python3-dev",
        )


def main() -> int:
    found = list(clashes(here()))
    broken, others = ([x for x in found if x.breaks is each] for each in (True, False))
    for each in broken:
        print(each)
    if not broken:
        print("nothing clashes")
    if others:
        print("for tests alone:")
    for each in others:
        print(each)
    return int(bool(broken))
