# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_quantize_index_query.

q [.., N, 128]   weights [.., N]   ->   values [.., N, 128], and either the weights times the
scales, float32 [.., N] (`fold`), or the scales, float32 [.., N]
"""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from torch import Tensor

from ...check import Checker
from ...common import quantized
from ..common import quantization

SCHEMA = (
    "npu_quantize_index_query(Tensor q, Tensor weights, *, str kind, bool fold=True,"
    ' str scale_format="ue8m0", bool index_hadamard=False, str hadamard_round="bf16")'
    " -> (Tensor, Tensor)"
)
ONNX = "QuantizeIndexQuery"


class Arguments(TypedDict):
    q: Tensor
    weights: Tensor
    kind: str
    fold: bool
    scale_format: str
    index_hadamard: bool
    hadamard_round: str


def check(c: Checker, x: Arguments) -> None:
    q, weights = x["q"], x["weights"]
    c.same_device(q=q, weights=weights)
    quantization.kind(c, x["kind"], x["scale_format"])
    c.one_of("hadamard_round", x["hadamard_round"], "bf16", "fp32")
    c.floating("q", q)
    c.floating("weights", weights)
    c.require(
        q.ndim in (3, 4), f"`q` has shape {list(q.shape)}, expected [B, S, N, 128] or [T, N, 128]."
    )
    rows = "B S" if q.ndim == 4 else "T"
    c.shape("q", q, f"{rows} N {quantized.INDEX}")
    c.shape("weights", weights, f"{rows} N")
    c.dense_rows(q=q, weights=weights)


def fake(q: Tensor, kind: str, **_: Any) -> tuple[Tensor, Tensor]:
    return (
        q.new_empty(q.shape, dtype=quantized.VALUES[kind]),
        q.new_empty(q.shape[:-1], dtype=torch.float32),
    )
