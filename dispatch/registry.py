# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Every op, by family and name; each is defined in its module of `ops/<family>/`.

Registration, the three backends, autograd guards, the GE converters, the ONNX nodes, the docs'
parameter tables and the contract tests are all derived from `SPECS`.  Shapes use one alphabet:

    B requests        S query tokens a request   T tokens of all requests   N heads   D head dim
    H hidden size     R latent rank (512)        P page (cache block) size  K selected keys
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

from . import ops
from .op_spec import Spec


def _ops() -> Iterator[ModuleType]:
    """The modules of `ops/<family>/` that define an op."""
    for family in iter_modules(ops.__path__):
        package = import_module(f"{ops.__name__}.{family.name}")
        for file in iter_modules(package.__path__):
            module = import_module(f"{package.__name__}.{file.name}")
            if hasattr(module, "SCHEMA"):
                yield module


SPECS: tuple[Spec, ...] = tuple(spec for op in _ops() for spec in Spec.of(op))

BY_NAME: dict[str, Spec] = {spec.name: spec for spec in SPECS}
