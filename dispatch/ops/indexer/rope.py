# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Rotary parts of a teacher's queries and keys, given apart from the rest."""

from __future__ import annotations

from torch import Tensor

from ...check import Checker


def check_rope(
    c: Checker, query_rope: Tensor | None, key_rope: Tensor | None, shapes: tuple[str, str]
) -> None:
    """Both or none, of these shapes."""
    c.require(
        (query_rope is None) == (key_rope is None),
        "only one of `query_rope` and `key_rope` is given, expected both or none.",
    )
    if query_rope is not None and key_rope is not None:
        c.shape("query_rope", query_rope, shapes[0])
        c.shape("key_rope", key_rope, shapes[1])
