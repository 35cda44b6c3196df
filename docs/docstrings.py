# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Docstrings as the pages show them: griffe runs nothing, so what a decorator completes and what
follows `>>>` is completed here."""

from __future__ import annotations

import re
from typing import Any

import griffe

from custom._op import description


def fenced(docstring: str) -> str:
    """mkdocstrings reads an example as text."""
    return re.sub(r"^>>> .*?(?=\n\n|\Z)", r"```python\n\g<0>\n```", docstring, flags=re.M | re.S)


def complete(function: griffe.Function) -> None:
    """By `described_by` and `variant_of`, each with a function that stands before in the file."""
    for decorator in function.decorators:
        if by := re.fullmatch(r"(described_by|variant_of)\((\w+)\)", str(decorator.value)):
            base = function.parent[by[2]]
            if by[1] == "variant_of":
                function.parameters = base.parameters
            function.docstring.value = description(
                function.docstring.value,
                base.docstring.value,
                [each.name for each in function.parameters],
            )


class Fenced(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if isinstance(obj, griffe.Function):
            complete(obj)
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)
