# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Why a mistake that no test notices changes nothing that anybody could notice."""

from __future__ import annotations

from .changes import Mutant

# by place, words of a mutant's title ($ is its end)
REASONS: dict[str, tuple[tuple[str, str], ...]] = {}


def reason(mutant: Mutant) -> str | None:
    words = REASONS.get(mutant.place, ())
    return next((why for word, why in words if word in f"{mutant.title}$"), None)
