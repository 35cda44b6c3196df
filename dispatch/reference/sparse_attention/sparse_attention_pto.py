# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The four stages of dispatch/common/layer.py, one after the other."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...common import layer
from ..indexer import lightning_indexer, quant_lightning_indexer
from ..prolog import indexer_prolog_pto, mla_prolog_pto
from . import kv_quant_sparse_flash_attention, sparse_flash_attention

STAGES = layer.Stages(
    mla_prolog_pto.forward,
    indexer_prolog_pto.forward,
    lightning_indexer.forward,
    sparse_flash_attention.forward,
    quant_lightning_indexer.forward,
    kv_quant_sparse_flash_attention.forward,
)


def shared(**arguments: Any) -> Tensor:
    """npu_sparse_attention_shared_pto"""
    return layer.Shared(**arguments).run(STAGES)


def with_indices(**arguments: Any) -> tuple[Tensor, Tensor]:
    return layer.Whole(**arguments).run(STAGES)


def forward(**arguments: Any) -> Tensor:
    return with_indices(**arguments)[0]
