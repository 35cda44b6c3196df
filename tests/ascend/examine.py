# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Lowers and runs the kernels of one case, in a process of its own, and judges the result."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from custom.dispatch import log, register
from custom.dispatch.common import memory as launcher_memory
from custom.dispatch.registry import BY_NAME

from . import aten, driver, memory, sources
from . import case as judgement
from .case import Case
from .driver import Launch, recorder
from .lowered import pipeline
from .toolchain import digest, versions


@dataclass
class Outcome:
    """What the process of one case sends back."""

    key: str
    launches: list[Launch]
    share: float = 0.0
    findings: list[str] = field(default_factory=list)
    seconds: float = 0.0
    kept: bool = False
    aten: set[str] = field(default_factory=set)  # what its launcher asks of PyTorch


def prepare() -> None:
    """State of every process of a case."""
    torch.set_num_threads(1)
    driver.install()
    launcher_memory.empty = memory.empty


def call(case: Case, arguments: dict[str, Any]) -> Any:
    before = log.calls[case.op, "npu"]
    outputs = getattr(torch.ops.custom, case.op)(**arguments)
    if log.calls[case.op, "npu"] != before + 1:
        raise RuntimeError("the NPU backend did not run")
    return outputs


def launches(case: Case, arguments: dict[str, Any]) -> list[Launch]:
    """What the call would launch with each number of cores; nothing runs."""
    recorder.execute = False
    for recorder.cube_cores in case.cores:
        call(case, judgement.copied(arguments))
    recorder.execute = True
    return list(recorder.launches)


def _key(case: Case, file: str, launched: list[Launch]) -> str:
    spec = BY_NAME[case.op]
    lowered = [(x.lowered_key, x.grid, x.scalars) for x in launched]
    read = sources.of(
        *sources.path(spec.module),
        f"custom.npu_ops.{spec.module}",
        f"custom.dispatch.reference.{spec.module}",
        file,
        __name__,
        "tests.ascend.isolated",
    )
    tools = json.dumps(versions(), sort_keys=True)
    return digest(case.title, repr(case.cores), repr(lowered), read, tools, pipeline())


def lower(case: Case) -> list[Launch]:
    """What the case launches; nothing runs."""
    prepare()
    return launches(case, case.make(judgement.Inputs(case.dtype, case.seed)))


def lower_large(op: str) -> dict[str, list[Launch]]:
    """What the large calls of an op launch, by title; nothing runs, and no tensor is filled."""
    from . import models

    prepare()
    launcher_memory.empty = memory.vast
    recorder.execute = False
    launched = {}
    for large in models.LARGE:
        if large.op == op:
            recorder.launches = []
            call(large, large.make(models.Sizes(large.dtype)))
            launched[large.title] = recorder.launches
    return launched


def examine(case: Case, file: str, kept: str | None) -> Outcome:
    """Lower the kernels of the case; run them unless `kept` is the key of this very run."""
    prepare()
    inputs = judgement.Inputs(case.dtype, case.seed)
    arguments = case.make(inputs)
    launched = launches(case, arguments)
    outcome = Outcome(_key(case, file, launched), launched, aten={*aten.seen})
    if outcome.key == kept:
        outcome.kept = True
        return outcome
    start = time.time()
    outcome.share, outcome.findings = measure(case, inputs, arguments)
    outcome.seconds = time.time() - start
    return outcome


def measure(
    case: Case, inputs: judgement.Inputs, arguments: dict[str, Any]
) -> tuple[float, list[str]]:
    """Run the case: the largest share of the bound, and what was found, the worst first."""
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and not memory.holds(value):
            raise ValueError(f"{case.title}: `{name}` has no forbidden pages around it")
    worst = 0.0
    findings: list[str] = []
    plain = judgement.copied(arguments)
    exact = judgement.reference(case.op, case.widen(judgement.copied(plain)))
    rounded = judgement.reference(case.op, judgement.copied(plain))
    first: dict[str, Any] = {}
    register.forget()  # the first call is checked and bound, the next one is a repetition of it
    for recorder.cube_cores in case.cores:
        for name, value in arguments.items():  # a mutated argument starts anew
            if isinstance(value, torch.Tensor):
                value.copy_(plain[name])
        with memory.Forbidden(inputs.forbidden):
            outputs = call(case, arguments)
        got = judgement.results(case.op, outputs, arguments)
        if not first:
            for share, sentence in case.judge(case, got, exact, rounded):
                findings.insert(0 if share > worst else len(findings), sentence)
                worst = max(worst, share)
            first = judgement.copied(got)
        elif not all(_same(first[name], got[name]) for name in first):
            worst = float("inf")
            findings.insert(0, f"another result with {recorder.cube_cores} cube cores")
    return worst, findings


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(12345.0), b.nan_to_num(12345.0))
