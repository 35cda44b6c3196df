# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments and outputs of npu_sparse_attention_shared_pto: those of npu_sparse_attention_pto that
are not the indexer's, and the selection [B, S, 1, K]."""

from __future__ import annotations

from typing import Any

from ...check import Checker
from ...common import layer
from .sparse_attention_pto import SHARED_SCHEMA as SCHEMA
from .sparse_attention_pto import check_attention, fake

__all__ = ["SCHEMA", "check", "fake"]
ONNX = "SparseAttentionSharedPto"


def check(**arguments: Any) -> None:
    a = layer.Shared(**arguments)
    given = dict(sparse_indices=(a.sparse_indices, "B S 1 K"))
    check_attention(Checker("npu_sparse_attention_shared_pto"), a, {}, given, {}, (), {})
