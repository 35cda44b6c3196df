# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Every extra of setup.cfg, and every set of them that a page or the Makefile installs, is found on
PyPI alone, for x86-64 and for aarch64, as wheels:  python -m tests.tools.extras
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).parents[2]
MACHINES = ("x86_64", "aarch64")
PYTHON = "3.11"  # the newest that triton-ascend has wheels for
GLIBC = {"vllm": "2_34"}  # its tilelang has no wheels for an older one
SETUP = ConfigParser()
SETUP.read(ROOT / "setup.cfg")
TOLD = ("torch", "torch-npu", "triton", "triton-ascend", "transformers", "numpy")


def sets() -> list[str]:
    """`npu`, `npu,test,bench`, and so on."""
    pages = (ROOT / "Makefile", *ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))
    text = "".join(page.read_text() for page in pages)
    named = re.findall(r'"\.\[([\w,]+)\]"', text)
    return list(dict.fromkeys((*SETUP["options.extras_require"], *named)))


def found(extras: str, machine: str) -> dict[str, str] | str:
    """The version of each distribution, or why there are none."""
    required = [SETUP["options"]["install_requires"]]
    required += [SETUP["options.extras_require"][extra] for extra in extras.split(",")]
    command = [sys.executable, "-m", "uv", "pip", "compile", "-", "--quiet"]
    command += ["--no-config", "--default-index", "https://pypi.org/simple"]
    command += ["--only-binary", ":all:", "--no-header", "--no-annotate"]
    glibc = max(GLIBC.get(extra, "2_28") for extra in extras.split(","))
    command += ["--python-platform", f"{machine}-manylinux_{glibc}", "--python-version", PYTHON]
    # another index, or constraints, of this machine
    plain = {name: value for name, value in os.environ.items() if not name.startswith("UV_")}
    text = "\n".join(required)
    done = subprocess.run(command, input=text, env=plain, capture_output=True, text=True)
    if done.returncode:
        return done.stderr.strip()
    return dict(line.split("==") for line in done.stdout.split())


def wrong(pins: dict[str, str] | str) -> str | None:
    """Why these do not make an environment, or None."""
    if isinstance(pins, str):
        return pins
    if {"triton", "triton-ascend"} <= pins.keys():
        return "has both triton and triton-ascend, which own the same import folder"
    return None


def main() -> int:
    asked = [(extras, machine) for extras in sets() for machine in MACHINES]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda each: found(*each), asked))
    failed = 0
    for (extras, machine), pins in zip(asked, answers, strict=True):
        reason = wrong(pins)
        failed += reason is not None
        told = reason or ", ".join(f"{name} {pins[name]}" for name in TOLD if name in pins)
        print(f"{machine:<9}{extras:<22}{told}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
