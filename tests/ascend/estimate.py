# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Estimated times on Atlas A3, launch by launch:  tests/ascend/run.sh --estimate OP [--shape b=4]

The rows are those of `python -m custom.bench`.  The kernels are compiled and walked (cost.py), and
none runs but those that number what later ones work through: tensors have addresses and no memory,
and read as zeros, so that every index of a selection is the first key.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from custom.dispatch.common import memory as launcher_memory
from custom.dispatch.errors import NotSupported

from custom.bench.case import Arguments, Case, Draw
from custom.bench.presets import presets

from . import cost, driver, memory, published
from .compiler import compile_for_npu
from .driver import Launch, recorder
from .models import Sizes
from .toolchain import NEWEST

NUMBERING = (
    "sparse_flash_attention.resolve",
    "sparse_flash_attention.collect",
    "chunk_gated_delta_rule_grad.places",
    "chunk_kda_grad.places",
    "fused_infer_attention_score_v2.note",
    "blocks_in_place.note",
    "before_attention.tokens",
    "sparse_attn_sharedkv.note",
    "sparse_attn_sharedkv.collect",
)
# the request of a packed token is a sum of the vectors, and the first one's in what is estimated
PACKED = "block_indexer.scores"
# what the vectors find none of: tokens whose gates leave the range of a product
NONE = (PACKED, "chunk_kda.factors")
_hivm: dict[str, str] = {}


def _compiled(launch: Launch) -> str:
    if launch.lowered_key not in _hivm:
        compiled = compile_for_npu(launch.linalg, launch.options, NEWEST)
        if not compiled.ok:
            raise RuntimeError(f"{launch.kernel}: {compiled.error}")
        _hivm[launch.lowered_key] = compiled.hivm
    return _hivm[launch.lowered_key]


@dataclass(frozen=True)
class Row:
    """A launch: seconds, the head among them; its slowest program; a line of the table."""

    seconds: float
    head: float
    block: int
    text: str


def row(launch: Launch, given: list[Any]) -> Row:
    """Of the slowest of three programs: cores are not loaded alike."""
    hivm, programs = _compiled(launch), launch.grid[0]
    cost.by_vectors = 0 if launch.kernel in NONE else None
    slots = cost.slots(hivm)
    blocks = sorted({0, programs // 2, programs - 1})
    walked = [cost.of(hivm, given, launch.grid, block) for block in blocks]
    again = cost.read_again(walked, programs)
    found = [
        (cost.seconds(halves, slots, programs, again), block, halves)
        for block, halves in zip(blocks, walked, strict=True)
    ]
    (seconds, binds), block, halves = max(found, key=lambda x: x[:2])
    head = cost.head(halves)
    if head > seconds:
        binds = "head"
    seconds += head
    kib = [sum(half.copied(way) for half in halves) / 1024 for way in ("loads", "stores")]
    counts = (
        sum(half.multiplied for half in halves) / 1e6,
        sum(sum(half.vector.values()) for half in halves) / 1e6,
        sum(sum(half.copies.values()) for half in halves),
        sum(half.scalar_loads for half in halves),
        max(half.waits for half in halves),
    )
    text = f"{launch.kernel:<40}{programs:>5}{kib[0]:>10.0f}{kib[1]:>10.0f}"
    text += "{:>9.1f}{:>9.2f}{:>8}{:>8}{:>8}".format(*counts)
    return Row(seconds, head, block, f"{text}{seconds * 1e6:>10.1f}  {binds}")


_HEAD = (
    f"{'launch':<40}{'grid':>5}{'in KiB':>10}{'out KiB':>10}{'MMAC':>9}{'vec MB':>9}"
    f"{'copies':>8}{'loads':>8}{'waits':>8}{'us':>10}  binds"
)


def leave(launch: Launch, given: list[Any]) -> None:
    """What later launches work through: a kernel that numbers it runs, and counts are told."""
    recorder.execute = launch.kernel in NUMBERING
    if launch.kernel == PACKED:
        *_, counts, _, _, wide = given[:10]
        counts.fill_(wide)


def launched(call: Callable[[], Any]) -> list[tuple[float, str]]:
    """(seconds, a line of the table) of every launch of a call."""
    rows: list[tuple[float, str]] = []

    def observe(launch: Launch, given: list[Any]) -> None:
        found = row(launch, given)
        rows.append((found.seconds, found.text))
        leave(launch, given)

    recorder.observe = observe
    call()
    return rows


def install() -> None:
    torch.set_num_threads(1)
    driver.install()
    launcher_memory.empty = memory.vast
    Draw.normal = lambda self, *shape, dtype=None, std=1.0: memory.vast(  # type: ignore[method-assign]
        shape, dtype or self.dtype
    )


def apart(launches: list[float]) -> float:
    """As others measure: a kernel's own time, without the gap behind the last."""
    return cost.in_graph(launches) - (cost.rates.gap - cost.HEADS["vectors"])


def called(figure: published.Figure) -> Callable[[], Any]:
    """The figure's call, on its card; what fills a cache neither runs nor counts."""
    recorder.cube_cores = cost.use(figure.card).cores
    recorder.observe, recorder.execute = None, False
    return partial(getattr(torch.ops.custom, figure.op), **figure.make(Sizes()))


def estimated(figure: published.Figure) -> tuple[float, str]:
    """us of our launches on the figure's card, and what binds the longest."""
    rows = launched(called(figure))
    ours = [x for x in rows if not figure.kernels or x[1].startswith(figure.kernels)]
    slowest = max(ours)[1]
    binds = f"{slowest.split()[0]}: {slowest.rpartition('  ')[2]}"
    return apart([x for x, _ in ours]) * figure.times * 1e6, binds


def stale() -> list[str]:
    """Where published.json has something else than the model of today, of a figure of each card
    that takes seconds."""
    install()
    kept = {row["what"]: row["ours"] for row in published.read()}
    cheap = ("delta rule, b = 16", "sparse decode, 16 heads, 2048 keys, b = 1")
    found = []
    for figure in published.FIGURES:
        if figure.what in cheap:
            us, _ = estimated(figure)
            if abs(us / kept[figure.what] - 1) > 0.01:
                found.append(f"published: {figure.what}: kept {kept[figure.what]}, now {us:.1f}")
    return found


def compare(name: str, record: bool, only: str) -> None:
    """The times of a set beside ours, of the rows whose name has `only`; the others stay."""
    install()
    kept = {row["what"]: row for row in published.read(name)}
    rows = []
    print(f"{'us, ESTIMATED':<48}{'ours':>9}  over each")
    for figure in published.SETS[name][0]:
        if only not in figure.what:
            rows += [kept[figure.what]] if figure.what in kept else []
            continue
        us, binds = estimated(figure)
        kept_row = kept.get(figure.what, {}) | dict(
            what=figure.what,
            card=figure.card,
            us=figure.us,
            source=figure.source,
            ours=round(us, 1),
            binds=binds,
        )
        if figure.stages is not None:
            by_model, measured = figure.stages()
            kept_row["stages"] = dict(ours=round(by_model, 1), us=measured)
        rows.append(kept_row)
        over = ", ".join(f"{us / x:.2f} of {by}'s {x:g}" for by, x in figure.us.items())
        print(f"{figure.what:<48}{us:>9.1f}  {over}; {binds}", flush=True)
    print(f"geometric mean {published.mean(published.ratios(rows)):.2f}")
    if record:
        published.write(name, rows)


def made(case: Case) -> Arguments:
    """What the row is called with; what fills a cache neither runs nor counts."""
    recorder.observe, recorder.execute = None, False
    return case.make(torch.device("cpu"), 0)


def _estimate(case: Case, table: bool) -> None:
    """One row of the bench: every launch, if a `table` is wanted, and the whole."""
    started = time.perf_counter()
    arguments = made(case)
    try:
        rows = launched(lambda: case.call(arguments))
    except NotSupported as error:
        reason = next(x for x in str(error).splitlines() if x.startswith("  npu"))
        print(f"{case.label}: no kernel: {reason.removeprefix('  npu').strip()}", flush=True)
        return
    if table:
        print(_HEAD)
        for _, text in rows:
            print(text)
    kernels = sum(seconds for seconds, _ in rows)
    graph = cost.in_graph([seconds for seconds, _ in rows])
    host = len(rows) * cost.rates.host
    floor = max(case.bytes / cost.MEMORY, case.flops / cost.CUBE)
    slowest, text = max(rows)
    of_kernel, unit = text.split()[0], text.rpartition("  ")[2]
    print(
        f"{case.label}: {len(rows)} launches {kernels * 1e6:.1f} us; in a graph {graph * 1e6:.1f};"
        f" one by one {max(kernels, host) * 1e6:.1f}; floor {floor * 1e6:.1f},"
        f" {100 * floor / graph:.0f}%; binds: {of_kernel} {100 * slowest / graph:.0f}%, {unit}"
        f" ({time.perf_counter() - started:.0f} s to estimate)",
        flush=True,
    )


def matching(cases: list[Case], wanted: dict[str, str]) -> list[Case]:
    return [x for x in cases if all(str(x.shape.get(name)) == n for name, n in wanted.items())]


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.ascend.estimate")
    parser.add_argument("op", help=f"or a set of times: {', '.join(published.SETS)}")
    parser.add_argument("--shape", default="", help="only rows with these sizes: b=4,s1=1")
    parser.add_argument("--only", default="", help="of a set, rows whose name has this")
    parser.add_argument("--whole", action="store_true", help="one line a row, without its launches")
    parser.add_argument("--record", action="store_true", help="keep what a set says")
    parser.add_argument("--rates", type=Path, help="a file that tests.ascend.calibrate wrote")
    chosen = parser.parse_args()
    if chosen.rates:
        cost.take(chosen.rates)
    if chosen.op in published.SETS:
        return compare(chosen.op, chosen.record, chosen.only)
    wanted = dict(pair.split("=") for pair in chosen.shape.split(",") if pair)
    install()
    cases = matching(presets(chosen.op, "npu"), wanted)
    if not cases:
        sys.exit(f"no row of {chosen.op} has {chosen.shape}")
    print("ESTIMATES for Atlas A3, from the final HIVM and public rates; nothing ran on hardware.")
    print("Sizes are those of the slowest of three programs; `binds` is what it waits for most.")
    print(f"Cache, least copy, hand-off, gap and host: {cost.rates.source}.")
    print(chosen.op)
    for case in cases:
        _estimate(case, table=not chosen.whole)


if __name__ == "__main__":
    main()
