# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The table in docs/portability.md."""

from __future__ import annotations

from typing import Any

CAPABILITIES = (80, 89, 90, 100, 120)
TRITONS = ("3.6.0", "3.9.0")
WHOLE = {(capability, version) for capability in CAPABILITIES for version in TRITONS}


def table(found: dict[tuple[int, str], dict[str, Any]], results: dict[str, Any]) -> str:
    return "\n"
