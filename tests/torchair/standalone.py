# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Imports torchair's Python from the torch_npu wheel, with a stand-in for its C++ module.

The conversion FX -> GE graph is torchair's own; what only CANN can do (run the graph) is left out.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

_NAME = "torchair.core._torchair"
_DTYPES = (
    "BOOL UINT8 INT8 INT16 INT32 INT64 BF16 FLOAT16 FLOAT32 FLOAT64 COMPLEX32 COMPLEX64 COMPLEX128"
    " UINT16 UINT32 UINT64"
)


def _export(serialised: bytes, options: dict[str, str]) -> None:
    """Stands for the C++ part of dynamo_export, which lets GE write the graph that it is given."""
    path = Path(options["export_path_dir"]) / options["export_name"]
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(serialised)


def _stand_in(registered: set[str]) -> types.ModuleType:
    module = types.ModuleType(_NAME)
    members = {name: number for number, name in enumerate(_DTYPES.split())}
    module.TorchDataType = type("TorchDataType", (), members)
    module.TorchNpuGraphBase = type(
        "TorchNpuGraphBase", (), {"__init__": lambda self, name="": None}
    )
    module.get_registered_ir_def = lambda name: (
        ("SUCCESS" if name in registered else "ERROR"),
        [],
        [],
        [],
    )
    module.check_cann_compat = lambda *_: ""
    module.export = _export
    for name in (
        "SetDebugLogPath",
        "InitializeGraphEngine",
        "FinalizeGraphEngine",
        "InitDeviceStdoutChannel",
    ):
        setattr(module, name, lambda *_: None)
    return module


class _Finder:
    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, self) if name == _NAME else None

    def create_module(self, spec):
        return self._module

    def exec_module(self, module):
        pass


def install(registered: set[str]) -> None:
    """Make `import torchair` work; `registered` are the IR operators that CANN is taken to have."""
    module = _stand_in(registered)
    sys.modules[_NAME] = module
    sys.meta_path.insert(0, _Finder(module))
    torch_npu = importlib.util.find_spec("torch_npu")
    sys.path.insert(0, str(Path(torch_npu.origin).parent / "dynamo"))
