# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and output of npu_hadamard: x [.., 128], any strides with dense rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...check import Checker
from ...common import quantized

SCHEMA = f"npu_hadamard(Tensor x, float scale={quantized.INDEX**-0.5!r}) -> Tensor"
ONNX = "Hadamard"


def check(c: Checker, a: Mapping[str, Any]) -> None:
    x: Tensor = a["x"]
    c.floating("x", x)
    c.require(
        x.ndim in (1, 2, 3, 4) and x.shape[-1] == quantized.INDEX,
        f"`x` has shape {list(x.shape)}, expected [.., {quantized.INDEX}] of 1 to 4 dimensions.",
    )
    c.dense_rows(x=x)


def fake(x: Tensor, **_: Any) -> Tensor:
    return x.new_empty(x.shape)
