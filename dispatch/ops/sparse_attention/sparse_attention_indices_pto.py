# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_sparse_attention_indices_pto: those of npu_sparse_attention_pto, and
its selection [B, S, 1, K]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import sparse_attention_pto

_NAME = "npu_sparse_attention_indices_pto"
SCHEMA = (
    sparse_attention_pto.SCHEMA.replace("npu_sparse_attention_pto", _NAME).removesuffix("Tensor")
    + "(Tensor, Tensor)"
)
ONNX = "SparseAttentionIndicesPto"


def check(**arguments: Any) -> None:
    sparse_attention_pto.check(**arguments, op=_NAME)


def fake(x: Tensor, sparse_count: int, **arguments: Any) -> tuple[Tensor, Tensor]:
    batch, rows, _hidden = x.shape
    indices = x.new_empty([batch, rows, 1, sparse_count], dtype=torch.int32)
    return sparse_attention_pto.fake(x, **arguments), indices
