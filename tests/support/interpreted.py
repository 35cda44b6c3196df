# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Tests run once more in a process of their own, under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def passes(chosen: str, *files: str | Path, **variables: str) -> None:
    """The tests of these files that `chosen` (pytest's -k) names pass with the CUDA kernels on CPU
    tensors."""
    pytest.importorskip("triton")
    command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--device", "cpu"]
    ran = subprocess.run(
        [sys.executable, *command, *files, "-k", chosen],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "CUSTOM_BACKEND": "cuda"} | variables,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0 and "passed" in ran.stdout, ran.stdout[-4000:] + ran.stderr[-2000:]
