# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""In a clone that was not installed the other folders lie beside this one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType


class _Beside:
    """They alone: with the clone in `__path__`, setup.py and tests were submodules too."""

    def __init__(self, package: str, root: Path) -> None:
        folders = ("cuda_ops", "dispatch", "graph_mode", "npu_ops")
        self.files = {f"{package}.{each}": root / each / "__init__.py" for each in folders}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self.files.get(name)
        return spec_from_file_location(name, file) if file else None


def find(package: str, root: Path) -> None:
    """Before the finder of an editable installation, which may be of another clone."""
    sys.meta_path.insert(0, _Beside(package, root))
