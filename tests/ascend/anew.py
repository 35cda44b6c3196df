# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Every launch of a call is refused once, as the compiler refuses, before its kernel runs: outputs
and all that the op writes must have the bits of a call without a refusal.

Each configuration is followed by a twin that compiles to the same kernel: the bits are those of one
order of sums, and nothing is lowered or built beyond the call itself.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import random
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
import triton
from custom.npu_ops.common import refusals, tune

from . import case as judgement
from . import isolated, memory, sources
from .case import Case
from .driver import recorder
from .examine import Outcome, call, prepare
from .toolchain import digest

_SAID = b"error: ub overflow, requires 1675520 bits while 1572864 bits available!"


class _Twin(tune.Config):
    """The next tiles: the same ones."""

    @property
    def title(self) -> str:
        return f"{super().title} again"


def _twin(config: tune.Config) -> tune.Config:
    return _Twin(**{each.name: getattr(config, each.name) for each in fields(config)})


def _with_twins(choose: Callable[..., tune.Config]) -> Callable[..., tune.Config]:
    def chosen(kernel: str, candidates: Sequence[tune.Config], *shape: Any) -> tune.Config:
        both = [each for config in candidates for each in (config, _twin(config))]
        return choose(kernel, both, *shape)

    return chosen


def _refuse() -> None:
    """As triton-ascend does: an error of its own while it handles that of the process."""
    try:
        raise subprocess.CalledProcessError(1, ["bishengir-compile", "kernel"], b"", _SAID)
    except subprocess.CalledProcessError as error:
        raise RuntimeError("ConvertLinalgRToBinary encounters an error") from error


@contextlib.contextmanager
def _refused(number: int) -> Iterator[None]:
    """Launch `number` does not compile; the others do."""
    real, launched = triton.JITFunction.run, 0

    def run(self: Any, *args: Any, **keywords: Any) -> None:
        nonlocal launched
        launched += 1
        if launched == number + 1:
            _refuse()
        real(self, *args, **keywords)

    triton.JITFunction.run = run
    try:
        yield
    finally:
        triton.JITFunction.run = real


def _bits(got: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {
        name: value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        for name, value in got.items()
    }


def examine(case: Case) -> list[str]:
    """The launches of the case whose refusal changes a bit."""
    prepare()
    tune.choose = _with_twins(tune.choose)
    inputs = judgement.Inputs(case.dtype, case.seed)
    arguments = case.make(inputs)
    plain = judgement.copied(arguments)
    recorder.cube_cores = case.cores[-1]

    def bits() -> dict[str, bytes]:
        refusals.known().clear()
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor):
                value.copy_(plain[name])
        with memory.Forbidden(inputs.forbidden), contextlib.redirect_stderr(io.StringIO()):
            outputs = call(case, arguments)
        return _bits(judgement.results(case.op, outputs, arguments))

    right = bits()
    kernels = [launch.kernel for launch in recorder.launches]
    wrong = []
    for number, kernel in enumerate(kernels):
        with _refused(number):
            got = bits()
        differing = [name for name in right if got[name] != right[name]]
        if differing:
            wrong.append(f"launch {number}, {kernel}, refused: another {', '.join(differing)}")
    return wrong


def chosen(cases: Iterable[Case], outcomes: dict[str, Outcome]) -> dict[str, Case]:
    """One case for each set of kernels that an op launches, that of the fewest launches."""
    found: dict[tuple[str, frozenset[str]], Case] = {}

    def launches(case: Case) -> int:
        return len(outcomes[case.title].launches)

    for case in sorted((x for x in cases if x.title in outcomes), key=launches):
        kernels = frozenset(launch.kernel for launch in outcomes[case.title].launches)
        if kernels:
            found.setdefault((case.op, kernels), case)
    return {case.title: case for case in found.values()}


def run(
    cases: Iterable[Case],
    outcomes: dict[str, Outcome],
    kept: dict[str, str],
    sample: int,
    cold: bool,
    jobs: int,
) -> list[str]:
    """Failures; what passed is put into `kept`, and is not run again, but for a sample."""
    # of the table of tiles what a case launches is in its own key
    choosing = inspect.getsource(tune).partition("class _Call")[2]
    code = choosing, inspect.getsource(refusals), sources.of(__name__)
    asked = chosen(cases, outcomes)
    keys = {title: digest(outcomes[title].key, *code) for title in asked}
    there = [] if cold else [title for title in asked if kept.get(title) == keys[title]]
    skipped = {*there} - {*random.sample(there, min(sample, len(there)))}
    todo = [(asked[title],) for title in asked if title not in skipped]
    failures = []
    for (case,), wrong in isolated.each(examine, todo, jobs):
        found = [str(wrong)] if isinstance(wrong, isolated.Crash) else wrong
        failures += [f"{case.title}: {each}" for each in found]
        if not found:
            kept[case.title] = keys[case.title]
    print(f"{len(asked)} cases with each launch refused once, {len(todo)} of them run now")
    return failures
