# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What the plug-ins of engines refuse in one sentence: versions and modes that were not tried."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from ..dispatch.errors import BackendUnavailable, NotSupported

# (numbers): tried with the first, up to before the second
Versions = tuple[tuple[int, ...], tuple[int, ...]]


def in_words(versions: Versions) -> str:
    first, below = (".".join(map(str, each)) for each in versions)
    return f">={first},<{below}"


def holds(tried: Versions, here: str) -> bool:
    """Whether a version is one of those."""
    first, below = tried
    return first <= tuple(map(int, re.findall(r"\d+", here)))[: len(first)] < below


def check_version(switch: str, name: str, here: str, tried: Versions) -> None:
    """Refuse what was not tried: its hooks may have moved."""
    if not holds(tried, here):
        raise BackendUnavailable(
            f"{switch}=1 was tried with {name} {in_words(tried)}, and {here} is installed; "
            f"install one of these, or unset {switch}."
        )


def refuse(switch: str, model: str, asked: Mapping[str, bool]) -> None:
    """Refuse, in one sentence, the first mode that is asked for."""
    for mode, on in asked.items():
        if on:
            raise NotSupported(
                f"{switch}=1 serves {model} without {mode}, and this engine asks for it; turn "
                f"it off, or unset {switch}."
            )


def refuse_unread(
    switch: str, model: str, arguments: Mapping[str, Any], hints: Collection[str] = ()
) -> None:
    """Refuse an argument that an engine passes and ours does not read; `hints` change no result."""
    given = {name: x for name, x in arguments.items() if x is not None and x is not False}
    refuse(switch, model, {f"`{name}`": name not in hints for name in given})
