# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The bench's own rows: what a call launches and lays out, whether its kernels compile, and what
they plan of UB.

`make test-ascend` takes a few ops, drawn anew each time, and asks those that go in rounds what
they lay out; `make test-ascend-large` takes all of them.  No tensor is filled.
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
from custom.dispatch.registry import BY_NAME, SPECS
from custom.npu_ops.common import tiling

from custom.bench.case import Case, Draw
from custom.bench.presets import presets

from ..support import places
from . import aten, driver, isolated, known, memory, store
from .compiler import Compiled, compile_for_npu
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
    "npu_chunk_kda_grad": (Bill(445, 615), "32 rounds of 65,536 tokens, 4 kernels and 10 in each"),
    "npu_chunk_gated_delta_rule_grad": (Bill(145, 723), "a round is a head or two, of 65,536"),
    "npu_sparse_attention_score": (
        Bill(114, 562),
        "pools of 4: three kernels a head of keys, in rounds",
    ),
}
# forms of which the oldest build plans more of UB than `known.TIGHT`, and how much; the others do
# not, and another tile would cost time there.  known.py has those of every build.
OLDEST = {
    "chunk_gated_delta_rule.triangles": 183,
    "chunk_gated_delta_rule.walk": 192,
    "chunk_gated_delta_rule_grad.gates": 165,
    "chunk_gated_delta_rule_grad.pairs": 163,
    "chunk_gated_delta_rule_grad.walk_grads": 188,
    "chunk_gated_delta_rule_grad.walk_states": 191,
    "chunk_kda.triangles": 169,
    "chunk_kda.walk": 192,
    "chunk_kda_grad.walk_states": 177,
    "chunk_kda_grad.walk_grads": 163,
    "fused_attention_backward.grad_keys": 183,
    "fused_infer_attention_score_v2.accumulate": 169,
    "hc_post.blend": 176,
    "lightning_indexer.collect": 173,
    "sparse_lightning_indexer_grad_kl_loss.row_loss": 169,
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
        try:
            arguments = _arguments(row)
            found[row.label] = bill(lambda row=row, arguments=arguments: row.call(arguments))
        except NotSupported:
            continue
    return found


def launched(op: str, number: int) -> list[Launch]:
    """What a row of the op launches, lowered."""
    prepare()
    row = presets(op, "npu")[number]
    try:
        row.call(_arguments(row))
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


def tight(kernel: str, build: str, kib: int) -> str | None:
    """What is wrong with so much of UB, or None."""
    listed = any((x.kernel, x.kind) == (kernel, "tight") for x in known.KNOWN)
    least = OLDEST.get(kernel, 0) if build == BUILDS[0] else 0
    if kib <= max(known.TIGHT, least + store.SPREAD.get(build, 0)) or listed:
        return None
    return (
        f"{kernel} of a row of the bench plans {kib} KiB of UB with {build}: tests/ascend/large.py"
    )


def ops() -> list[str]:
    return [
        spec.name
        for spec in SPECS
        if spec.name not in _SLOW
        and backends.has_kernel(backends.NPU, spec)
        and presets(spec.name, "npu")
    ]


def in_rounds() -> list[str]:
    """Those whose launcher plans rounds: a round that is too long gives the same result."""
    return [op for op in ops() if "at_once(" in places.files()[BY_NAME[op].file].read_text()]


def _raise(plans: dict[tuple[str, str], int], kernel: str, build: str, answer: Compiled) -> None:
    plans[kernel, build] = max(plans.get((kernel, build), 0), answer.kib.get("UB", 0))


def run(sample: int, of_cases: set[str], jobs: int) -> tuple[list[str], list[str]]:
    """What was seen, failures: of so many ops, 0 for all with all their rows; `of_cases` are
    the lowered texts that a case runs, which are compiled there."""
    asked = random.sample(ops(), sample) if sample else ops()
    failures: list[str] = []
    billed = dict.fromkeys([*asked, *in_rounds()])
    for (op,), found in isolated.each(bills, [(op,) for op in billed], jobs):
        failures += [f"{op}: {found}"] if isinstance(found, isolated.Crash) else excess(op, found)
    rows = {op: range(len(presets(op, "npu"))) for op in asked}
    calls = [(op, n) for op in asked for n in (random.sample(rows[op], 1) if sample else rows[op])]
    launched_by: dict[str, Launch] = {}
    for (op, n), launches in isolated.each(launched, calls, jobs):
        if isinstance(launches, isolated.Crash):
            failures.append(f"{op}, row {n}: {launches}")
        else:
            launched_by |= {x.lowered_key: x for x in launches}
    new = {key: x for key, x in launched_by.items() if key not in of_cases}
    plans: dict[tuple[str, str], int] = {}  # the most KiB of UB, by kernel and build
    kept = store.read().compiled
    for key in launched_by.keys() & kept.keys():
        for build, entry in kept[key].items():
            _raise(plans, launched_by[key].kernel, build, store.answer(entry))
    builds = [random.choice(BUILDS)] if sample else [*BUILDS]
    work = {(x.linalg, repr(x.options), build): x for x in new.values() for build in builds}
    todo = [(x.linalg, x.options, build) for (_, _, build), x in work.items()]
    for (text, options, build), answer in isolated.each(compile_for_npu, todo, jobs):
        kernel = work[text, repr(options), build].kernel
        if not isinstance(answer, isolated.Crash):
            _raise(plans, kernel, build, answer)
        if isinstance(answer, isolated.Crash) or not answer.ok:
            said = answer if isinstance(answer, isolated.Crash) else answer.error
            failures.append(f"{kernel} of a row of the bench with {build}: {said}")
    failures += [x for (of, build), kib in sorted(plans.items()) if (x := tight(of, build, kib))]
    if not sample:
        failures += [
            f"large.py: {x} plans less with {BUILDS[0]}, and need not be listed"
            for x in OLDEST
            if plans.get((x, BUILDS[0]), 0) <= known.TIGHT - store.SPREAD[BUILDS[0]]
        ]
    kernels = sorted({x.kernel for x in new.values()})
    told = f"{len(calls)} rows of the bench, {len(asked)} ops; {len(new)} forms in no case"
    return [told + (f": {', '.join(kernels)}" if kernels else "")], failures
