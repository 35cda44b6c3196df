# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What became of planted mistakes, by title: a line each in a file, so that a diff shows them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

Verdict = TypeVar("Verdict")


def read(path: Path, kind: type[Verdict]) -> dict[str, Verdict]:
    if not path.exists():
        return {}
    return {title: kind(*fields) for title, fields in json.loads(path.read_text()).items()}


def write(path: Path, verdicts: Mapping[str, Any]) -> None:
    """The fields of each verdict in their order; a reader finds the old file or the new one."""
    lines = (
        f"{json.dumps(title)}: {json.dumps([*vars(verdict).values()])}"
        for title, verdict in sorted(verdicts.items())
    )
    beside = path.with_suffix(".new")
    beside.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    beside.replace(path)
