# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""triton-ascend's own names, which it moved: kernels take them from here.

3.2.0 has them in `triton.language`, 3.2.1 and later in `triton.language.extra.cann.extension`.
Presence decides, name by name.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

_MOVED = "triton.language.extra.cann"


def _find(name: str) -> Any:
    places = [f"{_MOVED}.extension"] if find_spec(_MOVED) is not None else []
    for place in (*places, "triton.language"):
        found = getattr(import_module(place), name, None)
        if found is not None:
            return found
    raise ImportError(f"triton.language has no `{name}`: this is no triton-ascend")


extract_slice = _find("extract_slice")
get_element = _find("get_element")
insert_slice = _find("insert_slice")
sort = _find("sort")
