# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What a configuration may show, and why: every other finding fails the run.

A kernel that a build refuses is never listed: every build compiles every shipped configuration.
An entry that meets nothing any more fails the run as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .toolchain import BUILDS, NEWEST

TIGHT = 160  # KiB of UB that the newest build may plan, of 192

# kinds of findings, and the builds on which they are judged
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "multiply": ("the multiply reads another tile than it was given", BUILDS),
    "index": ("a masked load through an index that is not clamped", BUILDS),
    "retry": ("compiled at the second attempt, without double buffering", BUILDS),
    "repeat": ("both vector sub-cores repeat the same vector work", BUILDS),
    # the older builds give every workspace one slot
    "turns": ("cube and vector take turns: a workspace of one slot", (NEWEST,)),
    # the older builds make loops of 64 bit compares as well
    "scalar": ("innermost loops that load or store single elements", (NEWEST,)),
    "tight": (f"more than {TIGHT} KiB of UB", (NEWEST,)),
}


@dataclass(frozen=True)
class Known:
    """Findings of `kind` in the configurations of `kernel` that hold all of `tiles`."""

    kernel: str
    kind: str
    reason: str
    builds: tuple[str, ...] = BUILDS
    tiles: tuple[tuple[str, int], ...] = ()

    @property
    def where(self) -> str:
        """The configurations and builds, in words; empty for all."""
        tiles = [f"{name}={value}" for name, value in self.tiles]
        builds = [] if self.builds == BUILDS else [f"({', '.join(self.builds)})"]
        return " ".join(tiles + builds)

    def covers(self, kernel: str, config: Any, kind: str, build: str) -> bool:
        values: Mapping[str, Any] = config.keywords
        return (
            (kernel, kind) == (self.kernel, self.kind)
            and build in self.builds
            and all(values.get(name) == value for name, value in self.tiles)
        )


KNOWN: tuple[Known, ...] = ()

_met: set[Known] = set()


def expected(kernel: str, config: Any, kind: str, build: str) -> Known | None:
    """The entry that lists this finding, or None."""
    for entry in KNOWN:
        if entry.covers(kernel, config, kind, build):
            _met.add(entry)
            return entry
    return None


def listed(kernel: str, kind: str) -> bool:
    return any((x.kernel, x.kind) == (kernel, kind) for x in KNOWN)


def unused() -> list[str]:
    """After all rows were looked at: the entries that met nothing."""
    return [f"known.py: {x.kernel} {x.kind} {x.where}" for x in KNOWN if x not in _met]
