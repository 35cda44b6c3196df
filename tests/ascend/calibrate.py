# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The five rates that the cost model assumes, measured on a card:

    python -m tests.ascend.calibrate --device npu --to rates.json
    tests/ascend/run.sh --estimate OP --rates rates.json

Each is the difference of two runs of a probe (probes.py), which differ in turns alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

import torch

from . import cost
from .cost import Rates

# bytes far below the cache, and far above: whole tiles for 40 cores and for 48
SMALL, LARGE = 960 * 2**15, 30720 * 2**15
# what a turn of the hand-offs waits for: two of the cube's copies and one of the vectors', which
# follow each other, and two hand-offs
COPIES, HAND_OFFS = 3, 2
# turns of both runs, bytes of a sweep
RUNS = {
    "copies": (1_000, 21_000, 0),
    "sweep, once": (1, 3, LARGE),
    "sweep, again": (1, 17, SMALL),
    "hand_offs": (500, 5_500, 0),
}


class Device(Protocol):
    name: str

    def seconds(self, probe: str, turns: int, bytes_: int = 0, launches: int = 1) -> float:
        """Of so many launches of a captured graph."""

    def host(self, launches: int) -> float:
        """Until the host has launched so many."""


class Card:
    """An NPU."""

    def __init__(self) -> None:
        self.device = torch.device("npu", torch.npu.current_device())
        self.name = torch.npu.get_device_name()

    def _call(self, probe: str, turns: int, bytes_: int = 0) -> Callable[[], None]:
        from . import probes  # needs triton-ascend

        return probes.of(probe, self.device, turns, bytes_).call

    def seconds(self, probe: str, turns: int, bytes_: int = 0, launches: int = 1) -> float:
        from custom.bench import timing

        calls = [self._call(probe, turns, bytes_)] * launches
        return timing.measure(calls, self.device).median * 1e-6 * launches

    def host(self, launches: int) -> float:
        call = self._call("nothing", 1)
        call()
        torch.npu.synchronize()
        began = time.perf_counter()
        for _ in range(launches):
            call()
        spent = time.perf_counter() - began
        torch.npu.synchronize()
        return spent


class StandIn:
    """A card with these rates, where there is none."""

    name = "a stand-in"

    def __init__(self, rates: Rates) -> None:
        self.rates = rates

    def seconds(self, probe: str, turns: int, bytes_: int = 0, launches: int = 1) -> float:
        x = self.rates
        again = 1.0 if bytes_ == LARGE else x.cached
        body = {
            "nothing": 0.0,
            "copies": turns * x.copy,
            "sweep": bytes_ / cost.MEMORY * (1 + (turns - 1) / again),
            "hand_offs": turns * (HAND_OFFS * x.hand_off + COPIES * x.copy),
        }[probe]
        return launches * (body + x.gap)

    def host(self, launches: int) -> float:
        return launches * self.rates.host


def measured(device: Device) -> Rates:
    turn = {}
    for what, (few, many, bytes_) in RUNS.items():
        both = [device.seconds(what.partition(",")[0], turns, bytes_) for turns in (few, many)]
        turn[what] = (both[1] - both[0]) / (many - few)
    few, many = (device.seconds("nothing", 1, launches=n) for n in (64, 320))
    found = Rates(
        cached=turn["sweep, once"] / LARGE / (turn["sweep, again"] / SMALL),
        copy=turn["copies"],
        hand_off=(turn["hand_offs"] - COPIES * turn["copies"]) / HAND_OFFS,
        gap=(many - few) / 256,
        host=device.host(200) / 200,
        source=f"measured on {device.name}, {datetime.date.today()}",
    )
    wrong = {name: x for name, x in asdict(found).items() if name != "source" and not x > 0}
    if wrong:
        sys.exit(f"calibrate: no rate can be {wrong}: the card was busy with something else; again")
    return found


def table(found: Rates) -> list[str]:
    """Each rate beside the assumed one."""
    assumed = Rates()
    rows: tuple[tuple[str, str, float, str], ...] = (
        ("cache, times the memory's rate", "cached", 1, ""),
        ("least copy", "copy", 1e9, " ns"),
        ("hand-off", "hand_off", 1e6, " us"),
        ("gap between launches of a graph", "gap", 1e6, " us"),
        ("the host, a launch", "host", 1e6, " us"),
    )
    lines = [f"{'':<34}{'assumed':>12}{'measured':>12}{'ratio':>8}"]
    for what, name, scale, unit in rows:
        a, b = getattr(assumed, name), getattr(found, name)
        both = "".join(f"{f'{x * scale:.3g}{unit}':>12}" for x in (a, b))
        lines.append(f"{what:<34}{both}{b / a:>8.2f}")
    return [*lines, found.source]


def claims() -> list[str]:
    """Where a probe computes something else than it says, does not compile, or would take another
    time on a card of the assumed rates than the model charges for the compiler's IR."""
    from . import estimate, probes
    from .compiler import compile_for_npu
    from .driver import recorder
    from .toolchain import BUILDS

    estimate.install()
    wrong = []
    device = torch.device("cpu")
    for probe in ("nothing", "copies", "sweep", "hand_offs"):
        made = probes.of(probe, device, 67, 100 * 4 * probes.TILE)
        made.call()
        want = made.want()
        if not torch.allclose(made.out[: len(want)], want, rtol=1e-2, atol=1e-4):
            wrong.append(f"{probe} computes something else")
        launch = recorder.launches[-1]
        for build in BUILDS:
            answer = compile_for_npu(launch.linalg, launch.options, build)
            if not answer.ok:
                wrong.append(f"{probe} with {build}: {answer.error}")
    recorder.execute = False
    card = StandIn(Rates())
    for what, (few, many, bytes_) in RUNS.items():
        probe = what.partition(",")[0]
        charged, taken = [], []
        for turns in (few, many):
            charged += estimate.launched(probes.of(probe, device, turns, bytes_).call)
            taken.append(card.seconds(probe, turns, bytes_))
        ratio = (charged[1][0] - charged[0][0]) / (taken[1] - taken[0])
        if abs(ratio - 1) > 0.01:
            wrong.append(f"{what}: the model charges {ratio:.2f} of what is taken for a turn")
    return [f"calibrate: {x}" for x in wrong]


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.ascend.calibrate", description=__doc__)
    parser.add_argument("--device", choices=("npu", "stand-in"), default="npu")
    parser.add_argument("--to", type=Path, required=True, help="the file that --rates reads")
    chosen = parser.parse_args()
    found = measured(Card() if chosen.device == "npu" else StandIn(Rates()))
    print("\n".join(table(found)))
    chosen.to.write_text(json.dumps(asdict(found), indent=1) + "\n")


if __name__ == "__main__":
    main()
