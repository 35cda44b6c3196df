# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Every script in examples/ runs on every device, with small settings."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SMALL = {
    "deepseek_v32_decode.py": ["--batch", "5", "--context", "64", "--new-tokens", "6"],
    "qwen3_next_generate.py": ["--batch", "3", "--context", "40", "--new-tokens", "6"],
}
SCRIPTS = sorted(p.name for p in (ROOT / "examples").glob("*.py") if not p.name.startswith("_"))


def run(script, *arguments):
    return subprocess.run(
        [sys.executable, ROOT / "examples" / script, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},  # a bare clone finds the package too
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_example(script, device):
    if script in SMALL and importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers")
    done = run(script, "--device", device.type, *SMALL.get(script, []))
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"device: {device.type}" in done.stdout


def test_options_of_the_demo():
    pytest.importorskip("transformers")
    options = ["--device", "cpu", "--dtype", "float16", "--weight-format", "nd"]
    done = run("deepseek_v32_decode.py", *options, *SMALL["deepseek_v32_decode.py"])
    assert done.returncode == 0, done.stderr[-4000:]
    assert "float16: 5 requests" in done.stdout and "two tokens a step: " in done.stdout
