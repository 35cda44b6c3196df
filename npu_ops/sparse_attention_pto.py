# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The four stages of dispatch/common/layer.py, one after the other."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..dispatch.common import layer
from . import (
    indexer_prolog_pto,
    kv_quant_sparse_flash_attention,
    lightning_indexer,
    mla_prolog_pto,
    quant_lightning_indexer,
    sparse_flash_attention,
)

_MODULES = (
    mla_prolog_pto,
    indexer_prolog_pto,
    lightning_indexer,
    sparse_flash_attention,
    quant_lightning_indexer,
    kv_quant_sparse_flash_attention,
)
STAGES = layer.Stages(*(module.forward for module in _MODULES))
REASONS = layer.Stages(*(module.unsupported for module in _MODULES))


def unsupported(**arguments: Any) -> str | None:
    return layer.Whole(**arguments).unsupported(REASONS)


def with_indices(**arguments: Any) -> tuple[Tensor, Tensor]:
    return layer.Whole(**arguments).run(STAGES)


def forward(**arguments: Any) -> Tensor:
    return with_indices(**arguments)[0]
