# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The bench's own rows: what a call launches and lays out, and whether its kernels compile.

`make test-ascend` takes a few ops, drawn anew each time, `make test-ascend-large` all of them.  No
tensor is filled.
"""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from custom.dispatch import backends
from custom.dispatch.common import memory as launcher_memory
from custom.dispatch.errors import NotSupported
from custom.dispatch.registry import SPECS
from custom.npu_ops.common import tiling

from custom.bench.case import Case, Draw
from custom.bench.presets import presets

from . import aten, driver, isolated, memory
from .compiler import compile_for_npu
from .driver import Launch, recorder
from .toolchain import BUILDS

MIB = 2**20
# of one call: a round's workspace, and what all rounds share
WORKSPACE = 3 * tiling.WORKSPACE // 2 // MIB
LAUNCHES = 100


@dataclass(frozen=True)
class Bill:
    """Of a call."""

    launches: int
    workspace: int  # MiB at the most at one time, outputs left out


# the largest of an op's rows, where it is above the limits, and why
KNOWN = {
    "npu_chunk_kda": (Bill(4, 4624), "all chunks are laid out at once"),
    "npu_chunk_kda_grad": (Bill(352, 640), "a round is one head, of 65,536 tokens"),
    "npu_chunk_gated_delta_rule_grad": (Bill(145, 723), "a round is a head or two, of 65,536"),
}
# drawing the arguments of these takes minutes
_SLOW = ("npu_indexer_loss",)


class _Counting:
    """In the place of memory.empty: addresses, and how many bytes of them are held."""

    def __init__(self) -> None:
        self.held = self.most = 0

    def __call__(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
    ) -> torch.Tensor:
        count = math.prod(shape)
        with aten.apart():
            if not count:
                return torch.empty(tuple(shape), dtype=dtype)
            region = memory.reserved(count * dtype.itemsize)
            self.held += len(region)
            self.most = max(self.most, self.held)
            weakref.finalize(region, self._gone, len(region))
            return torch.frombuffer(region, dtype=dtype, count=count).view(*shape)

    def _gone(self, size: int) -> None:
        self.held -= size


def bill(call: Callable[[], Any]) -> Bill:
    """Of a call whose kernels are not even lowered."""
    launches, counting = 0, _Counting()

    def run(*_: Any, **__: Any) -> None:
        nonlocal launches
        launches += 1

    real, kept = triton.JITFunction.run, launcher_memory.empty
    triton.JITFunction.run, launcher_memory.empty = run, counting
    try:
        outputs = call()
        found = Bill(launches, (counting.most - counting.held) // MIB)
        del outputs
    finally:
        triton.JITFunction.run, launcher_memory.empty = real, kept
    return found


def prepare() -> None:
    torch.set_num_threads(1)
    driver.install()
    launcher_memory.empty = memory.vast
    recorder.execute = False
    Draw.normal = lambda self, *shape, dtype=None, std=1.0: memory.vast(  # type: ignore[method-assign]
        shape, dtype or self.dtype
    )


def _arguments(row: Case) -> Any:
    """Kernels that fill a cache do not run."""
    real = triton.JITFunction.run
    triton.JITFunction.run = lambda *_, **__: None
    try:
        return row.make(torch.device("cpu"), 0)
    finally:
        triton.JITFunction.run = real


def bills(op: str) -> dict[str, Bill]:
    """By the row's label; without the rows that no NPU takes."""
    prepare()
    found = {}
    for row in presets(op, "npu"):
        arguments = _arguments(row)
        try:
            found[row.label] = bill(lambda row=row, arguments=arguments: row.call(arguments))
        except NotSupported:
            continue
    return found


def launched(op: str, number: int) -> list[Launch]:
    """What a row of the op launches, lowered."""
    prepare()
    row = presets(op, "npu")[number]
    arguments = _arguments(row)
    try:
        row.call(arguments)
    except NotSupported:
        return []
    return list(recorder.launches)


def excess(op: str, found: dict[str, Bill]) -> list[str]:
    """Failures."""
    if not found:
        return []
    most = Bill(max(x.launches for x in found.values()), max(x.workspace for x in found.values()))
    known, why = KNOWN.get(op, (Bill(LAUNCHES, WORKSPACE), ""))
    if most.launches > known.launches or most.workspace > known.workspace:
        return [f"{op}: {most} in a row of the bench, at most {known}: tests/ascend/large.py"]
    if why and most.launches <= LAUNCHES and most.workspace <= WORKSPACE:
        return [f"large.py: {op} is within the limits, and need not be known for: {why}"]
    return []


def ops() -> list[str]:
    return [
        spec.name
        for spec in SPECS
        if spec.name not in _SLOW
        and backends.has_kernel(backends.NPU, spec)
        and presets(spec.name, "npu")
    ]


def run(sample: int, known: set[str], jobs: int) -> tuple[list[str], list[str]]:
    """What was seen, failures: of so many ops, 0 for all with all their rows; `known` are the
    lowered texts that a case runs."""
    asked = random.sample(ops(), sample) if sample else ops()
    failures: list[str] = []
    for (op,), found in isolated.each(bills, [(op,) for op in asked], jobs):
        failures += [f"{op}: {found}"] if isinstance(found, isolated.Crash) else excess(op, found)
    rows = {op: range(len(presets(op, "npu"))) for op in asked}
    calls = [(op, n) for op in asked for n in (random.sample(rows[op], 1) if sample else rows[op])]
    new: dict[str, Launch] = {}
    for (op, n), launches in isolated.each(launched, calls, jobs):
        if isinstance(launches, isolated.Crash):
            failures.append(f"{op}, row {n}: {launches}")
        else:
            new |= {x.lowered_key: x for x in launches if x.lowered_key not in known}
    builds = [random.choice(BUILDS)] if sample else [*BUILDS]
    work = {(x.linalg, repr(x.options), build): x for x in new.values() for build in builds}
    todo = [(x.linalg, x.options, build) for (_, _, build), x in work.items()]
    for (text, options, build), answer in isolated.each(compile_for_npu, todo, jobs):
        if isinstance(answer, isolated.Crash) or not answer.ok:
            kernel = work[text, repr(options), build].kernel
            said = answer if isinstance(answer, isolated.Crash) else answer.error
            failures.append(f"{kernel} of a row of the bench with {build}: {said}")
    kernels = sorted({x.kernel for x in new.values()})
    told = f"{len(calls)} rows of the bench, {len(asked)} ops; {len(new)} forms in no case"
    return [told + (f": {', '.join(kernels)}" if kernels else "")], failures
