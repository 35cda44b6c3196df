# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Examples of docstrings as blocks of code: mkdocstrings reads what follows `>>>` as text."""

from __future__ import annotations

import re
from typing import Any

import griffe


def fenced(docstring: str) -> str:
    return re.sub(r"^>>> .*?(?=\n\n|\Z)", r"```python\n\g<0>\n```", docstring, flags=re.M | re.S)


class Fenced(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)
