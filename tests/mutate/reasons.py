# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Why a mistake that no test notices changes nothing that anybody could notice."""

from __future__ import annotations

from .changes import Mutant

# by place, words of a mutant's title ($ is its end)
REASONS: dict[str, tuple[tuple[str, str], ...]] = {}


def words(mutant: Mutant) -> list[str]:
    """Those that explain it."""
    listed = REASONS.get(mutant.place, ())
    return [word for word, _ in listed if word in f"{mutant.title}$"]


def reason(mutant: Mutant) -> str | None:
    found = words(mutant)
    return dict(REASONS[mutant.place])[found[0]] if found else None
