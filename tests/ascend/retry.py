# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What a launcher does where the compiler refuses its tiles: triton-ascend's own JIT and every
build of the real compiler, up to the launch, which needs a device."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from pathlib import Path

import torch
import triton
from custom.dispatch.env import config
from custom.dispatch.errors import NotSupported
from custom.npu_ops.common import refusals, tune
from triton.backends.ascend.driver import NPUUtils

from . import driver, isolated
from .toolchain import ARCH, BUILDS, bishengir

KERNEL = "rows.finish"
TOO_WIDE = (tune.Config({"WIDTH": 65536}), tune.Config({"WIDTH": 32768}))
# stands for the closed code generator
_CODE_GENERATOR = """#!/bin/sh
[ "$1" = --version ] && { echo "hivmc 1.2.0"; exit 0; }
while [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2" && : > "$2.o"; shift; done
"""


def _install(compiler: Path, scratch: Path) -> None:
    """Compile as on the machine, with this compiler; launch nothing."""
    generator = scratch / "hivmc"
    generator.write_text(_CODE_GENERATOR)
    generator.chmod(0o755)
    os.environ["PATH"] = f"{scratch}:{compiler.parent}:{os.environ['PATH']}"
    os.environ["TRITON_CACHE_DIR"] = str(scratch / "triton")
    os.environ["ASCEND_HOME_PATH"] = str(scratch)
    config.cache_dir = str(scratch / "cache")
    triton.runtime.driver.set_active(driver.Driver())
    NPUUtils.__init__ = lambda self: None  # type: ignore[method-assign]
    NPUUtils.get_arch = lambda self: ARCH  # type: ignore[method-assign]
    run = triton.JITFunction.run
    triton.JITFunction.run = lambda self, *a, warmup, **k: run(self, *a, warmup=True, **k)


def _norm() -> str:
    """What was said while a launcher of one kernel ran."""
    from custom.npu_ops.prolog import rows  # not before mistakes are planted, in other processes

    def launcher(x: torch.Tensor) -> None:
        turned, slots = x[:, :16], torch.zeros(len(x), dtype=torch.int32)
        cache = x.new_zeros(1, 16, 1, 32)
        latent = rows.Latent(x[0], cache[0, 0, 0], cache, cache, x, 1e-5, 1e-5, True)
        sums = torch.zeros(1, len(x), x.shape[1] + 48)
        rows.norms(sums, turned, turned, slots, latent, None)

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        tune.retrying("npu_mla_prolog_pto", launcher)(x=torch.zeros(3, 1024, dtype=torch.bfloat16))
    return said.getvalue()


def examine(build: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        _install(bishengir(build), Path(folder))
        shipped = tune.TABLE[KERNEL]
        tune.TABLE[KERNEL] = TOO_WIDE + shipped
        lines = _norm().splitlines()
        assert len(lines) == 2, lines
        assert all(refusals.compiler() in line and "UB overflow" in line for line in lines), lines
        assert _norm() == "", "said twice"
        refusals.forget()
        assert len(refusals.known()) == 2, "another process does not know"
        assert tune.at_least(KERNEL, "WIDTH", 1024).tiles == shipped[0].tiles
        tune.TABLE[KERNEL] = TOO_WIDE
        try:
            _norm()
        except NotSupported as error:
            sentence = str(error)
        assert refusals.compiler() in sentence and "x[3,1024] bf16" in sentence, sentence
        return f"{lines[0]}\n  {sentence}"


def run(jobs: int) -> tuple[list[str], list[str]]:
    """What was said by build; failures."""
    said: list[str] = []
    failures: list[str] = []
    for (build,), answer in isolated.each(examine, [(build,) for build in BUILDS], jobs):
        failed = isinstance(answer, isolated.Crash)
        (failures if failed else said).append(f"refused tiles with {build}: {answer}")
    return said, failures
