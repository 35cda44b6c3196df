# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What the first call of a process costs:  python -m custom.bench OP --cold

Each call is made in a process of its own, with a device that is awake: first with an empty cache of
Triton, then with the one that it left.  What the call would import (Triton, the op's kernels) is
imported and timed before it.  Kernels are compiled side by side: the longest one bounds the call.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..dispatch import backends
from ..dispatch.registry import BY_NAME
from .case import Case
from .presets import presets
from .timing import waiting


def _first_call(op: str, label: str, kind: str) -> tuple[float, float, float, str]:
    """Seconds of imports, of the call, of the kernel that took longest to compile, and its name, in
    this process."""
    device = torch.device(kind)
    case = next(case for case in presets(op, kind) if case.label == label)
    arguments = case.make(device, 0)
    wait = waiting(device)
    wait()
    begin = time.perf_counter()
    backends.launcher(backends.CUDA, BY_NAME[op])
    compiled = [(0.0, "-")]

    def note(*, src: Any, times: Any, **_: Any) -> None:
        compiled.append((times.total / 1e6, src.name))

    importlib.import_module("triton").knobs.compilation.listener = note
    start = time.perf_counter()
    case.call(arguments)
    wait()
    return start - begin, time.perf_counter() - start, *max(compiled)


def table(cases: Sequence[Case], device: torch.device) -> str:
    """A line a case: seconds with an empty cache and with a full one, of imports, the kernels in
    it, and the one that took longest."""
    lines = ["   cold     warm  imports  kernels  longest  case"]
    for case in cases:
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, "-m", __name__, case.op, case.label, device.type]
            environment = os.environ | {"TRITON_CACHE_DIR": cache}
            first, again = (
                subprocess.check_output(command, env=environment, text=True).split()[-4:]
                for _ in range(2)
            )
            kernels = sum(1 for _ in Path(cache).rglob("*.cubin"))
        _, cold, longest = map(float, first[:3])
        imports, warm = map(float, again[:2])
        lines.append(
            f"{cold:5.2f} s  {warm:5.2f} s  {imports:5.2f} s  {kernels:7}  {longest:5.2f} s  "
            f"{case.label}: {first[3]}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(*_first_call(*sys.argv[1:4]))
