# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Every kernel with a name that triton-ascend moved, lowered as with 3.2.1 and later: the names are
gone from `triton.language`, and `triton.language.extra.cann.extension` has them."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from types import ModuleType

import triton.language as tl

from ..support import places
from . import isolated
from .case import Case
from .examine import Outcome, lower
from .mutants import kernels_with, names_called

# all of 3.2.1's but `parallel`, which the code generator of 3.2.0 itself takes from the language
MOVED = (
    "cast", "compile_hint", "extract_slice", "flip", "get_element", "insert_slice", "multibuffer",
    "sort", "sync_block_all", "sync_block_set", "sync_block_wait",
)  # fmt: skip
_PLACE = "triton.language.extra.cann"
# no kernel is in them; a case that goes in rounds has set the workspace in the last
_KEPT = [f"custom.npu_ops.common.{name}" for name in ("tune", "refusals", "tiling")]


def taken() -> tuple[str, ...]:
    """The names that kernels take of front_end.py."""
    tree = ast.parse(places.files()["front_end"].read_text())
    made = [x for x in tree.body if isinstance(x, ast.Assign) and "_find(" in ast.unparse(x.value)]
    return tuple(ast.unparse(x.targets[0]) for x in made)


def kernels() -> set[str]:
    """The jitted functions with such a name, and those that they are part of."""
    names = {*taken()}
    users = [title for title, called in names_called().items() if names & called]
    return {kernel for user in users for kernel in kernels_with(user) or ()}


def _move() -> None:
    """Here, from now on; kernels are imported anew."""
    for name in (_PLACE, f"{_PLACE}.extension"):
        made = ModuleType(name)
        made.__spec__ = ModuleSpec(name, None, is_package=True)
        made.__path__ = []
        sys.modules[name] = made
    for name in MOVED:
        setattr(sys.modules[f"{_PLACE}.extension"], name, getattr(tl, name))
        delattr(tl, name)
    for name in [x for x in sys.modules if x.startswith("custom.npu_ops.")]:
        if name not in _KEPT:
            del sys.modules[name]


def _lowered(case: Case) -> list[tuple[str, str]]:
    _move()
    return [(launch.kernel, launch.lowered_key) for launch in lower(case)]


def chosen(cases: Iterable[Case], outcomes: dict[str, Outcome]) -> list[Case]:
    """For each of the kernels the case of the fewest launches that has it."""
    left, found = kernels(), []

    def launches(case: Case) -> int:
        return len(outcomes[case.title].launches)

    for case in sorted((x for x in cases if x.title in outcomes), key=launches):
        here = {launch.kernel for launch in outcomes[case.title].launches} & left
        if here:
            found.append(case)
            left -= here
    return found


def run(
    cases: Iterable[Case], outcomes: dict[str, Outcome], jobs: int
) -> tuple[list[str], list[str]]:
    """What was seen; failures."""
    asked = chosen(cases, outcomes)
    failures: list[str] = []
    seen: set[str] = set()
    for (case,), found in isolated.each(_lowered, [(case,) for case in asked], jobs):
        if isinstance(found, isolated.Crash):
            failures.append(f"{case.title}, as with triton-ascend 3.2.1: {found}")
            continue
        seen |= {kernel for kernel, _ in found} & kernels()
        if found != [(x.kernel, x.lowered_key) for x in outcomes[case.title].launches]:
            failures.append(f"{case.title}: another text with the names that moved")
    told = f"{len(seen)} kernels of {len(asked)} cases lower with {', '.join(taken())} moved"
    return [told] if asked else [], failures
